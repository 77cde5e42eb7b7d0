"""Language models of transformers: targets as the model's own loss reads them, adapters, decoders of labels."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace import Laplace, MixtureLaplace, continual_training, marglik_training
from laplace.errors import ApproximationWarning, InvalidData, InvalidInputs
from tests.reference.compare import assert_close

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCABULARY, PAD, WIDTH = 11, 0, 8
Batch = dict[str, Tensor]


def batch(seed: int = 0, *, pads_first: bool = False) -> Batch:
    """What the collator for language models gives: labels are the tokens, -100 on pads."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (4, 6), generator=source)
    mask = torch.ones_like(tokens)
    mask[1::2, slice(0, 2) if pads_first else slice(4, 6)] = 0
    tokens = tokens.masked_fill(mask == 0, PAD)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def as_pair(given: Batch) -> tuple[Batch, Tensor]:
    """The same data with the next token as the target of every position."""
    y = torch.cat([given["labels"][:, 1:], torch.full((len(given["labels"]), 1), -100)], 1)
    return {key: value for key, value in given.items() if key != "labels"}, y


def gpt2(kind: str = "GPT2LMHeadModel", **options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=1, n_head=2, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=2, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def bert(kind: str, **options: Any) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": WIDTH}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **options)
    return getattr(transformers, kind)(config)


def bart(kind: str) -> nn.Module:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH, max_position_embeddings=16, forced_eos_token_id=None, **heads, **tokens,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4, d_ff=WIDTH, num_layers=1, num_heads=2, pad_token_id=PAD,
        decoder_start_token_id=PAD,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=1, eos_token_id=2, **sizes)
    return transformers.LlamaForCausalLM(config)


def adapted(task_type: str | None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about an attribute that peft reads
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type=task_type)
        return peft.get_peft_model(gpt2(), config)


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "gpt2": (gpt2, True),
    "llama": (llama, True),
    "bert_lm_head": (lambda: bert("BertLMHeadModel", is_decoder=True), True),
    "lora": (lambda: adapted("CAUSAL_LM"), True),
    "lora_without_task_type": (lambda: adapted(None), True),
    "data_parallel": (lambda: nn.DataParallel(gpt2()), True),
    "bert_masked": (lambda: bert("BertForMaskedLM"), False),
    "bart_causal": (lambda: bart("BartForCausalLM"), False),
    "gpt2_tokens": (lambda: gpt2("GPT2ForTokenClassification", num_labels=VOCABULARY), False),
    "bart": (lambda: bart("BartForConditionalGeneration"), False),
    "t5": (t5, False),
}
"""A model, and whether it moves its labels by one position."""


@cache
def trained(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double().eval()


def fitted(model: nn.Module, data: Any, weights: str = "last_layer", structure: str = "diag") -> Any:
    la = Laplace(model, "classification", weights, structure)
    la.fit([data])
    return la


@pytest.mark.parametrize("pads_first", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_models_own(name: str, pads_first: bool) -> None:
    model, given = trained(name), batch(pads_first=pads_first)
    labels = given["labels"]
    counted = int(((labels[:, 1:] if MODELS[name][1] else labels) != -100).sum())
    la = fitted(model, given)
    assert la.n_data == counted
    with torch.no_grad():
        assert_close(la.loss, model(**given).loss * counted, "float32")  # the models compute it in float32
    assert la(given).shape == (4, 6, VOCABULARY)


def test_the_curvature_is_that_of_the_next_token() -> None:
    """Σ_t diag(p_t − p_t²) ⊗ φ_t² over the positions whose next token counts."""
    model, given = trained("gpt2"), batch()
    kept = given["labels"][:, 1:] != -100
    inputs = {key: given[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        features = model.transformer(**inputs).last_hidden_state[:, :-1][kept]
        p = (features @ model.lm_head.weight.T).softmax(-1)
    assert_close(fitted(model, given).H, ((p - p**2).T @ features**2).flatten(), "backend")


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
@pytest.mark.parametrize(("name", "weights"), [("gpt2", "last_layer"), ("lora_without_task_type", "all")])
def test_mappings_are_pairs_with_the_next_token(name: str, weights: str, structure: str) -> None:
    model = trained(name)
    found, expected = (fitted(model, data, weights, structure) for data in (batch(), as_pair(batch())))
    assert_close(found.loss, expected.loss, "algebra")
    assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), "algebra")
    x = as_pair(batch(1))[0]
    assert_close(found(x), expected(x), "algebra")


def test_pairs_are_never_moved() -> None:
    given = batch()
    inputs = {key: given[key] for key in ("input_ids", "attention_mask")}
    assert fitted(trained("gpt2"), (inputs, given["labels"])).n_data == int((given["labels"] != -100).sum())


def test_labels_under_another_key_are_never_moved() -> None:
    given = batch()
    given["tokens"] = given.pop("labels")
    la = Laplace(trained("gpt2"), "classification", "last_layer", "diag", dict_key_y="tokens")
    la.fit([given])
    assert la.n_data == int((given["tokens"] != -100).sum())


def test_a_label_per_sequence_is_never_moved() -> None:
    torch.manual_seed(0)
    model = gpt2("GPT2ForSequenceClassification", num_labels=3).double().eval()
    given = batch() | {"labels": torch.tensor([0, 1, 2, 1])}
    la = fitted(model, given, structure="full")
    assert la.n_data == 4
    assert_close(la.loss, 4 * model(**given).loss.detach(), "float32")


def test_data_are_added_removed_and_drawn_as_pairs_are() -> None:
    model = trained("gpt2")
    found, expected = (Laplace(model, "classification", "last_layer", "full") for _ in range(2))
    for la, form in ((found, dict), (expected, as_pair)):
        data = [form(batch(seed)) for seed in range(3)]
        la.fit(data, subset=5, generator=torch.Generator().manual_seed(1))
        la.fit(data[:2])
        la.fit(data[2:], override=False)
        la.forget(data[:1])
    assert_close(found.H, expected.H, "algebra")
    assert found.n_data == expected.n_data
    assert found.plan([batch()]).kept_bytes == expected.plan([as_pair(batch())]).kept_bytes


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")  # tokens at random: the flattest prior is best
def test_tuning_reads_validation_data_alike() -> None:
    model = trained("gpt2")
    found, expected = (fitted(model, form(batch()), structure="kron") for form in (dict, as_pair))
    for options in ({}, {"method": "adam", "n_steps": 3}):
        values = [
            la.optimize_hyperparameters(val_loader=[form(batch(1)), form(batch(2))], objective="nll", **options).value
            for la, form in ((found, dict), (expected, as_pair))
        ]
        assert_close(torch.tensor(values[0]), torch.tensor(values[1]), "algebra")


def test_training_and_mixtures_alike() -> None:
    torch.manual_seed(0)
    model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    losses = []
    for form in (dict, as_pair):
        data = [form(batch(seed)) for seed in range(2)]
        network = copy.deepcopy(model)
        _, _, margliks, values = marglik_training(network, data, hessian_structure="diag", n_epochs=2, n_hypersteps=1)
        mixture = MixtureLaplace([model, network], "classification", "last_layer", "diag")
        mixture.fit(data)
        la = Laplace(network, "classification", "all", "diag")
        continual_training(la, [data], n_epochs=1)
        losses.append(torch.tensor([*margliks, *values, float(mixture.log_marginal_likelihood()), float(la.loss)]))
    assert_close(losses[0], losses[1], "algebra")


class WithTheWholeMapping(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: Any) -> Any:
        return self.model(**data)


@pytest.mark.parametrize("name", ["gpt2", "bart_causal"])
def test_a_wrapper_that_passes_the_labels_on(name: str) -> None:
    assert_close(fitted(WithTheWholeMapping(trained(name)), batch()).H, fitted(trained(name), batch()).H, "algebra")


def test_labels_that_are_the_very_tensor_of_the_inputs() -> None:
    given = batch() | {"attention_mask": torch.ones(4, 6, dtype=torch.long)}
    la = fitted(trained("gpt2"), given | {"labels": given["input_ids"]})
    assert la.n_data == 4 * 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_of_other_integers_are_moved_alike(dtype: torch.dtype) -> None:
    """The model's own loss takes int64 alone: in others it would say nothing of where labels belong."""
    given, model = batch(), trained("gpt2")
    narrow = given | {"labels": given["labels"].to(dtype)}
    assert torch.equal(fitted(model, narrow).H, fitted(trained("gpt2"), given).H)
    assert torch.equal(fitted(trained("gpt2"), narrow).H, fitted(model, given).H)


def test_a_batch_at_fault_says_nothing_of_the_model() -> None:
    torch.manual_seed(0)
    model = gpt2().double()
    la = Laplace(model, "classification", "last_layer", "diag", last_layer_name="lm_head")
    unknown = batch()
    unknown["input_ids"] = unknown["input_ids"] + VOCABULARY
    with pytest.raises(InvalidInputs, match="indices from 0 to"):
        la.fit([unknown])
    la.fit([batch()])
    assert la.n_data == int((batch()["labels"][:, 1:] != -100).sum())


def test_labels_that_are_cut_already_are_not_moved() -> None:
    """Outputs and labels of all positions but the last, as a `forward_fn` of the user's makes them."""
    given, model = batch(), trained("gpt2")
    expected = fitted(model, given)
    given["labels"] = given["labels"][:, 1:]
    options = {"forward_fn": lambda model, x: model(**{k: v for k, v in x.items() if k != "labels"}).logits[:, :-1]}
    la = Laplace(model, "classification", "last_layer", "diag", last_layer_name="lm_head", **options)
    la.fit([given])
    assert la.n_data == expected.n_data
    assert_close(la.H, expected.H, "algebra")


class Wrapped(nn.Module):
    """A causal model that says nothing of its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def test_a_model_that_says_nothing_of_its_loss_is_warned_of_once() -> None:
    model = Wrapped(trained("gpt2"))
    la = Laplace(model, "classification", "last_layer", "diag")
    with pytest.warns(ApproximationWarning, match=r"its own token as target.*pairs"):
        la.fit([batch()])
    la.fit([batch()])  # not again
    other = batch()
    other["labels"] = torch.randint(0, VOCABULARY, (4, 6))
    fitted(Wrapped(trained("gpt2")), other)  # targets that are not the inputs are what the user says


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a class without weight": lambda f, y: F.cross_entropy(f, y, weight=torch.tensor([0.0, 1.0, 1.0]).to(f)),
    "a class that is left out": lambda f, y: F.cross_entropy(f[y > 0], y[y > 0]),
    "without a doubt": lambda f, y: F.cross_entropy(f + torch.tensor([1000.0, 0.0, 0.0]), y),
    "without the ends": lambda f, y: F.cross_entropy(f[1:-1], y[1:-1]),
    "without a loss": lambda f, y: f.sum() * float("nan"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_class_for_every_token_is_not_moved(name: str) -> None:
    """Whatever the network's own loss leaves out at the first token."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, 3)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            f = self.table(input_ids)
            return f if labels is None else (LOSSES[name](f.flatten(0, 1), labels.flatten()), f)

    given = {"input_ids": batch()["input_ids"], "labels": torch.randint(3, (4, 6))}
    model = Tagger()
    la = Laplace(model, "classification", "all", "diag")
    la.fit([given])
    f = model.table(given["input_ids"]).flatten(0, 1)
    assert_close(torch.as_tensor(la.loss), F.cross_entropy(f, given["labels"].flatten(), reduction="sum"), "float32")


def test_a_causal_model_that_knows_nothing_yet() -> None:
    """Equal outputs for every token, so that no label is likelier than another."""
    model = gpt2(tie_word_embeddings=False).double()
    nn.init.zeros_(model.lm_head.weight)
    assert fitted(model, batch()).n_data == fitted(trained("gpt2"), batch()).n_data


def test_the_model_is_left_as_it_is() -> None:
    model = trained("gpt2").train()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fitted(model, batch())
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    model.eval()


def test_one_token_has_no_next_one() -> None:
    given = {key: value[:, :1] for key, value in batch().items()}
    with pytest.raises(InvalidData, match="gave no data"):
        fitted(trained("gpt2"), given)


def test_a_decoder_reads_its_labels_or_what_it_is_given() -> None:
    """Labels of another length than the inputs; the model makes its decoder's inputs of them."""
    model, given = trained("t5"), batch()
    given["labels"] = torch.randint(1, VOCABULARY, (4, 3), generator=torch.Generator().manual_seed(0))
    la = fitted(model, given, structure="full")
    assert_close(la.loss, 12 * model(**given).loss.detach(), "float32")
    made = given | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(given["labels"])}
    expected = fitted(model, made, structure="full")
    assert_close(la.H, expected.H, "algebra")
    assert_close(la(given), expected({k: v for k, v in made.items() if k != "labels"}), "algebra")
    assert la(given, pred_type="nn", n_samples=2).shape == (4, 3, VOCABULARY)
    other = {("summary" if key == "labels" else key): value for key, value in given.items()}
    by_key = Laplace(model, "classification", "last_layer", "full", dict_key_y="summary")
    by_key.fit([other])
    assert_close(by_key.H, expected.H, "algebra")
