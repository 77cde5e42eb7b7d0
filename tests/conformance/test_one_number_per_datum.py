"""Networks that return `[B]`, one number per datum: the posterior of the same network that returns `[B, 1]`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import (
    ELLA,
    BaseLaplace,
    FunctionalLaplace,
    Laplace,
    MixtureLaplace,
    marglik_training,
)
from laplace.curvature import NativeEF, NativeGGN, NativeHessian
from laplace.errors import InvalidArgument, InvalidData
from laplace.structures import STRUCTURES
from tests.reference.compare import assert_close

X = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = {
    "regression": X.sum(1).sin() + 0.1 * NOISE,
    "bernoulli": (X[:, 0] + NOISE > 0).double(),
    "poisson": NOISE.abs().mul(3).round(),
}


class Network(nn.Module):
    """One output, in the shape of `flat`."""

    def __init__(self, flat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.flat = nn.Linear(3, 5), nn.Linear(5, 1), flat

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(self.head(torch.tanh(self.body(x))))


FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze(-1)": lambda f: f.squeeze(-1),
    "squeeze()": lambda f: f.squeeze(),  # of a batch of one it leaves no dimension at all
    "[:, 0]": lambda f: f[:, 0],
    "column": lambda f: f,
}


def network(flat: str) -> Network:
    torch.manual_seed(0)
    return Network(FLAT[flat]).double()


def batches(likelihood: str, flat: str) -> list[tuple[Tensor, Tensor]]:
    """The last batch has one datum."""
    y = TARGETS[likelihood]
    y = y.unsqueeze(1) if flat == "column" else y
    return [(X[:7], y[:7]), (X[7:11], y[7:11]), (X[11:], y[11:])]


def pair(likelihood: str, weights: str, structure: str, flat: str = "squeeze()", **options: Any) -> list[Any]:
    if weights == "subnetwork":
        options["subnetwork_indices"] = torch.tensor([0, 3, 18, 20, 23, 25])
    fitted = []
    for form in (flat, "column"):
        la = Laplace(network(form), likelihood, weights, structure, **options)
        la.fit(batches(likelihood, form))
        fitted.append(la)
    return fitted


def same(actual: Any, expected: Any) -> None:
    """The same numbers, up to the dimension of the one output."""
    for one, other in zip(*(v if isinstance(v, tuple) else (v,) for v in (actual, expected)), strict=True):
        assert_close(one.reshape(-1), other.reshape(-1), "algebra")


@pytest.mark.parametrize("likelihood", TARGETS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("weights", ["all", "last_layer", "subnetwork"])
def test_every_choice_of_weights_and_structure(weights: str, structure: str, likelihood: str) -> None:
    la, column = pair(likelihood, weights, structure)
    assert la.n_outputs == 1 and la.channel_dim == 0
    same(la.log_marginal_likelihood(), column.log_marginal_likelihood())
    out = la(X)
    same(out, column(X))
    if likelihood == "regression":
        assert [part.shape for part in out] == [(12,), (12, 1, 1)]
        assert la(X, diagonal_output=True)[1].shape == (12,)
        assert [part.shape for part in la(X, joint=True)] == [(12,), (12, 12)]
    elif likelihood == "bernoulli":
        assert out.shape == (12,)


@pytest.mark.parametrize("flat", [name for name in FLAT if name != "column"])
@pytest.mark.parametrize("backend", [NativeGGN, NativeEF, NativeHessian])
def test_every_kind_of_curvature_and_way_to_return_a_vector(backend: Any, flat: str) -> None:
    la, column = pair("regression", "all", "full", flat, backend=backend, prior_precision=1e3)
    assert_close(la.H, column.H, "algebra")
    assert la(X[:1])[0].shape == (1,)
    for pred_type in ("glm", "nn"):
        samples = []
        for one in (la, column):
            torch.manual_seed(3)
            samples.append(one.predictive_samples(X[:1], pred_type=pred_type, n_samples=4))
        assert samples[0].shape == (4, 1)
        same(*samples)


def test_quantities_of_a_prediction() -> None:
    for likelihood in TARGETS:
        la, column = pair(likelihood, "all", "kron")
        predictions = []
        for one in (la, column):
            torch.manual_seed(3)
            predictions.append(one.predict(X))
        seed = torch.manual_seed
        for name in ("mean", "variance", "latent_mean", "latent_variance", "latent_samples", "mean_samples"):
            values = [(seed(3), getattr(prediction, name))[1] for prediction in predictions]
            assert values[0].shape[-1] == 12, name
            same(*values)
        if likelihood == "regression":
            same(predictions[0].interval(0.9), predictions[1].interval(0.9))
            assert predictions[0].interval(0.9)[0].shape == (12,)


def _tuned(la: Any, data: Any) -> Any:
    la.optimize_prior_precision(method="gridsearch", val_loader=data, grid_size=5, log_prior_prec_min=-1)
    return la.prior_precision


def _saved(la: Any, data: Any) -> Any:
    again = Laplace(la.model, "regression", "all", "kron")
    again.load_state_dict(la.state_dict())
    return again(X)


def _more(la: Any, data: Any) -> Any:
    la.fit(data, override=False)
    return la(X)


def _refined(la: Any, data: Any) -> Any:
    la.refine(data)
    return la(X)


USES: dict[str, Callable[[Any, Any], Any]] = {
    "evidence": lambda la, _: la.optimize_prior_precision(n_steps=3) or la.prior_precision,
    "grid": _tuned,
    "saved": _saved,
    "more data": _more,
    "refined": _refined,
    "mixture": lambda la, _: MixtureLaplace([la, copy.deepcopy(la)])(X),
    "calibrated": lambda la, data: la.calibrate([(x + 0.1, y) for x, y in data]) and la(X),
    "compared": lambda la, data: torch.tensor(
        [row.posterior for row in la.compare([(x + 0.1, y) for x, y in data]).rows.values()], dtype=torch.float64
    ),
    "exported": lambda la, _: laplace.export(la, X)(X),
    "predictions by samples": lambda la, _: la(X, pred_type="nn", link_approx="mc", n_samples=7),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("use", USES)
def test_every_use(use: str) -> None:
    results = []
    for la, flat in zip(pair("regression", "all", "kron"), ("squeeze()", "column"), strict=True):
        torch.manual_seed(3)
        results.append(USES[use](la, batches("regression", flat)))
    same(*results)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gaussian_processes_and_training() -> None:
    results: list[Any] = []
    for flat in ("squeeze()", "column"):
        gp = FunctionalLaplace(network(flat), "regression", n_subset=6)
        gp.fit(batches("regression", flat))
        torch.manual_seed(0)
        options: dict[str, Any] = {"n_epochs": 3, "marglik_frequency": 1, "n_hypersteps": 2, "progress_bar": False}
        la, *_ = marglik_training(network(flat), batches("regression", flat), "regression", "kron", **options)
        assert isinstance(la, BaseLaplace)
        ella = ELLA(network(flat), "regression", subsample_size=6, n_eigenvalues=4)
        ella.fit(batches("regression", flat))
        ella.optimize_prior_precision(method="gridsearch", val_loader=batches("regression", flat), grid_size=3)
        results.append((*gp(X), *la(X), *ella(X)))
    same(*results)


def test_what_outputs_without_a_dimension_of_channels_do_not_fit() -> None:
    x, y = X, TARGETS["regression"]
    with pytest.raises(InvalidData, match=r"give targets \[B\].*channel_dim=0"):
        Laplace(network("squeeze()"), "regression").fit([(x, y.unsqueeze(1))])
    with pytest.raises(InvalidData, match="a Laplace approximation needs"):
        Laplace(network("squeeze()"), "classification").fit([(x, y.long())])
    with pytest.raises(InvalidArgument, match=r"channel_dim=0 is of outputs \[B\]"):
        Laplace(network("column"), "regression", channel_dim=0).fit([(x, y)])
    given = Laplace(network("squeeze()"), "regression", channel_dim=0)
    given.fit([(x, y.unsqueeze(1))])  # a column is as good where the user says so
    assert given(x)[0].shape == (12,)


def test_all_outputs_of_one_datum_are_not_taken_for_one_of_each() -> None:
    """A loader without batches gives `[D]`, of which an autoencoder makes `[D]`."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    with pytest.raises(InvalidData, match="batch dimension"):
        Laplace(model, "regression", "all", "diag").fit([(X[0], X[0])])


def test_conformal_intervals_of_held_out_data() -> None:
    flat, column = pair("regression", "all", "full")
    y = TARGETS["regression"]
    intervals = [
        laplace.conformal(la, val_loader=[(X, targets)]).interval(X)
        for la, targets in ((flat, y), (column, y[:, None]))
    ]
    for one, other in zip(*intervals, strict=True):
        assert_close(one, other, "algebra")
