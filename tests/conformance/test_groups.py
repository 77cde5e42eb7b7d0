"""Joint covariances within groups of inputs against dense algebra: every structure, and all that reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import DiagLaplace, Laplace, MixtureLaplace
from laplace.errors import InvalidArgument
from laplace.predictive import latent
from tests.conformance.cases import Case, by_turns, few, truth
from tests.conformance.test_predictions import covariance_of
from tests.reference import predictive
from tests.reference.compare import assert_close

pytestmark = [pytest.mark.portable, pytest.mark.turns]


@pytest.mark.parametrize("case", by_turns() + few("last_layer", "mixed"))
def test_every_structure(case: Case) -> None:
    la, half = case.fit(prior_precision=0.4), len(case.problem.y) // 2
    x = case.problem.batches(2 * half)[0]
    x, n_data = x[0] if isinstance(x, tuple) else x, 2 * half
    jacobian = case.jacobian[:n_data]
    for size in (2, half):
        # The oracle: a group is a datum whose outputs are those of its inputs.
        groups = jacobian.reshape(n_data // size, size * case.n_outputs, -1)
        gaussian = latent.linearised(la.engine, la.posterior(), x, "joint", group_size=size)
        assert_close(gaussian.mean, truth(case.problem.name).f[:n_data], "backend", label="mean")
        expected = predictive.functional_variance(groups, covariance_of(la))
        assert_close(gaussian.covariance, expected, "backend", label=f"groups of {size}")


def fitted(structure: str = "kron", *, double: bool = True, **options: Any) -> tuple[Any, Tensor]:
    """A small regression, and inputs to predict, `[12, 3]`."""
    torch.manual_seed(0)
    dtype = torch.float64 if double else torch.float32
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    la = Laplace(model, "regression", "all", structure, sigma_noise=0.3, **options)
    la.fit([(torch.randn(10, 3, dtype=dtype), torch.randn(10, 2, dtype=dtype))])
    return la, torch.randn(12, 3, dtype=dtype)


def parts_of(joint: tuple[Tensor, Tensor], n_groups: int) -> tuple[Tensor, Tensor]:
    """Means and covariances of groups, as parts of those of all inputs together."""
    mean, covariance = joint
    parts = covariance.view(n_groups, -1, n_groups, len(mean) // n_groups)
    return mean.view(n_groups, -1), torch.stack([parts[i, :, i] for i in range(n_groups)])


FUNCTIONAL = [
    ("gp", {"n_subset": 8}),
    ("gp", {"n_subset": 8, "independent_outputs": True}),
    ("gp", {"functional_approximation": "nystrom", "n_eigenvalues": 5, "subsample_size": 10}),
]


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("structure, options", [*FUNCTIONAL, ("kron", {}), ("diag", {}), ("full", {})])
def test_groups_are_parts_of_what_is_joint(structure: str, options: dict[str, Any], double: bool) -> None:
    la, x = fitted(structure, double=double, **options)
    for noisy in (False, True):
        expected = parts_of(la(x, joint=True, observation_noise=noisy), 4)
        found = la(x, joint=True, group_size=3, observation_noise=noisy)
        assert [part.shape for part in found] == [(4, 6), (4, 6, 6)]
        for part, other in zip(found, expected, strict=True):
            assert_close(part, other, "backend" if double else "float32")
    mean, covariance = la.predictive_moments(x, joint=True, group_size=3)
    assert torch.equal(mean, la(x, joint=True, group_size=3)[0])
    assert covariance.dtype == x.dtype


def test_pieces_may_end_within_a_group() -> None:
    la, x = fitted()
    expected = la(x, joint=True, group_size=4)
    la.engine.memory_budget = 1  # every input by itself
    for part, other in zip(la(x, joint=True, group_size=4), expected, strict=True):
        assert_close(part, other, "backend")


def test_a_prediction_and_its_samples() -> None:
    la, x = fitted()
    prediction = la.predict(x, joint=True, group_size=3, n_samples=20000, generator=torch.Generator().manual_seed(0))
    mean, covariance = la(x, joint=True, group_size=3)
    assert prediction.latent_mean.shape == (12, 2)
    assert torch.equal(prediction.latent_covariance, covariance)
    samples = prediction.latent_samples.view(20000, 4, 6)
    error = torch.einsum("sgi,sgj->gij", samples - mean, samples - mean) / 20000 - covariance
    assert error.abs().max() < 0.05 * covariance.abs().max()
    noisy = prediction.distribution()
    assert isinstance(noisy, MultivariateNormal)
    assert (noisy.batch_shape, noisy.event_shape) == ((4,), (6,))
    assert_close(noisy.covariance_matrix, la(x, joint=True, group_size=3, observation_noise=True)[1], "backend")


def test_sampled_weights_have_moments_of_groups() -> None:
    la, x = fitted()
    prediction = la.predict(x, "nn", joint=True, group_size=3, n_samples=50)
    assert prediction.latent_covariance.shape == (4, 6, 6)
    rows = prediction.latent_samples.view(50, 4, 6)
    expected = torch.stack([torch.cov(rows[:, g].T) for g in range(4)])
    assert_close(prediction.latent_covariance, expected, "backend")


def test_mixtures_have_moments_of_groups() -> None:
    components = [fitted()[0], fitted("diag")[0]]
    mixture, x = MixtureLaplace(components, weights=[0.3, 0.7]), fitted()[1]
    expected = parts_of(mixture(x, joint=True), 4)
    for part, other in zip(mixture(x, joint=True, group_size=3), expected, strict=True):
        assert_close(part, other, "backend")
    assert_close(mixture.predict(x, joint=True, group_size=3).latent_covariance, expected[1], "backend")
    assert mixture.functional_samples(x, n_samples=3, joint=True, group_size=3).shape == (3, 12, 2)


def test_classes_of_users_are_asked_by_groups() -> None:
    class Doubled(DiagLaplace):
        def functional_covariance(self, Js: Tensor) -> Tensor:
            return 2 * super().functional_covariance(Js)

    torch.manual_seed(0)
    la = Doubled(nn.Linear(3, 2).double(), "regression")
    la.fit([(torch.randn(10, 3).double(), torch.randn(10, 2).double())])
    x = torch.randn(12, 3).double()
    expected = parts_of(la(x, joint=True), 4)
    for part, other in zip(la(x, joint=True, group_size=3), expected, strict=True):
        assert_close(part, other, "backend")


@pytest.mark.parametrize("structure, options", [*FUNCTIONAL, ("kron", {}), ("diag", {}), ("lowrank", {})])
def test_gradients_reach_the_inputs(structure: str, options: dict[str, Any]) -> None:
    la, x = fitted(structure, enable_backprop=True, **options)
    weights = torch.randn(4, 6, 6).double()
    slopes: list[Tensor] = []
    for grouped in (True, False):
        leaf = x.clone().requires_grad_()
        moments = la(leaf, joint=True, group_size=3) if grouped else parts_of(la(leaf, joint=True), 4)
        (moments[0].sum() + (weights * moments[1]).sum()).backward()
        assert leaf.grad is not None
        slopes.append(leaf.grad)
    assert_close(slopes[0], slopes[1], "backend")


def test_groups_that_do_not_exist_are_refused() -> None:
    la, x = fitted()
    with pytest.raises(InvalidArgument, match="2 of their rows"):
        la(x, joint=True, group_size=5)
    with pytest.raises(InvalidArgument, match="2 of their rows"):
        la.predict(x, "nn", joint=True, group_size=5).latent_covariance  # noqa: B018
    with pytest.raises(InvalidArgument, match="joint=True"):
        la(x, group_size=3)
    with pytest.raises(InvalidArgument, match="group_size"):
        la(x, joint=True, group_size=0)


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        each = result if isinstance(result, tuple | list) else [result]
        self.numbers = max([self.numbers, *(part.numel() for part in each if isinstance(part, Tensor))])
        return result


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
def test_nothing_between_groups_is_computed(structure: str) -> None:
    la, _ = fitted(structure)
    with Largest() as largest:
        la(torch.randn(4096, 3).double(), joint=True, group_size=4)
    assert largest.numbers < 4096 * 2 * 64 < (4096 * 2) ** 2 / 64  # of rows [b·q, C, P], P = 38
