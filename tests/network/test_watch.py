"""What is no weight and decides outputs: it is noticed after a fit, and random outputs are noticed in it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.operations import Counted
from laplace import FunctionalLaplace, Laplace, TaskFit, VaLLA, curvature, marglik_training
from laplace.core import pieces
from laplace.errors import ApproximationWarning, ModelChangedError, ModelChangedWarning, StateError
from laplace.network.watch import (
    ROWS,
    DeterminismCheck,
    attributes_of,
    changed_names,
    checksums,
    differ,
    digests,
    first_rows,
    same_sums,
)
from laplace.parametric import ParametricLaplace
from tests import grid

X = grid.data()[0]


class Switched(nn.Module):
    """A network with an adapter, a setting that is no plain attribute, and a count of its passes."""

    def __init__(self, active: str | None = "adapter") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.body, self.adapter = grid.network(), nn.Linear(3, 3)
        self.active: Any = active
        self.config = SimpleNamespace(scale=1.0, passes=[])

    def forward(self, x: Tensor) -> Tensor:
        self.config.passes.append(len(x))  # the library puts attributes back, not what an object of another kind holds
        f = self.body(x)
        return self.config.scale * (f if self.active is None else f + self.adapter(x))


def fitted(weights: str = "all", structure: str = "kron", **options: Any) -> tuple[Any, ParametricLaplace]:
    model = Switched()
    if weights == "last_layer":
        options["last_layer_name"] = "body.3"
    la = grid.make(weights, structure, model=model, **options)
    la.fit(grid.batches())
    return model, la


CALLS: dict[str, Callable[[Any], Any]] = {
    "glm": lambda la: la(X),
    "nn": lambda la: la(X, "nn", n_samples=2),
    "predict": lambda la: la.predict(X),
    "variances": lambda la: la.functional_variance_fast(X),
    "samples": lambda la: la.functional_samples(X, n_samples=2),
    "grid": lambda la: la.optimize_prior_precision(method="gridsearch", val_loader=grid.batches(), grid_size=2),
    "forget": lambda la: la.forget(grid.batches()[:1]),
    "refine": lambda la: la.refine(grid.batches(), max_steps=1),
    "move": lambda la: la.to(dtype=torch.float64),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_switched_adapter_is_noticed_by_every_reader(call: str) -> None:
    model, la = fitted()
    model.active = None
    with pytest.raises(ModelChangedError, match=r"\['active'\].*fit again"):
        CALLS[call](la)
    model.active = "adapter"
    assert torch.equal(la(X), fitted()[1](X))


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_a_switched_adapter_is_noticed_with_every_choice(weights: str, structure: str) -> None:
    model, la = fitted(weights, structure)
    probabilities = la(X)
    model.active = None
    with pytest.raises(ModelChangedError, match="active"):
        la(X)
    model.active = "adapter"
    assert torch.equal(la(X), probabilities)
    la.fit(grid.batches())
    la(X)


@pytest.mark.parametrize("make", [
    lambda model: (FunctionalLaplace(model, "classification", 7), {}),
    lambda model: (VaLLA(model, "classification", X[:4].clone()), {"iterations": 2}),
], ids=["gp", "valla"])  # fmt: skip
def test_posteriors_over_functions_notice_it(make: Any) -> None:
    model = Switched()
    la, options = make(model)
    la.fit(grid.batches(), **options)
    la(X)
    model.active = None
    with pytest.raises(ModelChangedError, match="active"):
        la(X)


def test_a_task_of_continual_learning_notices_it() -> None:
    model = Switched()
    la = grid.make("all", "kron", model=model)
    task = TaskFit.from_data(la, grid.batches())
    task.finish()
    model.active = None
    for posterior in (task.posterior, la):
        with pytest.raises(ModelChangedError, match="active"):
            posterior(X)


def test_a_fit_of_a_subset_notices_it() -> None:
    model = Switched()
    la = grid.make("all", "kron", model=model)
    la.fit(grid.batches(), subset=7)
    model.active = None
    with pytest.raises(ModelChangedError, match="active"):
        la(X)


@pytest.mark.parametrize("change", ["setting", "hook"])
def test_what_no_attribute_shows_is_noticed_by_the_first_prediction(change: str) -> None:
    model, la = fitted()
    if change == "setting":
        model.config.scale = 2.0
    else:
        model.register_forward_hook(lambda module, args, output: output + 1)
    for _ in range(2):
        with pytest.raises(ModelChangedError, match="a setting, a hook"):
            la(X)


def test_attributes_that_decide_nothing_may_change() -> None:
    model, la = fitted()
    probabilities = la(X)
    model.epoch, model.body.names = 3, ["a", "b"]
    assert torch.equal(la(X), probabilities)
    model.epoch = 4
    model.active = "another name of the same"
    assert torch.equal(la(X), probabilities)


def test_outputs_are_compared_once_and_when_attributes_change() -> None:
    """A pass of at most two data beside those of the prediction, which has 12."""
    model, la = fitted()
    passes = model.config.passes
    assert passes == [5, 2, 5, 2]  # the first two data once more
    passes.clear()
    la(X)
    assert sorted(passes) == [2, 12]
    la(X)
    assert sorted(passes) == [2, 12, 12]
    model.epoch = 3
    la(X)
    la(X)
    assert sorted(passes) == [2, 2, 12, 12, 12, 12]


def test_two_data_are_kept_and_they_are_copies() -> None:
    x, y = torch.randn(20, 3), torch.randint(3, (20,))
    model = Switched()
    la = grid.make("all", "diag", model=model)
    la.fit([(x, y)])
    assert model.config.passes == [20, ROWS]
    kept = la.fingerprint.reference.x
    assert torch.equal(kept, x[:ROWS])
    assert kept.untyped_storage().nbytes() == ROWS * 3 * 4
    x.zero_()
    la(X)


def test_the_pass_that_finds_the_last_layer_is_that_of_the_witness() -> None:
    model = Switched(active=None)
    la = Laplace(model, "classification", "last_layer", "diag")
    la.fit(grid.batches())
    assert la.last_layer_name == "body.3"
    assert model.config.passes == [ROWS, 5, 5, 2]
    assert torch.equal(la.fingerprint.reference.x, X[:ROWS])
    model.config.passes.clear()
    la.fit(grid.batches())  # of a layer that is known
    assert model.config.passes == [5, ROWS, 5, 2]
    model.config.scale = 1.1
    with pytest.raises(ModelChangedError, match="outputs at data of the fit"):
        la(X)


def test_a_batch_of_which_the_first_data_are_ignored_has_a_pass_of_its_own() -> None:
    model = Switched(active=None)
    x, y = grid.data()[:2]
    y = y.clone()
    y[0] = -100
    la = Laplace(model, "classification", "last_layer", "diag")
    la.fit([(x, y)])
    assert model.config.passes == [ROWS, len(x) - 1, ROWS]
    assert torch.equal(la.fingerprint.reference.x, x[1 : 1 + ROWS])


def test_large_inputs_and_outputs_are_kept_in_part() -> None:
    volumes = torch.zeros(1, 1).expand(6, 2**24)  # 64 MiB each
    rows, n_rows = first_rows({"x": volumes, "scale": torch.ones(3)}, 6)
    assert n_rows == len(rows["x"]) == 1
    assert len(rows["scale"]) == 3

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.active = nn.Parameter(torch.ones(2)), False

        def forward(self, x: Tensor) -> Tensor:
            return (x[:, None] * self.scale).expand(-1, 300_000, 2) + float(self.active)

    la = Laplace(Wide(), "regression", "all", "diag")
    first = DeterminismCheck(la.model, None)
    first.run(torch.randn(8, 2), torch.zeros(8))
    assert first.reference is not None
    assert 2**19 < len(first.reference.outputs) <= 2**20
    assert first.reference.agrees(la.model, changed=True)
    la.model.active = True
    assert not first.reference.agrees(la.model, changed=True)


def test_a_posterior_that_was_moved_still_notices() -> None:
    model, la = fitted()
    la.to(dtype=torch.float64)
    la(X.double())
    model.active = None
    with pytest.raises(ModelChangedError, match="active"):
        la(X.double())


def test_inference_mode_and_autocast_do_not_matter() -> None:
    _, la = fitted()
    probabilities = fitted()[1](X)
    with torch.inference_mode(), torch.autocast("cpu"):
        assert torch.equal(la(X), probabilities)


# Copies and states hold no data.


def through_a_file(la: Any) -> Any:
    file = io.BytesIO()
    torch.save(la, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_a_state(la: Any) -> Any:
    other = grid.make("all", "kron", model=copy.deepcopy(la.model))
    other.load_state_dict(la.state_dict())
    return other


COPIES = {"torch.save": through_a_file, "pickle": lambda la: pickle.loads(pickle.dumps(la)), "deepcopy": copy.deepcopy,
          "state": through_a_state}  # fmt: skip


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("read", [False, True])
def test_copies_hold_no_data_and_compare_attributes(way: str, read: bool) -> None:
    _, la = fitted()
    if read:
        la(X)
    probabilities = la(X)
    other = COPIES[way](la)
    assert la.fingerprint.reference is not None
    assert other.fingerprint.reference is None
    assert torch.equal(other(X), probabilities)
    other.model.active = None
    with pytest.warns(ModelChangedWarning, match=r"\['active'\].*after loading or copying") as caught:
        other(X)
    assert [w.filename for w in caught] == [__file__]
    other(X)  # said once
    other.model.active = "adapter"
    assert torch.equal(other(X), probabilities)
    la(X)


def test_no_row_of_the_data_is_in_a_pickle() -> None:
    _, la = fitted()
    for content in (pickle.dumps(la), pickle.dumps(la.state_dict())):
        assert not [row for row in X if row.numpy().tobytes() in content]
    assert [row for row in X if row.numpy().tobytes() in pickle.dumps((la, X))]


def test_a_state_is_of_the_attributes_at_the_fit() -> None:
    """It holds short strings by name, and what is compared is the network at the fit, not when it was saved."""
    model, la = fitted()
    model.active = "b"
    state = la.state_dict()
    assert all(isinstance(value, str) and len(value) == 16 for value in state["attributes"].values())
    assert {"active", "in_features", "p"} <= state["attributes"].keys()
    other = grid.make("all", "kron", model=model)
    other.load_state_dict(state)
    with pytest.warns(ModelChangedWarning, match="active"):
        other(X)
    assert other.state_dict()["attributes"] == state["attributes"]


def test_older_states_and_other_versions_of_packages() -> None:
    """Without attributes there is nothing to compare; names that only one side has are no difference."""
    _, la = fitted()
    state = la.state_dict()
    del state["attributes"]
    other = grid.make("all", "kron", model=Switched(None))
    other.load_state_dict(state)
    other(X)
    other.load_state_dict(la.state_dict() | {"attributes": {"gone": "0123456789abcdef"}})
    other(X)
    with pytest.raises(StateError, match="attributes is 3; it must be a dict"):
        other.load_state_dict(la.state_dict() | {"attributes": 3})


class Counting(nn.Module):
    """Counts its passes, as a setting it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.n_passes, self.name_or_path = grid.network(), 0, "here"

    def forward(self, x: Tensor) -> Tensor:
        self.n_passes += 1
        return self.body(x)


@pytest.mark.parametrize("way", COPIES)
def test_what_a_forward_pass_writes_and_where_a_network_is_from_are_no_settings(way: str) -> None:
    model = Counting()
    la = grid.make("all", "kron", model=model)
    la.fit(grid.batches())
    assert not {"n_passes", "name_or_path"} & la.state_dict()["attributes"].keys()
    other = COPIES[way](la)
    other.model(X)
    other.model.name_or_path = "there"
    other(X)
    model(X)
    la(X)
    assert torch.equal(la(X), other(X))


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_rows_that_changed_places_are_noticed(shift: int) -> None:
    """Four rows of 1,024 entries are as many entries as the first sums of a checksum repeat their weights after."""
    hidden = nn.Linear(1024, 16, bias=False)
    model = nn.Sequential(nn.Linear(3, 1024), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(16, 3))
    la = grid.make("last_layer", "kron", model=model)
    la.fit(grid.batches())
    la(X)
    with torch.no_grad():
        hidden.weight.copy_(hidden.weight.roll(shift, 0))
    with pytest.raises(ModelChangedError, match="weights"):
        la(X)


def test_checksums_of_older_states_have_no_sums_by_row() -> None:
    now, other = checksums(nn.Linear(4, 2000)), checksums(nn.Linear(4, 2000))
    assert same_sums(now[:, :2], now)
    assert not same_sums(now[:, :2], other)
    assert not any(same_sums(other, now) for other in (now[:1], now[:, :1], now[0], now.sum()))


@pytest.mark.parametrize("shape", [(0,), (), (7,), (4096,), (33 * 4096 + 5,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bool])
def test_checksums_weigh_entries_by_column_and_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = nn.Module()
    values = torch.randn(shape, dtype=torch.complex64) * 3
    model.register_buffer("values", values if dtype.is_complex else values.real.to(dtype))
    kept = torch.view_as_real(model.values) if dtype.is_complex else model.values
    flat = kept.flatten().double()
    place = torch.arange(len(flat))
    by_column, by_row = torch.cos(1.0 + place.double() % 4096), torch.cos(1.0 + (place // 4096).double())
    expected = torch.stack([flat.sum(), flat @ by_column, flat @ by_row])
    torch.testing.assert_close(checksums(model)[0], expected, rtol=1e-10, atol=1e-8)


def test_checksums_of_a_card_take_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1500)
    with Counted() as of_cpu:
        expected = checksums(model)
    monkeypatch.setattr(pieces, "_CHEAP", frozenset())
    with Counted() as of_card:
        found = checksums(model)
    assert same_sums(found, expected)
    assert of_card.operations < 30 < of_cpu.operations


def test_further_tensors_are_not_said_to_have_been_moved() -> None:
    model, la = fitted()
    model.register_buffer("extra", torch.zeros(1))
    with pytest.raises(ModelChangedError, match="weights or buffers changed"):
        la(X)


# Attributes.


def test_plain_attributes_are_read_and_others_left_alone() -> None:
    model = nn.Sequential(nn.LSTM(2, 3), nn.Linear(3, 2))
    first = digests(attributes_of(model))
    model[0].extra = {"a": [1, (2.0, None)], "b": {"y", "x"}}
    model.table = list(range(5000))
    model.module_list = [nn.Linear(1, 1)]
    model.tensor = torch.zeros(2)
    model.loop = [1]
    model.loop.append(model.loop)
    model.train(False)
    found = attributes_of(model)
    assert found.keys() - first.keys() == {"extra"}
    assert changed_names(first, digests(found)) == ["extra"]
    assert not changed_names(first, digests(found), common=True)
    again = copy.deepcopy(model)
    assert digests(attributes_of(again)) == digests(found)
    model[0].extra["a"][1] = 5
    assert changed_names(digests(found), digests(attributes_of(model))) == ["extra"]
    model[1].active = "default"
    alone = digests(attributes_of(model))
    model[1].active = ["default"]  # the same adapter, written as packages do
    assert digests(attributes_of(model)) == alone


# Random outputs.


class Dropping(nn.Module):
    """The mistake: dropout that does not know of evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mode = nn.Linear(3, 16), nn.Linear(16, 3), "a"

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.5))


RANDOM = r"two forward passes.*F\.dropout.*training=self\.training"


FITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all-kron": ({"hessian_structure": "kron"}, {}),
    "last layer": ({"subset_of_weights": "last_layer"}, {}),
    "read twice": ({"hessian_structure": "lowrank"}, {}),
    "gp": ({"hessian_structure": "gp", "n_subset": 5}, {}),
    "subset": ({"hessian_structure": "diag"}, {"subset": 7}),
}


@pytest.mark.parametrize("name", FITS)
def test_random_outputs_are_warned_of_once_per_fit(name: str) -> None:
    chosen, options = FITS[name]
    la = Laplace(Dropping(), "classification", **({"subset_of_weights": "all"} | chosen))
    for _ in range(2):
        with pytest.warns(ApproximationWarning, match=RANDOM) as caught:
            la.fit(grid.batches(), **options)
        assert [w.filename for w in caught] == [__file__]
    assert la.fingerprint.reference is None
    la(X)


class Skipping(nn.Module):
    """Leaves a layer out, now and then, for the whole batch: most often two passes are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x if torch.rand(()) < 0.2 else torch.tanh(self.first(x)))


def test_rarely_random_outputs_are_warned_of() -> None:
    model, warned = Skipping(), 0
    for seed in range(20):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DeterminismCheck(model, None).run(X[:4], torch.zeros(4))
        warned += any(w.category is ApproximationWarning for w in caught)
        assert torch.equal(before, torch.get_rng_state())
    assert warned >= 19


def test_random_outputs_have_no_witness_and_compare_attributes() -> None:
    model = Dropping()
    la = Laplace(model, "classification", "all", "diag")
    with pytest.warns(ApproximationWarning, match=RANDOM):
        la.fit(grid.batches())
    la(X)
    model.mode = "b"
    with pytest.warns(ModelChangedWarning, match="mode"):
        la(X)


def test_marglik_training_warns_of_random_outputs() -> None:
    with pytest.warns(ApproximationWarning, match=RANDOM):
        marglik_training(Dropping(), grid.batches(), n_epochs=2)


def test_a_warning_as_an_error_keeps_the_former_posterior() -> None:
    model = Dropping()
    la = Laplace(model, "classification", "all", "kron")
    with pytest.raises(ApproximationWarning):  # warnings are errors in this suite
        la.fit(grid.batches())
    assert not la.is_fitted


def test_dropout_that_knows_of_evaluation_mode_is_not_warned_of() -> None:
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 3)).train()
    state = torch.get_rng_state()
    Laplace(model, "classification", "all", "kron").fit(grid.batches())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_rounding_does_is_no_difference() -> None:
    """Relative to the largest output: 1,000 times the precision, and a tenth at most."""
    for dtype, share in ((torch.float32, 1000 * 2**-23), (torch.float64, 1000 * 2**-52), (torch.bfloat16, 0.1)):
        model = nn.Linear(1, 1).to(dtype)
        f = torch.tensor([4.0, 1.0, torch.nan], dtype=dtype)
        assert not differ(f, f + 0.9 * 4 * share, model)
        assert differ(f, f + torch.tensor([0, 5 * share, 0], dtype=dtype), model)
    wide, half = nn.Linear(1, 1), nn.Linear(1, 1).half()
    assert differ(torch.ones(1), torch.full((1,), 1.01), wide)
    assert not differ(torch.ones(1), torch.full((1,), 1.01), half)
    assert differ(torch.ones(2), torch.tensor([1, torch.nan]), wide)
    assert differ(torch.ones(2), torch.ones(3), wide)
    assert not differ(torch.zeros(2), torch.zeros(2), wide)
    assert not differ(torch.zeros(0), torch.zeros(0), wide)


def test_faster_products_are_no_change_but_a_small_adapter_is() -> None:
    """Half a percent without a changed attribute may be TF32; with one it is the adapter."""
    model, la = fitted()
    model.config.scale = 1.005
    la(X)
    model.epoch = 1
    with pytest.raises(ModelChangedError, match=r"\['epoch'\].*fit again"):
        la(X)


# Networks that are not like others.


class WholeBatches(nn.Module):
    """Takes batches of twelve alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.active = grid.network(), True

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(12, 3))


class Asserting(nn.Module):
    """Says so itself if a batch is not whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = grid.network()

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) > ROWS
        return self.net(x)


class Writing(nn.Module):
    """Writes to its inputs, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = grid.network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x.add_(1))


@pytest.mark.parametrize("network", [WholeBatches, Asserting])
def test_the_witness_of_a_network_of_whole_batches_is_one(network: type[nn.Module]) -> None:
    la = Laplace(network(), "classification", "all", "kron")
    la.fit([grid.data()])
    assert len(la.fingerprint.reference.x) == len(X)
    la(X)


def test_a_network_that_writes_to_its_inputs() -> None:
    la = Laplace(Writing(), "classification", "last_layer", "kron", last_layer_name="net.3")
    la.fit(grid.batches())
    assert la.fingerprint.reference is not None
    for _ in range(2):
        la(X.clone())


@pytest.mark.parametrize("form", ["mapping", "pair", "positions", "one datum", "forward_fn"])
def test_other_forms_of_data(form: str) -> None:
    x, y = grid.data()
    options: dict[str, Any] = {}
    batch: Any = (x, y)
    model: Any = Switched()
    call = model.forward
    if form == "mapping":
        model.forward = lambda data: call(data["x"])
        batch = {"x": x, "labels": y}
    elif form == "pair":
        model.forward = lambda a, b: call(a + b)
        batch = (x / 2, x / 2, y)
    elif form == "positions":
        batch = (x.view(3, 4, 3), y.view(3, 4))
    elif form == "one datum":
        batch = (x[:1], y[:1])
    else:
        options["forward_fn"] = lambda net, data: {"f": net(data)}["f"]
    la = Laplace(model, "classification", "all", "kron", **options)
    la.fit([batch])
    inputs = batch if form == "mapping" else batch[0] if len(batch) == 2 else tuple(batch[:-1])
    la(inputs)
    model.active = None
    with pytest.raises(ModelChangedError, match="active"):
        la(inputs)


def test_a_network_that_no_longer_runs_on_these_data_has_changed() -> None:
    model, la = fitted()
    model.config.scale = None
    with pytest.raises(ModelChangedError, match="fit again"):
        la(X)


class Graph(nn.Module):
    """A layer that mixes its units by a sparse matrix, as networks of graphs do."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 3)
            adjacency = (torch.rand(6, 6) > 0.5) + torch.eye(6)
        self.register_buffer("adjacency", adjacency if layout is torch.strided else adjacency.to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.adjacency @ self.first(x).tanh().T).T)


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_buffers(layout: torch.layout) -> None:
    model = Graph(layout)
    la, dense = (Laplace(network, "classification", "all", "full") for network in (model, Graph(torch.strided)))
    la.fit(grid.batches())
    dense.fit(grid.batches())
    torch.testing.assert_close(la(X), dense(X))
    other = Laplace(model, "classification", "all", "full")
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other(X), la(X))
    values = model.adjacency._values() if layout is torch.sparse_coo else model.adjacency.values()
    for change in (lambda: values.data.mul_(2), lambda: setattr(model, "adjacency", model.adjacency * 2)):
        change()
        for changed in (la, other):
            with pytest.raises(ModelChangedError, match="buffers changed"):
                changed(X)


class Rewired(nn.Module):
    """A network whose layers are reached under several names."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.a = nn.Linear(3, 3)
            self.d, self.act, self.last = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)
        self.b, self.skip = self.a, None

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(x)
        for extra in (getattr(self.act, "extra", None), self.skip):
            x = x if extra is None else extra(x)
        return self.last(self.act(self.d(x) + self.a(x)))


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("change", ["another name", "a module below one without", "an empty place"])
def test_layers_that_are_called_from_other_places_are_noticed(change: str, weights: str) -> None:
    model = Rewired()
    la = Laplace(model, "classification", weights, "diag")
    la.fit(grid.batches())
    la(X)
    if change == "another name":
        model.b = model.d
    elif change == "a module below one without":
        model.act.extra = model.d
    else:
        model.skip = model.d
    with pytest.raises(ModelChangedError):
        la(X)


def test_an_attribute_in_the_place_of_another_is_noticed() -> None:
    model = Switched()
    model.name_or_path = "here"  # which decides nothing
    la = Laplace(model, "classification", "all", "diag")
    la.fit(grid.batches())
    la(X)
    del model.name_or_path
    model.other = 3.0
    model.config.scale = 2.0  # of an object, which is no plain attribute
    with pytest.raises(ModelChangedError):
        la(X)


class AsksAutograd(nn.Module):
    """A network that computes another thing where autograd records it, as equilibrium layers do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h * 1.5 if torch.is_grad_enabled() else h)


@pytest.mark.parametrize("backend", ["native", "CurvlinopsGGN"])
def test_networks_that_ask_whether_autograd_records(backend: str) -> None:
    if backend != "native":
        pytest.importorskip("curvlinops")
    options: Any = {} if backend == "native" else {"backend": getattr(curvature, backend)}
    la = Laplace(AsksAutograd(), "classification", "last_layer", "diag", **options)
    la.fit(grid.batches())
    assert la.fingerprint.reference is not None
    for _ in range(2):
        la(X)


def test_a_fit_after_a_write_that_no_norm_shows_knows_the_network_as_it_is() -> None:
    model = grid.network()
    Laplace(model, "classification").fit(grid.batches())
    next(model.parameters()).data.neg_()
    la = Laplace(model, "classification")
    la.fit(grid.batches())
    assert torch.equal(la.fingerprint.sums, checksums(model))


@pytest.mark.parametrize("shape", [(1,), (4095,), (4096,), (4097,), (64, 64), (3, 4096), (33, 4096), (40, 4100)])
def test_checksums_are_sums_over_rows_of_one_length(shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.randn(shape)) for _ in range(2))
    weights = torch.cos(torch.arange(1, 4097, dtype=torch.float64))
    for values, sums in zip((model.a, model.b), checksums(model), strict=True):
        flat = values.detach().double().flatten()
        rows = F.pad(flat, (0, -len(flat) % 4096)).view(-1, 4096)
        by_row = rows.sum(1) @ weights[: len(rows)]
        torch.testing.assert_close(sums, torch.stack([flat.sum(), (rows @ weights).sum(), by_row]))
