"""Log determinants relative to a prior, and their slopes, against float64 sums and finite differences."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from laplace import Laplace, ParametricLaplace
from laplace.core import log_det
from laplace.core import pieces as core_pieces
from laplace.core.log_det import EigenvaluePairs, log_det_ratio, log_det_relative
from laplace.large_structures import kronecker_eigenvectors
from tests.reference.compare import assert_close

F64 = torch.float64

SIZES = (5, 1, 9)


def _drawn(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.rand(*shape, generator=generator, dtype=F64).to(dtype)


def _eigenvalues() -> Tensor:
    """Over twelve orders of magnitude, with zeros among them."""
    values = 10 ** (12 * _drawn(sum(SIZES)) - 8)
    return values.index_fill(0, torch.tensor([0, 3, 5]), 0.0)


def _ratios(n: int) -> Tensor:
    return (0.1 + _drawn(n)).requires_grad_()


def _pieces(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(log_det, "_PIECE", piece)


pieces = pytest.mark.parametrize("piece", [3, 2**16], ids=["in pieces", "at once"])
runs = pytest.mark.parametrize("sizes", [(sum(SIZES),), SIZES], ids=["one prior", "one per run"])


@pieces
@runs
def test_values_and_slopes_against_sums(sizes: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _pieces(monkeypatch, piece)
    values, ratios = _eigenvalues(), _ratios(len(sizes))
    found = log_det_ratio(values, ratios, sizes)
    (slopes,) = torch.autograd.grad(found, ratios)
    terms = list(zip(values.split(list(sizes)), ratios.detach(), strict=True))
    assert_close(found, sum((run * c).log1p().sum() for run, c in terms), "algebra")
    assert_close(slopes, torch.stack([(run / (1 + c * run)).sum() for run, c in terms]), "algebra")


@pieces
@runs
def test_both_derivatives_of_both_arguments(
    sizes: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pieces(monkeypatch, piece)
    inputs = ((0.1 + _drawn(sum(sizes))).requires_grad_(), _ratios(len(sizes)))

    def ratio(values: Tensor, ratios: Tensor) -> Tensor:
        return log_det_ratio(values, ratios, sizes)

    assert torch.autograd.gradcheck(ratio, inputs)
    assert torch.autograd.gradgradcheck(ratio, inputs)


@pieces
def test_eigenvalues_below_zero(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an indefinite curvature under a prior that exceeds them."""
    _pieces(monkeypatch, piece)
    values, ratios = torch.tensor([-0.9, -1e-9, 0.0, 4.0, 1e5], dtype=F64), torch.ones(1, dtype=F64)
    assert_close(log_det_ratio(values, ratios, (5,)), (1 + values).log().sum(), "algebra")


@pieces
def test_float32_loses_nothing_to_the_number_of_terms(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million small terms, in small pieces fewer, each far below the rounding of their sum."""
    _pieces(monkeypatch, piece)
    values, ratios = (
        1e-6 * _drawn(2**20 if piece > 3 else 2**16, dtype=torch.float32),
        torch.ones(1, requires_grad=True),
    )
    found = log_det_ratio(values, ratios, (len(values),))
    (slope,) = torch.autograd.grad(found, ratios)
    assert_close(found.double(), values.double().log1p().sum(), "float32")
    assert_close(slope.double(), (values.double() / (1 + values.double())).sum().view(1), "float32")
    assert slope.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own rules of forward mode
def test_transforms_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    values, ratios = _eigenvalues(), _ratios(1).detach()

    def ratio(c: Tensor) -> Tensor:
        return log_det_ratio(values, c, (len(values),))

    found = []
    for piece in (3, 2**16):
        _pieces(monkeypatch, piece)
        both = torch.stack([ratios, 2 * ratios])
        found.append(
            [
                torch.func.grad(ratio)(ratios),
                torch.func.hessian(ratio)(ratios),
                torch.func.jvp(ratio, (ratios,), (ratios,))[1],
                torch.func.vmap(ratio)(both),
                torch.func.vmap(torch.func.grad(ratio))(both),
                torch.func.jacfwd(lambda h: log_det_ratio(h, ratios, (len(values),)))(values),
            ]
        )
    for one, other in zip(*found, strict=True):
        assert_close(one, other, "algebra")


@runs
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_relative_to_a_prior_where_operations_are_dear(
    sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_pieces, "_CHEAP", frozenset())
    scale, deltas = torch.tensor(1.3, dtype=dtype, requires_grad=True), (0.2 + _drawn(len(sizes))).to(dtype)
    values, deltas = _eigenvalues(), deltas.requires_grad_()
    found = torch.autograd.grad(log_det_relative(values, scale, deltas, sizes), (scale, deltas))
    runs_of = zip(values.split(list(sizes)), deltas, strict=True)
    sums = torch.stack([(run * scale / delta).log1p().sum() for run, delta in runs_of]).sum()
    assert_close(log_det_relative(values, scale, deltas, sizes), sums, "algebra" if dtype == F64 else "float32")
    for one, other in zip(found, torch.autograd.grad(sums, (scale, deltas)), strict=True):
        assert one.dtype == dtype
        assert_close(one, other, "algebra" if dtype == F64 else "float32")
    if dtype == F64:
        assert torch.autograd.gradgradcheck(lambda s, d: log_det_relative(values, s, d, sizes), (scale, deltas))
        tangents = torch.ones_like(scale.detach()), torch.ones_like(deltas.detach())
        along = torch.func.jvp(
            lambda s, d: log_det_relative(values, s, d, sizes), (scale.detach(), deltas.detach()), tangents
        )[1]
        assert_close(along, found[0] + found[1].sum(), "algebra")


# Eigenvalues two by two.


@pieces
@pytest.mark.parametrize("n", [1, len(SIZES)], ids=["one prior", "one per run"])
@pytest.mark.parametrize("factor", [1e-20, 1e-3, 1.0, 1e11, 1e13, 1e22], ids="{:g}".format)
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_pairs_against_sums(
    dtype: torch.dtype, factor: float, n: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the products of two eigenvalues, or of these with c, leave the range of float32."""
    _pieces(monkeypatch, piece)
    for unit in (1.0, 1e-22, 1e10):
        values, scale = (unit * _eigenvalues()).to(dtype), torch.tensor(1.3, dtype=dtype, requires_grad=True)
        deltas = (1.3 / factor / _ratios(n).detach()).to(dtype)
        found = EigenvaluePairs(partial(torch.clone, values), SIZES).log_det_ratio(scale, deltas)
        (slope,) = torch.autograd.grad(found, scale)
        sizes = SIZES if n > 1 else (sum(SIZES),)
        terms = list(zip(values.double().split(list(sizes)), 1 / deltas.double(), strict=True))
        tolerance = "algebra" if dtype == F64 else "float32"
        s = scale.detach().double()
        assert_close(found.double(), sum((s * c * run).log1p().sum() for run, c in terms), tolerance)
        assert_close(slope.double(), sum((c * run / (1 + s * c * run)).sum() for run, c in terms), tolerance)


@pieces
def test_derivatives_of_pairs(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _pieces(monkeypatch, piece)
    pairs = EigenvaluePairs(_eigenvalues, SIZES)
    inputs = (torch.tensor(0.7, dtype=F64, requires_grad=True), _ratios(len(SIZES)))
    assert torch.autograd.gradcheck(pairs.log_det_ratio, inputs)
    assert torch.autograd.gradgradcheck(pairs.log_det_ratio, inputs)


def test_pairs_of_eigenvalues_below_zero_are_none() -> None:
    """(1 − 2) (1 − 3) is positive, and a matrix with these eigenvalues is not."""
    one = torch.ones(1, dtype=F64)
    values = torch.tensor([-0.9, -1e-9, 0.0, 4.0, 1e5], dtype=F64)
    assert_close(EigenvaluePairs(lambda: values, (5,)).log_det_ratio(one[0], one), (1 + values).log().sum(), "algebra")
    assert EigenvaluePairs(lambda: -values - 2, (5,)).log_det_ratio(one[0], one).isnan()


def test_pairs_without_eigenvalues() -> None:
    one = torch.ones(1)
    assert EigenvaluePairs(lambda: one[:0], (0,)).log_det_ratio(one[0], one) == 0


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "lowrank_kron", "block"])
def test_copies_of_what_computed_an_evidence(structure: str) -> None:
    la = _fitted(structure)
    value = la.log_marginal_likelihood()
    for copied in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert torch.equal(copied.log_marginal_likelihood(), value)


# The evidence of posteriors.

STRUCTURES = ("diag", "kron", "ekfac", "lowrank_kron")
PRIORS = ("scalar", "layerwise", "diag")


def _fitted(structure: str, dtype: torch.dtype = F64) -> ParametricLaplace:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)
    la = Laplace(model, "regression", "all", structure, temperature=1.3)
    la.fit([(_drawn(12, 3, dtype=dtype), _drawn(12, 2, dtype=dtype))])
    return la


def _prior(la: ParametricLaplace, form: str) -> Tensor:
    """δ of a form, at which S of lowrank_kron has no kink."""
    n = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[form]
    return 0.5 + _drawn(n or 1).to(la.mean.dtype)


def _evidence(la: ParametricLaplace) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda delta, sigma: la.log_marginal_likelihood(delta, sigma)


@pytest.mark.parametrize("form", PRIORS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_slopes_of_the_evidence(structure: str, form: str) -> None:
    la = _fitted(structure)
    inputs = (_prior(la, form).requires_grad_(), torch.tensor(0.7, dtype=F64, requires_grad=True))
    assert torch.autograd.gradcheck(_evidence(la), inputs)


@pytest.mark.parametrize("form", ["scalar", "layerwise"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_second_derivatives_of_the_evidence(structure: str, form: str) -> None:
    la = _fitted(structure)
    inputs = (_prior(la, form).requires_grad_(), torch.tensor(0.7, dtype=F64, requires_grad=True))
    assert torch.autograd.gradgradcheck(_evidence(la), inputs)


@pytest.mark.parametrize("form", PRIORS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_log_det_against_the_dense_precision(structure: str, form: str) -> None:
    la = _fitted(structure)
    la.prior_precision = _prior(la, form)
    dense = la.posterior().to_dense()
    expected = torch.linalg.slogdet(dense).logabsdet - la.prior_precision_diag.log().sum()
    assert_close(la.log_det_ratio, expected, "algebra")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float32_models_against_float64(structure: str) -> None:
    found, expected = (
        torch.autograd.grad(la.log_marginal_likelihood(delta), delta)[0]
        for la in (_fitted(structure, torch.float32), _fitted(structure))
        for delta in (_prior(la, "layerwise").requires_grad_(),)
    )
    assert found.dtype == torch.float32
    assert_close(found.double(), expected, "float32_solve")


@pytest.mark.parametrize("shape", [(20,), (2, 20)])
def test_derivatives_of_grams_whose_pairs_are_not_kept(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker_eigenvectors, "CHUNK_BYTES", 64)
    columns = kronecker_eigenvectors.Columns(_drawn(3, 4), _drawn(3, 5), _drawn(1, 3).abs())
    weights = _drawn(*shape).requires_grad_()
    assert torch.autograd.gradcheck(columns.gram, weights)
    assert torch.autograd.gradgradcheck(lambda w: columns.gram(w).square(), weights)


@pytest.mark.parametrize("different", [(2, 4), (4, 2), (1, 4), (4, 4)], ids=str)
def test_grams_of_columns_that_share_factors(different: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker_eigenvectors, "_AT_ONCE", 21)
    left, right = (_drawn(n, width)[torch.arange(4) % n] for n, width in zip(different, (5, 7), strict=True))
    columns, weights = kronecker_eigenvectors.Columns(left, right, torch.ones(1, 4, dtype=F64)), _drawn(2, 35)
    whole = (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)
    expected = torch.einsum("kp,mp,lp->mkl", whole, weights, whole)
    assert_close(columns.gram(weights), expected, "algebra")
    assert_close(columns.gram_of(lambda at: weights[:, at]), expected, "algebra")
    assert torch.autograd.gradcheck(columns.gram, weights.clone().requires_grad_())


@pytest.mark.parametrize("form", PRIORS)
def test_second_derivatives_where_pairs_are_not_kept(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (kronecker_eigenvectors.CHUNK_BYTES, 64):
        monkeypatch.setattr(kronecker_eigenvectors, "CHUNK_BYTES", chunk)
        la = _fitted("lowrank_kron")
        prior = _prior(la, form).requires_grad_()
        (slope,) = torch.autograd.grad(la.log_marginal_likelihood(prior), prior, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), prior)[0])
    assert_close(*found, "algebra")


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("largest", [1.0, 1e6, 1e12, 1e18])
def test_second_derivatives_of_pairs_keep_their_range(largest: float, dtype: torch.dtype) -> None:
    """Of terms whose squares would leave the range of numbers: δ² d² log det / dδ² against float64, one by one."""
    values = largest * (0.5 + _drawn(7))
    for delta in (1e-12, 1e-6, 1e-2, 1.0, 1e6):
        if dtype is torch.float32 and largest / delta > 1e18:  # whose square no sum of single terms holds either
            continue
        leaf = torch.tensor([delta], dtype=dtype, requires_grad=True)
        found = EigenvaluePairs(lambda: values.to(dtype), (7,)).log_det_ratio(torch.ones((), dtype=dtype), leaf)
        (slope,) = torch.autograd.grad(found, leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), leaf)
        share = values / (delta + values)  # log(1 + h/δ): −h / (δ (δ + h)), and h (2 δ + h) / (δ² (δ + h)²)
        expected = (share * (2 * delta + values) / (delta + values)).sum()
        torch.testing.assert_close(second.double().squeeze() * delta**2, expected, rtol=1e-4, atol=0)
