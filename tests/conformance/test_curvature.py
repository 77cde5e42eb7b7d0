"""The unit curvature of full and diagonal structures equals the dense one, for every problem and choice of weights."""

from __future__ import annotations

import pytest
import torch

from tests import problems as catalogue
from tests.conformance.cases import KEPT, LINEAR, STRUCTURE_NAMES, Case, by_turns, drawn, few, own_dense, thinned
from tests.reference.compare import assert_close


@pytest.mark.parametrize("case", thinned(*KEPT))
def test_ggn_equals_the_exact_one(case: Case) -> None:
    check(case, "ggn")


@pytest.mark.parametrize("case", by_turns() + few("last_layer", "mixed"))
def test_empirical_fisher_equals_the_exact_one(case: Case) -> None:
    if case.structure in KEPT:
        check(case, "ef")


def check(case: Case, kind: str) -> None:
    la = case.fit(kind=kind)
    assert_close(own_dense(la), KEPT[case.structure](case, case.dense(kind)), "backend", label="curvature")
    assert_close(la.mean, case.mean, "exact", label="mean")
    assert la.n_data == int((case.problem.y != -100).sum() if case.problem.y.ndim == 1 else len(case.problem.y))
    assert la.n_outputs == case.n_outputs and la.n_params == len(case.columns)


def test_every_structure_of_the_registry_has_a_truth() -> None:
    elsewhere = {"kron", "ekfac", "lowrank_kron"}
    assert set(STRUCTURE_NAMES) == {*KEPT, *elsewhere}, "give a new structure a truth, and its tests, here"


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression", "conv2d_regression"]))
def test_terms_of_several_noises_add_up(case: Case) -> None:
    """With a vector noise a fit keeps one term per output, so that its ratios can be changed afterwards."""
    sigma = drawn(case, "noise", case.n_outputs).exp()
    la = case.fit(sigma_noise=sigma)
    if case.structure in KEPT:
        for scale in (sigma**-2, torch.rand_like(sigma)):
            expected = KEPT[case.structure](case, case.dense(output_scale=scale))
            assert_close(own_dense(la, scale), expected, "backend", label="weighted curvature")
    assert_close(own_dense(la), own_dense(case.fit()), "backend", label="sum of the terms")


@pytest.mark.parametrize(
    "case",
    few("all", structures=LINEAR, names=["mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "pair"])
    + few("last_layer", "mixed", structures=LINEAR, names=["mlp_classification"]),
)
@pytest.mark.turns
def test_sampled_curvature_is_right_on_average(case: Case) -> None:
    options = {"stochastic": True, "num_samples": 5, "generator": torch.Generator().manual_seed(0)}
    la = case.build(backend_kwargs=options)
    fits: list[torch.Tensor] = []
    for _ in range(16):
        la.fit(case.problem.batches(4))
        fits.append(own_dense(la))
    fits = torch.stack(fits)
    error = fits.std(0) / len(fits) ** 0.5
    assert (error > 0).any(), "the fits are equal: nothing was drawn"
    assert_close(fits.mean(0), own_dense(case.fit(4)), "mc", standard_error=error + 1e-9, label="mean of the fits")


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_sampled_curvature_draws_anew_in_every_batch_and_from_its_own_generator(structure: str) -> None:
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    x, y = case.problem.x[:3], case.problem.y[:3]

    def fitted(batches: int, seed: int | None) -> torch.Tensor:
        options = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
        la = case.build(backend_kwargs={"stochastic": True, **options})
        la.fit([(x, y)] * batches)
        return own_dense(la)

    state = torch.get_rng_state()
    assert not torch.allclose(fitted(2, 1), 2 * fitted(1, 1)), "the second batch got the draws of the first"
    assert torch.equal(fitted(1, 1), fitted(1, 1)) and not torch.equal(fitted(1, 1), fitted(1, 2))
    assert torch.equal(fitted(1, None), fitted(1, None))
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
