"""Backends by other packages: every quantity equals the dense truth, whoever of the two engines computed it."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import CurvlinopsGGN, NativeEF, NativeGGN, NativeHessian
from laplace.errors import InstallationWarning, UnsupportedError
from laplace.likelihoods import LikelihoodFromLoss
from laplace.structures import STRUCTURES
from tests import problems as catalogue
from tests.conformance.backend_table import PAGE, section
from tests.conformance.backends import BACKENDS, PRIMITIVES, Backend, computed, engine_of, expected
from tests.conformance.cases import FEW, WEIGHTS, Case, has_own_head, own_dense
from tests.pairs import ALL
from tests.reference.compare import assert_close
from tests.reference.likelihoods import DENSITIES

NATIVE = {"ggn": NativeGGN, "ef": NativeEF, "hessian": NativeHessian}
CURVLINOPS = ("CurvlinopsGGN", "CurvlinopsEF")
_FOUND = find_spec("curvlinops")
VERSION_2 = _FOUND is not None and not Path(_FOUND.origin or "").with_name("_torch_base.py").exists()
"""Operators of version 2 are not used, see docs/backends.md: of its numbers only Kronecker factors are its own."""
OWNED = {"kron"} if VERSION_2 else {"full", "blocks", "matmul", "kron"}
products_are_the_packages = pytest.mark.skipif(VERSION_2, reason="products beside version 2 are native")


def cells() -> list[Any]:
    """One problem of every kind with every backend and three choices of weights; the others with every second backend.

    These take all weights or another choice by turns.
    """
    found: list[Any] = []
    for i, problem in enumerate(catalogue.PROBLEMS.values()):
        others = [w for w in WEIGHTS[1:] if w != "last_layer" or has_own_head(problem)]
        for j, backend in enumerate(BACKENDS.values()):
            if problem.name not in FEW and (i + j) % 2 and not ALL:
                continue
            turn = "all" if (i + j) // 2 % 2 else others[(i + j) // 4 % len(others)]
            chosen = {"all", others[0], "mixed"} if problem.name in FEW else {turn}
            cases = [Case(problem, "full", choice) for choice in sorted(chosen)]
            found += [pytest.param(backend, case, id=f"{backend}-{problem}-{case.weights}") for case in cases]
    return found


@pytest.mark.parametrize("primitive", PRIMITIVES.values())
@pytest.mark.parametrize(("backend", "case"), cells())
@pytest.mark.turns
def test_primitives_equal_the_dense_truth(backend: Backend, case: Case, primitive: str) -> None:
    if case.problem.likelihood in DENSITIES:  # PyTorch has no loss of them
        with pytest.raises(UnsupportedError, match="NativeGGN"):
            engine_of(backend, case)
        return
    engine = engine_of(backend, case)
    if (backend.kind, primitive) == ("hessian", "kron"):
        with pytest.raises(UnsupportedError, match="NativeGGN"):
            computed(engine, primitive, case)
        return
    actual = computed(engine, primitive, case, 4)
    assert_close(actual, expected(backend.kind, primitive, case), "backend", label=primitive)


@pytest.mark.parametrize("name", BACKENDS)
def test_products_with_held_data_are_native(name: str) -> None:
    case = Case(catalogue.get("mlp_classification"), "matrix_free", "all")
    with pytest.raises(UnsupportedError, match=rf"{name}.*output_curvature.*matrix_free.*NativeGGN"):
        case.build(backend=BACKENDS[name].cls).fit(case.problem.batches(4))


@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "matrix_free"])
@pytest.mark.parametrize("name", BACKENDS)
def test_structures_equal_the_native_ones(name: str, structure: str) -> None:
    backend = BACKENDS[name]
    if backend.kind == "hessian" and structure not in ("full", "diag"):
        structure = "full"  # what becomes of negative eigenvalues is another matter; here the numbers of the backend
    for problem, weights in (("mlp_classification", "all"), ("conv2d_grouped", "mixed"), ("pair", "all")):
        case = Case(catalogue.get(problem), structure, weights)
        pair = [case.build(backend=b, prior_precision=1e3) for b in (backend.cls, NATIVE[backend.kind])]
        for la in pair:
            la.fit(case.problem.batches(4))
        assert_close(own_dense(pair[0]), own_dense(pair[1]), "algebra", label=structure)
        assert_close(pair[0].log_marginal_likelihood(), pair[1].log_marginal_likelihood(), "algebra", label="evidence")
        assert_close(pair[0].posterior_variance, pair[1].posterior_variance, "algebra", label="variance")


# Who computed a number: a package whose results are doubled shows in what is its, and nowhere else.

KFAC = "_compute_kfac" if VERSION_2 else "compute_kronecker_factors"
DOUBLED: dict[str, list[Any]] = {
    "curvlinops": [("curvlinops.kfac", "KFACLinearOperator", KFAC, lambda self, _: _doubled_factors(self))]
}
if not VERSION_2:
    DOUBLED["curvlinops"].append(
        ("curvlinops._torch_base", "CurvatureLinearOperator", "_matmat", lambda _, found: [2 * m for m in found])
    )


def _doubled_factors(kfac: Any) -> None:
    for covariance in kfac._gradient_covariances.values():
        covariance.mul_(2)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Doubles what a package computes, from its call number `first` on."""

    def double(package: str, first: int = 0) -> None:
        numbers = itertools.count()
        for module, name, method, change in DOUBLED[package]:
            owner = getattr(importlib.import_module(module), name)
            original = getattr(owner, method)

            def twice(self: Any, *args: Any, _original: Any = original, _change: Any = change) -> Any:
                found = _original(self, *args)
                return _change(self, found) if next(numbers) >= first else found

            monkeypatch.setattr(owner, method, twice)

    return double


@pytest.mark.parametrize("weights", ["all", "last_layer", "mixed"])
@pytest.mark.parametrize("problem", ["mlp_regression", "conv2d", "group_norm"])
@pytest.mark.parametrize("name", CURVLINOPS)
def test_the_package_computes_what_coverage_says(
    name: str, problem: str, weights: str, doubled: Callable[..., None]
) -> None:
    backend, case = BACKENDS[name], Case(catalogue.get(problem), "full", weights)
    _ = backend.cls
    doubled(backend.package)
    for primitive in PRIMITIVES.values():
        engine = engine_of(backend, case)
        actual = computed(engine, primitive, case, 4)
        covered = engine.coverage()
        (own,) = {covered[slot.name] == backend.package for slot in engine.problem.slots}
        norms = problem == "group_norm" and weights != "last_layer"  # which have no Kronecker factors
        assert own == (primitive in OWNED and not (norms and primitive == "kron")), f"{primitive}: {covered}"
        truth = expected(backend.kind, primitive, case)
        assert_close(actual, 2 * truth if own else truth, "backend", label=primitive)


@products_are_the_packages
@pytest.mark.parametrize("primitive", ["full", "blocks", "matmul"])
def test_the_package_computes_the_hessian_once_it_is_proved(primitive: str, doubled: Callable[..., None]) -> None:
    case = Case(catalogue.get("mlp_regression"), "full", "all")
    truth = expected("hessian", primitive, case)
    _ = BACKENDS["CurvlinopsHessian"].cls
    doubled("curvlinops", first=1)  # the first product is the proof
    engine = engine_of(BACKENDS["CurvlinopsHessian"], case)
    assert_close(computed(engine, primitive, case), 2 * truth, "backend")
    doubled("curvlinops")
    assert_close(computed(engine, primitive, case), truth, "backend", label="after a proof that failed")
    assert all("not curvlinops" in words for words in engine.coverage().values())


@pytest.mark.parametrize("name", CURVLINOPS)
@pytest.mark.parametrize("problem", ["conv2d", "shared_positions", "time_major_square", "row_view", "conv2d_grouped"])
def test_kfac_reduce(name: str, problem: str) -> None:
    case = Case(catalogue.get(problem), "kron", "all")
    engine = engine_of(BACKENDS[name], case, kfac_approx="reduce")
    actual = computed(engine, "kron", case)
    assert_close(actual, expected(BACKENDS[name].kind, "kron", case, "reduce"), "backend", label="factors")
    own = problem in ("conv2d", "shared_positions")
    assert (set(engine.coverage().values()) == {"curvlinops"}) == own, engine.coverage()


@pytest.mark.parametrize("primitive", ["full", "kron", "matmul"])
@pytest.mark.parametrize("problem", ["mlp_classification", "mlp_regression", "mlp_bernoulli_multi"])
@pytest.mark.turns
def test_sampled_curvature_is_right_on_average(problem: str, primitive: str) -> None:
    case = Case(catalogue.get(problem), "full", "all")
    options = {"stochastic": True, "num_samples": 5, "generator": torch.Generator().manual_seed(0)}
    engine = engine_of(BACKENDS["CurvlinopsGGN"], case, **options)
    draws = torch.stack([computed(engine, primitive, case, 4) for _ in range(24)])
    assert (set(engine.coverage().values()) == {"curvlinops"}) == (primitive in OWNED)
    error = draws.std(0) / len(draws) ** 0.5
    assert (error > 0).any(), "nothing was drawn"
    truth = expected("ggn", primitive, case)
    assert_close(draws.mean(0), truth, "mc", standard_error=error + 1e-9, label=primitive)


def test_sampled_curvature_draws_anew_in_every_batch_and_from_its_own_generator() -> None:
    case = Case(catalogue.get("mlp_regression"), "full", "all")
    backend = BACKENDS["CurvlinopsGGN"]

    def drawn_twice(seed: int | None) -> list[Tensor]:
        options = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
        engine = engine_of(backend, case, stochastic=True, **options)
        return [computed(engine, primitive, case) for primitive in ("full", "full", "kron", "kron")]

    state = torch.get_rng_state()
    first = drawn_twice(1)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[2], first[3])
    assert all(torch.equal(a, b) for a, b in zip(first, drawn_twice(1), strict=True))
    assert not torch.equal(first[0], drawn_twice(2)[0])
    assert torch.equal(drawn_twice(None)[0], drawn_twice(None)[0])
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"


# Networks of which a copy is not the network.


class Closure(nn.Module):
    """Calls its layer through a function that knows the original."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.act = lambda x: torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(x))


class Uncopied(nn.Module):
    """Cannot be copied: holds a generator of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.numbers = nn.Linear(3, 2), (n for n in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class StraightThrough(nn.Module):
    """Its backward pass is not the derivative of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Rounded.apply(self.body(x)))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.zeros_like(tangents[0])


X = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
Y = torch.randint(2, (9,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("network", [Closure, Uncopied, StraightThrough])
@pytest.mark.parametrize("name", CURVLINOPS)
def test_networks_that_the_package_would_misread_are_routed(name: str, network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, backend = network().double(), BACKENDS[name]
    pair = [Laplace(model, "classification", "all", "full", backend=b) for b in (backend.cls, NATIVE[backend.kind])]
    for la in pair:
        la.fit([(X, Y)])
    assert_close(own_dense(pair[0]), own_dense(pair[1]), "algebra")
    assert all(f"not {backend.package} (" in words for words in pair[0].coverage().values())
    if network is not StraightThrough and not VERSION_2:
        assert all("cop" in words for words in pair[0].coverage().values())


@products_are_the_packages
def test_forward_derivatives_that_are_not_those_of_the_backward_pass_are_noticed() -> None:
    case = Case(catalogue.get("embedding_padding"), "full", "all")
    for name in CURVLINOPS:
        engine = engine_of(BACKENDS[name], case)
        assert_close(computed(engine, "full", case), expected(BACKENDS[name].kind, "full", case), "backend")
        assert all("forward-mode" in words for words in engine.coverage().values())


def test_a_forward_fn_that_ignores_its_model_is_routed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    options: dict[str, Any] = {"forward_fn": lambda _, x: model(x)}
    pair = [
        Laplace(model, "classification", "all", "full", backend=b, **options)
        for b in (BACKENDS["CurvlinopsGGN"].cls, NativeGGN)
    ]
    for la in pair:
        la.fit([(X, Y)])
    assert_close(own_dense(pair[0]), own_dense(pair[1]), "algebra")


@pytest.mark.parametrize("name", CURVLINOPS)
def test_ignored_labels_and_one_noise_per_output(name: str) -> None:
    backend, case = BACKENDS[name], Case(catalogue.get("mlp_ignored_labels"), "full", "all")
    _, direct = backend.cls(case.problem.make_model(), "classification").full(case.problem.x, case.problem.y)
    assert_close(direct, expected(backend.kind, "full", case), "backend", label="called with ignored labels")
    if backend.kind == "ggn":
        case = Case(catalogue.get("mlp_regression"), "kron", "all")
        options = {"sigma_noise": torch.tensor([0.5, 2.0], dtype=torch.float64)}
        la, native = case.build(backend=backend.cls, **options), case.build(**options)
        for one in (la, native):
            one.fit(case.problem.batches(4))
        assert_close(la.log_marginal_likelihood(), native.log_marginal_likelihood(), "algebra")
        assert all("one noise per output" in words for words in la.coverage().values())


# Several of them.


def test_backends_one_after_the_other_on_one_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    first: dict[str, Tensor] = {}
    for turn in range(2):
        for name, backend in BACKENDS.items():
            structure = "full" if backend.kind == "hessian" else "kron"
            la = Laplace(model, "classification", "all", structure, backend=backend.cls, prior_precision=1e3)
            la.fit([(X, Y)])
            evidence = la.log_marginal_likelihood().detach()
            assert torch.equal(first.setdefault(name, evidence), evidence), f"{name} in turn {turn}"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_package_is_the_native_engine_with_one_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS[name]
    cls, native = getattr(importlib.import_module("laplace.curvature"), name), NATIVE[backend.kind]
    monkeypatch.setattr("laplace.curvature.packages._MISSED", set())
    monkeypatch.setitem(sys.modules, backend.package, None)
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    la, expected = (case.build(backend=b, prior_precision=1e3) for b in (cls, native))
    with pytest.warns(InstallationWarning, match=rf"backend={name}.*{backend.package}.*pip install --no-deps") as told:
        la.fit(case.problem.batches(4))
    assert len(told) == 1
    expected.fit(case.problem.batches(4))
    assert torch.equal(own_dense(la), own_dense(expected))
    assert torch.equal(la(case.problem.x), expected(case.problem.x))
    assert la.coverage() == expected.coverage()
    direct = [
        b(case.problem.make_model(), "classification").diag(case.problem.x, case.problem.y) for b in (cls, native)
    ]
    assert torch.equal(direct[0][1], direct[1][1]), "called directly"


def test_draws_of_a_missing_package_are_the_native_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laplace.curvature.packages._MISSED", {"curvlinops"})
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    case = Case(catalogue.get("mlp_classification"), "kron", "all")
    options = {"stochastic": True, "kfac_approx": "reduce"}
    pair = [case.build(backend=b, backend_kwargs=options) for b in (CurvlinopsGGN, NativeGGN)]
    for la in pair:
        torch.manual_seed(3)
        la.fit(case.problem.batches(4))
    assert torch.equal(own_dense(pair[0]), own_dense(pair[1]))


@pytest.mark.parametrize("error", [ImportError("no einconv"), RuntimeError("operator torchvision::nms does not exist")])
def test_a_package_whose_import_fails_is_a_missing_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr("laplace.curvature.packages._MISSED", set())
    monkeypatch.setattr(CurvlinopsGGN.engine_type, "load", staticmethod(fails))
    la = Case(catalogue.get("mlp_classification"), "full", "all").build(backend=CurvlinopsGGN)
    with pytest.warns(InstallationWarning, match=str(error)):
        la.fit([(X, Y)])


def test_likelihoods_without_a_loss_of_pytorch_are_refused() -> None:
    class Poisson(LikelihoodFromLoss):
        name = "poisson"

        def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
            return (f.exp() - y * f).sum()

        def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
            return torch.poisson(f.exp().expand(n, *f.shape), generator=generator)

        def inverse_link(self, f: Tensor) -> Tensor:
            return f.exp()

    la = Laplace(nn.Linear(3, 1).double(), Poisson(), "all", "full", backend=BACKENDS["CurvlinopsGGN"].cls)
    with pytest.raises(UnsupportedError, match="NativeGGN"):
        la.fit([(X, torch.ones(9, 1, dtype=torch.float64))])


@pytest.mark.nightly
@pytest.mark.parametrize("name", BACKENDS)
def test_the_table_of_the_docs_is_what_is_found(name: str) -> None:
    backend = BACKENDS[name]
    _ = backend.cls
    assert section(backend) in PAGE.read_text("utf-8"), "write it anew by: python -m tests.conformance.backend_table"
