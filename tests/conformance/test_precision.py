"""Numbers that are hard to hold: saturated and ill-conditioned float32 networks, bfloat16 models, float64."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from tests import problems as catalogue
from tests.conformance.cases import STRUCTURE_NAMES, Case, own_dense
from tests.models.dense import mlp
from tests.reference.compare import assert_close

DELTAS = (1e-4, 1e-2, 1.0, 1e2)
WEIGHTS = ("all", "last_layer", "subnetwork")


@cache
def saturated() -> tuple[nn.Module, Tensor, Tensor]:
    """A float32 network with certain predictions, dead units and nearly equal features, and its data."""
    torch.manual_seed(0)
    model = mlp(6, 20, 20, 4)
    with torch.no_grad():
        first, last = model.get_parameter("0.weight"), model.get_parameter("4.weight")
        first[:5] = first[5:10] * (1 + 1e-4)  # nearly equal units
        first[10:13] *= 60  # saturated ones
        last *= 25  # probabilities of 0 and 1
    x = torch.randn(60, 6) * torch.tensor([1.0, 1.0, 1.0, 30.0, 1e-3, 1e-3])
    return model, x, torch.randint(4, (60,))


def fitted(structure: str, weights: str, dtype: torch.dtype, likelihood: str = "classification") -> ParametricLaplace:
    model, x, y = saturated()
    model, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    options = {"subnetwork_indices": torch.arange(0, 500, 3)} if weights == "subnetwork" else {}
    targets = y if likelihood == "classification" else torch.nn.functional.one_hot(y, 4).to(dtype)
    la = Laplace(model, likelihood, weights, structure, **options)  # pyright: ignore
    la.fit([(x[i : i + 25], targets[i : i + 25]) for i in (0, 25, 50)])
    assert isinstance(la, ParametricLaplace)
    return la


@pytest.mark.filterwarnings("ignore:sigma_noise is 1")  # residuals of ten are what saturates
@pytest.mark.filterwarnings("ignore:the curvature was summed in float32")  # the least prior is below its rounding
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
@pytest.mark.turns
def test_saturated_float32_network(structure: str, weights: str, likelihood: str) -> None:
    single = fitted(structure, weights, torch.float32, likelihood)
    double = fitted(structure, weights, torch.float64, likelihood)
    x = saturated()[1]
    for delta in DELTAS:
        single.prior_precision = double.prior_precision = delta
        values = single.log_marginal_likelihood(), double.log_marginal_likelihood()
        assert values[0].dtype == torch.float32 and values[0].isfinite()
        # The factors of a product are better behaved than a dense matrix.
        kind = {"full": "float32_ill", "block": "float32_ill_blocks"}.get(structure, "float32_solve")
        assert_close(values[0], values[1], kind, label=f"evidence at {delta}")
        per_tensor = torch.full((single.n_layers or 1,), delta, requires_grad=True)
        layerwise = single.log_marginal_likelihood(per_tensor)
        assert_close(layerwise, values[1], kind, label=f"layerwise evidence at {delta}")
        assert torch.autograd.grad(layerwise, per_tensor)[0].isfinite().all()
        found = single.posterior_variance, single.sample(3), single(x), single(x, "nn", n_samples=3)
        for part in found:
            for tensor in part if isinstance(part, tuple) else [part]:
                assert tensor.isfinite().all()
        assert (single.posterior_variance > 0).all()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_variances_of_the_saturated_network_are_close_to_float64(structure: str, weights: str) -> None:
    single, double = (fitted(structure, weights, dtype) for dtype in (torch.float32, torch.float64))
    x = saturated()[1]
    for delta in DELTAS[1:]:
        single.prior_precision = double.prior_precision = delta
        one, other = single._latent(x, "diagonal").covariance, double._latent(x.double(), "diagonal").covariance
        assert ((one - other).abs() <= 0.02 * other).all()
        probabilities = single(x), double(x.double())
        assert (probabilities[0] - probabilities[1]).abs().max() < 2e-3
        for link in ("mc", "bridge", "bridge_norm"):
            rows = single(x, link_approx=link)
            assert_close(rows.sum(1), torch.ones(len(x)), "float32", label=link)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_bfloat16_model_has_float32_curvature(structure: str, weights: str) -> None:
    model, x, y = mlp(6, 12, 8, 4), torch.randn(40, 6), torch.randint(4, (40,))
    half = copy.deepcopy(model).bfloat16()
    model = copy.deepcopy(half).float()  # the same weights
    options = {"subnetwork_indices": torch.arange(0, 100, 3)} if weights == "subnetwork" else {}
    rounded, plain = (Laplace(m, "classification", weights, structure, **options) for m in (half, model))
    rounded.fit([(x.bfloat16(), y)])
    plain.fit([(x.bfloat16().float(), y)])
    assert rounded.prior_precision.dtype == rounded.mean.dtype == torch.float32
    assert rounded.log_marginal_likelihood().dtype == torch.float32
    assert_close(rounded.log_marginal_likelihood(), plain.log_marginal_likelihood(), "bfloat16", label="evidence")
    assert_close(rounded.posterior_variance, plain.posterior_variance, "bfloat16", label="variance")
    predictions = rounded(x.bfloat16()), plain(x.bfloat16().float())
    assert predictions[0].dtype == torch.float32
    assert (predictions[0] - predictions[1]).abs().max() < 0.03
    assert rounded(x.bfloat16(), "nn", n_samples=5).isfinite().all()
    assert rounded.sample(3).dtype == torch.float32
    assert next(half.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("weights", ["all", "last_layer", "random"])
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_float64_is_kept(structure: str, weights: str) -> None:
    case = Case(catalogue.get("mlp_classification"), structure, weights)
    la = case.fit(prior_precision=0.1, temperature=0.3)
    x = case.problem.x
    numbers = [
        la.mean, la.prior_precision, la.temperature, la.sigma_noise, la.log_marginal_likelihood(), la.log_likelihood,
        la.posterior_variance, la.posterior_covariance, la.posterior_scale, la.sample(2), la(x), la(x, "nn"),
        la.functional_samples(x), la.functional_variance(case.jacobian), la.scatter, la.log_det_ratio, own_dense(la),
    ]  # fmt: skip
    assert {number.dtype for number in numbers} == {torch.float64}
    # a Python number is not rounded to float32 on its way in
    assert la.temperature.item() == 0.3 and la.prior_precision.item() == 0.1


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_rank_deficient_curvature_down_to_tiny_priors(structure: str) -> None:
    """More parameters than data: eigenvalues that are zero must not be negative by rounding."""
    model = mlp(10, 30, 3)
    la = Laplace(model, "regression", "all", structure)
    la.fit([(torch.randn(4, 10), torch.randn(4, 3))])
    values = [la.log_marginal_likelihood(delta) for delta in (1e-10, 1e-7, 1e-4, 1.0)]
    assert all(value.isfinite() for value in values)
    for delta in (1e-4, 1.0):
        la.prior_precision = delta
        assert la(torch.randn(5, 10))[1].isfinite().all()


@pytest.mark.parametrize("structure", ["kron", "damped", "ekfac", "diag", "block"])
def test_a_small_difference_of_large_determinants(structure: str) -> None:
    """Log det P − log det P₀ of many weights that the data say little of: float32 sums would lose it."""
    options = {"damping": True} if structure == "damped" else {}
    structure = "kron" if structure == "damped" else structure
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_000, 4), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.arange(8).view(4, 2), torch.tensor([0, 1, 2, 0])
    if structure == "block":
        model.get_parameter("0.weight").requires_grad_(False)
    ratios: dict[torch.dtype, list[Tensor]] = {}
    for dtype in (torch.float32, torch.float64):
        la = Laplace(copy.deepcopy(model).to(dtype), "classification", "all", structure, **options)  # pyright: ignore
        la.fit([(x, y)])
        ratios[dtype] = []
        for length in (1, la.n_layers, la.n_params):
            la.prior_precision = torch.full((length or 1,), 300.0)
            ratios[dtype].append(la.log_det_ratio)
    assert_close(torch.stack(ratios[torch.float32]), torch.stack(ratios[torch.float64]), "float32")
    assert_close(torch.stack(ratios[torch.float64])[1:], ratios[torch.float64][0].expand(2), "backend")
