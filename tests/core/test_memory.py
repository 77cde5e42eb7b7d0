"""Memory that runs out: the work goes on in smaller pieces with the same numbers, or an error says what to do."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.core.memory import DATUM, in_slices, ran_out
from laplace.curvature import NativeHessian
from laplace.engines.native import proof
from laplace.errors import LaplaceError, MemoryWarning, OutOfMemory
from laplace.structures import STRUCTURES
from laplace.structures.full import FullPrecision
from tests import grid
from tests import problems as catalogue
from tests.conformance.cases import Case
from tests.conformance.test_invariance import same
from tests.network.test_model_guard import prepared
from tests.reference.compare import assert_close
from tests.robustness.faults import Large, Memory, memory_for, nothing_changes, posterior_bits, same_bits

pytestmark = pytest.mark.portable

X = grid.data(seed=8)[0]


def test_what_running_out_looks_like() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert ran_out(caught.value)
    for error in (torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("MPS backend out of memory")):
        assert ran_out(error)
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyError()):
        assert not ran_out(error)


def test_slices_are_halved_and_cover_everything_once() -> None:
    tried: list[int] = []

    def compute(part: slice) -> list[int]:
        tried.append(part.stop - part.start)
        if tried[-1] > 3:
            raise MemoryError
        return list(range(part.start, part.stop))

    with pytest.warns(MemoryWarning, match="13 data at once; the work goes on with 6") as caught:
        found = list(in_slices(20, 13, compute, DATUM))
    assert len(caught) == 1
    assert [i for _, values in found for i in values] == list(range(20))
    assert all(list(range(20))[part] == values for part, values in found)
    assert tried == [13, 6, 3, 3, 3, 3, 3, 3, 2]  # never a larger one again


def test_the_smallest_slice_and_other_errors() -> None:
    def full(_: slice) -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.warns(MemoryWarning), pytest.raises(OutOfMemory, match=r"single datum.*la\.plan") as caught:
        list(in_slices(4, 4, full, DATUM))
    assert isinstance(caught.value, (LaplaceError, torch.OutOfMemoryError))
    assert isinstance(caught.value, torch.OutOfMemoryError)

    def wrong(_: slice) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="multiplied"):
        list(in_slices(4, 4, wrong, DATUM))


@pytest.mark.filterwarnings("ignore:memory ran out")
def test_a_failed_attempt_keeps_nothing_alive() -> None:
    """Its traceback would hold the tensors that did not fit."""
    alive: list[weakref.ref[Tensor]] = []

    def compute(part: slice) -> int:
        assert not any(made() is not None for made in alive)
        activation = torch.zeros(part.stop - part.start)
        alive.append(weakref.ref(activation))
        if len(activation) > 1:
            raise MemoryError
        return 1

    assert len(list(in_slices(8, 8, compute, DATUM))) == 8


# Fits.

# Outputs by several cotangents, tensors without a rule, positions, and an attention.
PROBLEMS = ("mlp_classification", "bare_parameter", "transformer")


@pytest.mark.parametrize("structure", sorted({*STRUCTURES} - {"matrix_free"}))  # which holds data, and multiplies later
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_fit_with_little_memory_gives_the_same_numbers(name: str, structure: str) -> None:
    case = Case(catalogue.get(name), structure, "all")
    whole = case.fit()
    with memory_for(1), pytest.warns(MemoryWarning):
        la = case.fit()
    same(la, whole)
    assert la.coverage() == whole.coverage()


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
def test_the_exact_hessian_with_little_memory(structure: str) -> None:
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    options = {"indefinite": "clamp"} | case.exactly.get("structure_kwargs", {})

    def fitted() -> Any:
        la = case.build(backend=NativeHessian, structure_kwargs=options)
        la.fit(case.problem.batches())
        return la

    whole = fitted()
    with memory_for(3), pytest.warns(MemoryWarning, match="products with vectors"):
        la = fitted()
    same(la, whole)


def test_sampled_curvature_is_of_the_same_draws() -> None:
    def make() -> Any:
        options = {"stochastic": True, "num_samples": 5, "generator": torch.Generator().manual_seed(1)}
        return grid.fitted("all", "kron", backend_kwargs=options)

    whole = make()
    with memory_for(2), pytest.warns(MemoryWarning, match="backward passes"):
        la = make()
    assert_close(la.posterior_variance, whole.posterior_variance, "float32")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_that_memory_cannot_hold(structure: str) -> None:
    """The batch is named, the mend is said, and the former posterior is as it was."""
    memory = Memory()
    model = prepared(lambda: Large(grid.network(), memory))
    la = grid.make("all", structure, model=model)
    la.fit(grid.batches())
    before = posterior_bits(la)
    batches = [(x[:3], y[:3]) for x, y in grid.batches()[:1]] + grid.batches()
    for override in (True, False):
        message = r"(?s)batch 1: memory ran out.*batch_size.*la\.plan.*2\.00 GiB"
        with nothing_changes(model), memory.of(3), pytest.raises(OutOfMemory, match=message):
            la.fit(batches, override=override)
        assert same_bits(before, posterior_bits(la))


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
def test_not_one_backward_pass(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(grid.network)
    la = grid.make("all", structure, model=model)
    la.fit(grid.batches())
    before, real = posterior_bits(la), torch.autograd.grad

    def grad(*args: Any, **options: Any) -> Any:
        if options.get("retain_graph"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*args, **options)

    refused = pytest.raises(OutOfMemory, match=r"batch 0: memory ran out.*batch")
    with nothing_changes(model), monkeypatch.context() as patched, refused:
        patched.setattr(torch.autograd, "grad", grad)
        la.fit(grid.batches())
    assert same_bits(before, posterior_bits(la))


def test_a_rule_is_not_refused_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of a rule that runs out of memory proves nothing: another rule would be another curvature."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(proof, "block_of", full)
    la = grid.make("all", "kron")
    with pytest.raises(OutOfMemory, match="batch 0: memory ran out"):
        la.fit(grid.batches())
    assert not la.is_fitted


# Predictions.


def large(weights: str, structure: str, **options: Any) -> tuple[Any, Memory]:
    memory = Memory()
    la = grid.make(weights, structure, model=prepared(lambda: Large(grid.network(), memory)), **options)
    la.fit(grid.batches())
    return la, memory


PREDICTIONS: dict[str, dict[str, Any]] = {
    "probit": {},
    "joint": {"link_approx": "mc", "joint": True},
    "bridge": {"link_approx": "bridge"},
}


@pytest.mark.parametrize("options", PREDICTIONS.values(), ids=PREDICTIONS)
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_a_prediction_of_too_many_data(weights: str, structure: str, options: dict[str, Any]) -> None:
    la, memory = large(weights, structure)

    def predict() -> Tensor:
        return la(X, **options, generator=torch.Generator().manual_seed(0))

    expected = predict()
    warned = pytest.warns(MemoryWarning, match="12 data at once; the work goes on with 6")
    with nothing_changes(la.model), memory.of(5), warned:
        found = predict()
    assert_close(found, expected, "float32_solve" if options.get("joint") else "float32")


def test_gradients_of_a_prediction_of_too_many_data() -> None:
    la, memory = large("all", "kron", enable_backprop=True)

    def gradient() -> Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(la(x).square().sum(), x)[0]

    expected = gradient()
    with memory.of(5), pytest.warns(MemoryWarning):
        assert_close(gradient(), expected, "float32")


def test_jacobians_and_contractions_of_too_many_data(monkeypatch: pytest.MonkeyPatch) -> None:
    la = grid.fitted("all", "full")
    expected = la(X)
    with memory_for(2), pytest.warns(MemoryWarning, match="data at once"), pytest.raises(OutOfMemory, match="datum"):
        la(X)  # three outputs of a single datum take three cotangents
    real = FullPrecision.variance

    def contract(precision: FullPrecision, jacobian: Any, form: Any) -> Tensor:
        if jacobian.n_data > 4:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return real(precision, jacobian, form)

    monkeypatch.setattr(FullPrecision, "variance", contract)
    with pytest.warns(MemoryWarning):
        assert_close(la(X), expected, "float32")


def test_a_single_datum_that_memory_cannot_hold() -> None:
    la, memory = large("all", "diag")
    expected = posterior_bits(la)
    with memory.of(0), pytest.warns(MemoryWarning), pytest.raises(OutOfMemory, match=r"single datum.*la.plan"):
        la(X)
    assert same_bits(expected, posterior_bits(la))


class Scaled(nn.Module):
    """A mapping whose first tensor is no data."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.memory = grid.network(), Memory()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        self.memory.take(inputs["x"])
        return self.net(inputs["x"]) * inputs["scale"].sum()


@pytest.mark.filterwarnings("ignore:memory ran out")
def test_inputs_that_cannot_be_split_are_not_split_wrongly() -> None:
    model = Scaled()
    la = Laplace(model, "classification", "all", "kron")
    scale = torch.tensor([0.5, 0.25])
    la.fit([{"scale": scale, "x": x, "labels": y} for x, y in grid.batches()])
    batch = {"scale": scale, "x": X}
    expected = la(batch)
    with model.memory.of(11), pytest.raises(OutOfMemory, match=r"cannot be split|single datum"):
        la(batch)
    with model.memory.of(6):
        assert_close(la({"x": X, "scale": scale}), expected, "float32")


@pytest.mark.filterwarnings("ignore:grid search")
def test_tuning_of_too_many_data() -> None:
    options = {"method": "gridsearch", "val_loader": [grid.data()], "grid_size": 5}
    la, memory = large("all", "kron")
    la.optimize_prior_precision(**options)
    expected = la.prior_precision
    la.prior_precision = 1.0
    with memory.of(7), pytest.warns(MemoryWarning):
        la.optimize_prior_precision(**options)
    assert torch.equal(la.prior_precision, expected)
