"""The callback of transformers' `Trainer`: the posterior that a fit after training gives."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import DiagLaplace, Laplace, LowRankKronLaplace
from laplace.errors import InvalidArgument, InvalidCall, MissingDependency

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages' own, on import
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from laplace.integrations.transformers import LaplaceCallback

VOCABULARY, CLASSES = 11, 3
DIAG: dict[str, Any] = {"subset_of_weights": "all", "hessian_structure": "diag"}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, max_position_embeddings=8, **sizes)
    return transformers.BertForSequenceClassification(config)


def rows(n_data: int = 10) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (n_data, 5), generator=source)
    labels = torch.randint(CLASSES, (n_data,), generator=source)
    return [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, labels, strict=True)]


def train(model: nn.Module, callbacks: list[Any], folder: Path) -> Any:
    """Trains by a real `Trainer`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", logging_strategy="no", learning_rate=1e-2,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows(), callbacks=callbacks)
        trainer.train()
    return trainer


def together() -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows()]) for key in rows()[0]}


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "laplace.integrations.transformers")
    with pytest.raises(MissingDependency, match="pip install"):
        importlib.import_module("laplace.integrations.transformers")


def test_it_is_a_callback_like_any_other() -> None:
    assert issubclass(LaplaceCallback, transformers.TrainerCallback)
    kept = pickle.loads(pickle.dumps(LaplaceCallback("regression", tuning={"n_steps": 3}, **DIAG)))
    assert type(kept) is LaplaceCallback and kept.la is None


def test_the_posterior_of_the_trained_network_is_fitted_and_saved(tmp_path: Path) -> None:
    model, callback = classifier(), LaplaceCallback("classification", filename="posterior.pt", **DIAG)
    before, modes = copy.deepcopy(model.state_dict()), []

    class Before(transformers.TrainerCallback):
        def on_train_end(self, *_: Any, **given: Any) -> None:
            modes.append([module.training for module in given["model"].modules()])

    class After(Before):
        pass

    assert callback.la is None
    trainer = train(model, [Before(), callback, After()], tmp_path)
    assert trainer.model is model
    assert not torch.equal(before["classifier.weight"], model.classifier.weight)  # it was trained
    assert modes[0] == modes[1]
    assert type(callback.la) is DiagLaplace and callback.la.n_data == 10

    own = Laplace(model, "classification", **DIAG)
    own.fit([together()])
    torch.testing.assert_close(callback.la.H, own.H, rtol=1e-4, atol=1e-6)
    loaded = Laplace(copy.deepcopy(model), "classification", **DIAG)
    loaded.load_state_dict(torch.load(tmp_path / "posterior.pt", weights_only=True))
    assert torch.equal(loaded(together()), callback.la(together()))
    kept = pickle.loads(pickle.dumps(callback))
    assert torch.equal(kept.la(together()), callback.la(together()))


def test_the_prior_is_tuned_on_request(tmp_path: Path) -> None:
    model = classifier()
    callback = LaplaceCallback("classification", tuning={"n_steps": 5}, **DIAG)
    train(model, [callback], tmp_path)
    own = Laplace(model, "classification", **DIAG)
    own.fit([together()])
    own.optimize_prior_precision(n_steps=5)
    torch.testing.assert_close(callback.la.prior_precision, own.prior_precision, rtol=1e-3, atol=1e-5)
    state = torch.load(tmp_path / "laplace.pt", weights_only=True)
    assert torch.equal(state["prior_precision"], callback.la.prior_precision)


def test_adapters_have_their_default(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    callback = LaplaceCallback("classification")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about an attribute that peft reads
        model = peft.get_peft_model(classifier(), lora)
    train(model, [callback], tmp_path)
    assert type(callback.la) is LowRankKronLaplace and callback.la.n_data == 10


def test_a_wrong_argument_stops_training_before_it_begins(tmp_path: Path) -> None:
    model = classifier()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidArgument, match="hessian_structure='diagonal'"):
        train(model, [LaplaceCallback("classification", hessian_structure="diagonal")], tmp_path)
    with pytest.raises(InvalidCall, match="did you mean 'method'"):
        train(model, [LaplaceCallback("classification", tuning={"mehtod": "marglik"}, **DIAG)], tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_tuning_that_fails_leaves_the_posterior_of_the_fit(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", tuning={"method": "cross"}, **DIAG)
    with pytest.raises(InvalidArgument, match="cross"):
        train(classifier(), [callback], tmp_path)
    assert callback.la.n_data == 10


def test_a_causal_language_model_in_half_precision(tmp_path: Path) -> None:
    """The labels are the tokens, as the trainer's models take them."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    callback = LaplaceCallback("classification", hessian_structure="diag")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", bf16=True,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assert callback.la.n_data == 10 * 4
    assert callback.la({"input_ids": data[0]["input_ids"][None]}).shape == (1, 5, VOCABULARY)
