"""Classes of users that derive from the bases, and choose no structure."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from laplace import BaseLaplace
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.weights.last_layer import LastLayer
from tests import grid
from tests.reference.compare import assert_close

X, Y = grid.data("regression")


class Prior(BaseLaplace):
    """The prior's variance around the network's outputs."""

    def fit(self, train_loader, override: bool = True, progress_bar: bool = False) -> None:
        self.n_seen = sum(len(y) for _, y in train_loader)

    def __call__(self, x: Tensor, pred_type: str = "glm", **options) -> tuple[Tensor, Tensor]:
        f = self._outputs(x)
        return f, (1 / self.prior_precision).expand_as(f)

    def _outputs(self, x: Tensor) -> Tensor:
        return self.backend.jacobians(x)[1]


class Summed(Prior):
    """A curvature that its own fit sums by hooks, which nobody else calls."""

    def fit(self, train_loader, override: bool = True, progress_bar: bool = False) -> None:
        self._init_H()
        for x, y in train_loader:
            self.diagonal = self.diagonal + self._curv_closure(x, y)

    def _init_H(self) -> None:
        self.diagonal = torch.zeros(self.n_params)

    def _curv_closure(self, x: Tensor, y: Tensor) -> Tensor:
        return self.backend.diag(x, y)[1]

    def log_marginal_likelihood(self, prior_precision=None, sigma_noise=None) -> Tensor:
        return -self.diagonal.sum()


class OfLastLayer(Prior):
    weights_type = LastLayer


def made(cls: type = Prior, **options):
    la = cls(grid.network("regression"), "regression", **options)
    la.fit([(X, Y)])
    return la


def test_a_class_of_two_methods() -> None:
    la = made(prior_precision=4.0, sigma_noise=0.5)
    assert la.n_seen == len(X)
    mean, variance = la.predictive(X, "glm", "mc", 3)
    assert_close(mean, copy.deepcopy(la.model).eval()(X), "algebra")
    assert_close(variance, torch.full_like(mean, 0.25), "exact")
    assert (la.n_params, la.n_layers, la.is_subset_params) == (38, 4, False)
    for again in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        again.prior_precision = 2.0
        assert_close(again(X)[1], torch.full_like(mean, 0.5), "exact")
    assert_close(la(X)[1], variance, "exact")


@pytest.mark.parametrize(("name", "value"), [("prior_precision", -1.0), ("sigma_noise", 0.0), ("temperature", -2.0)])
def test_hyperparameters_are_checked(name: str, value: float) -> None:
    la = made()
    with pytest.raises(InvalidArgument, match=name):
        setattr(la, name, value)
    with pytest.raises(InvalidArgument, match=name):
        made(**{name: value})


@pytest.mark.parametrize(
    "read",
    [
        lambda la: la.log_marginal_likelihood(),
        lambda la: la.marglik(2.0),
        lambda la: la.evidence(),
        lambda la: la.log_likelihood,
        lambda la: la.log_det_ratio,
        lambda la: la.scatter,
    ],
)
def test_an_evidence_that_is_not_defined(read) -> None:
    la = made()
    with pytest.raises(UnsupportedError, match="class Prior has no evidence; define log_marginal_likelihood"):
        read(la)
    assert float(la.prior_precision) == 1.0
    with pytest.raises(UnsupportedError, match="class Prior has no posterior; define __call__"):
        la.posterior()


def test_methods_that_its_own_fit_calls() -> None:
    la = made(Summed)
    assert_close(la.marglik(), -la.diagonal.sum(), "exact")
    assert (la.diagonal >= 0).all()


def test_a_class_of_the_last_layer() -> None:
    la = OfLastLayer(grid.network("regression"), "regression")
    la.model.find_last_layer(X)
    assert la.n_params == 18
    assert la.backend.jacobians(X)[0].shape == (12, 3, 18)


def test_private_names_of_the_library_stay_refused() -> None:
    with pytest.raises(UnsupportedError, match="_assign, which is private to this library"):
        type("Own", (Prior,), {"_assign": lambda self, **given: None})
