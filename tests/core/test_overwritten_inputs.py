"""A prediction that is read after its inputs were overwritten says so; one that has its numbers keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, MixtureLaplace
from laplace.core import overwritten_inputs
from laplace.errors import InvalidData
from tests import grid

X, Y = grid.data()
NEW = torch.full_like(X, 0.3)
LARGE = overwritten_inputs._COMPARED


def in_place(x: Tensor) -> None:
    x.copy_(NEW)


def through_data(x: Tensor) -> None:
    x.data.copy_(NEW)


def through_numpy(x: Tensor) -> None:
    x.numpy()[:] = 0.3


def one_row_through_numpy(x: Tensor) -> None:
    x.numpy()[-1] = 0.3


WRITES = [in_place, through_data, through_numpy, one_row_through_numpy]
READS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda p: p.mean,
    "latent_mean": lambda p: p.latent_mean,
    "latent_variance": lambda p: p.latent_variance,
    "latent_samples": lambda p: p.latent_samples,
    "entropy": lambda p: p.entropy,
    "mutual information": lambda p: p.decomposition.mutual_information,
    "interval": lambda p: p.interval(),
    "distribution": lambda p: p.distribution(),
    "rows": lambda p: p.rows.latent.covariance,
}


def fitted(**options: Any) -> Any:
    la = grid.make("last_layer", "full", **options)
    la.fit(grid.batches())
    return la


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
@pytest.mark.parametrize("options", [{}, {"link_approx": "mc"}, {"pred_type": "nn"}], ids=["probit", "mc", "nn"])
def test_overwritten_inputs_are_refused(write: Any, read: Any, options: dict[str, Any]) -> None:
    buffer = X.clone()
    p = fitted().predict(buffer, **options)
    write(buffer)
    with pytest.raises(InvalidData, match=r"overwritten after the call.*la\.predict\(x\.clone\(\)\)"):
        read(p)


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_what_was_read_before_stays(read: Any) -> None:
    la, buffer = fitted(), X.clone()
    p, mean = la.predict(buffer, n_samples=20), la(X)
    read(p), p.latent, p.mean, p.latent_samples
    buffer.copy_(NEW)
    assert torch.equal(p.mean, mean) and torch.isfinite(p.latent_variance).all()


def test_inputs_that_stay_are_read_again() -> None:
    la = fitted()
    with torch.inference_mode():
        inside = X.clone()
    for x in (X, X.T.contiguous().T, torch.from_numpy(np.ascontiguousarray(X)), inside):
        p = la.predict(x)
        assert torch.equal(p.mean, la(X)) and p.latent_samples.shape[1:] == (len(X), 3)
    x = X.clone().requires_grad_()
    assert torch.equal(la.predict(x.detach()).mean, la(X))


@pytest.mark.parametrize("change", ["entry", "tensor", "none"])
def test_entries_of_a_mapping(change: str) -> None:
    la = Laplace(grid.network(), "classification", "last_layer", "full", forward_fn=lambda model, b: model(b["x"]))
    la.fit([{"x": X, "labels": Y}])
    batch = {"x": X.clone()}
    p = la.predict(batch)
    if change == "none":
        assert torch.equal(p.mean, la({"x": X}))
        return
    if change == "entry":
        batch["x"] = NEW
    else:
        batch["x"].fill_(1.0)
    with pytest.raises(InvalidData, match="overwritten"):
        _ = p.mean


def test_missing_values_are_equal_to_themselves() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.nan_to_num())

    x = X.clone()
    x[0, 1] = torch.nan
    la = Laplace(Filled(), "classification", "last_layer", "full")
    la.fit([(x, Y)])
    p = la.predict(x)
    assert torch.equal(p.mean, la(x))
    x.numpy()[0, 1] = 3.0
    with pytest.raises(InvalidData, match="overwritten"):
        _ = p.latent_samples


def test_large_inputs_are_compared_by_some_values() -> None:
    x = torch.zeros(LARGE, 3)
    la = Laplace(model := nn.Linear(3, 3), "classification", "all", "diag")
    la.fit([(X, Y)])
    p = la.predict(x)
    x.numpy()[:] = 1.0
    with pytest.raises(InvalidData, match="overwritten"):
        _ = p.latent_mean
    x = torch.zeros(3, LARGE).T  # not contiguous: PyTorch's own count
    p = la.predict(x)
    assert torch.equal(p.latent_mean, model(x))
    p = la.predict(x)
    x += 1
    with pytest.raises(InvalidData, match="overwritten"):
        _ = p.latent_mean


def test_mixtures_and_streams() -> None:
    la, buffer = fitted(), X.clone()
    p = MixtureLaplace([la, fitted()]).predict(buffer)
    buffer.copy_(NEW)
    with pytest.raises(InvalidData, match="overwritten"):
        _ = p.mean

    def stream() -> Any:
        for start in (0, 6):
            buffer[:6] = X[start : start + 6]
            yield buffer[:6]

    means = torch.cat([each.mean for each in la.predict(stream())])
    torch.testing.assert_close(means, la(X))
    late = list(la.predict(stream()))
    torch.testing.assert_close(late[1].mean, la(X[6:]))
    with pytest.raises(InvalidData, match="overwritten"):
        _ = late[0].mean
