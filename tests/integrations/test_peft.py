"""Adapters of PEFT that are switched or disabled after a fit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import ModelChangedError, ModelChangedWarning
from tests import grid

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages' own, on import
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")


def with_two_adapters(net: nn.Module, targets: list[str], **options: Any) -> Any:
    """A network with the adapters "default" and "other", the first of them active."""
    config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        model = peft.get_peft_model(net, config)
        model.add_adapter("other", config)
    model.set_adapter("default")
    return model


def perceptron() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return with_two_adapters(grid.network(), ["0"]), grid.batches()


def transformer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    net = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, num_labels=3, **sizes))
    model = with_two_adapters(net, ["query", "value"], task_type="SEQ_CLS")
    ids = torch.randint(20, (12, 5))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(3, (12,))}
    return model, [data]


def inputs_of(batches: Any) -> Any:
    return batches[0] if isinstance(batches[0], dict) else batches[0][0]


@pytest.mark.parametrize("make", [perceptron, transformer])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_an_adapter_that_is_switched_or_disabled(make: Any, weights: str) -> None:
    model, batches = make()
    x = inputs_of(batches)
    la = Laplace(model, "classification", weights, "kron")
    la.fit(batches)
    probabilities = la(x)
    model.set_adapter("other")
    with pytest.raises(ModelChangedError, match="active_adapter"):
        la(x)
    model.set_adapter("default")
    assert torch.equal(la(x), probabilities)
    with model.disable_adapter(), pytest.raises(ModelChangedError, match="_disable_adapters"):
        la(x)
    assert torch.equal(la(x), probabilities)


def test_it_is_noticed_by_the_first_prediction_too() -> None:
    model, batches = perceptron()
    la = Laplace(model, "classification", "all", "kron")
    la.fit(batches)
    model.set_adapter("other")
    with pytest.raises(ModelChangedError, match="active_adapter"):
        la(inputs_of(batches))


def test_a_loaded_posterior_warns() -> None:
    """And is silent at the adapter of the fit, also after others were active."""
    model, batches = perceptron()
    x = inputs_of(batches)
    la = Laplace(model, "classification", "last_layer", "kron")
    la.fit(batches)
    probabilities = la(x)
    loaded = Laplace(copy.deepcopy(model), "classification", "last_layer", "kron")
    loaded.load_state_dict(la.state_dict())
    loaded.model.model.set_adapter("other")
    with pytest.warns(ModelChangedWarning, match="active_adapter"):
        loaded(x)
    loaded.model.model.set_adapter("default")
    with loaded.model.model.disable_adapter():
        pass
    assert torch.equal(loaded(x), probabilities)
