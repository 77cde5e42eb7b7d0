"""One policy for wide numbers: float64, or float32 on devices that have none."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import Laplace
from laplace.core import precision_policy
from laplace.core.nested import move
from laplace.core.precision_policy import root_dtype, wide_dtype, widened
from laplace.structures import STRUCTURES
from tests.source import name_of, nodes

HOME = "core/precision_policy.py"
TABLES = {
    "engines/native/proof.py": "how closely derivatives agree, by dtype",
    "refinement/linear_model.py": "how closely a minimum is found, by dtype",
    "network/input_errors.py": "the method that casts to a dtype, by dtype",
}
"""Tables of dtypes, which name them all."""

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(10) % 2
OPTIONS: dict[str, Any] = {name: {"structure_kwargs": {"rank": 3}} for name in ("lowrank", "lowrank_kron")}


def places(name: str) -> list[str]:
    """Uses of an attribute in the package outside of the policy."""
    return [
        f"{name_of(path)}:{node.lineno}"
        for path, node in nodes(ast.Attribute)
        if node.attr == name and name_of(path) != HOME
    ]


def test_no_tensor_is_widened_without_the_policy() -> None:
    assert not places("double")


def test_float64_is_named_by_the_policy_and_by_tables_alone() -> None:
    named = {place.rpartition(":")[0] for place in places("float64")}
    assert named == set(TABLES)


def test_wide_is_float64_where_there_is_one() -> None:
    assert wide_dtype() == wide_dtype("cpu") == wide_dtype(torch.device("cuda", 1)) == torch.float64
    assert wide_dtype("mps") == torch.float32
    x = torch.ones(2, dtype=torch.float64)
    assert widened(x) is x
    assert widened(torch.ones(2)).dtype == widened(torch.arange(2)).dtype == torch.float64


class _NoFloat64(TorchDispatchMode):
    """A device without float64: no operation may give such a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                raise AssertionError(f"{func} gave float64")
        return result


def test_a_state_is_held_in_what_its_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"sums": [torch.ones(2, dtype=torch.float64)], "counts": torch.ones(2, dtype=torch.long)}
    assert move(state, torch.device("cpu"), None)["sums"][0].dtype == torch.float64
    monkeypatch.setattr(precision_policy, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    moved = move(state, torch.device("cpu"), None)
    assert moved["sums"][0].dtype == torch.float32 and moved["counts"].dtype == torch.long


@pytest.mark.parametrize("structure", ["full", "block"])
def test_sums_stay_wide_when_a_posterior_is_cast(structure: str) -> None:
    la = Laplace(nn.Linear(3, 2), "classification", "all", structure)
    la.fit([(X, Y)])
    la.prior_precision = 1e-4
    before = la.log_marginal_likelihood()
    la.to(dtype=torch.float32)
    assert torch.equal(la.log_marginal_likelihood(), before)


def test_roots_are_narrow_where_that_loses_nothing() -> None:
    cpu = torch.device("cpu")
    assert root_dtype(torch.float32, 1e3, 1.0, cpu) == torch.float32
    assert root_dtype(torch.float32, 1e5, 1.0, cpu) == root_dtype(torch.float32, 1.0, 0.0, cpu) == torch.float64


class _Products(TorchDispatchMode):
    """Notes in which types rows of a batch, at least a hundred of a layer, are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func._schema.name.removeprefix("aten::") in ("mm", "bmm", "addmm_", "baddbmm_")
        if is_product and args[-1].shape[-2] >= 100 and result.shape[-1] > 2:  # not those of the two outputs
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("fast", [True, False])
def test_cards_with_slow_float64_multiply_in_float32_and_sum_in_float64(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = tour(model, "all", "kron")
    monkeypatch.setattr(precision_policy, "has_fast_float64", lambda device: fast)
    la = Laplace(model, "classification", "all", "kron")
    batch = torch.randn(200, 3), torch.arange(200) % 2
    la.fit([batch])
    with _Products() as products:
        la.fit([(-batch[0], batch[1])], override=False)
    assert (torch.float64 in products.dtypes) is fast
    assert all(sums.dtype == torch.float64 for sums in la.fitted().curvature.parts.factors.values())
    for found, truth in zip(tour(model, "all", "kron"), expected, strict=True):
        assert torch.allclose(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((8, 6), False), ((9, 0), True)])
def test_float64_is_fast_on_cards_for_computing(
    capability: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision_policy.has_fast_float64(torch.device("cuda")) is fast
    assert precision_policy.has_fast_float64(torch.device("cpu"))


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "block", "diag", "kron", "ekfac", "lowrank", "lowrank_kron"])
def test_on_a_device_without_float64_nothing_is_float64(
    structure: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert structure in STRUCTURES
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    numbers = tour(model, weights, structure)
    monkeypatch.setattr(precision_policy, "WITHOUT_FLOAT64", frozenset({"cpu"}))
    with _NoFloat64():
        narrow = tour(model, weights, structure)
    for wide, found in zip(numbers, narrow, strict=True):
        assert torch.allclose(wide.float(), found, rtol=1e-3, atol=1e-4)


def tour(model: nn.Module, weights: str, structure: str) -> list[Tensor]:
    """Fit, evidence and predictions."""
    la = Laplace(model, "classification", weights, structure, **OPTIONS.get(structure, {}))
    la.fit([(X, Y)])
    la.prior_precision = torch.tensor(2.0)
    evidence = la.log_marginal_likelihood().detach()
    variances = la.functional_variance_fast(X)[1]
    links = [la(X, link_approx=link) for link in ("probit", "bridge")]
    for sampled in ({"link_approx": "mc"}, {"pred_type": "nn", "link_approx": "mc"}):
        la(X, generator=torch.Generator().manual_seed(0), **sampled)
    return [evidence, variances, *links]
