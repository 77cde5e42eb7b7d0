"""Language models that answer by choices: logits at the last token, adapters, pads on either side, refusals."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import Laplace
from laplace.errors import InvalidArgument, InvalidInputs

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from laplace.integrations.transformers import Answers, answers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
VOCABULARY, PAD = 23, 0
CHOICES = [3, 7, 11]


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [1 + ord(letter) - ord("a") for letter in text]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, pad_token_id=PAD,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gemma() -> nn.Module:
    """Its logits are bounded after the head."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=16, pad_token_id=PAD, final_logit_softcapping=0.1,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval()


MODELS = {"gpt2": gpt2, "llama": llama, "gemma": gemma}


def prompts(*, left: bool = False) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A batch of prompts of 3 to 6 tokens, and the prompts one by one."""
    source = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, VOCABULARY, (n,), generator=source) for n in (6, 3, 5, 4)]
    tokens, mask = torch.full((4, 6), PAD), torch.zeros(4, 6, dtype=torch.long)
    for i, row in enumerate(rows):
        part = slice(6 - len(row), 6) if left else slice(0, len(row))
        tokens[i, part], mask[i, part] = row, 1
    return {"input_ids": tokens, "attention_mask": mask}, rows


def of_choices(logits: Tensor) -> Tensor:
    """Logits of the choices after the last token, less what all of them share."""
    chosen = logits[:, -1, CHOICES]
    return chosen - chosen.mean(1, keepdim=True)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_after_every_prompt(name: str, left: bool) -> None:
    model, (batch, rows) = MODELS[name](), prompts(left=left)
    expected = torch.cat([of_choices(model(input_ids=row.unsqueeze(0)).logits) for row in rows])
    before = copy.deepcopy(model.state_dict())
    assert_close(answers(model, None, CHOICES)(batch), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_prompts_without_pads_need_no_mask() -> None:
    model, (batch, _) = gpt2(), prompts()
    tokens = batch["input_ids"][:1]
    found = answers(model, None, CHOICES)({"input_ids": tokens, "labels": torch.tensor([1])})
    assert_close(found, of_choices(model(input_ids=tokens).logits), rtol=1e-5, atol=1e-6)


def test_the_head_sees_one_position_of_every_prompt() -> None:
    model, (batch, _) = llama(), prompts()
    shapes: list[Any] = []
    model.get_output_embeddings().register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    answers(model, None, CHOICES)(batch)
    assert shapes == [(4, 1, VOCABULARY)]


class Watched(TorchDispatchMode):
    """Remembers the largest tensor of the vocabulary's width that is no weight of the model (width 8)."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for part in found if isinstance(found, tuple | list) else (found,):
            if isinstance(part, Tensor) and VOCABULARY in part.shape and 8 not in part.shape:
                self.largest = max(self.largest, part.numel())
        return found


def test_fit_and_prediction_hold_the_vocabulary_at_one_position() -> None:
    """One row of the vocabulary per prompt and answer, however long the prompts are."""
    model, (batch, _) = with_lora(llama()), prompts()
    la = Laplace(answers(model, None, CHOICES), "classification", "all", "lowrank_kron")
    with Watched() as watched:
        la.fit([{**batch, "labels": torch.tensor([0, 1, 2, 0])}])
        la(batch)
    assert 0 < watched.largest <= len(CHOICES) * 4 * VOCABULARY
    with Watched() as watched:
        model(**batch)
    assert watched.largest == 4 * 6 * VOCABULARY


def test_several_threads_do_not_meet() -> None:
    network, (batch, _) = answers(gpt2(), None, CHOICES), prompts()
    expected = network(batch)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(network, [batch] * 40):
            assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_virtual_tokens_come_first() -> None:
    """Of prompt tuning, whose tokens stand before those of the batch."""
    torch.manual_seed(0)
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, (_, rows) = peft.get_peft_model(gpt2(), options).eval(), prompts()
    expected = torch.cat([of_choices(model(input_ids=row.unsqueeze(0)).logits) for row in rows])
    network = answers(model, None, CHOICES)
    found = torch.cat([network({"input_ids": row.unsqueeze(0)}) for row in rows])
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return adapted.eval()


@pytest.mark.parametrize("structure", ["kron", "diag", "lowrank_kron"])
def test_the_posterior_of_adapters(structure: str) -> None:
    model, (batch, _) = with_lora(llama()).double(), prompts()
    data = [{**batch, "labels": torch.tensor([0, 1, 2, 0])}]
    la = Laplace(answers(model, None, CHOICES), "classification", "all", structure)
    la.fit(data)
    probs = la(batch)
    assert probs.shape == (4, 3)
    assert_close(probs.sum(1), torch.ones(4, dtype=probs.dtype), rtol=1e-6, atol=0)
    assert la.n_params == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_curvature_of_adapters_is_that_of_their_jacobian() -> None:
    """Σ Jᵀ Λ J with the Jacobian of the choices' logits by automatic differentiation."""
    model, (batch, _) = with_lora(llama()).double(), prompts()
    network = answers(model, None, CHOICES)
    weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
    jacobian = torch.autograd.functional.jacobian(
        lambda *values: torch.func.functional_call(network, dict(zip(weights, values, strict=True)), (batch,)),
        tuple(weights.values()),
    )
    rows = torch.cat([part.reshape(4, 3, -1) for part in jacobian], 2)
    probs = network(batch).softmax(1).detach()
    hessian = probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)
    expected = torch.einsum("bkp,bkl,blq->pq", rows, hessian, rows)
    la = Laplace(network, "classification", "all", "full")
    la.fit([{**batch, "labels": torch.tensor([0, 1, 2, 0])}])
    assert_close(la.H, expected, rtol=1e-4, atol=1e-8)  # the model itself computes norms in float32


def test_choices_are_tokens() -> None:
    network = answers(gpt2(), Letters(), ["a", "c", 11])
    assert isinstance(network, Answers)
    assert network.tokens == (1, 3, 11)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (["ab", "c"], "is 2 tokens"),
        (["a", 1], "two are the same"),
        (["a"], "two answers or more"),
        ("ab", "two answers or more"),
        ([1, 99], "the tokens 0 to 22"),
        ([1, -1], "the tokens 0 to 22"),
        (["aa", "ab"], "begin alike"),
        ([True, 2], "hold True"),
        ([1.5, 2], "hold 1.5"),
        (None, "two answers or more"),
        ({"a", "b"}, "two answers or more"),
    ],
)
def test_wrong_choices_are_refused(choices: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        answers(gpt2(), Letters(), choices)


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no output embeddings"):
        answers(nn.Linear(2, 2), None, [0, 1])
    with pytest.raises(InvalidArgument, match="takes a tokenizer"):
        answers(gpt2(), None, ["a", "b"])
    with pytest.raises(InvalidArgument, match="tokenizer=int"):
        answers(gpt2(), 3, ["a", "b"])


TOKENS = torch.tensor([[1, 4, 5], [2, 6, PAD]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(2, 3), "a mapping with input_ids"),
        ({"input_ids": TOKENS[0]}, r"of shape \[3\]"),
        ({"input_ids": TOKENS[:, :0]}, r"of shape \[2, 0\]"),
        ({"input_ids": TOKENS[:0]}, r"of shape \[0, 3\]"),
        ({"input_ids": torch.full((2, 3), VOCABULARY)}, "knows the tokens 0 to 22"),
        ({"input_ids": torch.full((2, 3), -1)}, "from -1 to -1"),
        ({"input_ids": TOKENS}, "no attention_mask"),
        ({"input_ids": TOKENS.flip(1)}, "no attention_mask"),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(2, 4)}, r"of shape \[2, 4\]; \[2, 3\]"),
        ({"input_ids": TOKENS, "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "no token"),
    ],
)
def test_wrong_prompts_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(InvalidInputs, match=message):
        answers(gpt2(), None, CHOICES)(inputs)


def test_the_token_that_begins_and_ends_a_text_may_be_its_pad() -> None:
    """As GPT-2 has it: it may come first without a mask, and is not the end of a prompt."""
    model = gpt2()
    model.config.pad_token_id = model.config.bos_token_id  # type: ignore[union-attr]
    network, tokens = answers(model, None, CHOICES), torch.tensor([[1, 4, 5]])
    assert_close(network({"input_ids": tokens}), of_choices(model(input_ids=tokens).logits), rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidInputs, match="no attention_mask"):
        network({"input_ids": tokens.flip(1)})


def test_what_all_choices_share_widens_no_prediction() -> None:
    """The same addition to all logits of the choices, from weights with a distribution, changes no probability."""
    torch.manual_seed(0)

    class Shifted(nn.Module):
        def __init__(self, size: float) -> None:
            super().__init__()
            self.model, self.size = gpt2().double(), size

        def get_output_embeddings(self) -> nn.Module:
            return self.model.get_output_embeddings()  # type: ignore[operator]

        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
            found = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
            found.logits = found.logits + self.size * found.logits.exp().mean(-1, keepdim=True)
            return found

    batch, found = prompts()[0], []
    for size in (0.0, 3.0):
        la = Laplace(answers(Shifted(size), None, CHOICES), "classification", "all", "full", prior_precision=3.0)
        la.model.requires_grad_(False)
        la.model.model.model.transformer.ln_f.requires_grad_(True)  # type: ignore[union-attr]
        la.fit([{**batch, "labels": torch.tensor([0, 1, 2, 0])}])
        found.append(la(batch))
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)
