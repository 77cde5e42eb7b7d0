"""Data that fade and data that are removed: weighted sums and differences of fits, against fits and dense oracles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import DiagLaplace, Laplace
from laplace.curvature import NativeHessian
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, ModelChangedError, UnsupportedError
from laplace.parametric import ParametricLaplace
from laplace.structures import STRUCTURES, Curvature
from laplace.structures.diag import DiagCurvature
from tests import grid
from tests.reference import curvature as reference
from tests.reference import evidence, kfac
from tests.reference.compare import assert_close

LIKELIHOODS = ("classification", "regression")
# Those that are sums over data.
SUMS = tuple(name for name, structure in STRUCTURES.items() if structure.minus is not Curvature.minus)
each_cell = pytest.mark.parametrize(("weights", "structure"), [(w, s) for w in grid.WEIGHTS for s in SUMS])
each_structure = pytest.mark.parametrize("structure", SUMS)
NAMES = ["0.weight", "0.bias", "3.weight", "3.bias"]


def network(likelihood: str = "classification") -> nn.Module:
    return grid.network(likelihood).double().eval()


def data(likelihood: str = "classification", n: int = 3) -> list[list[tuple[Tensor, Tensor]]]:
    """Sets of data in batches, float64."""
    sets = []
    for seed in range(n):
        batches = grid.batches(likelihood, seed=seed)
        sets.append([(x.double(), y.double() if y.is_floating_point() else y) for x, y in batches])
    return sets


def joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def moved(model: nn.Module) -> None:
    """Other weights, as after more training."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(1.3).add_(0.05)


def assert_same_posterior(la: ParametricLaplace, other: ParametricLaplace) -> None:
    assert_close(la.posterior().to_dense(), other.posterior().to_dense(), "algebra", label="precision")
    assert_close(la.loss, other.loss, "algebra", label="loss")
    assert_close(la.n_data, other.n_data, "algebra", label="n_data")
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), "algebra", label="evidence")


# Removing.


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_of_an_exact_hessian(structure: str) -> None:
    """What is left may be as indefinite as what was fitted."""
    model, (kept, gone) = network(), data(n=2)
    options = {"backend": NativeHessian, "prior_precision": 50.0}
    la, expected = (Laplace(model, "classification", "all", structure, **options) for _ in range(2))
    la.fit(kept + gone)
    la.forget(gone)
    expected.fit(kept)
    assert_same_posterior(la, expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@each_cell
def test_forgetting_is_a_fit_without_the_data(weights: str, structure: str, likelihood: str) -> None:
    first, second, third = data(likelihood)
    la, rest = (grid.make(weights, structure, likelihood, network(likelihood)) for _ in range(2))
    la.fit([*first, *second, *third])
    mean = la.mean.clone()
    la.forget(second)
    rest.fit([*first, *third])
    assert_same_posterior(la, rest)
    assert torch.equal(la.mean, mean)
    for got, want in zip(_prediction(la, first), _prediction(rest, first), strict=True):
        assert_close(got, want, "algebra", label="prediction")


def _prediction(la: ParametricLaplace, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    prediction = la(batches[0][0])
    return [prediction] if isinstance(prediction, Tensor) else list(prediction)


@each_structure
def test_one_noise_per_output(structure: str) -> None:
    first, second, _ = data("regression")
    noise = torch.tensor([0.3, 0.7, 1.1])
    la, rest = (Laplace(network("regression"), "regression", "all", structure, sigma_noise=noise) for _ in range(2))
    la.fit([*first, *second])
    la.forget(first)
    rest.fit(second)
    assert_same_posterior(la, rest)


@each_structure
def test_without_all_data_the_prior_is_left(structure: str) -> None:
    first, second, _ = data()
    la = Laplace(network(), "classification", "all", structure, prior_precision=0.7)
    la.fit([*first, *second])
    la.forget(first)
    la.forget(second)
    assert la.n_data == 0
    assert torch.equal(la.posterior().to_dense(), 0.7 * torch.eye(la.n_params, dtype=torch.float64))
    assert float(la.loss) == 0
    la.fit(first, override=False)
    again = Laplace(network(), "classification", "all", structure, prior_precision=0.7)
    again.fit(first)
    assert_same_posterior(la, again)


@each_structure
def test_float32_leaves_no_negative_curvature(structure: str) -> None:
    """Units that only the removed data used have curvature zero, up to rounding of both signs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(400, 4), torch.randint(3, (400,))
    la, rest = (Laplace(model, "classification", "all", structure) for _ in range(2))
    la.fit([(x[i : i + 50], y[i : i + 50]) for i in range(0, 400, 50)])
    la.forget([(x[2:], y[2:])])
    rest.fit([(x[:2], y[:2])])
    assert_close(la.posterior().to_dense(), rest.posterior().to_dense(), "float32_solve")
    assert la.log_marginal_likelihood().isfinite()
    assert (la.posterior_variance <= 1 + 1e-5).all()


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@each_structure
def test_other_batches_than_those_of_the_fit(weights: str, structure: str) -> None:
    """Numbers of a float32 network round otherwise in other batches, also where their sums are float64."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
    la, expected = (Laplace(model, "classification", weights, structure, prior_precision=0.1) for _ in range(2))
    la.fit([(x, y)])
    la.forget(list(zip(x[13:].split(7), y[13:].split(7), strict=True)))
    expected.fit([(x[:13], y[:13])])
    error = la.predictive_moments(x)[1] - expected.predictive_moments(x)[1]
    assert error.abs().max() < 1e-4 * expected.predictive_moments(x)[1].abs().max()


@each_structure
def test_what_was_not_seen_cannot_be_removed(structure: str) -> None:
    first, second, _ = data()
    la = Laplace(network(), "classification", "all", structure)
    la.fit(first)
    before = copy.deepcopy(la.state_dict())
    with pytest.raises(InvalidData, match="24 data are to be removed, but the fit has seen 12"):
        la.forget([*first, *second])
    foreign = [(10 * x[:1], y[:1]) for x, y in second[:1]]
    with pytest.raises(CurvatureError, match="indefinite"):
        la.forget(foreign)
    assert _equal(before, la.state_dict())
    assert la(first[0][0]).isfinite().all()


def test_a_foreign_datum_of_little_weight_is_noticed_in_float64() -> None:
    """Of a float64 network no more is put down to rounding than float64 has."""
    la = Laplace(network(), "classification", "all", "full")
    first, second = data(n=2)
    la.fit(first)
    with pytest.raises(CurvatureError, match="indefinite"):
        la.forget([(x[:1], y[:1]) for x, y in second[:1]], weight=1e-4)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_refusals_name_the_mend() -> None:
    first, second, _ = data()
    la = Laplace(network(), "classification", "all", "diag")
    with pytest.raises(RuntimeError, match="fit"):
        la.forget(first)
    la.fit([*first, *second])
    for weight in (0.0, 1.5, float("nan")):
        with pytest.raises(InvalidArgument, match="weight="):
            la.forget(first, weight=weight)
    moved(la.model)
    with pytest.raises(ModelChangedError):
        la.forget(first)
    sampled = Laplace(network(), "classification", "all", "diag", backend_kwargs={"stochastic": True})
    sampled.fit(first)
    with pytest.raises(UnsupportedError, match="stochastic=True"):
        sampled.forget(first)


class Sketch(DiagCurvature):
    """A structure that is no sum over data."""

    name = "sketch"
    scaled = Curvature.scaled
    minus = Curvature.minus


def test_a_structure_that_is_no_sum_refuses_by_name() -> None:
    first, second, _ = data()
    la = type("Sketched", (DiagLaplace,), {"structure": Sketch})(network(), "classification")
    la.fit(first[:1])
    with pytest.raises(UnsupportedError, match=r"'sketch' .* subtracted"):
        la.forget([(x[:2], y[:2]) for x, y in first[:1]])
    with pytest.raises(UnsupportedError, match=r"'sketch' .* weighted anew"):
        la.fit(second, override=False, decay=0.5)
    assert la.n_data == 5


def test_curvatures_of_two_structures_do_not_meet() -> None:
    first, *_ = data()
    curvatures = []
    for structure in SUMS:
        la = Laplace(network(), "classification", "all", structure)
        la.fit(first)
        curvatures.append(la.fitted().curvature)
    for mine in curvatures:
        for other in curvatures:
            if mine is not other:
                with pytest.raises(CurvatureError, match=f"{other.name!r} .* {mine.name!r}"):
                    mine.minus(other)


# Fading.


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_can_fade(structure: str) -> None:
    first, second, _ = data()
    la = Laplace(network(), "classification", "all", structure)
    la.fit(first)
    curvature = la.fitted().curvature
    one, prior = torch.ones(1, dtype=torch.float64), la.prior
    eye = torch.eye(la.n_params, dtype=torch.float64)
    options = {"engine": la.snapshot().engine}
    pair = (curvature, curvature.scaled(0.3))
    whole, faded = (c.precision(one, prior, **options).to_dense() - eye for c in pair)
    assert_close(faded, 0.3 * whole, "algebra")
    la.fit(second, override=False, decay=0.3)
    assert la.posterior_variance.isfinite().all() and la.n_data == pytest.approx(12 * 1.3)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@each_structure
def test_decay_weighs_the_curvature_at_the_former_weights(structure: str, likelihood: str) -> None:
    """0.9² H₁(θ₁) + 0.9 H₂(θ₂) + H₃(θ₃), by the dense curvature of every set at the weights of its fit."""
    model = network(likelihood)
    la = Laplace(model, likelihood, "all", structure, prior_precision=0.3)
    truths, losses = [], []
    for i, batches in enumerate(data(likelihood)):
        la.fit(batches, override=i == 0, **({} if i == 0 else {"decay": 0.9}))
        x, y = joined(batches)
        factors = kfac.kfac(model, x, y, NAMES, likelihood)
        truths.append((reference.ggn(model, x, y, NAMES, likelihood), factors))
        losses.append(reference.loss(model(x).detach(), y, likelihood))
        moved(model)
    weights = [0.81, 0.9, 1.0]
    H = sum(w * matrix for w, (matrix, _) in zip(weights, truths, strict=True))
    assert isinstance(H, Tensor)
    split = H.shape[0] - 18  # the last layer, 5 inputs and a bias for 3 outputs
    H = {
        "full": H,
        "block": torch.block_diag(H[:split, :split], H[split:, split:]),
        "diag": torch.diag(H.diag()),
        "kron": _summed(weights, [f for _, f in truths]),
    }[structure]
    assert_close(la.posterior().to_dense(), H + 0.3 * torch.eye(len(H)), "backend")
    loss = torch.stack([w * value for w, value in zip(weights, losses, strict=True)]).sum()
    assert_close(la.loss, loss, "backend")
    assert_close(la.n_data, 12 * 2.71, "algebra")
    loglik = evidence.log_likelihood(loss, 1, 3, likelihood=likelihood)
    if likelihood == "regression":  # the normaliser of N data, where N is a sum of weights
        loglik = -loss + 12 * 2.71 * (loglik + loss)
    prior = torch.full((len(H),), 0.3, dtype=torch.float64)
    want = evidence.log_marginal_likelihood(H, la.mean, prior, 0.0, 1.0, loglik)
    assert_close(la.log_marginal_likelihood(), want, "backend")


def _summed(weights: list[float], factors: list[Any]) -> Tensor:
    """(Σ w B) ⊗ (Σ w N A) / Σ w N of every weight, Σ w B of every bias; the reference's A is a mean."""
    blocks = []
    for name in NAMES:
        parts = [f[name][0] for f in factors]
        block = sum(w * part[0] for w, part in zip(weights, parts, strict=True))
        if len(parts[0]) == 2:
            mean = sum(w * part[1] for w, part in zip(weights, parts, strict=True)) / sum(weights)
            block = torch.kron(block.contiguous(), mean.contiguous())
        blocks.append(block)
    return torch.block_diag(*blocks)


@each_structure
def test_a_single_datum_may_fade(structure: str) -> None:
    """Less than one datum, and less than one position of a shared weight, is no reason to round up."""
    (x, y), *_ = data()[0]
    la, whole = (Laplace(network(), "classification", "all", structure) for _ in range(2))
    la.fit([(x[:1], y[:1])])
    whole.fit([(x[:1], y[:1])])
    faded = la.fitted().scaled(0.25).curvature.precision(torch.ones(1, dtype=torch.float64), la.prior)
    eye = torch.eye(la.n_params, dtype=torch.float64)
    assert_close(faded.to_dense() - eye, 0.25 * (whole.posterior().to_dense() - eye), "algebra")


@each_structure
def test_faded_data_are_forgotten_with_the_weight_they_have(structure: str) -> None:
    first, second, third = data()
    la, rest = (Laplace(network(), "classification", "all", structure) for _ in range(2))
    la.fit(first)
    for batches in (second, third):
        la.fit(batches, override=False, decay=0.5)
    la.forget(first, weight=0.25)
    rest.fit(second)
    rest.fit(third, override=False, decay=0.5)
    assert_same_posterior(la, rest)
    la.forget(third)
    la.forget(second, weight=0.5)
    assert la.n_data == 0


def test_decay_is_checked() -> None:
    first, *_ = data()
    la = Laplace(network(), "classification", "all", "diag")
    for decay in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(InvalidArgument, match="decay="):
            la.fit(first, override=False, decay=decay)
    with pytest.raises(InvalidArgument, match="override=False"):
        la.fit(first, decay=0.9)
    la.fit(first, override=False, decay=0.9)  # nothing yet that could fade
    assert la.n_data == 12


@each_structure
def test_a_faded_posterior_is_saved_and_shown(structure: str) -> None:
    first, second, _ = data()
    la, loaded = (Laplace(network(), "classification", "all", structure) for _ in range(2))
    la.fit(first)
    la.fit(second, override=False, decay=0.9)
    loaded.load_state_dict(la.state_dict())
    assert loaded.n_data == la.n_data == 22.8
    assert "22.8 data" in repr(la)
    assert_same_posterior(la, loaded)


class _Attention(nn.Module):
    """A softmax does not see the bias of its keys: the derivative in it is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.head = (nn.Linear(16, n) for n in (16, 16, 16, 3))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x) @ self.key(x).mT, -1)
        return self.head((weights @ self.value(x)).mean(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("structure", ["diag", "block", "kron"])
def test_what_is_zero_but_for_rounding_can_be_removed(structure: str, dtype: torch.dtype) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model, x, y = _Attention().to(dtype), torch.randn(12, 9, 16).to(dtype), torch.randint(3, (12,))
        la, kept = (Laplace(model, "classification", "all", structure) for _ in range(2))
        la.fit([(x, y)])
        la.forget([(x[i : i + 1], y[i : i + 1]) for i in range(11)])
        kept.fit([(x[11:], y[11:])])
        exact = kept.log_marginal_likelihood()
        assert abs(float(la.log_marginal_likelihood() - exact)) < 1e-4 * abs(float(exact))
