"""The Lightning callback: the same training as a loop of one's own."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import OnlineLaplace
from laplace.errors import MissingDependency, NotFittedError
from laplace.integrations.lightning import OnlineLaplaceCallback, _callback_class
from tests import grid


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _callback_class.cache_clear()
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(MissingDependency, match="pip install lightning"):
        OnlineLaplaceCallback("regression")
    _callback_class.cache_clear()


@pytest.mark.parametrize("named", [False, True])
def test_the_callback_trains_as_a_loop_does(tmp_path: Any, named: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own, on import
        lightning = pytest.importorskip("lightning.pytorch")

    class Net(lightning.LightningModule):
        def __init__(self, net: nn.Module, evidence: Any) -> None:
            super().__init__()
            self.net, self.evidence = net, evidence

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.evidence.loss(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    twin, loader = copy.deepcopy(model), DataLoader(TensorDataset(*grid.data("regression")), batch_size=5)
    options: dict[str, Any] = {"n_hypersteps": 3, "marglik_frequency": 2, "sigma_noise_init": 0.7}
    evidence = OnlineLaplaceCallback("regression", "diag", model=model if named else None, **options)
    with pytest.raises(NotFittedError, match="callbacks"):
        evidence.loss(*next(iter(loader)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # workers, logging steps
        trainer = lightning.Trainer(
            max_epochs=6, callbacks=[evidence], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Net(model, evidence), loader)

    online = OnlineLaplace(twin, loader, "regression", "diag", **options)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    for epoch in range(1, 7):
        for x, y in loader:
            optimizer.zero_grad()
            online.loss(twin(x), y).backward()
            optimizer.step()
        online.step(epoch)
    la = online.finish()
    assert evidence.online.margliks == online.margliks
    assert torch.equal(evidence.la.mean, la.mean)
    assert torch.equal(evidence.la.prior_precision, la.prior_precision)
    assert trainer.callback_metrics["log_marginal_likelihood"].item() == pytest.approx(-online.margliks[-1])
