"""What the block structure promises beyond the generated conformance tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import BlockLaplace, FullLaplace, Laplace
from laplace.core.layout import Layout
from laplace.errors import InvalidArgument
from laplace.jacobian.blocks import CHUNK_BYTES
from laplace.jacobian.outer import OuterBlock
from laplace.structures.block import BlockCurvature
from tests import problems as catalogue
from tests.conformance.cases import Case, drawn
from tests.reference.compare import assert_close


def one_layer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double(), torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
def test_of_one_layer_it_is_the_full_posterior(prior: str) -> None:
    model, x, y = one_layer()
    values = {"scalar": torch.tensor([0.3]), "layerwise": torch.tensor([0.3, 2.0]), "diag": torch.rand(15) + 0.1}
    block, full = (kind(model, "classification", prior_precision=values[prior]) for kind in (BlockLaplace, FullLaplace))
    for la in (block, full):
        la.fit([(x[:12], y[:12]), (x[12:], y[12:])])
    assert_close(block.H[0], full.H, "algebra", label="curvature")
    assert_close(block.posterior_precision.to_matrix(), full.posterior_precision, "algebra", label="P")
    assert_close(block.posterior_covariance, full.posterior_covariance, "algebra", label="covariance")
    assert_close(block.log_marginal_likelihood(), full.log_marginal_likelihood(), "algebra", label="evidence")
    assert_close(block(x), full(x), "algebra", label="predictions")


def test_a_layer_s_tensors_share_a_block_and_layers_do_not() -> None:
    layout = Layout(("0.weight", "0.bias", "2.weight", "3.weight", "3.bias", "scale"), (6, 2, 4, 3, 1, 5))
    assert layout.layers == ((0, 1), (2,), (3, 4), (5,))
    assert Layout(("weight", "bias", "0.weight"), (2, 1, 2)).layers == ((0, 1), (2,))


def test_a_layer_that_is_too_large_is_refused_before_data_are_read() -> None:
    read: list[int] = []

    class Loader:
        def __iter__(self):
            read.append(1)
            return iter([])

    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    la = Laplace(model, "classification", "all", "block", structure_kwargs={"max_block": 19})
    with pytest.raises(InvalidArgument, match=r"layer '0' has 20 random entries.*max_block=19.*'kron'"):
        la.fit(Loader())
    assert not read
    for allowed in (20, 8192):
        la = Laplace(model, "classification", "all", "block", structure_kwargs={"max_block": allowed})
        la.fit([(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))])
    with pytest.raises(InvalidArgument, match="max_block=0"):
        Laplace(model, "classification", "all", "block", structure_kwargs={"max_block": 0})


def test_log_density_before_fit_holds_no_blocks() -> None:
    """The prior of a network whose blocks could not be held."""
    model = nn.Linear(3000, 3000)
    la = Laplace(model, "regression", "all", "block", prior_precision=2.0)
    theta = torch.randn(la.n_params)
    expected = torch.distributions.Normal(0.0, 0.5**0.5).log_prob(theta).sum()
    assert_close(la.log_prob(theta), expected.double(), "float32_solve", label="log density")


def test_evidence_steps_with_a_scalar_prior_decompose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(catalogue.get("mlp_classification"), "block", "all")
    la = case.fit()
    la.log_marginal_likelihood()
    calls: list[int] = []
    eigh, factor = torch.linalg.eigh, torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "eigh", lambda *a, **k: calls.append(1) or eigh(*a, **k))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a, **k: calls.append(2) or factor(*a, **k))
    for delta in (0.1, 1.0, 10.0):
        la.log_marginal_likelihood(torch.tensor(delta, dtype=torch.float64))
    assert not calls
    la.log_marginal_likelihood(drawn(case, "diag", len(case.columns)).exp())
    assert set(calls) == {2}, "a prior that varies within a layer takes one Cholesky factorisation per layer"


@pytest.mark.parametrize("apart", [False, True])
def test_squares_of_a_large_weight_do_not_hold_all_cotangents(apart: bool) -> None:
    """A weight of which one datum's piece of all cotangents exceeds the chunk, against plain sums."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs, columns = 700, 800, 9
    assert columns > CHUNK_BYTES // (8 * outputs * inputs) > 1
    a = torch.randn(2, 3, 1, inputs, generator=generator)
    g = torch.randn(columns, 2, 3, 1, outputs, generator=generator)
    block, found = OuterBlock(a, g), torch.zeros(outputs * inputs)
    if apart:
        found = block.squares_per_cotangent()
    else:
        block.add_squares(found)
    expected = torch.einsum("kbtgo,btgi->kboi", g.double(), a.double()).square().sum(1).flatten(1)
    assert_close(found, expected if apart else expected.sum(0), "float32", label="squares")


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
def test_the_quadratic_form_follows_the_eigenvectors(prior: str) -> None:
    """The basis of a sum of several terms turns with their weights: with one noise per output it is no constant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    values = {"scalar": torch.tensor([0.3]), "layerwise": torch.rand(4) + 0.1, "diag": torch.rand(26) + 0.1}
    noise = torch.tensor([0.4, 1.7], dtype=torch.float64)
    la = BlockLaplace(model, "regression", prior_precision=values[prior], sigma_noise=noise)
    la.fit([(x, y)])
    theta = torch.randn(26, dtype=torch.float64)

    def norm(sigma: torch.Tensor) -> torch.Tensor:
        la.sigma_noise = sigma
        return la.square_norm(theta)

    leaf = noise.clone().requires_grad_()
    (slope,) = torch.autograd.grad(norm(leaf), leaf)
    steps = 1e-6 * torch.eye(2, dtype=torch.float64)
    expected = torch.stack([(norm(noise + step) - norm(noise - step)) / 2e-6 for step in steps])
    assert_close(slope, expected, "finite_difference")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_block_that_is_not_finite_is_told(value: float) -> None:
    finite, other = torch.eye(2).unsqueeze(0), torch.eye(3).unsqueeze(0)
    for matrices, expected in (((finite, other), True), ((finite, value * other), False)):
        curvature = BlockCurvature.from_state({"values": list(matrices), "groups": [[0], [1]]})
        assert bool(curvature.is_finite()) is expected
