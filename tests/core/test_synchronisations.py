"""A host that reads a number waits for the device: once per batch of a fit, and once per prediction."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import Laplace
from laplace.core import checks
from laplace.errors import InvalidData, LaplaceError
from laplace.structures import STRUCTURES

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y: dict[str, Tensor] = {
    "classification": torch.arange(12) % 3,
    "regression": torch.randn(12, 3, generator=torch.Generator().manual_seed(1)),
    "bernoulli": torch.arange(36).reshape(12, 3) % 2.0,
}
READINGS = {"ekfac": 2, "lowrank": 4, "lowrank_kron": 2, "lowrank_kron, corrected": 3}
OPTIONS: dict[str, Any] = {
    **{name: {"structure_kwargs": {"rank": 3}} for name in ("lowrank", "lowrank_kron")},
    "lowrank_kron, corrected": {"structure_kwargs": {"rank": 3, "corrected": True}},
}


class _Reads(TorchDispatchMode):
    """Counts operations whose results the host waits for, in C++ and (lists, arrays) in Python."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._python = _Copies(self.seen)

    def __enter__(self) -> _Reads:
        self._python.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._python.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        by_mask = name.startswith("index") and any(_is_mask(index) for index in _indices(args))
        of_the_host = name == "equal" and args[0].dtype == torch.uint8  # states of the host's generator
        if (name.startswith(self.WAITING) or by_mask) and not of_the_host:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def _indices(args: Any) -> list[Any]:
    return list(args[1]) if len(args) > 1 and isinstance(args[1], list | tuple) else []


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def reads_of_fit(n_batches: int, likelihood: str, weights: str, structure: str) -> tuple[Any, Counter[str]]:
    name, _, _ = structure.partition(",")
    la = Laplace(network(), likelihood, weights, name, **OPTIONS.get(structure, {}))
    with _Reads() as reads:
        la.fit([(X, Y[likelihood])] * n_batches)
    return la, reads.seen


@pytest.mark.parametrize("likelihood", Y)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize(
    "structure", ["full", "block", "diag", "kron", "ekfac", "lowrank", "lowrank_kron", "lowrank_kron, corrected"]
)
@pytest.mark.turns
def test_a_batch_of_a_fit_waits_once_per_reading(structure: str, weights: str, likelihood: str) -> None:
    assert structure.partition(",")[0] in STRUCTURES
    (_, few), (_, many) = (reads_of_fit(n, likelihood, weights, structure) for n in (2, 5))
    assert (many - few).total() <= 3 * READINGS.get(structure, 1), many - few


@pytest.mark.parametrize("likelihood", Y)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "block", "diag", "kron", "ekfac", "lowrank", "lowrank_kron"])
@pytest.mark.parametrize("options", [{}, {"pred_type": "nn", "link_approx": "mc"}], ids=["glm", "nn"])
def test_a_prediction_waits_once(options: dict[str, str], structure: str, weights: str, likelihood: str) -> None:
    la, _ = reads_of_fit(1, likelihood, weights, structure)
    la(X, **options)  # what is computed once per posterior
    with _Reads() as reads:
        la(X, **options)
    # Variances of this structure are computed anew where they cancel, which has to be asked; of sampled outputs the
    # moments are checked after the samples.
    again = structure == "lowrank_kron" if not options else likelihood == "regression"
    bound = 2 if again else 1
    assert reads.seen.total() <= bound, reads.seen


class Encoder(nn.Module):
    """An encoder layer, whose weights are used by functions that are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def convolutional() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1, stride=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {"encoder": (Encoder, (5, 8)), "images": (convolutional, (2, 4, 4))}


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_of_every_kind_wait_once(name: str, structure: str, weights: str) -> None:
    """Backward passes one by one, watched functions and dense blocks ask nothing of their own."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x = make().eval(), torch.randn(12, *shape)

    def fitted(n_batches: int) -> tuple[Any, Counter[str]]:
        la = Laplace(model, "classification", weights, structure)
        with _Reads() as reads:
            la.fit([(x, Y["classification"])] * n_batches)
        return la, reads.seen

    (la, few), (_, many) = (fitted(n) for n in (2, 5))
    assert (many - few).total() <= 3 * READINGS.get(structure, 1), many - few
    for options in ({}, {"link_approx": "mc"}, {"pred_type": "nn", "link_approx": "mc"}):
        la(x, **options)
        with _Reads() as reads:
            la(x, **options)
        drawn = "pred_type" not in options and bool(options)  # from covariances, whose root asks if they are diagonal
        assert reads.seen.total() <= 1 + drawn, (options, reads.seen)


def test_the_counter_sees_what_waits() -> None:
    x = torch.arange(4.0)
    for read in (
        lambda: x.sum().item(),
        lambda: bool(x.sum() > 1),
        lambda: torch.equal(x, x),
        lambda: x.tolist(),
        lambda: x[x > 1],
        lambda: x.nonzero(),
    ):
        with _Reads() as reads:
            read()
        assert reads.seen.total() >= 1
    with _Reads() as reads:
        _ = x + x[1:2]
    assert not reads.seen


# A bad batch is told as before, whenever its conditions are read.

BAD = {
    "outputs": (torch.full((12, 3), float("nan")), Y["classification"], "classification", "outputs .*NaN"),
    "targets": (X, Y["regression"] / 0, "regression", "Targets have NaN"),
    "labels": (X, Y["classification"] + 1, "classification", "Label 3 is out of range"),
    "probabilities": (X, Y["bernoulli"] - 2, "bernoulli", "Targets reach from -2 to -1"),
}


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "lowrank"])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_batch_is_named(fault: str, place: int, structure: str) -> None:
    x, y, likelihood, message = BAD[fault]
    batches = [(X, Y[likelihood])] * 4
    batches[place] = (x, y)
    la = Laplace(network(), likelihood, "all", structure, **OPTIONS.get(structure, {}))
    with pytest.raises(InvalidData, match=f"^batch {place}: .*{message}"):
        la.fit(batches)
    assert not la.is_fitted


def test_no_batch_is_read_long_after_a_bad_one() -> None:
    seen: list[int] = []

    def batches(likelihood: str) -> Any:
        for number in range(6):
            seen.append(number)
            yield (X / (number != 2), Y[likelihood])

    for likelihood in Y:
        seen.clear()
        with pytest.raises(InvalidData, match=r"^batch 2: "):
            Laplace(network(), likelihood, "all", "diag").fit(batches(likelihood))
        assert seen[-1] <= 3


# The collection of conditions.


def truth(value: bool) -> Tensor:
    return torch.tensor(value)


def fault(name: str) -> Any:
    return lambda: InvalidData(name)


def test_conditions_are_read_in_their_order_with_the_names_of_their_batches() -> None:
    with pytest.raises(InvalidData, match=r"^one: first$"), checks.together():
        with checks.named("one"):
            checks.require(truth(True), fault("fine"))
            checks.require(truth(False), fault("first"))
        with checks.named("two"):
            checks.require(truth(False), fault("second"))


def test_outside_of_a_collection_a_condition_is_read_at_once() -> None:
    with pytest.raises(InvalidData, match=r"^one: first$"), checks.named("one"):
        checks.require(torch.tensor([True, False]), fault("first"))
    checks.require(truth(True), fault("fine"))
    checks.require(truth(False), lambda: None)  # a closer look found nothing


def test_an_error_that_follows_from_a_condition_gives_way_to_it() -> None:
    with pytest.raises(InvalidData, match="first") as caught, checks.together():
        checks.require(truth(False), fault("first"))
        raise RuntimeError("a consequence")
    assert isinstance(caught.value.__context__, RuntimeError)
    with pytest.raises(RuntimeError, match="of its own"), checks.together():
        checks.require(truth(True), fault("fine"))
        raise RuntimeError("of its own")


def test_a_question_takes_the_conditions_along() -> None:
    with _Reads() as reads, checks.together():
        checks.require(truth(True), fault("fine"))
        assert checks.is_true(truth(True)) and not checks.is_true(truth(False))
    assert reads.seen.total() == 2
    with pytest.raises(InvalidData, match="first"), checks.together():
        checks.require(truth(False), fault("first"))
        checks.is_true(truth(True))
        pytest.fail("the condition was not read")


def test_nothing_is_finite() -> None:
    """A tied network has tensors without Kronecker factors alone."""
    assert bool(checks.all_finite([])) and bool(checks.all_finite([X, X]))
    assert not bool(checks.all_finite([X, X / 0]))


def test_collections_may_be_inside_each_other() -> None:
    with pytest.raises(LaplaceError, match="inner"), checks.together():
        checks.require(truth(True), fault("outer"))
        with checks.together():
            checks.require(truth(False), fault("inner"))
        pytest.fail("the inner one was not read")
