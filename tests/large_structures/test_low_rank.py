"""Low-rank curvature: what the iteration finds, how it is combined, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import Laplace, LowRankLaplace
from laplace.curvature import NativeEF, NativeGGN, NativeHessian
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.jacobian.blocks import Block
from laplace.jacobian.outer import OuterBlock
from laplace.large_structures.low_rank import LowRankCurvature
from tests import problems as catalogue
from tests.conformance.cases import Case, drawn, own_dense
from tests.models.dense import mlp
from tests.reference import curvature as reference
from tests.reference.compare import assert_close


def wide() -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A float64 network of 515 weights, and 24 data: the rank of the GGN is at most 48."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = mlp(6, 30, 8, 7, 3).double()
    x = torch.randn(24, 6, dtype=torch.float64, generator=generator)
    return model, x, torch.randint(3, (24,), generator=generator)


def fitted(structure: str = "lowrank", backend: Any = NativeGGN, batch: int = 7, **options: Any) -> Any:
    model, x, y = wide()
    wanted = {"backend": backend, "structure_kwargs": options}
    la = Laplace(model, "classification", "all", structure, **wanted)
    la.fit(list(zip(x.split(batch), y.split(batch), strict=True)))
    return la


def exact(kind: str) -> Tensor:
    model, x, y = wide()
    names = [name for name, _ in model.named_parameters()]
    function = {"ggn": reference.ggn, "ef": reference.empirical_fisher, "hessian": reference.exact_hessian}[kind]
    return function(model, x, y, names, "classification")


# What the iteration finds.


@pytest.mark.parametrize("kind", ["ggn", "ef"])
def test_a_rank_that_holds_everything_is_exact(kind: str) -> None:
    """The block is far narrower than the space, so that nothing but the iteration finds the range."""
    dense, x = exact(kind), wide()[1]
    la = fitted(backend=NativeGGN if kind == "ggn" else NativeEF, rank=60)
    full = fitted("full", backend=NativeGGN if kind == "ggn" else NativeEF)
    assert la.n_params > 4 * 70
    assert_close(own_dense(la), dense, "backend", label="curvature")
    assert la.residual < 1e-10
    for delta in (1e-3, 1.0, 50.0):
        la.prior_precision = full.prior_precision = delta
        assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend", label="evidence")
        assert_close(la(x), full(x), "backend", label="prediction")
        assert_close(la.posterior_variance, full.posterior_variance, "backend", label="variance")


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
def test_share_of_the_trace(share: float) -> None:
    """The smallest number of eigenpairs that reaches it; the block grows as far as need be."""
    truth = torch.linalg.eigvalsh(exact("ggn")).flip(0).clamp(min=0)
    la = fitted(rank=share, power_iterations=6)
    wanted = int((truth.cumsum(0) < share * truth.sum() * (1 - 1e-12)).sum()) + 1
    found = la.H[1]
    if share < 1:
        assert len(found) == wanted
    assert_close(found.sum() / truth.sum(), truth[: len(found)].sum() / truth.sum(), "float32", label="share")
    assert found.sum() >= share * truth.sum() * (1 - 1e-9)


@pytest.mark.parametrize("rank", [4, 7, 9])
def test_equal_eigenvalues_at_the_cut_are_chosen_alike_from_any_batches(rank: int) -> None:
    """Of a regression's last layer every eigenvalue is as many-fold as there are outputs."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(22, n, dtype=torch.float64, generator=generator) for n in (5, 3))
    found: list[Tensor] = []
    for batch in (22, 4, 1):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
        la = Laplace(model, "regression", "last_layer", "lowrank", structure_kwargs={"rank": rank})
        la.fit(list(zip(x.split(batch), y.split(batch), strict=True)))
        found.append(own_dense(la))
        assert len(la.H[1]) == rank
    for other in found[1:]:
        assert_close(other, found[0], "float32", label="curvature")


def test_equal_seeds_give_equal_bits_and_the_global_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (fitted(rank=5, power_iterations=0, seed=seed).H[0] for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_sampled_curvature_is_the_same_operator_in_every_reading() -> None:
    """Else the last product would not be that of the basis found by the former ones."""

    def options(samples: int) -> dict[str, Any]:
        return {"stochastic": True, "num_samples": samples, "generator": torch.Generator().manual_seed(5)}

    model, x, y = wide()
    data = list(zip(x.split(10), y.split(10), strict=True))
    fits: dict[int, Tensor] = {}
    for samples in (1, 2000):
        pair = [
            Laplace(model, "classification", "all", structure, backend_kwargs=options(samples), structure_kwargs=chosen)
            for structure, chosen in (("lowrank", {"rank": 60}), ("full", {}))
        ]
        for la in pair:
            la.fit(data)
        assert_close(own_dense(pair[0]), own_dense(pair[1]), "backend", label=f"{samples} samples")
        fits[samples] = own_dense(pair[0])
    error = (fits[2000] - exact("ggn")).norm() / exact("ggn").norm()
    assert error < 0.05 < (fits[1] - exact("ggn")).norm() / exact("ggn").norm()
    share = Laplace(
        model, "classification", "all", "lowrank", backend_kwargs=options(1), structure_kwargs={"rank": 1.0}
    )
    share.fit(data)
    curvature = share.fitted().curvature
    assert isinstance(curvature, LowRankCurvature) and curvature.trace is not None
    assert_close(curvature.trace.sum(), fits[1].trace(), "backend", label="trace of the same draws")


def test_several_noises_have_a_factor_each() -> None:
    case = Case(catalogue.get("mlp_regression"), "lowrank", "all")
    sigma = drawn(case, "noise", case.n_outputs).exp()
    la = case.fit(sigma_noise=sigma, structure_kwargs={"rank": 3, "power_iterations": 30, "oversampling": 5})
    for scale in (sigma**-2, torch.rand_like(sigma)):
        truncated = torch.zeros(len(case.columns), len(case.columns), dtype=torch.float64)
        for output, weight in enumerate(scale):
            one = torch.zeros(case.n_outputs, dtype=torch.float64).index_fill(0, torch.tensor([output]), 1.0)
            values, vectors = torch.linalg.eigh(case.dense(output_scale=one))
            truncated += weight * (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].T
        assert_close(own_dense(la, scale), truncated, "float32", label="weighted")


def test_no_curvature_at_all_is_of_rank_zero() -> None:
    """A network that does not depend on its weights: the posterior is the prior."""
    model, x, y = wide()
    torch.nn.init.zeros_(model.get_parameter("6.weight"))
    names = list(dict(model.named_parameters()))
    inside = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("6."))
    la = Laplace(model, "classification", "subnetwork", "lowrank", subnetwork_indices=torch.arange(inside),
                 prior_precision=2.0)  # fmt: skip
    la.fit([(x, y)])
    assert names[-2] == "6.weight" and la.H[0].shape == (inside, 0)
    assert_close(la.log_det_ratio, 0.0, "algebra")
    assert_close(la.posterior_variance, torch.full((inside,), 0.5), "algebra")
    assert la._latent(x, "full").covariance.abs().max() == 0
    assert la.sample(3).isfinite().all() and la.residual == 0


# Sums.


def test_sums_of_fits() -> None:
    model, x, y = wide()
    parts = [(x[:10], y[:10]), (x[10:], y[10:])]
    la = Laplace(model, "classification", "all", "lowrank", structure_kwargs={"rank": 60})
    la.fit(parts[:1])
    la.fit(parts[1:], override=False)
    assert_close(own_dense(la), exact("ggn"), "backend", label="of ranks that hold everything")
    assert la.residual < 1e-9 and la.n_data == 24
    small = Laplace(model, "classification", "all", "lowrank", structure_kwargs={"rank": 4, "power_iterations": 8})
    small.fit(parts[:1])
    first = own_dense(small)
    small.fit(parts[1:], override=False)
    alone = Laplace(model, "classification", "all", "lowrank", structure_kwargs={"rank": 4, "power_iterations": 8})
    alone.fit(parts[1:])
    values, vectors = torch.linalg.eigh(first + own_dense(alone))
    assert_close(own_dense(small), (vectors[:, -4:] * values[-4:]) @ vectors[:, -4:].T, "backend", label="truncated")
    vectors, values = small.H
    actual = (exact("ggn") @ vectors - vectors * values).norm() / values.norm()
    assert actual <= small.residual, "the estimate promises more than there is"


# The algebra.


@pytest.mark.parametrize("delta", [1e-9, 1e-6, 1e-3, 1.0])
def test_float32_variances_where_the_data_leave_little(delta: float) -> None:
    """J δ⁻¹ Jᵀ is far larger than the variance, so that rounding of their difference would be all that is left."""
    x, y = wide()[1:]
    pair: list[Tensor] = []
    for dtype in (torch.float64, torch.float32):
        inputs = x.to(dtype)
        la = Laplace(
            wide()[0].to(dtype),
            "classification",
            "all",
            "lowrank",
            prior_precision=delta,
            structure_kwargs={"rank": 60},
        )
        la.fit([(inputs, y)])
        variance = la._latent(inputs, "diagonal").covariance
        full = la._latent(inputs, "full").covariance.diagonal(dim1=1, dim2=2)
        assert_close(full, variance, "float32_solve")
        pair.append(variance.double())
    assert (pair[1] > 0).all()
    assert_close(pair[1].log(), pair[0].log(), "bfloat16")


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_products_of_shared_weights_position_by_position(groups: int, input_first: bool) -> None:
    """Where there are few vectors and positions, Σ_t g ⊗ a is not made; it is the same number."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 4, groups, 7, dtype=torch.float64, generator=generator)
    g = torch.randn(9, 5, 4, groups, 6, dtype=torch.float64, generator=generator)
    block = OuterBlock(a, g, input_first=input_first)
    vectors = torch.randn(2, block.size, dtype=torch.float64, generator=generator)
    by_position = block.apply(vectors)
    assert_close(by_position, torch.einsum("kbp,sp->sbk", block.dense(), vectors), "algebra")
    assert not torch.equal(by_position, Block.apply(block, vectors)), "the dense way was taken"
    single = block.cast(torch.float32)
    assert single.dense().dtype == torch.float32
    assert_close(single.apply(vectors.float()), by_position, "float32")


# What it refuses.


@pytest.mark.parametrize(
    "options",
    [{"rank": 0}, {"rank": 1.5}, {"rank": 0.0}, {"rank": True}, {"rank": "10"}, {"oversampling": -1},
     {"power_iterations": 0.5}, {"indefinite": "ignore"}, {"ranks": 3}],
)  # fmt: skip
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Laplace(wide()[0], "classification", "all", "lowrank", structure_kwargs=options)


def test_a_share_of_an_indefinite_trace_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="share of the trace"):
        fitted(backend=NativeHessian, rank=0.9)


def test_a_loader_that_can_be_read_once_is_refused() -> None:
    model, x, y = wide()
    la = Laplace(model, "classification", "all", "lowrank")
    with pytest.raises(InvalidArgument, match="read only once"):
        la.fit(iter([(x, y)]))


def test_old_scripts() -> None:
    """`backend` is the third argument, and the backend's `low_rank` is the rank."""
    model, x, y = wide()
    la = LowRankLaplace(model, "classification", NativeGGN, 1.0, 2.0, backend_kwargs={"low_rank": 4})
    la.fit([(x, y)])
    (vectors, values), prior = la.posterior_precision
    assert vectors.shape == (la.n_params, 4) and values.shape == (4,)
    assert torch.equal(prior, torch.full_like(prior, 2.0)) and la.backend_cls is NativeGGN
    assert_close(values, torch.linalg.eigvalsh(exact("ggn")).flip(0)[:4], "bfloat16")
