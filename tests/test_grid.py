"""Cells of the grid: registered parts go together with no edit elsewhere, and a user's own class is found first."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import laplace
from laplace import Laplace, LLLaplace, ParametricLaplace, SubnetLaplace
from laplace.curvature import NativeEF
from laplace.errors import InvalidArgument, InvalidCall, StateError
from laplace.function_space import FAMILIES, BaseFunctionalLaplace
from laplace.gp.subset import SubsetCurvature
from laplace.grid import classes
from laplace.parametric import COMMON, PRECISION_OPTIONS
from laplace.structures import STRUCTURES, AdditiveCurvature, DiagCurvature
from laplace.weights import WEIGHTS, AllWeights
from tests import grid
from tests.reference.compare import assert_close
from tests.registries import temporarily

BASES = {"all": ParametricLaplace, "last_layer": LLLaplace, "subnetwork": SubnetLaplace}
each_weights = pytest.mark.parametrize("weights", BASES)


@dataclass(frozen=True)
class MeanOptions:
    """Something to choose."""

    digits: int = 8


@dataclass(frozen=True)
class MeanCurvature(AdditiveCurvature):
    """One number for all parameters, the mean of the diagonal."""

    mean: Tensor
    n_params: int
    name = "one_number"
    options = MeanOptions

    @property
    def n_terms(self):
        return len(self.mean)

    @classmethod
    def from_batch(cls, engine, x, y):
        summary, diagonal = engine.diag(x, y)
        return summary, cls(diagonal.mean(1), diagonal.shape[1])

    def __add__(self, other):
        return MeanCurvature(self.mean + other.mean, self.n_params)

    def precision(self, weights, prior, **options):
        return DiagCurvature(self.mean.unsqueeze(1).expand(-1, self.n_params)).precision(weights, prior)

    def public(self):
        return self.mean.sum(0)


@pytest.fixture
def registered() -> Iterator[None]:
    """The structure under a name, for the length of a test."""
    with temporarily(STRUCTURES):
        STRUCTURES.register("one_number")(MeanCurvature)
        yield


@each_weights
def test_a_registered_structure_works_with_all_weights(registered: None, weights: str) -> None:
    la, diagonal = (grid.fitted(weights, name, "regression", prior_precision=2.0) for name in ("one_number", "diag"))
    assert isinstance(la, BASES[weights])
    assert type(la).__name__ == f"OneNumber{ {'all': '', 'last_layer': 'LL', 'subnetwork': 'Subnet'}[weights] }Laplace"
    assert_close(la.H, diagonal.H.mean(), "float32")
    x = grid.data("regression")[0]
    jacobians, f = la.backend.jacobians(x)
    mean, variance = la(x)
    assert_close(mean, f, "float32")
    assert_close(variance, jacobians @ jacobians.mT / (la.H + 2), "float32")
    before = la.log_marginal_likelihood()
    la.optimize_prior_precision()
    assert la.log_marginal_likelihood() > before
    assert la.sample(3).shape[0] == 3


@each_weights
def test_a_class_that_is_made_is_one_class(registered: None, weights: str) -> None:
    """It is copied, pickled and saved as those with names are."""
    la = grid.fitted(weights, "one_number", prior_precision=2.0)
    again = grid.make(weights, "one_number")
    assert type(again) is type(la)
    again.load_state_dict(la.state_dict())
    x = grid.data()[0]
    for other in (again, copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert type(other) is type(la)
        assert torch.equal(other(x), la(x))
    with pytest.raises(StateError, match="class"):
        grid.make(weights, "diag").load_state_dict(la.state_dict())


def test_its_options_and_arguments_are_checked(registered: None) -> None:
    la = grid.make("last_layer", "one_number", structure_kwargs={"digits": 2}, last_layer_name="3")
    assert (la.structure_options, la.last_layer_name) == (MeanOptions(2), "3")
    with pytest.raises(InvalidArgument, match="accepted: digits"):
        grid.make("all", "one_number", structure_kwargs={"digit": 2})
    with pytest.raises(InvalidCall, match=r"OneNumberLaplace\(\) has no argument 'last_layer_name'"):
        grid.make("all", "one_number", last_layer_name="3")
    with pytest.raises(InvalidArgument, match="damping"):
        grid.make("subnetwork", "one_number", damping=True)
    with pytest.raises(InvalidArgument, match="'one_number'"):
        grid.make("all", "two_numbers")


def test_registered_weights_work_with_all_structures() -> None:
    class OtherWeights(AllWeights):
        """All weights under another name."""

    with temporarily(WEIGHTS):
        WEIGHTS.register("others")(OtherWeights)
        for structure in STRUCTURES:
            la, whole = (grid.fitted(weights, structure) for weights in ("others", "all"))
            assert isinstance(la.weights, OtherWeights)
            assert torch.equal(la(grid.data()[0]), whole(grid.data()[0]))
        with pytest.raises(InvalidArgument, match=r"subset_of_weights='other'.*'others'"):
            grid.make("other", "full")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_registered_family_is_a_posterior_over_functions(weights: str) -> None:
    options = {"structure_kwargs": {"n_subset": 5}, "functional_approximation": "mine"}
    with temporarily(FAMILIES):
        FAMILIES.register("mine")(SubsetCurvature)
        la = grid.fitted(weights, "gp", **options)
        assert isinstance(la, BaseFunctionalLaplace)
        x = grid.data()[0]
        assert torch.equal(la(x), grid.fitted(weights, "gp", n_subset=5)(x))
        assert torch.equal(pickle.loads(pickle.dumps(la))(x), la(x))
        with pytest.raises(InvalidArgument, match="'mine'"):
            grid.make("subnetwork", "gp", **options)
        with pytest.raises(InvalidArgument, match="GGN"):
            grid.make(weights, "gp", backend=NativeEF, **options)
    with pytest.raises(InvalidArgument, match=r"'sod', 'nystrom', 'variational'\]"):
        grid.make(weights, "gp", **options)


def test_a_user_s_class_of_a_family_is_found_by_its_key() -> None:
    class Mine(laplace.ELLA):
        _key = ("all", "gp", "nystrom")

    class Further(laplace.FunctionalLaplace):
        _key = ("all", "gp", "further")

    try:
        assert (
            type(grid.make("all", "gp", subsample_size=5, n_eigenvalues=2, functional_approximation="nystrom")) is Mine
        )
        assert type(grid.make("all", "gp", n_subset=5, functional_approximation="further")) is Further
    finally:
        del Mine, Further
        gc.collect()
    ella = grid.make("all", "gp", subsample_size=5, n_eigenvalues=2, functional_approximation="nystrom")
    assert type(ella) is laplace.ELLA
    with pytest.raises(InvalidArgument, match="further"):
        grid.make("all", "gp", n_subset=5, functional_approximation="further")


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_every_argument_of_a_constructor_reaches_its_part(cls: type[ParametricLaplace]) -> None:
    """What is neither common nor an option of the weights or the precision is one of the structure."""
    code = cls.__init__.__code__
    names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    own = names - COMMON - PRECISION_OPTIONS - cls.weights_type.arguments.keys()
    assert own <= set(cls.structure.options.__dataclass_fields__)
    assert set(code.co_varnames) == names


def test_the_factory_says_what_it_makes() -> None:
    assert Laplace.__annotations__["return"] == "ParametricLaplace"
