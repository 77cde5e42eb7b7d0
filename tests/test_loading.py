"""Loading what was saved: objects that are given again, other networks, and files of something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")

from safetensors.torch import save_file

import laplace
from laplace import Laplace
from laplace.core import nested
from laplace.curvature import NativeEF, NativeGGN
from laplace.errors import (
    InvalidCall,
    StateError,
)
from laplace.likelihoods import Categorical
from laplace.weights import WEIGHTS
from tests import grid
from tests.test_saving import called, loaded
from tests.test_state import assert_same, other_weights

OBJECTS: dict[str, tuple[str, Any, str]] = {
    "backend": ("backend", NativeEF, "backend= (it was NativeEF)"),
    "likelihood": ("likelihood", Categorical(), "likelihood= (it was Categorical)"),
    "forward_fn": ("forward_fn", called, "forward_fn= (it was called)"),
    "generator": ("backend_kwargs", {"generator": torch.Generator()}, "backend_kwargs= (it was dict)"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "posterior.safetensors"


@pytest.mark.parametrize("case", OBJECTS)
def test_an_object_is_given_again(case: str, path: Path) -> None:
    name, value, message = OBJECTS[case]
    la = Laplace(grid.network(), **{"likelihood": "classification", name: value}, subset_of_weights="all")
    la.fit(grid.batches())
    assert_same(la, loaded(la, path, **{name: value}))
    with pytest.raises(InvalidCall) as caught:
        laplace.load(path, grid.network())
    assert message in str(caught.value)


def test_objects_of_other_classes_are_refused(path: Path) -> None:
    la = grid.fitted("all", "kron", backend=NativeEF)
    la.save(path)
    with pytest.raises(StateError, match="it was saved with a NativeEF"):
        laplace.load(path, grid.network(), backend=NativeGGN)
    la = Laplace(grid.network(), Categorical(), "all", "kron")
    la.fit(grid.batches())
    la.save(path)
    with pytest.raises(StateError, match="it was saved with a Categorical"):
        laplace.load(path, grid.network(), likelihood="classification")


def test_a_likelihood_object_with_other_options_is_refused(path: Path) -> None:
    la = Laplace(grid.network(), Categorical(class_weight=[1, 2, 0.5]), "all", "kron")
    la.fit(grid.batches())
    la.save(path)
    with pytest.raises(StateError, match=r"it was saved with a Categorical\(class_weight=\(1.0, 2.0, 0.5\)\)"):
        laplace.load(path, grid.network(), likelihood=Categorical(class_weight=[1, 1, 0.5]))
    assert_same(la, laplace.load(path, grid.network(), likelihood=Categorical(class_weight=[1, 2, 0.5])))


def test_what_the_file_holds_is_not_given_again(path: Path) -> None:
    grid.fitted("all", "kron").save(path)
    for name, value in {"backend": NativeEF, "likelihood": "classification", "prior_precision": 2.0}.items():
        with pytest.raises(InvalidCall, match=f"given {name}; of this posterior it accepts none"):
            laplace.load(path, grid.network(), **{name: value})


def renamed() -> nn.Module:
    model = nn.Module()
    model.net = grid.network()
    model.forward = lambda x: model.net(x)
    return model


def with_buffer() -> nn.Module:
    model = grid.network()
    model.register_buffer("extra", torch.zeros(1))
    return model


def with_relu() -> nn.Module:
    model = grid.network()
    model[1] = nn.ReLU()
    return model


OTHERS = {
    "values": (other_weights, "other weights"),
    "names": (renamed, "'0.weight' was float32 .*, is none"),
    "shapes": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)), "is float32 .6, 3"),
    "dtypes": (lambda: grid.network().double(), "'0.weight' was float32 .*, is float64"),
    "buffers": (with_buffer, "'extra' was none, is float32"),
    "modules": (lambda: "model", "str"),
    "activations": (with_relu, "'1' was Tanh, is ReLU"),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", OTHERS)
def test_another_network_is_refused(case: str, weights: str, path: Path) -> None:
    """By a message that names the file, and what differs."""
    make, message = OTHERS[case]
    grid.fitted(weights, "full").save(path)
    with pytest.raises(StateError, match=f"{path}.*{message}"):
        laplace.load(path, make())


def test_files_of_something_else_are_refused(path: Path) -> None:
    la = grid.fitted("all", "kron")
    torch.save(la.state_dict(), path)
    with pytest.raises(StateError, match="no posterior that could be loaded"):
        laplace.load(path, la.model)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(StateError, match=r"nothing that la\.save wrote"):
        laplace.load(path, la.model)
    save_file({"weight": torch.zeros(3)}, path, {"laplace_format": "2"})
    with pytest.raises(StateError, match="version '2'"):
        laplace.load(path, la.model)
    path.write_bytes(b"")
    with pytest.raises(StateError, match="no posterior that could be loaded"):
        laplace.load(path, la.model)
    with pytest.raises(StateError, match="is a folder; give the file"):
        laplace.load(path.parent, la.model)
    with pytest.raises(FileNotFoundError):
        laplace.load(path.parent / "none", la.model)


def forged(path: Path, change: Any) -> None:
    """A file whose value was changed, with the digest that belongs to it."""
    metadata, tensors = nested._contents(path)
    text = change(metadata["laplace"])
    text = text if isinstance(text, str) else json.dumps(text)
    save_file(tensors, path, nested._metadata(text, tensors))


def with_recipe(**changes: Any) -> Any:
    def change(text: str) -> Any:
        value = json.loads(text)
        value["recipe"] |= changes
        return value

    return change


HOSTILE = {
    "class outside of the registry": with_recipe(cell=["all", "os.system"], cls_name="os.system"),
    "class of another name": with_recipe(cls_name="os.system"),
    "cell that is no cell": with_recipe(cell="all"),
    "cell with a module": with_recipe(cell=["all", {"__reduce__": ["os.system", "true"]}]),
    "likelihood outside of the registry": with_recipe(arguments={"likelihood": "os.system"}),
    "backend by its name": with_recipe(arguments={"likelihood": "classification", "backend": "os.system"}),
    "call by its name": with_recipe(arguments={"likelihood": "classification", "forward_fn": "os.system"}),
    "unknown arguments": with_recipe(arguments={"likelihood": "classification", "__class__": "os.system"}),
    "another network": with_recipe(arguments={"likelihood": "classification", "model": None}),
    "unknown options": with_recipe(arguments={"likelihood": "classification", "structure_kwargs": {"__init__": 1}}),
    "objects that are none": with_recipe(objects=3),
    "huge nesting": lambda _: "[" * 200_000 + "]" * 200_000,
    "huge nesting of tuples": lambda _: '{"$tuple":[' * 20_000 + "]}" * 20_000,
    "unknown tags": with_recipe(arguments={"$import": "os"}),
    "tensor that is not there": with_recipe(arguments={"likelihood": {"$tensor": "/etc/passwd"}}),
    "order that is none": with_recipe(arguments={"likelihood": {"$tensor": "state.mean", "order": [5, "x"]}}),
    "no recipe": lambda _: [],
    "many components": with_recipe(components=[[]] * 1000),
    "no JSON": lambda _: "import os",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_no_code_of_a_file_runs(case: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid.fitted("all", "full").save(path)
    forged(path, HOSTILE[case])

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a file led to code")

    for place in ("os.system", "pickle.Unpickler", "pickle.loads", "torch.load", "importlib.import_module"):
        monkeypatch.setattr(place, never)
    with pytest.raises(StateError):
        laplace.load(path, grid.network())


def test_a_file_is_loaded_without_pickles(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la = grid.fitted("all", "kron")
    model = grid.network()

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a pickle")

    for place in ("pickle.dumps", "pickle.loads", "pickle.Unpickler", "pickle.Pickler", "torch.save", "torch.load"):
        monkeypatch.setattr(place, never)
    la.save(path)
    assert_same(la, laplace.load(path, model))
