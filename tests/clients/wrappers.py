"""Every call that packages make of laplace-torch, made of this library: tests for the environment of `make clients`.

Two of the packages have tests of their own in their source archives, which `tests.clients.run` runs as they are.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace
from laplace.errors import GradientWarning

CLASSES = 3


def network(n_outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n_outputs))


def data(task: str, n: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    y = x[:, 0].sign().long() + 1 if task == "classification" else x.sum(1, keepdim=True).sin()
    return TensorDataset(x, y)


def loader(task: str) -> DataLoader[Any]:
    return DataLoader(data(task), batch_size=8)


def inputs(task: str) -> Tensor:
    return data(task).tensors[0][:5]


# torch-uncertainty

LINKS = {"glm": ("probit", "mc", "bridge", "bridge_norm"), "nn": ("mc",)}


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize(("kind", "link"), [(kind, link) for kind, links in LINKS.items() for link in links])
def test_torch_uncertainty(task: str, weights: str, structure: str, kind: str, link: str) -> None:
    from torch_uncertainty.post_processing import LaplaceApprox

    n_outputs = CLASSES if task == "classification" else 1
    options: Any = {"weight_subset": weights, "hessian_struct": structure, "pred_type": kind, "link_approx": link}
    given = LaplaceApprox(task, network(n_outputs), **options)
    later = LaplaceApprox(task, optimize_prior_precision=False, **options)
    later.set_model(network(n_outputs))
    for approximation in (given, later):
        approximation.fit(loader(task))
        assert approximation.la.n_data == 24
        out = approximation(inputs(task))
        assert out.shape == (5, n_outputs) and out.isfinite().all()
        if task == "classification":
            torch.testing.assert_close(out.sum(1), torch.ones(5))
    assert given.la.prior_precision != later.la.prior_precision


def test_torch_uncertainty_in_its_classification_routine() -> None:
    from lightning import LightningDataModule
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.post_processing import LaplaceApprox
    from torch_uncertainty.routines import ClassificationRoutine

    class Data(LightningDataModule):
        def test_dataloader(self) -> DataLoader[Any]:
            return loader("classification")

        postprocess_dataloader = test_dataloader

    model = network(CLASSES)
    approximation = LaplaceApprox("classification", model)
    routine = ClassificationRoutine(num_classes=CLASSES, model=model, loss=None, post_processing=approximation)
    trainer = TUTrainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result,) = trainer.test(routine, datamodule=Data(), verbose=False)
    expected = approximation.la(data("classification").tensors[0]).argmax(1)
    accuracy = (expected == data("classification").tensors[1]).double().mean().item()
    found = [value for name, value in result.items() if "post" in name and "Acc" in name]
    assert found[:1] == [pytest.approx(accuracy)], result


# lightning-uq-box


class Batches:
    """A data module, as the trainer has one: batches are mappings."""

    def __init__(self, task: str) -> None:
        self.task = task

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.task)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Trainer:
    def __init__(self, task: str) -> None:
        self.datamodule = Batches(task)


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("n_samples", [None, 20])
@pytest.mark.parametrize(("kind", "link"), [("glm", "probit"), ("nn", "mc")])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_lightning_uq_box(task: str, weights: str, structure: str, n_samples: int | None, kind: str, link: str) -> None:
    from lightning_uq_box.uq_methods import LaplaceClassification, LaplaceRegression

    n_outputs = CLASSES if task == "classification" else 1
    la = Laplace(network(n_outputs), task, weights, structure, prior_precision=2.0)
    options: Any = {"pred_type": kind, "link_approx": link, "num_samples": n_samples}
    if task == "regression":
        wrapper: Any = LaplaceRegression(la, tune_sigma_noise=True, n_epochs_tuning=3, **options)
    else:
        wrapper = LaplaceClassification(la, **options)
    assert type(wrapper.laplace_model) is type(la)
    assert wrapper.laplace_model.prior_precision == la.prior_precision
    wrapper._trainer, wrapper.input_key, wrapper.target_key = Trainer(task), "input", "target"
    wrapper.on_test_start()
    assert wrapper.laplace_model.n_data == 24
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):  # which hand over inputs that require a gradient
            out = wrapper.predict_step(inputs(task))
    assert sum(issubclass(warning.category, GradientWarning) for warning in told) <= 1
    assert out["pred"].shape[0] == 5 and out["pred"].isfinite().all()
    assert all(value.isfinite().all() for value in out.values())


# probly


needs_probly = pytest.mark.skipif(sys.version_info < (3, 13), reason="probly 0.9.1 needs Python 3.12.2 or newer")


@needs_probly
@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_probly(weights: str, structure: str) -> None:
    from probly.predictor import predict, predict_raw
    from probly.representation.distribution import CategoricalDistribution
    from probly.representer import representer

    la = Laplace(network(CLASSES), "classification", weights, structure)
    la.fit(loader("classification"))
    x = inputs("classification")
    found = predict(la, x)
    assert isinstance(found, CategoricalDistribution)
    torch.testing.assert_close(torch.as_tensor(found.probabilities), la(x))
    torch.testing.assert_close(torch.as_tensor(predict_raw(la, x, link_approx="bridge")), la(x, link_approx="bridge"))
    sample = representer(la, num_samples=7).represent(x)
    assert sample.tensor.probabilities.shape == (5, 7, CLASSES)


@needs_probly
def test_probly_refuses_regressions() -> None:
    from probly.predictor import predict

    la = Laplace(network(1), "regression")
    la.fit(loader("regression"))
    with pytest.raises(NotImplementedError, match="classification"):
        predict(la, inputs("regression"))


# laplace-bayesopt


@pytest.mark.parametrize("mode", ["posthoc", "online"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("last_layer", [False, True])
def test_laplace_bayesopt(mode: str, structure: str, last_layer: bool) -> None:
    from botorch.acquisition import LogExpectedImprovement
    from laplace_bayesopt.botorch import LaplaceBoTorch

    x, y = data("regression").tensors
    model = LaplaceBoTorch(
        lambda: network(1), x, y, marglik_mode=mode, hess_factorization=structure, last_layer=last_layer,
        n_epochs=20, online_marglik_freq=5, posthoc_marglik_iters=5, noise_var=0.01,
    )  # fmt: skip
    point = x[:6].unsqueeze(1).clone().requires_grad_()
    value = LogExpectedImprovement(model, best_f=y.max())(point).sum()
    value.backward()
    assert value.isfinite() and point.grad is not None and point.grad.abs().max() > 0
    assert model.condition_on_observations(x[:2], y[:2]).train_X.shape == (26, 4)


def test_the_library_is_this_one() -> None:
    assert laplace.__name__ == "laplace" and hasattr(laplace, "MixtureLaplace")
