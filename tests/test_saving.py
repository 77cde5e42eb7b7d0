"""One file of safetensors with all that a posterior is made of again: what is written, read, and refused."""

from __future__ import annotations

import json
import pickle
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from safetensors import safe_open

import laplace
from laplace import KronLaplace, Laplace, MixtureLaplace, OnlineLaplace, VaLLA
from laplace.core import nested
from laplace.enums import FeatureReduction, Likelihood
from laplace.errors import (
    InvalidCall,
    InvalidType,
    MissingDependency,
    NotFittedError,
    StateError,
    UnsupportedError,
)
from laplace.function_space import FAMILIES
from laplace.likelihoods import LIKELIHOODS, Categorical
from laplace.structures import STRUCTURES, DiagCurvature
from laplace.weights import WEIGHTS, AllWeights
from tests import grid
from tests.registries import temporarily
from tests.test_state import assert_same, other_weights

SEEN = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
"""Inputs of which every number is told from any other that a state may hold."""


def holds_inputs(state: Any) -> bool:
    """True if some number of the inputs is in a state."""
    if isinstance(state, Tensor):
        numbers = state.double().reshape(-1, 1) if state.is_floating_point() else torch.empty(0, 1)
        return bool((numbers == SEEN.reshape(1, -1)).any())
    if isinstance(state, dict):
        return any(map(holds_inputs, state.values()))
    return isinstance(state, list | tuple) and any(map(holds_inputs, state))


EVERY = list(product(WEIGHTS, STRUCTURES, LIKELIHOODS))
OVER_FUNCTIONS = {
    "sod": {"n_subset": 7, "selection": "top"},
    "nystrom": {"subsample_size": 7, "n_eigenvalues": 4},
    "variational": {"inducing_locations": "random", "num_inducing": 4},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "posterior.safetensors"


def loaded(la: Any, path: Path, **objects: Any) -> Any:
    """A posterior that was saved, of a copy of its network."""
    la.save(path)
    return laplace.load(path, copied(la), **objects)


def copied(la: Any) -> nn.Module:
    """The network of a posterior, as another process has it."""
    return pickle.loads(pickle.dumps(la.weights.model))


# Round trips.


@pytest.mark.parametrize(("weights", "structure", "likelihood"), EVERY)
@pytest.mark.turns
def test_every_cell_comes_back(weights: str, structure: str, likelihood: str, path: Path) -> None:
    """To the bit, for a network with equal weights and no further arguments."""
    la = grid.fitted(weights, structure, likelihood, prior_precision=0.7)
    again = loaded(la, path)
    assert type(again) is type(la)
    assert_same(la, again, likelihood)


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_what_comes_back_goes_on(weights: str, structure: str, path: Path) -> None:
    """More data and tuning lead to the same bits."""
    la = grid.fitted(weights, structure)
    again = loaded(la, path)
    for posterior in (la, again):
        posterior.fit([grid.data(seed=9)], override=False)
        posterior.optimize_prior_precision(n_steps=3)
    assert_same(la, again)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_posteriors_over_functions_come_back(family: str, weights: str, path: Path) -> None:
    options = {"functional_approximation": family, **OVER_FUNCTIONS[family]}
    la = Laplace(grid.network(), "classification", weights, "gp", **options)
    la.fit(grid.batches(), **({"iterations": 3} if family == "variational" else {}))
    again = loaded(la, path)
    assert type(again) is type(la)
    assert again.structure_options == la.structure_options or family == "variational"
    x = grid.data()[0]
    assert torch.equal(la(x), again(x))
    assert torch.equal(la.log_marginal_likelihood(), again.log_marginal_likelihood())


def test_inputs_as_an_argument_come_back(path: Path) -> None:
    """Locations of a variational posterior, which is given tensors."""
    x = grid.data()[0]
    la = VaLLA(grid.network(), "classification", x[:4], inducing_classes=torch.tensor([0, 1, 2, 0]), seed=5)
    la.fit(grid.batches(), iterations=2)
    again = loaded(la, path)
    assert torch.equal(again.inducing_locations, la.inducing_locations)
    assert torch.equal(again.structure_options.inducing_locations, x[:4]) and again.seed == 5
    assert torch.equal(la(x), again(x))


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
def test_every_argument_comes_back(path: Path) -> None:
    given: dict[str, Any] = {
        "sigma_noise": 0.5, "prior_mean": torch.linspace(-1, 1, 38), "temperature": 0.3,
        "prior_precision": torch.arange(1.0, 5.0), "damping": True, "enable_backprop": True, "dict_key_x": "a",
        "dict_key_y": "b", "backend_kwargs": {"stochastic": True, "num_samples": 3},
    }  # fmt: skip
    torch.manual_seed(0)
    la = grid.fitted("all", "kron", "regression", **given)
    again = loaded(la, path)
    assert again.damping and again.enable_backprop and again.backend_kwargs == given["backend_kwargs"]
    assert_same(la, again, "regression")
    for posterior in (la, again):  # sampled curvature goes on with its random numbers
        posterior.fit(grid.batches("regression"), override=False)
    assert_same(la, again, "regression")


def test_options_of_structure_and_weights_come_back(path: Path) -> None:
    la = grid.fitted("all", "lowrank", structure_kwargs={"rank": 0.9, "power_iterations": 1})
    assert loaded(la, path).structure_options == la.structure_options
    la = grid.fitted("last_layer", "kron", last_layer_name="3", feature_reduction=FeatureReduction.AVERAGE)
    again = loaded(la, path)
    assert (again.last_layer_name, again.feature_reduction) == ("3", la.feature_reduction)
    indices = grid.INDICES.flip(0)
    la = grid.fitted("subnetwork", "full", Likelihood.CLASSIFICATION, subnetwork_indices=indices)
    assert torch.equal(loaded(la, path).subnetwork_indices, indices)
    la = grid.fitted("all", "diag", channel_dim=-1)
    assert loaded(la, path).channels_known


def test_channels_that_labels_told_come_back(path: Path) -> None:
    """Pixels `[B, C, H, W]`, as labels `[B, H, W]` say."""
    model, x = nn.Conv2d(2, 3, 1), torch.randn(4, 2, 5, 5)
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, torch.randint(3, (4, 5, 5)))])
    again = loaded(la, path)
    assert again.channel_dim == la.channel_dim == 1
    assert torch.equal(la(x), again(x))


def test_what_was_assigned_or_refined_comes_back(path: Path) -> None:
    la = grid.fitted("all", "full", "regression")
    la.refine(grid.batches("regression"))
    again = loaded(la, path)
    assert again.refinement is not None and again.refinement.method == la.refinement.method
    assert_same(la, again, "regression")
    la.fit(grid.batches("regression"))
    la.mean = la.mean + 0.1
    la.posterior_scale = 0.1 * torch.eye(la.n_params)
    again = loaded(la, path)
    assert torch.equal(again.posterior_scale, la.posterior_scale) and torch.equal(again.mean, la.mean)


@pytest.mark.parametrize("weights", ["uniform", "evidence", [0.2, 0.8]])
def test_mixtures_come_back(weights: Any, path: Path) -> None:
    """Of different posteriors, for networks in their order."""
    other = other_weights()
    mixture = MixtureLaplace([grid.make("all", "kron"), grid.make("last_layer", "diag", model=other)], weights=weights)
    mixture.fit(grid.batches())
    mixture.save(path)
    again = laplace.load(path, [grid.network(), other])
    x = grid.data()[0]
    assert torch.equal(mixture(x), again(x)) and torch.equal(mixture.weights, again.weights)
    with pytest.raises(StateError, match="1 networks were given, it has 2"):
        laplace.load(path, [other])
    with pytest.raises(StateError, match="other weights"):
        laplace.load(path, [other, grid.network()])


def test_heads_of_one_network_come_back(path: Path) -> None:
    model = nn.Linear(6, 6)
    for subset in ("last_layer", "all"):
        mixture = laplace.from_mimo(model, 2, "classification", subset, last_layer_name="")
        mixture.fit(grid.batches())
        mixture.save(path)
        again = laplace.load(path, model)
        x = grid.data()[0]
        assert torch.equal(mixture(x), again(x))
        assert [la.forward_fn for la in again.components] == [la.forward_fn for la in mixture.components]


def test_objects_of_a_mixture_are_given_for_all_or_each(path: Path) -> None:
    calls = [partial(called, scale=2.0), partial(called, scale=3.0)]
    mixture = MixtureLaplace([grid.make("all", "diag", forward_fn=call) for call in calls])
    mixture.fit(grid.batches())
    mixture.save(path)
    again = laplace.load(path, grid.network(), forward_fn=calls)
    x = grid.data()[0]
    assert torch.equal(mixture(x), again(x))
    assert not torch.equal(mixture(x), laplace.load(path, grid.network(), forward_fn=calls[0])(x))
    with pytest.raises(StateError, match="1 entries, it has 2"):
        laplace.load(path, grid.network(), forward_fn=calls[:1])


def test_the_posterior_of_online_training_comes_back(path: Path) -> None:
    online = OnlineLaplace(grid.network(), grid.batches(), "classification", n_hypersteps=2)
    online.step(1)
    assert_same(online.la, loaded(online.la, path))


def test_registered_parts_come_back(path: Path) -> None:
    """Structures, weights, likelihoods and classes of users, by their names."""

    class Mine(DiagCurvature):
        name = "mine"

    class Labels(Categorical):
        name = "labels"

    with temporarily(STRUCTURES, WEIGHTS, LIKELIHOODS):
        STRUCTURES.register("mine")(Mine)
        WEIGHTS.register("every")(AllWeights)
        LIKELIHOODS.register("labels")(Labels)
        la = Laplace(grid.network(), "labels", "every", "mine")
        la.fit(grid.batches())
        assert_same(la, loaded(la, path))
    with pytest.raises(StateError, match=r"could not be loaded: subset_of_weights='every'"):
        laplace.load(path, grid.network())


def test_a_class_with_a_key_comes_back(path: Path) -> None:
    class Keyed(KronLaplace):
        _key = ("all", "keyed")

        def __init__(self, *args: Any, flavour: str, **options: Any) -> None:
            super().__init__(*args, **options)
            self.flavour = flavour

    la = Laplace(grid.network(), "classification", "all", "keyed", flavour="plum", damping=True)
    la.fit(grid.batches())
    la.save(path)
    with pytest.raises(InvalidCall, match="flavour"):  # it is no option of the library's
        laplace.load(path, grid.network())
    again = laplace.load(path, grid.network(), flavour="pear")
    assert (again.flavour, again.damping) == ("pear", True)
    assert_same(la, again)


def test_the_dtype_is_the_network_s_and_the_device_too(path: Path) -> None:
    la = grid.make("all", "kron", model=grid.network().double())
    la.fit([(x.double(), y) for x, y in grid.batches()])
    la.save(path)
    model = grid.network().double()
    again = laplace.load(path, model, device="cpu")
    assert again.prior_precision.dtype == torch.float64 and again.model is model
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    with pytest.raises(StateError, match=r"'0.weight' was float64 \[5, 3\], is float32"):
        laplace.load(path, grid.network())


# Objects that no file holds.


def called(model: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
    return scale * model(x)


# Refusals to save.


def test_what_cannot_be_saved_is_refused(path: Path) -> None:
    class Unknown(KronLaplace):
        pass

    with pytest.raises(NotFittedError):
        grid.make("all", "kron").save(path)
    la = Unknown(grid.network(), "classification")
    la.fit(grid.batches())
    with pytest.raises(UnsupportedError, match=r"Unknown.*_key.*state_dict"):
        la.save(path)
    la = grid.fitted("all", "kron", "regression")
    la.backend.lossfunc = nn.MSELoss(reduction="sum")
    with pytest.raises(UnsupportedError, match="loss that was assigned"):
        la.save(path)
    assert not path.exists()


def test_without_safetensors_the_package_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la = grid.fitted("all", "kron")
    la.save(path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for act in (lambda: la.save(path), lambda: laplace.load(path, grid.network())):
        with pytest.raises(MissingDependency, match="pip install safetensors"):
            act()


# Refusals to load.


def test_damage_is_noticed_wherever_it_is(path: Path) -> None:
    """Truncated at any place, or with any byte changed: in the numbers, too."""
    la = grid.fitted("last_layer", "diag")
    la.save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        changed = bytes([whole[place] ^ 4])
        for damaged in (whole[:place], whole[:place] + changed + whole[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(StateError):
                laplace.load(path, la.weights.model)


def test_a_loaded_posterior_does_not_change_with_its_file(path: Path) -> None:
    """Tensors are copies, not the mapped file."""
    la = grid.fitted("all", "kron")
    again = loaded(la, path)
    with path.open("r+b") as file:
        file.write(b"\x00" * path.stat().st_size)
    assert_same(la, again)
    again.save(path)
    assert_same(la, laplace.load(path, grid.network()))


# Values in files.


def test_the_metadata_says_what_the_file_is(path: Path) -> None:
    """To whoever reads it with safetensors alone."""
    grid.fitted("all", "kron", damping=True).save(path)
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata(), set(file.keys())
    recipe = json.loads(metadata["laplace"])["recipe"]
    assert (metadata["format"], metadata["laplace_format"]) == ("pt", nested.VERSION)
    assert recipe["cell"][:2] == ["all", "kron"] and recipe["arguments"]["damping"] is True
    assert {"state.mean", "state.prior_precision"} < names


# Inputs of training data.


def _with_inputs() -> list[Any]:
    every: list[Any] = [pytest.param("all", name, {}, id=name) for name in STRUCTURES if name != "gp"]
    every += [
        pytest.param("all", "gp", {"functional_approximation": name, **options}, id=name)
        for name, options in OVER_FUNCTIONS.items()
    ]
    return every


@pytest.mark.parametrize(("weights", "structure", "options"), _with_inputs())
def test_files_without_inputs(weights: str, structure: str, options: dict[str, Any], path: Path) -> None:
    """Whichever states hold numbers of the training inputs are refused, and no others are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    la: Any = Laplace(model, "classification", weights, structure, **options)
    # Inducing points that are moved by no step are data.
    la.fit([(SEEN, torch.arange(9) % 3)], **({"iterations": 0} if isinstance(la, VaLLA) else {}))
    assert type(la).structure.holds_inputs == holds_inputs(la.state_dict())
    if not holds_inputs(la.state_dict()):
        la.save(path, inputs=False)
        assert torch.equal(laplace.load(path, model)(SEEN), la(SEEN))
        return
    with pytest.raises(UnsupportedError, match="holds inputs of training data"):
        la.save(path, inputs=False)
    assert not path.exists()
    la.save(path)


def test_files_of_mixtures_without_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts: list[Any] = []
    for structure in ("kron", "matrix_free"):
        parts.append(Laplace(nn.Linear(3, 3).double(), "classification", "all", structure))
        parts[-1].fit([(SEEN, torch.arange(9) % 3)])
    MixtureLaplace(parts[:1]).save(tmp_path / "one.safetensors", inputs=False)
    with pytest.raises(UnsupportedError, match="matrix_free"):
        MixtureLaplace(parts).save(tmp_path / "two.safetensors", inputs=False)
    with pytest.raises(InvalidType, match="inputs must be True or False"):
        parts[0].save(tmp_path / "one.safetensors", inputs="no")
