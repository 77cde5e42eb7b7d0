"""Layers of transformers: every weight is explained by a rule, and the curvature is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from tests.reference.compare import assert_close

transformers = pytest.importorskip("transformers")

_WIDTH = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
_TOKENS = {"vocab_size": 11, "pad_token_id": 0, "max_position_embeddings": 8}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8, num_labels=3, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config)


def _distilbert() -> nn.Module:
    sizes = {"dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2, "num_labels": 3}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**sizes, **_TOKENS))


def _modernbert() -> nn.Module:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**_WIDTH, **_TOKENS, **ends)
    return transformers.ModernBertForSequenceClassification(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, num_labels=3, pad_token_id=0,
        eos_token_id=10, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForSequenceClassification(config)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**_WIDTH, **_TOKENS)),
    "gemma": lambda: transformers.GemmaForSequenceClassification(
        transformers.GemmaConfig(**_WIDTH, **_TOKENS, num_key_value_heads=1, head_dim=4)
    ),
    "qwen2": lambda: transformers.Qwen2ForSequenceClassification(
        transformers.Qwen2Config(**_WIDTH, **_TOKENS, num_key_value_heads=1)
    ),
    "t5": _t5,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_WIDTH, **_TOKENS)),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**_WIDTH, image_size=8, patch_size=4)
    ),
}  # fmt: skip
IN_FLOAT32 = ("llama", "gemma", "qwen2", "t5")
OWN_RULES = {
    "gpt2": {"transformer.h.0.attn.c_attn.weight": "torch.addmm", "transformer.wpe.weight": "sum with all data"},
    "llama": {"model.norm.weight": "scale"},
    "gemma": {"model.norm.weight": "scale"},
    "qwen2": {"model.norm.weight": "scale"},
    "t5": {"transformer.decoder.final_layer_norm.weight": "scale", "transformer.shared.weight": "embedding, 2 uses"},
    "distilbert": {"distilbert.embeddings.position_embeddings.weight": "sum with all data"},
    "modernbert": {"model.embeddings.tok_embeddings.weight": "embedding"},
    "bert": {"bert.embeddings.position_embeddings.weight": "sum with all data"},
    "vit": {"vit.embeddings.position_embeddings": "sum with all data", "vit.embeddings.cls_token": "expanded"},
}


FALLBACKS = {
    "t5": [
        f"transformer.{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for side in ("encoder", "decoder")
    ]
}
"""Tables of relative positions, looked up once for all data, permuted and added to the scores of the attention."""


def _data(name: str) -> dict[str, Tensor]:
    y = torch.tensor([0, 2, 1])
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64), "labels": y}
    tokens = torch.randint(1, 11, (3, 6))
    tokens[1, 4:] = 0  # padded
    if name == "t5":  # which classifies by the outputs at one end of a sentence
        tokens = tokens.clamp(max=9)
        tokens[:, 3] = 10
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": y}


def _exact_diagonal(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    """Diagonal of Σ Jᵀ Λ J of the softmax, one datum and one output at a time."""
    tensors = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in tensors), dtype=torch.float64)
    for n in range(len(x["labels"])):
        datum: Any = {key: value[n : n + 1] for key, value in x.items() if key != "labels"}
        f = model(**datum).logits[0]
        rows = [torch.autograd.grad(out, tensors, retain_graph=True, allow_unused=True) for out in f]
        jacobian = torch.stack(
            [
                torch.cat(
                    [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(tensors, row, strict=True)]
                )
                for row in rows
            ]
        )
        probabilities = f.softmax(0)
        inner = torch.diag(probabilities) - torch.outer(probabilities, probabilities)
        total += torch.einsum("cp,cd,dp->p", jacobian, inner, jacobian).detach()
    return total


@pytest.mark.parametrize("name", NETWORKS)
def test_every_weight_has_a_rule(name: str) -> None:
    """But T5's tables of relative positions, which are right by a fallback."""
    torch.manual_seed(0)
    model, data = NETWORKS[name]().double().eval(), _data(name)
    key = "pixel_values" if name == "vit" else "input_ids"
    la = Laplace(model, "classification", "all", "diag", dict_key_x=key)
    la.fit([data])
    inside = "float32" if name in IN_FLOAT32 else "backend"  # in which they normalise, whatever their dtype
    assert_close(la.H, _exact_diagonal(model, data), inside)
    found = la.coverage()
    assert [tensor for tensor, words in found.items() if "fallback" in words] == FALLBACKS.get(name, [])
    assert {tensor: found[tensor] for tensor in OWN_RULES[name]} == OWN_RULES[name]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of names that transformers will change
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    """transformers checkpoints while it trains, and a fit evaluates, whichever mode the network was left in."""
    torch.manual_seed(0)
    model, data = NETWORKS[name]().double(), _data(name)
    expected = _exact_diagonal(model.eval(), data)
    model.gradient_checkpointing_enable()
    la = Laplace(model.train(), "classification", "all", "diag")
    la.fit([data])
    assert_close(la.H, expected, "float32" if name in IN_FLOAT32 else "backend")
    assert model.training
