"""Full matrices by pairs of layers: what large networks use, forced upon every problem of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.jacobian import full_sum
from laplace.jacobian.full_sum import MatrixSum
from laplace.jacobian.heads import HeadBlock
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.structures.full import FullPrecision
from tests.conformance.cases import KEPT, WEIGHTS, Case, by_turns, few, own_dense, thinned, truth
from tests.conformance.test_predictions import covariance_of, latent_of
from tests.pairs import ALL
from tests.reference import curvature, predictive
from tests.reference.compare import assert_close


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pairs for networks of any size, a few data at a time."""
    monkeypatch.setattr(full_sum, "_WORTHWHILE", 0)
    monkeypatch.setattr(full_sum, "_STRIP", 2)
    monkeypatch.setattr(full_sum, "CHUNK_BYTES", 2**12)
    full_sum.strips.cache_clear()
    yield
    full_sum.strips.cache_clear()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", thinned("full") if ALL else by_turns(["full"], WEIGHTS))
def test_variances_by_pairs_are_those_of_the_dense_covariance(case: Case) -> None:
    la = case.fit(prior_precision=0.4)
    covariance = covariance_of(la)
    variance = predictive.functional_variance(case.jacobian, covariance)
    rows = case.jacobian.flatten(0, 1)
    joint = rows @ covariance @ rows.mT
    forms = {"full": variance, "diagonal": variance.diagonal(dim1=1, dim2=2), "joint": joint}
    for form, expected in forms.items():
        assert_close(latent_of(la, case.problem.x, form).covariance, expected, "backend", label=form)
    assert_close(truth(case.problem.name).f, latent_of(la, case.problem.x, "full").mean, "backend", label="mean")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", thinned("full", "block") if ALL else by_turns(["full", "block"], WEIGHTS))
def test_sums_by_pairs_are_those_of_the_dense_jacobian(case: Case) -> None:
    for kind in ("ggn", "ef"):
        la = case.fit(batch_size=4, kind=kind)
        assert_close(own_dense(la), KEPT[case.structure](case, case.dense(kind)), "backend", label=kind)


@pytest.mark.usefixtures("always")
def test_batches_of_another_form_are_added_as_they_are() -> None:
    """A weight that is shared by positions in some batches only is multiplied out in these."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    mean = Mean(model)
    x, y = torch.randn(6, 3, 3, dtype=torch.float64), torch.randint(2, (6,))
    la = Laplace(mean, "classification", "all", "full")
    la.fit([(x[:2, :1], y[:2]), (x[2:4, :2], y[2:4]), (x[4:, :1], y[4:])])
    parts = [(x[:2, :1], y[:2]), (x[2:4, :2], y[2:4]), (x[4:, :1], y[4:])]
    expected = torch.zeros_like(la.H)
    for inputs, _ in parts:
        jacobian, f = curvature.flat_jacobian(mean, inputs, [name for name, _ in mean.named_parameters()])
        inner = curvature.output_hessian(f, "classification")
        expected += torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian)
    assert_close(la.H, expected, "backend")


class Mean(nn.Module):
    """The mean of a network's outputs over the positions of its inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean(1)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", few("all", "last_layer", structures=["full"], names=["mlp_classification", "pair"]))
def test_variances_by_pairs_have_the_gradients_of_dense_ones(case: Case) -> None:
    la = case.fit(prior_precision=0.4)
    delta = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def variance() -> torch.Tensor:
        la.prior_precision = delta
        return latent_of(la, case.problem.x, "full").covariance

    outer = torch.randn_like(variance())
    (slope,) = torch.autograd.grad((outer * variance()).sum(), delta)
    with torch.no_grad():
        step = 1e-5
        ends = []
        for end in (0.4 + step, 0.4 - step):
            la.prior_precision = end
            ends.append((outer * latent_of(la, case.problem.x, "full").covariance).sum())
    assert_close(slope, (ends[0] - ends[1]) / (2 * step), "finite_difference")


def wide_network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A float32 network for which pairs are less work, and its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 6))
    return model, torch.randn(150, 12), torch.randint(6, (150,))


@pytest.mark.parametrize("delta", [1.0, 1e-4])
def test_variances_and_joint_covariances_agree_in_float32(delta: float) -> None:
    model, x, y = wide_network()
    la = Laplace(model, "classification", "all", "full", prior_precision=delta)
    la.fit([(x, y)])
    x = x[:100]
    variance = latent_of(la, x, "full").covariance
    joint = latent_of(la, x, "joint").covariance.view(100, 6, 100, 6)
    own = torch.stack([joint[i, :, i] for i in range(100)])
    assert torch.allclose(variance, own, atol=1e-6 * float(own.abs().max()))
    assert torch.allclose(variance.diagonal(dim1=1, dim2=2), latent_of(la, x, "diagonal").covariance)


@pytest.mark.parametrize("delta", [1.0, 1e-4])
def test_variances_are_those_of_the_same_curvature_in_float64(delta: float) -> None:
    """The inverse is neither rounded nor contracted in float32: of an ill-conditioned one nothing would be left."""
    model, x, y = wide_network()
    la = Laplace(model, "classification", "all", "full", prior_precision=delta)
    la.fit([(x, y)])
    precision = la.posterior()
    assert isinstance(precision, FullPrecision)
    jacobian = torch.cat([part.dense() for part, _ in la.engine.jacobian(x[:100])]).double()
    H = precision.curvature.values[0].double()
    exact = jacobian @ torch.linalg.solve(H + delta * torch.eye(len(H)), jacobian.mT)
    got = latent_of(la, x[:100], "full").covariance
    assert ((got - exact).abs().amax((1, 2)) / exact.abs().amax((1, 2))).max() < 1e-5


@pytest.mark.parametrize("trained", [False, True], ids=["at random", "saturated"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_evidence_and_variances_are_those_of_the_same_jacobians_in_float64(weights: str, *, trained: bool) -> None:
    """Sums in float64, and of a softmax's rows, lose nothing that competes with a small prior precision."""
    model, x, y = wide_network()
    if trained:
        optimiser = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        for _ in range(300):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    la = Laplace(model, "classification", weights, "full")
    la.fit([(x[:100], y[:100]), (x[100:], y[100:])])
    (jacobian, f), *_ = la.engine.jacobian(x)
    J, p = jacobian.dense().double(), f.detach().double().softmax(1)
    pairs_of_outputs = ((c, d) for c in range(6) for d in range(c))  # Λ = Σ_{c<d} p_c p_d (e_c − e_d)(e_c − e_d)ᵀ
    rows = torch.cat([(p[:, c] * p[:, d]).sqrt()[:, None] * (J[:, c] - J[:, d]) for c, d in pairs_of_outputs])
    H = rows.mT @ rows
    for delta in (1.0, 1e-2, 1e-4):
        la.prior_precision = delta
        precision = la.posterior()
        exact = H + delta * torch.eye(len(H), dtype=torch.float64)
        ratio = torch.linalg.eigvalsh(H).clamp(min=0).div(delta).log1p().sum()
        assert torch.allclose(precision.logdet_ratio(), ratio, rtol=1e-6)
        variance = J @ torch.linalg.solve(exact, J.mT)
        assert torch.allclose(
            precision.variance(jacobian, "diagonal").double(), variance.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=0
        )
    assert la.H.dtype == torch.float32


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_few_data_leave_the_other_directions_of_a_head_at_zero(likelihood: str) -> None:
    """Fewer data than features: what rounding would put there competes with the prior precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 3))
    x, y = torch.randn(40, 8), torch.randint(3, (40,))
    la = Laplace(model, likelihood, "last_layer", "full", prior_precision=1e-4)
    la.fit([(x[:20], y[:20]), (x[20:], y[20:])] if likelihood == "classification" else [(x, torch.randn(40, 3))])
    spectrum = torch.linalg.eigvalsh(la.fitted().curvature.state()["values"][0])
    rank = 40 * (2 if likelihood == "classification" else 3)
    assert spectrum[:-rank].abs().max() < 1e-12 * spectrum[-1]


LAMBDAS: dict[str, Callable[[torch.Tensor], OutputHessian]] = {
    "softmax": lambda p: OutputHessian(p, p, sums_to_zero=True),
    "dense": lambda p: OutputHessian(p, dense=torch.diag_embed(p) - 0.5 * p.unsqueeze(2) * p.unsqueeze(1)),
    "diagonal": OutputHessian,
}


@pytest.mark.parametrize("form", LAMBDAS)
@pytest.mark.parametrize(("n_outputs", "n_inputs"), [(2, 20), (7, 20), (9, 3)])
def test_sums_of_a_head_are_those_of_its_outer_products(n_outputs: int, n_inputs: int, form: str) -> None:
    """Few outputs and many inputs, and the reverse: of either the fewer numbers are multiplied out."""
    torch.manual_seed(0)
    features, p = torch.randn(30, n_inputs).double(), torch.randn(30, n_outputs).double().softmax(1)
    total = MatrixSum(n_outputs * n_inputs)
    for data in (slice(0, 12), slice(12, 30)):
        total.add_head([HeadBlock(features[data], n_outputs)], LAMBDAS[form](p[data]), 1, features.new_empty(0))
    assert total.paired is not None
    own = LAMBDAS[form](p).entries(*total.paired.forms[0].indices(p.device))
    squares = (own.T @ features.square()).flatten()
    torch.testing.assert_close(torch.cat(total.paired.squares()).sort().values, squares.sort().values)
    expected = torch.einsum("bcd,bi,bj->cidj", LAMBDAS[form](p).matrix(), features, features)
    torch.testing.assert_close(total.complete()[0], expected.flatten(2).flatten(0, 1), rtol=1e-12, atol=1e-12)


def test_a_sum_of_heads_that_was_completed_goes_on() -> None:
    model, x, y = wide_network()
    la = Laplace(model, "classification", "last_layer", "full")
    la.fit([(x, y)])
    data_pass = la.structure.first_pass(la.engine, la.structure_options)
    for part in (slice(0, 50), slice(50, 150)):
        data_pass.add(x[part], y[part])
        (values,) = data_pass.sums().values()
    assert torch.allclose(values, la.fitted().curvature.state()["values"], rtol=1e-5, atol=1e-6)


def test_a_prediction_without_a_graph_leaves_the_next_one_its_own() -> None:
    model, x, y = wide_network()
    la = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    delta = torch.tensor(0.4, requires_grad=True)
    la.prior_precision = delta
    precision = la.posterior()
    assert isinstance(precision, FullPrecision) and precision.root.requires_grad
    (jacobian, _), *_ = la.engine.jacobian(x)
    for form in ("full", "diagonal"):
        with torch.no_grad():
            without = precision.variance(jacobian, form)
        variance = precision.variance(jacobian, form)
        assert torch.equal(variance, without)
        (slope,) = torch.autograd.grad(variance.sum(), delta, retain_graph=True)
        assert slope < 0


@pytest.mark.usefixtures("always")
def test_indices_that_are_kept_serve_autograd_after_inference_mode() -> None:
    values = torch.randn(3, 10, requires_grad=True)
    with torch.inference_mode():
        full_sum.SymmetricForm(4).completed(values)
    full_sum.SymmetricForm(4).completed(values).square().sum().backward()
    assert values.grad is not None


def test_a_matrix_that_is_not_completed_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory does not hold it at first, the sums by pairs are as they were."""
    model, x, y = wide_network()
    whole, la = (Laplace(model, "classification", "all", "full") for _ in range(2))
    for each in (whole, la):
        each.fit([(x, y)])

    def runs_out(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(full_sum, "_place_own", runs_out)
        with pytest.raises(MemoryError):
            _ = la.H
    assert torch.equal(la.H, whole.H)
