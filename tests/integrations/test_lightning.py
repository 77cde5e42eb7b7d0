"""The Lightning callback: the same training as a loop of one's own."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace, OnlineLaplace
from laplace.errors import InvalidArgument, MissingDependency, NotFittedError
from tests import grid

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package's own, on import
    lightning = pytest.importorskip("lightning.pytorch")

from laplace.integrations.lightning import LaplaceCallback, OnlineLaplaceCallback


class Net(lightning.LightningModule):
    """A network that learns by a loss of its own, or by that of a callback."""

    def __init__(self, net: nn.Module, loss: Any, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.net, self.loss, self.weight_decay = net, loss, weight_decay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=self.weight_decay)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*grid.data("regression")), batch_size=5)


def trained(module: Net, callback: Any, folder: Any, n_epochs: int) -> Any:
    """The trainer, after it has trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # workers, logging steps
        trainer = lightning.Trainer(
            max_epochs=n_epochs, callbacks=[callback], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, loader())
    return trainer


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "laplace.integrations.lightning")
    with pytest.raises(MissingDependency, match="pip install lightning"):
        importlib.import_module("laplace.integrations.lightning")


def test_a_second_prior_is_refused(tmp_path: Any) -> None:
    evidence = OnlineLaplaceCallback("regression", "diag")
    with pytest.raises(InvalidArgument, match=r"weight_decay=0\.1.*second prior.*weight_decay=0"):
        trained(Net(network(), evidence.loss, weight_decay=0.1), evidence, tmp_path, 1)


def test_wrong_arguments_stop_training_before_it_begins(tmp_path: Any) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidArgument, match="kronn"):
        trained(
            Net(model, nn.functional.mse_loss), LaplaceCallback("regression", hessian_structure="kronn"), tmp_path, 1
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("named", [False, True])
def test_a_posterior_after_training(tmp_path: Any, named: bool) -> None:
    model = network()
    posterior = LaplaceCallback(
        "regression", model=model if named else None, subset_of_weights="all", hessian_structure="diag",
        sigma_noise=0.5, tuning={"n_steps": 3},
    )  # fmt: skip
    assert posterior.la is None
    trained(Net(model, nn.functional.mse_loss), posterior, tmp_path, 2)
    la = Laplace(model, "regression", "all", "diag", sigma_noise=0.5)
    la.fit(loader())
    la.optimize_prior_precision(n_steps=3)
    x = grid.data("regression")[0]
    for mine, its in zip(la(x), posterior.la(x), strict=True):
        torch.testing.assert_close(its, mine)
    assert torch.equal(posterior.la.prior_precision, la.prior_precision)


@pytest.mark.parametrize("named", [False, True])
def test_the_callback_trains_as_a_loop_does(tmp_path: Any, named: bool) -> None:
    model, data = network(), loader()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"n_hypersteps": 3, "marglik_frequency": 2, "sigma_noise_init": 0.7}
    evidence = OnlineLaplaceCallback("regression", "diag", model=model if named else None, **options)
    with pytest.raises(NotFittedError, match="callbacks"):
        evidence.loss(*next(iter(data)))
    trainer = trained(Net(model, evidence.loss), evidence, tmp_path, 6)

    online = OnlineLaplace(twin, data, "regression", "diag", **options)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    for epoch in range(1, 7):
        for x, y in data:
            optimizer.zero_grad()
            online.loss(twin(x), y).backward()
            optimizer.step()
        online.step(epoch)
    la = online.finish()
    assert evidence.online.margliks == online.margliks
    assert torch.equal(evidence.la.mean, la.mean)
    assert torch.equal(evidence.la.prior_precision, la.prior_precision)
    assert trainer.callback_metrics["log_marginal_likelihood"].item() == pytest.approx(-online.margliks[-1])
