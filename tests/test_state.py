"""Saving, loading, copying, moving and describing a posterior."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import ELLA, FunctionalLaplace, KronLaplace, Laplace, VaLLA
from laplace.curvature import NativeEF
from laplace.errors import LaplaceError, ModelChangedError, NotFittedError, StateError, StateWarning
from tests import grid
from tests.reference.compare import assert_close

CASES = [(w, s, likelihood) for w, s in grid.CELLS for likelihood in grid.LIKELIHOODS]


def saved(state: Any, weights_only: bool = True) -> Any:
    """Through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def assert_same(la: Any, other: Any, likelihood: str = "classification") -> None:
    """Equal predictions, evidence, samples and hyper-parameters, bit by bit."""
    for mine, theirs in zip(grid.predict(la, likelihood), grid.predict(other, likelihood), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(la.log_marginal_likelihood(), other.log_marginal_likelihood())
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(la.sample(3, seeds[0]), other.sample(3, seeds[1]))
    for name in ("prior_precision", "prior_mean", "sigma_noise", "temperature", "mean", "loss"):
        assert torch.equal(getattr(la, name), getattr(other, name)), name
    for name in ("n_data", "n_outputs", "n_params", "n_layers", "enable_backprop", "dict_key_x", "dict_key_y"):
        assert getattr(la, name) == getattr(other, name), name
    assert la.coverage() == other.coverage()


@pytest.mark.parametrize(("weights", "structure", "likelihood"), CASES)
@pytest.mark.turns
def test_round_trip(weights: str, structure: str, likelihood: str) -> None:
    """Into a fresh object, whose last layer is not known yet, through a file that holds no code."""
    la = grid.fitted(weights, structure, likelihood)
    la.prior_precision = torch.rand(la.n_params) + 0.5
    other = grid.make(weights, structure, likelihood, model=la.model)
    other.load_state_dict(saved(la.state_dict()))
    assert_same(la, other, likelihood)


def test_round_trip_of_everything_that_decides_a_prediction() -> None:
    options = {"sigma_noise": torch.tensor([0.5, 1.0, 2.0]), "prior_mean": torch.linspace(-1, 1, 38)}
    keys = {"dict_key_x": "a", "dict_key_y": "b"}
    la = grid.fitted(
        "all", "kron", "regression", **options, temperature=0.5, damping=True, enable_backprop=True, **keys
    )
    other = grid.make("all", "kron", "regression", model=la.model)
    with pytest.warns(StateWarning) as caught:
        other.load_state_dict(saved(la.state_dict()))
    assert {str(w.message).split()[0] for w in caught} == {"temperature", "enable_backprop", "precision_options"}
    assert all(w.filename == __file__ for w in caught)
    assert other.damping
    assert_same(la, other, "regression")


def test_a_loaded_posterior_takes_more_data() -> None:
    for weights, structure in grid.CELLS:
        la = grid.fitted(weights, structure)
        other = grid.make(weights, structure, model=la.model)
        other.load_state_dict(saved(la.state_dict()))
        more = grid.data(seed=9)
        la.fit([more], override=False)
        other.fit([more], override=False)
        assert la.n_data == other.n_data == 24
        assert_same(la, other)


def test_a_last_layer_by_name_and_a_found_one() -> None:
    la = grid.fitted("last_layer", "kron", last_layer_name="3")
    other = grid.make("last_layer", "kron", model=la.model)
    other.load_state_dict(la.state_dict())
    assert other.last_layer_name == "3"
    assert_same(la, other)


def test_nothing_of_the_training_data_is_saved() -> None:
    """No tensor of the state has a dimension of the data's length or shares a row with them; no objects."""
    n_data = 29
    x, y = torch.randn(n_data, 3), torch.randint(3, (n_data,))
    for weights, structure in grid.CELLS:
        if structure == "matrix_free":  # it says so: its answers are products with the data
            continue
        la = grid.make(weights, structure)
        la.fit([(x[:17], y[:17]), (x[17:], y[17:])])
        for value in leaves(la.state_dict()):
            assert isinstance(value, (Tensor, int, float, str, bool, type(None))), type(value)
            if isinstance(value, Tensor):
                assert not {n_data, 17, 12} & set(value.shape)
                found = value.reshape(-1)[:, None, None] == x
                assert not found.any()


def some_rows_are_in(state: Any, x: Tensor) -> bool:
    """Whether consecutive numbers of a tensor are a datum."""
    tensors = [value.detach().flatten() for value in leaves(state) if isinstance(value, Tensor)]
    windows = [
        t.to(x.dtype).unfold(0, x.shape[1], 1) for t in tensors if t.is_floating_point() and len(t) >= x.shape[1]
    ]
    return any(bool((window[:, None] == x).all(-1).any()) for window in windows)


POSTERIORS_OVER_FUNCTIONS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "gp": (lambda model: FunctionalLaplace(model, "classification", 5), {}, True),
    "valla": (lambda model: VaLLA(model, "classification", "random", 4), {"iterations": 0}, True),
    "ella": (lambda model: ELLA(model, "classification", 5, 3), {}, False),
    "kron": (lambda model: Laplace(model, "classification", "all", "kron"), {}, False),
}


@pytest.mark.parametrize("name", POSTERIORS_OVER_FUNCTIONS)
def test_a_posterior_whose_state_holds_data_says_so(name: str) -> None:
    make, options, holds = POSTERIORS_OVER_FUNCTIONS[name]
    la = make(grid.network())
    assert "which in a first layer are data" not in repr(la)
    la.fit(grid.batches(), **options)
    assert some_rows_are_in(la.state_dict(), grid.data()[0]) == holds
    assert ("which in a first layer are data" in repr(la)) == holds


def leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    return [leaf for value in state for leaf in leaves(value)] if isinstance(state, (list, tuple)) else [state]


def test_a_state_is_a_copy_of_the_hyper_parameters() -> None:
    la = grid.fitted("all", "kron")
    state = la.state_dict()
    la.prior_precision = 5.0
    assert state["prior_precision"].item() == 1.0
    prior = torch.tensor(2.0, requires_grad=True)
    la.prior_precision = prior * 2
    assert not la.state_dict()["prior_precision"].requires_grad


def test_unfitted_posteriors_have_no_state() -> None:
    for weights, structure in grid.CELLS:
        with pytest.raises(NotFittedError, match="fit"):
            grid.make(weights, structure).state_dict()


# Refusals.


def of(la: Any, **changes: Any) -> dict[str, Any]:
    return la.state_dict() | changes


def other_architecture() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


def other_weights() -> nn.Module:
    model = grid.network()
    with torch.no_grad():
        model[0].bias[2] += 1e-3
    return model


REFUSED = {
    "class": (lambda: grid.fitted("all", "diag").state_dict(), {}, "DiagLaplace"),
    "weights": (lambda: grid.fitted("last_layer", "kron").state_dict(), {}, "KronLLLaplace"),
    "likelihood": (lambda: grid.fitted("all", "kron", "regression").state_dict(), {}, "regression"),
    "backend": (lambda: grid.fitted("all", "kron", backend=NativeEF).state_dict(), {}, "'ef'.*'ggn'"),
    "version": (lambda: of(grid.fitted("all", "kron"), version=0), {}, "version is 0"),
    "truncated": (lambda: {k: v for k, v in grid.fitted("all", "kron").state_dict().items() if k != "H"}, {}, "'H'"),
    "empty": (dict, {}, "truncated"),
    "no dict": (lambda: None, {}, "of type NoneType; give what la.state_dict"),
    "malformed": (lambda: of(grid.fitted("all", "kron"), H={"values": torch.zeros(3)}), {}, "malformed"),
    "short mean": (lambda: of(grid.fitted("all", "kron"), mean=torch.zeros(5)), {}, "the mean is torch.float32 .5."),
    "bad prior": (lambda: of(grid.fitted("all", "kron"), prior_precision=-torch.ones(1)), {}, "positive"),
    "architecture": (lambda: grid.fitted("all", "kron").state_dict(), {"model": other_architecture}, "sizes"),
    "model": (lambda: grid.fitted("all", "kron").state_dict(), {"model": other_weights}, "other weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_of_something_else_is_refused(case: str) -> None:
    """By a message that names what differs; the former posterior is intact."""
    make_state, options, message = REFUSED[case]
    options = {name: make() for name, make in options.items()}
    la = grid.make("all", "kron", prior_precision=3.0, **options)
    with pytest.raises(LaplaceError, match=message):
        la.load_state_dict(make_state())
    assert not la.is_fitted
    assert la.prior_precision.item() == 3.0
    la.fit(grid.batches())
    before = copy.deepcopy(la)
    with pytest.raises(LaplaceError, match=message):
        la.load_state_dict(make_state())
    assert_same(la, before)


def test_other_indices_are_refused() -> None:
    la = grid.fitted("subnetwork", "diag")
    other = grid.make("subnetwork", "diag", model=la.model, subnetwork_indices=grid.INDICES + 1)
    with pytest.raises(StateError, match=r"subnetwork_indices|treated"):
        other.load_state_dict(la.state_dict())
    same_tensors = grid.make(
        "subnetwork", "diag", model=la.model, subnetwork_indices=torch.tensor([1, 3, 17, 20, 21, 25])
    )
    with pytest.raises(StateError, match="subnetwork_indices"):
        same_tensors.load_state_dict(la.state_dict())
    assert not other.is_fitted
    reordered = grid.make("subnetwork", "diag", model=la.model, subnetwork_indices=grid.INDICES.flip(0))
    reordered.load_state_dict(la.state_dict())
    assert_same(la, reordered)


def test_another_last_layer_is_refused() -> None:
    """Two layers of one shape: nothing but the name tells them apart."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    la = Laplace(model, "classification", last_layer_name="2")
    la.fit(grid.batches())
    other = Laplace(model, "classification", last_layer_name="0")
    with pytest.raises(StateError, match="last_layer_name"):
        other.load_state_dict(la.state_dict())
    assert other.last_layer_name == "0"
    assert not other.is_fitted
    renamed = Laplace(nn.Sequential(nn.Sequential(*model)), "classification")
    with pytest.raises(LaplaceError, match="'2'"):
        renamed.load_state_dict(la.state_dict())
    assert renamed.last_layer_name is None


def test_a_user_s_buffers_are_part_of_the_model() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    torch.manual_seed(1)
    model = make()
    la = Laplace(model, "classification")
    la.fit(grid.batches())
    twin = make()
    twin.load_state_dict(model.state_dict())
    Laplace(twin, "classification").load_state_dict(la.state_dict())
    twin[1].running_mean += 1
    with pytest.raises(StateError, match="other weights"):
        Laplace(twin, "classification").load_state_dict(la.state_dict())


# Copies.


@pytest.mark.parametrize("copying", ["torch.save", "deepcopy", "pickle"])
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_copies(weights: str, structure: str, copying: str) -> None:
    """The whole object, with its model; also after predictions have filled what is derived, and with a graph."""
    for likelihood in ("classification", "regression"):
        la = grid.fitted(weights, structure, likelihood)
        grid.predict(la, likelihood)
        la.log_marginal_likelihood()
        la.prior_precision = torch.zeros(1, requires_grad=True).exp()
        if copying == "deepcopy":
            other = copy.deepcopy(la)
        elif copying == "pickle":
            other = pickle.loads(pickle.dumps(la))
        else:
            other = saved(la, weights_only=False)
        assert other.model is not la.model
        assert la.prior_precision.requires_grad
        assert_same(la, other, likelihood)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter += 1
        grid.predict(la, likelihood)
        with pytest.raises(ModelChangedError):
            grid.predict(other, likelihood)


def test_an_unfitted_object_can_be_copied() -> None:
    for weights, structure in grid.CELLS:
        la = copy.deepcopy(grid.make(weights, structure))
        la.fit(grid.batches())
        assert_same(la, grid.fitted(weights, structure))


def test_a_model_that_keeps_its_activations_can_be_copied() -> None:
    """A stored activation would be a tensor with a graph, which cannot be copied."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = grid.network()

        def forward(self, x: Tensor) -> Tensor:
            self.h = self.net[0](x)
            return self.net[1:](self.h)

    la = Laplace(Keeping(), "classification", "all", "kron")
    la.fit(grid.batches())
    assert_same(la, copy.deepcopy(la))


def test_stochastic_curvature_with_a_generator_can_be_copied() -> None:
    options = {"stochastic": True, "generator": torch.Generator().manual_seed(2)}
    la = grid.fitted("all", "diag", backend_kwargs=options)
    assert_same(la, copy.deepcopy(la))


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@pytest.mark.parametrize("way", [copy.deepcopy, lambda la: pickle.loads(pickle.dumps(la)), "state"])
def test_random_draws_go_on_in_a_copy(way: Any) -> None:
    """More draws over the same data refine a sampled curvature only if they are other draws."""
    options = {"backend_kwargs": {"stochastic": True}}
    la = grid.fitted("all", "diag", **options)
    if way == "state":
        other = grid.make("all", "diag", **options)
        other.load_state_dict(la.state_dict())
    else:
        other = way(la)
    grid.predict(other)  # which makes an engine
    once = la.H.clone()
    for posterior in (la, other):
        posterior.fit(grid.batches(), override=False)
    assert torch.equal(la.H, other.H) and not torch.allclose(la.H, 2 * once)


# Moves.


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_to_another_dtype(weights: str, structure: str) -> None:
    la = grid.fitted(weights, structure, "regression", prior_precision=2.0)
    expected = [part.double() for part in grid.predict(la, "regression")]
    evidence = la.log_marginal_likelihood()
    assert la.to(dtype=torch.float64) is la
    assert {p.dtype for p in la.model.parameters()} == {torch.float64}
    x = grid.data("regression")[0].double()
    for found, wanted in zip(la(x), expected, strict=True):
        assert found.dtype == torch.float64
        assert_close(found, wanted, "float32")
    assert_close(la.log_marginal_likelihood(), evidence, "float32")
    assert la.prior_precision.dtype == la.sample(2).dtype == la.posterior_variance.dtype == torch.float64
    la.fit([(x, grid.data("regression")[1].double())], override=False)
    assert la.n_data == 24
    la.to(dtype=torch.float32)
    assert la(x.float())[0].dtype == torch.float32


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_to_a_device(weights: str, structure: str, device: torch.device) -> None:
    la = grid.fitted(weights, structure)
    expected = grid.predict(la)[0]
    found = la.to(device)(grid.data()[0].to(device))
    assert found.device.type == device.type
    assert_close(found.cpu(), expected, "float32")
    la.log_marginal_likelihood(torch.ones(1, device=device))
    la.fit(grid.batches(), override=False)
    la.to("cpu")
    assert grid.predict(la)[0].device.type == "cpu"


def test_an_unfitted_posterior_moves() -> None:
    la = grid.make("last_layer", "kron").to(dtype=torch.float64)
    la.fit([(x.double(), y) for x, y in grid.batches()])
    assert la.mean.dtype == torch.float64


def test_a_changed_model_is_not_moved() -> None:
    la = grid.fitted("all", "kron")
    with torch.no_grad():
        la.model[0].weight *= 2
    with pytest.raises(ModelChangedError):
        la.to(dtype=torch.float64)
    assert la.model[0].weight.dtype == torch.float32


# Words.


def test_repr() -> None:
    la = Laplace(grid.network(), "regression")
    text = repr(la)
    assert text.startswith("KronLLLaplace(")
    assert "not fitted" in text
    assert "found at fit" in text
    la.fit(grid.batches("regression"))
    la.prior_precision = torch.tensor([1.0, 3.0])
    text = repr(la)
    for part in ("'regression'", "18 parameters in 2 tensors", "NativeGGN", "2 values from 1 to 3", "sigma_noise=1",
                 "fitted to 12 data with 3 outputs"):  # fmt: skip
        assert part in text, part
    la.prior_precision = torch.rand(18) + 1
    assert "eigenbasis" in repr(la)
    assert "sigma_noise" not in repr(grid.fitted("all", "full"))
    dampened = KronLaplace(grid.network(), "classification", damping=True)
    dampened.fit(grid.batches())
    assert "damping" in repr(dampened)
    prior = torch.ones(1, requires_grad=True)
    la.prior_precision = prior * 2
    assert "prior_precision=2" in repr(la)
