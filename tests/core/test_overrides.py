"""Members of users' classes: private ones of the library are refused, all others are free."""

from __future__ import annotations

import copy
import pickle

import pytest

from laplace import (
    FullLaplace,
    FullLLLaplace,
    FunctionalLaplace,
    KronLaplace,
)
from laplace.core.overrides import EVIDENCE, FITTING, HELD, HOOKS, POSTERIOR, PREDICTIONS, is_overridden
from laplace.errors import UnsupportedError
from tests.contract.test_user_hooks import PROBLEM, X, fitted


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_private_hooks_of_similar_libraries_are_refused(name: str) -> None:
    for make in (lambda: type("Own", (KronLaplace,), {name: lambda self: None}), lambda: _mixed_in(name)):
        with pytest.raises(UnsupportedError) as caught:
            make()
        assert name in str(caught.value) and HOOKS[name] in str(caught.value)


def _mixed_in(name: str) -> type:
    mixin = type("Mixin", (), {name: lambda self: None})
    return type("Own", (mixin, KronLaplace), {})


@pytest.mark.parametrize("name", ["_latent", "_predictor", "_group", "_take_over", "_precision", "_posterior"])
def test_private_names_of_the_library_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"defines {name}"):
        type("Own", (KronLaplace,), {name: lambda self: None})


def test_names_of_users_are_free() -> None:
    class Own(KronLaplace):
        _key = ("all", "kron of a test")
        _mine = 3

        def __secret(self) -> int:
            return 4

        def _helper(self) -> int:
            return self._mine + self.__secret()

        def helper(self) -> int:
            return self._helper()

    la = fitted(Own)
    assert la.helper() == 7
    la.anything = la._other = 5
    assert pickle.loads(pickle.dumps(copy.deepcopy(la.__dict__["anything"]))) == 5
    assert copy.deepcopy(la).anything == 5


def test_the_list_of_private_attributes_is_complete() -> None:
    for cls in (FullLaplace, FullLLLaplace):
        la = fitted(cls)
        la(X)
        assert {name for name in vars(la) if name.startswith("_")} <= HELD


@pytest.mark.parametrize("cls", [FullLaplace, KronLaplace, FullLLLaplace, FunctionalLaplace])
def test_a_class_that_overrides_nothing(cls: type) -> None:
    """Nothing goes by the slower way of users' methods."""
    own = type("Own", (cls,), {})
    la = own(PROBLEM.make_model(), PROBLEM.likelihood, *([5] if cls is FunctionalLaplace else []))
    names = {*FITTING, *POSTERIOR, *EVIDENCE, *PREDICTIONS, "sample", "square_norm", "log_marginal_likelihood"}
    assert not [name for name in names if is_overridden(la, name)]
