"""Models of transformers as they are: batches and outputs without glue, whatever the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from tests.reference.compare import assert_close

transformers = pytest.importorskip("transformers")

VOCABULARY, PAD, END, LENGTH, N, CLASSES = 11, 0, 10, 6, 4, 3
_SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "num_labels": CLASSES}
_ENDS = {"bos_token_id": 1, "eos_token_id": END}

CONFIGS: dict[str, Callable[[], Any]] = {
    "Bert": lambda: transformers.BertConfig(**_SIZES, **_TOKENS),
    "DistilBert": lambda: transformers.DistilBertConfig(dim=8, hidden_dim=12, n_layers=1, n_heads=2, **_TOKENS),
    "ModernBert": lambda: transformers.ModernBertConfig(
        **_SIZES, **_TOKENS, **_ENDS, cls_token_id=1, sep_token_id=2, max_position_embeddings=16
    ),
    "GPT2": lambda: transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, **_TOKENS, **_ENDS),
    "Llama": lambda: transformers.LlamaConfig(**_SIZES, **_TOKENS, **_ENDS),
    "Qwen2": lambda: transformers.Qwen2Config(**_SIZES, **_TOKENS, **_ENDS, num_key_value_heads=1),
    "T5": lambda: transformers.T5Config(
        d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, decoder_start_token_id=PAD, **_TOKENS, eos_token_id=END
    ),
    "ViT": lambda: transformers.ViTConfig(**_SIZES, num_labels=CLASSES, image_size=8, patch_size=4),
}
HEADS = {
    "ForSequenceClassification": ["Bert", "DistilBert", "ModernBert", "GPT2", "Llama", "Qwen2", "T5"],
    "ForTokenClassification": ["Bert", "DistilBert", "ModernBert", "GPT2", "Llama", "Qwen2", "T5"],
    "LMHeadModel": ["GPT2"],
    "ForCausalLM": ["Llama", "Qwen2"],
    "ForConditionalGeneration": ["T5"],
    "ForMaskedLM": ["Bert", "DistilBert", "ModernBert"],
    "ForImageClassification": ["ViT"],
}
"""Classes of models by the end of their names, with the families that have one."""

NAMES = [(family, head) for head, families in HEADS.items() for family in families]
CAUSAL = ("LMHeadModel", "ForCausalLM")


def made(family: str, head: str) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, family + head)(CONFIGS[family]()).double().eval()


def batch(head: str, seed: int = 0) -> Any:
    """What a tokenizer and a collator give: padded tokens, the mask, labels of the task."""
    source = torch.Generator().manual_seed(seed)
    if head == "ForImageClassification":
        images = torch.randn(N, 3, 8, 8, dtype=torch.float64, generator=source)
        return transformers.BatchFeature(
            {"pixel_values": images, "labels": torch.randint(CLASSES, (N,), generator=source)}
        )
    tokens = torch.randint(1, END, (N, LENGTH), generator=source)
    tokens[:, 3] = END
    mask = torch.ones_like(tokens)
    mask[1::2, 4:] = 0
    tokens = tokens.masked_fill(mask == 0, PAD)
    labels = tokens
    if head == "ForSequenceClassification":
        labels = torch.randint(CLASSES, (N,), generator=source)
    elif head == "ForTokenClassification":
        labels = torch.randint(CLASSES, (N, LENGTH), generator=source)
    if labels.ndim > 1:
        labels = labels.masked_fill(mask == 0, -100)
    return transformers.BatchEncoding({"input_ids": tokens, "attention_mask": mask, "labels": labels})


def counted(head: str, labels: Tensor) -> int:
    """Labels that count; a causal model predicts none of the first tokens."""
    return int(((labels[:, 1:] if head in CAUSAL else labels) != -100).sum())


@pytest.mark.parametrize(("family", "head"), NAMES)
def test_batches_and_outputs_as_they_are(family: str, head: str) -> None:
    """By default (the last layer, Kronecker-factored), with the loss that the model itself computes."""
    model, given = made(family, head), batch(head)
    key = {"dict_key_x": "pixel_values"} if family == "ViT" else {}
    la = Laplace(model, "classification", **key)
    la.fit([given, batch(head, 1)])
    with torch.no_grad():
        own = [(model(**x), counted(head, x["labels"])) for x in (given, batch(head, 1))]
    assert la.n_data == sum(count for _, count in own)
    assert_close(la.loss, sum(output.loss * count for output, count in own), "float32")  # in which models compute it
    probabilities = la(given)
    assert probabilities.shape == own[0][0].logits.shape
    assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:-1]), "algebra")
    assert not torch.allclose(probabilities, own[0][0].logits.softmax(-1))  # there is a variance
    assert torch.isfinite(la.log_marginal_likelihood())


@pytest.mark.parametrize(("family", "head"), [("DistilBert", "ForSequenceClassification"), ("Qwen2", "ForCausalLM")])
def test_all_weights_and_samples_of_them(family: str, head: str) -> None:
    model, given = made(family, head), batch(head)
    la = Laplace(model, "classification", "all", "diag", prior_precision=100.0)
    la.fit([given])
    linearised = la(given)
    sampled = la(given, pred_type="nn", n_samples=200, generator=torch.Generator().manual_seed(0))
    assert linearised.shape == sampled.shape
    assert (linearised - sampled).abs().max() < 0.1
    assert not [words for words in la.coverage().values() if "fallback" in words]
