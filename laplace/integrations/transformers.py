"""Transformers: a posterior at the end of training by the `Trainer`, and language models that answer by choices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, distributed, nn

from laplace.core.arguments import check_call
from laplace.core.checks import require
from laplace.enums import Likelihood, LikelihoodName
from laplace.errors import InvalidArgument, InvalidInputs, MissingDependency
from laplace.grid import from_names
from laplace.likelihoods.base import Likelihood as LikelihoodObject
from laplace.parametric import ParametricLaplace

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingDependency(
        "laplace.integrations.transformers needs transformers: pip install 'transformers[torch]'. Without it use "
        "laplace.Laplace after training."
    ) from error


class LaplaceCallback(TrainerCallback):
    """A callback of the `Trainer` that fits a posterior when training ends, and saves it beside the checkpoints.

    Arguments are checked when training begins. At its end the posterior is fitted to the trainer's training data, at
    the final weights (with `load_best_model_at_end=True` the best ones), and `la.state_dict()` is saved in the output
    directory. The data are one pass of the trainer's loader: `dataloader_drop_last=True` drops the last ones. With
    several processes, each gets the posterior given all data, and the first one saves it. The network stays in its
    mode, train or eval.

    Example:
        posterior = LaplaceCallback(hessian_structure="lowrank_kron", subset_of_weights="all")
        Trainer(model, arguments, train_dataset=data, callbacks=[posterior]).train()
        posterior.la(batch)

    Args:
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        tuning: Options of `la.optimize_prior_precision`, which is called after the fit: `{}` for its defaults; None to
            keep the prior.
        filename: Name of the saved file in the trainer's output directory.
        **options: Further arguments of `Laplace`.

    Attributes:
        la: The posterior; None before training has ended.
    """

    def __init__(
        self,
        likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
        *,
        tuning: Mapping[str, Any] | None = None,
        filename: str = "laplace.pt",
        **options: Any,
    ) -> None:
        self.la: ParametricLaplace | None = None
        self._likelihood, self._tuning, self._options = likelihood, tuning, options
        self._filename = filename
        self._made: ParametricLaplace | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the posterior, so that a wrong argument stops training before it begins."""
        self.la, self._made = None, from_names(kwargs["model"], self._likelihood, **self._options)
        tune = self._made.optimize_prior_precision
        check_call(tune, tune.__name__, (), self._tuning or {})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fits the posterior, and saves it."""
        if self._made is None:  # training did not begin with this callback
            return
        self._made.fit(kwargs["train_dataloader"], group=distributed.group.WORLD if args.world_size > 1 else None)
        self.la = self._made  # also where tuning raises
        if self._tuning is not None:
            self.la.optimize_prior_precision(**self._tuning)
        if args.should_save:
            path = Path(args.output_dir or "") / self._filename
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.la.state_dict(), path)


def answers(model: nn.Module, tokenizer: Any, choices: Sequence[str | int]) -> Answers:
    """A causal language model as a classifier: the logits of a few answers after a prompt, less their mean, `[B, K]`.

    What `Laplace(answers(model, tokenizer, ["A", "B", "C"]), "classification")` fits and predicts are the answers
    alone: the logits of the vocabulary exist at one position per prompt, inside the model's head, and nowhere else. Of
    a model with adapters (LoRA), the weights that are trained have the distribution (Yang et al., 2024). What all
    choices share, their weight against the rest of the vocabulary, is subtracted: their probabilities do not depend
    on it, but its variance would widen that of every single logit, by which predictions scale them.

    Batches are mappings of `input_ids` `[B, T]`, `attention_mask` `[B, T]` and whatever else the model takes; `labels`
    `[B]` are indices of the choices. Prompts may be padded on either side.

    Args:
        model: A causal language model of transformers, also with adapters of PEFT. It is not changed.
        tokenizer: Its tokenizer; None if all choices are indices of tokens. It is asked for the choices' tokens alone.
        choices: The answers, each one token as it follows the prompt: for many tokenizers `" A"` where a space comes
            before the answer. An integer is the index of a token.

    Raises:
        InvalidArgument: The model has no output embeddings; fewer than two choices, two equal ones, or one that is not
            exactly one token.
    """
    return Answers(model, _tokens_of(tokenizer, choices))


class Answers(nn.Module):
    """What `answers` returns: a module from prompts to the logits of the choices, less their mean, `[B, K]`.

    Attributes:
        model: The language model itself.
        tokens: Indices of the choices in the vocabulary, `[K]`.
    """

    def __init__(self, model: nn.Module, tokens: Sequence[int]) -> None:
        super().__init__()
        embeddings = getattr(model, "get_output_embeddings", None)
        head = None if embeddings is None else embeddings()
        if not isinstance(head, nn.Module):
            raise InvalidArgument(
                f"model={type(model).__name__} has no output embeddings; give a causal language model of transformers, "
                "such as AutoModelForCausalLM.from_pretrained(name). A model with a classifier needs no `answers`."
            )
        size = getattr(head, "out_features", None)
        if size is not None and not all(0 <= token < size for token in tokens):
            raise InvalidArgument(f"choices={list(tokens)}: the model has the tokens 0 to {size - 1}.")
        self.model = model
        self.tokens = tuple(tokens)
        adapters = getattr(model, "active_peft_config", None)
        has_virtual_tokens = getattr(adapters, "is_prompt_learning", False)  # whose positions PEFT itself counts
        parameters = inspect.signature(_inner(model).forward).parameters
        self._takes_positions = "position_ids" in parameters and not has_virtual_tokens

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of the choices at the last token of every prompt, less their mean, `[B, K]`.

        Args:
            inputs: What the model takes, `input_ids` `[B, T]` and `attention_mask` `[B, T]` among it; `labels` are left
                out.

        Raises:
            InvalidInputs: No `input_ids`, none in them or one that the model does not know, a mask of another shape,
                pads without a mask, or a prompt without a token.
        """
        if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
            raise InvalidInputs("answers take a mapping with input_ids [B, T] and attention_mask [B, T].")
        given = {name: value for name, value in inputs.items() if name != "labels"}
        tokens, mask = given["input_ids"], given.get("attention_mask")
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not tokens.numel():
            shape = list(getattr(tokens, "shape", []))
            raise InvalidInputs(f"input_ids of shape {shape}; [B, T], B > 0 and T > 0, is accepted.")
        if mask is None:
            self._require_no_pads(tokens)
            mask = torch.ones_like(tokens)
        if mask.shape != tokens.shape:
            raise InvalidInputs(
                f"attention_mask of shape {list(mask.shape)}; {list(tokens.shape)} of input_ids is accepted."
            )
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        last = (mask.long() * places).amax(1) - 1  # of pads on either side
        require(last >= 0, lambda: InvalidInputs("a prompt has no token: its attention_mask is zero."))
        caller = get_ident()
        if self._takes_positions and "position_ids" not in given:
            given["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)

        def last_of_each(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if get_ident() != caller:  # another thread's pass through the same model
                return None
            hidden = args[0]
            place = last + hidden.shape[1] - tokens.shape[1]  # after virtual tokens of an adapter, if it has some
            index = place.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
            return (hidden.gather(1, index), *args[1:])

        hook = self._head().register_forward_pre_hook(last_of_each)
        try:
            logits = self.model(**given).logits
        except IndexError:
            self._require_known(tokens)
            raise
        finally:
            hook.remove()
        chosen = logits[:, -1, list(self.tokens)]
        return chosen - chosen.mean(1, keepdim=True)

    def _require_known(self, tokens: Tensor) -> None:
        size = getattr(self.model.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
        if size is not None and not bool(((tokens >= 0) & (tokens < size)).all()):
            raise InvalidInputs(
                f"input_ids from {int(tokens.min())} to {int(tokens.max())}; the model knows the tokens 0 to "
                f"{size - 1}. Give those of its own tokenizer."
            )

    def _require_no_pads(self, tokens: Tensor) -> None:
        config = getattr(self.model, "config", None)
        pad = getattr(config, "pad_token_id", None)
        if pad is None:
            return
        is_own = pad not in (getattr(config, "bos_token_id", None), getattr(config, "eos_token_id", None))
        found = tokens if is_own else tokens[:, -1]  # a prompt may begin with the token that others end with
        require(
            (found != pad).all(),
            lambda: InvalidInputs(f"input_ids hold pads ({pad}) and there is no attention_mask; give the tokenizer's."),
        )

    def _head(self) -> nn.Module:
        return self.model.get_output_embeddings()  # type: ignore[operator]


def _inner(model: nn.Module) -> nn.Module:
    """The model behind adapters of PEFT, whose own `forward` takes anything."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def _tokens_of(tokenizer: Any, choices: Sequence[str | int]) -> list[int]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or len(choices) < 2:
        raise InvalidArgument(f"choices={choices!r}; give two answers or more, such as ['A', 'B'].")
    tokens: list[int] = []
    for choice in choices:
        if isinstance(choice, int) and not isinstance(choice, bool):
            tokens.append(choice)
            continue
        if not isinstance(choice, str):
            raise InvalidArgument(
                f"choices hold {choice!r}; a text of one token, or the index of a token, is accepted."
            )
        if not callable(getattr(tokenizer, "encode", None)):
            raise InvalidArgument(
                f"choices hold the text {choice!r}, which takes a tokenizer; tokenizer={type(tokenizer).__name__}."
            )
        found = list(tokenizer.encode(choice, add_special_tokens=False))
        if len(found) != 1:
            raise InvalidArgument(
                f"choice {choice!r} is {len(found)} tokens, {found}; give choices of one token each, as they follow "
                f"the prompt ({choice.strip()!r} or {' ' + choice.strip()!r}), or the index of a token. Answers that "
                "begin alike are told apart by letters before them, A, B, …, in the prompt."
            )
        tokens.extend(found)
    if len(set(tokens)) < len(tokens):
        raise InvalidArgument(f"choices={list(choices)!r} are the tokens {tokens}, of which two are the same.")
    return tokens
