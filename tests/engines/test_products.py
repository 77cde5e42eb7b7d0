"""Products of the curvature with vectors, by factors of the Jacobian and by a graph, are those of the dense one."""

from __future__ import annotations

from typing import Any

import pytest

from laplace.engines.native.kinds import OuterEngine
from laplace.engines.profile import BatchProfile
from laplace.jacobian.blocks import TensorShape
from tests import problems as catalogue
from tests.conformance.backends import Backend, computed, engine_of, expected
from tests.conformance.cases import Case, thinned
from tests.reference.compare import assert_close

BACKENDS = [Backend(f"Native{name}", "torch", name.lower()) for name in ("GGN", "EF")]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("case", thinned("lowrank"))
@pytest.mark.turns
def test_both_ways_are_the_product_with_the_dense_curvature(
    backend: Backend, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors are taken wherever rules explain all tensors, also those of which a profile would not take them."""
    truth = expected(backend.kind, "matmul", case)
    for by_factors in (True, False):
        monkeypatch.setattr(BatchProfile, "multiplies_by_factors", lambda self, n_vectors, by=by_factors: by)
        assert_close(computed(engine_of(backend, case), "matmul", case, 4), truth, "backend", label=f"{by_factors}")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the number of vectors of every product by a graph."""
    seen: list[int] = []
    original = OuterEngine._add_products_by_autograd

    def noted(self: OuterEngine, x: Any, y: Any, sink: Any) -> Any:
        seen.append(sink.vectors.shape[1])
        return original(self, x, y, sink)

    monkeypatch.setattr(OuterEngine, "_add_products_by_autograd", noted)
    return seen


@pytest.mark.parametrize(
    ("problem", "by_graph"), [("mlp_classification", False), ("conv2d", False), ("group_norm", True)]
)
def test_layers_decide(problem: str, by_graph: bool, graphs: list[int]) -> None:
    """Of many vectors and few outputs a graph is needed only where a tensor has no factors."""
    case = Case(catalogue.get(problem), "lowrank", "all")
    case.fit()
    assert bool(graphs) == by_graph


@pytest.mark.parametrize(("width", "of_one"), [(256, False), (64, True)])
def test_numbers_of_vectors_and_outputs_decide(width: int, of_one: bool) -> None:
    """A small network goes by factors, which are multiplied in float64, whatever the number of vectors."""
    wide = TensorShape(width**2, factored=True, n_outputs=width, n_inputs=width)
    profile = BatchProfile(
        None, (wide, wide), n_data=8, n_outputs=10, n_columns=10, n_terms=1, itemsize=4, graph=0, widest=0,
        gradients=8, budget=2**30, product_budget=2**24, loop=False,
    )  # fmt: skip  # pyright: ignore[reportArgumentType]
    assert profile.multiplies_by_factors(20) and profile.multiplies_by_factors(1) == of_one
