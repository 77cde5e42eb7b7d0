"""Fits that are killed go on from a file, to the same bits; what is another fit is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from laplace import KronLaplace, Laplace, ParametricLaplace
from laplace.core import nested
from laplace.errors import InvalidArgument, InvalidData, InvalidType, StateError, UnsupportedError
from laplace.fitting import resuming
from laplace.likelihoods import LikelihoodFromLoss
from laplace.network.watch import ROWS
from laplace.structures import STRUCTURES
from tests.conftest import THREADS
from tests.fitting.interrupted import CASES, Interrupted, left_behind


def assert_same_bits(a: ParametricLaplace, b: ParametricLaplace) -> None:
    mine, other = a.state_dict(), b.state_dict()
    tensors, others = dict(nested.named_tensors(mine)), dict(nested.named_tensors(other))
    assert tensors.keys() == others.keys()
    wrong = {name: (t - others[name]).abs().max() for name, t in tensors.items() if not torch.equal(t, others[name])}
    assert not wrong
    assert (mine["n_data"], mine["coverage"]) == (other["n_data"], other["coverage"])
    draws = mine["draws"], other["draws"]
    assert draws == (None, None) or torch.equal(*draws)


# The same bits.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("left behind")
    left_behind(path, THREADS)
    return path


def test_every_structure_has_a_case() -> None:
    assert {case.structure for case in CASES} == set(STRUCTURES)
    several = {name for name in STRUCTURES if STRUCTURES[name].n_passes > 1}
    assert {case.structure for case in CASES if case.batch >= 7} == several


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_killed_fit_goes_on_to_the_same_bits(case: Interrupted, folder: Path) -> None:
    whole, resumed, file = case.build(), case.build(), folder / case.name
    whole.fit(case.loader())
    assert file.exists()
    resumed.fit(case.loader(seed=4), resume=file, save_every=2)
    assert_same_bits(whole, resumed)
    assert not file.exists()


@pytest.mark.parametrize("structure", ["kron", "lowrank"])
def test_writing_changes_no_bit(structure: str, tmp_path: Path) -> None:
    case = Interrupted(structure, 0, wide=True)
    whole, written = case.build(), case.build()
    whole.fit(case.loader())
    written.fit(case.loader(), resume=tmp_path / "fit", save_every=1)
    assert_same_bits(whole, written)
    assert not list(tmp_path.iterdir())


class Failing:
    """Batches of which one raises an error, once."""

    def __init__(self, batches: list[Any], number: int) -> None:
        self.batches, self.number, self.reads = batches, number, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.reads += 1
            if self.reads == self.number:
                raise OSError("the disk is gone")
            yield batch


def batches(n_data: int = 30, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n_data, 4, generator=generator), torch.randint(3, (n_data,), generator=generator)
    return list(zip(x.split(5), y.split(5), strict=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def interrupted(file: Path, number: int = 5, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Data of which a fit has left sums in a file."""
    data = batches()
    la = Laplace(network(), "classification", "all", options.pop("structure", "kron"), **options)
    with pytest.raises(OSError, match="disk"):
        la.fit(Failing(data, number), resume=file, save_every=2)
    assert file.exists()
    return data


def test_an_error_in_the_loader_leaves_the_sums(tmp_path: Path) -> None:
    data = interrupted(tmp_path / "fit")
    whole, again = (Laplace(network(), "classification", "all", "kron") for _ in range(2))
    whole.fit(data)
    again.fit(Failing(data, 0), resume=str(tmp_path / "fit"), save_every=timedelta(hours=1))
    assert_same_bits(whole, again)


def test_data_in_addition(tmp_path: Path) -> None:
    former, data = batches(20, seed=1), batches()
    whole, begun, again = (Laplace(network(), "classification", "all", "kron") for _ in range(3))
    for la in (whole, begun, again):
        la.fit(former)
    whole.fit(data, override=False)
    with pytest.raises(OSError, match="disk"):
        begun.fit(Failing(data, 4), override=False, resume=tmp_path / "fit", save_every=1)
    unfitted = Laplace(network(), "classification", "all", "kron")
    with pytest.raises(StateError, match="data of the former fit = 0, the fit in the file 20"):
        unfitted.fit(data, override=False, resume=tmp_path / "fit")
    again.fit(data, override=False, resume=tmp_path / "fit")
    assert_same_bits(whole, again)


def test_the_witness_of_a_resumed_fit_is_its_first_batch(tmp_path: Path) -> None:
    data = interrupted(tmp_path / "fit")
    la = Laplace(network(), "classification", "all", "kron")
    la.fit(data, resume=tmp_path / "fit")
    assert la.fingerprint is not None
    assert la.fingerprint.reference is not None
    assert torch.equal(la.fingerprint.reference.x, data[0][0][:ROWS])


def test_batches_without_data_that_count(tmp_path: Path) -> None:
    data = batches()
    data.insert(0, (data[0][0], torch.full((5,), -100)))
    data.insert(4, (data[0][0], torch.full((5,), -100)))
    whole, begun, again = (Laplace(network(), "classification", "last_layer", "full") for _ in range(3))
    whole.fit(data)
    with pytest.raises(OSError, match="disk"):
        begun.fit(Failing(data, 6), resume=tmp_path / "fit", save_every=1)
    again.fit(data, resume=tmp_path / "fit")
    assert_same_bits(whole, again)


def test_layers_that_only_earlier_batches_use_are_remembered(tmp_path: Path) -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            return self.third(self.second(h).tanh() if len(x) == 5 else h)

    data = [*batches()[:3], *((x[:4], y[:4]) for x, y in batches()[3:])]
    torch.manual_seed(0)
    model = Switching()
    whole, begun, again = (Laplace(model, "classification", "all", "kron") for _ in range(3))
    whole.fit(data)
    with pytest.raises(OSError, match="disk"):
        begun.fit(Failing(data, 6), resume=tmp_path / "fit", save_every=1)
    again.fit(data, resume=tmp_path / "fit")
    assert_same_bits(whole, again)


# What is refused.


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("likelihood = 'bernoulli'", {"likelihood": "bernoulli"}),
        ("hessian_structure = 'diag'", {"hessian_structure": "diag"}),
        ("other numbers in '0.weight'", {"model": "trained"}),
        ("other tensors", {"model": "wider"}),
        ("backend = 'NativeEF'", {"backend": "ef"}),
        ("backend_kwargs", {"backend_kwargs": {"stochastic": True}}),
        ("other parameters random", {"subset_of_weights": "last_layer", "last_layer_name": "2"}),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_another_fit_is_refused(match: str, change: dict[str, Any], tmp_path: Path) -> None:
    from laplace.curvature import NativeEF

    data = interrupted(tmp_path / "fit")
    arguments: dict[str, Any] = {
        "model": network(), "likelihood": "classification", "subset_of_weights": "all", "hessian_structure": "kron",
    }  # fmt: skip
    if change.get("model") == "trained":
        with torch.no_grad():
            arguments["model"][0].weight[0, 0] += 1e-3
    elif "model" in change:
        arguments["model"] = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    else:
        arguments |= {"backend": NativeEF} if "backend" in change else change
    if change.get("likelihood") == "bernoulli":
        data = [(x, torch.nn.functional.one_hot(y, 3)) for x, y in data]
    la = Laplace(**arguments)
    with pytest.raises(StateError, match=match):
        la.fit(data, resume=tmp_path / "fit")
    assert not la.is_fitted
    assert (tmp_path / "fit").exists()


class Scaled(LikelihoodFromLoss):
    """A likelihood with a number of its own."""

    name = "scaled"

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return self.scale * (f - y).square().sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return f.expand(n, *f.shape)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f


def test_numbers_of_a_likelihood_are_compared(tmp_path: Path) -> None:
    data = [(x, torch.zeros(len(x), 3)) for x, _ in batches()]
    with pytest.raises(OSError, match="disk"):
        Laplace(network(), Scaled(1), "all", "kron").fit(Failing(data, 5), resume=tmp_path / "fit", save_every=2)
    with pytest.raises(StateError, match=r"attributes of the likelihood = \{'scale': 2\}"):
        Laplace(network(), Scaled(2), "all", "kron").fit(data, resume=tmp_path / "fit")


def test_options_of_the_structure_are_compared(tmp_path: Path) -> None:
    data = interrupted(tmp_path / "fit", structure="lowrank")
    la = Laplace(network(), "classification", "all", "lowrank", structure_kwargs={"rank": 4})
    with pytest.raises(StateError, match="structure_kwargs"):
        la.fit(data, resume=tmp_path / "fit")


def test_other_data_are_refused(tmp_path: Path) -> None:
    data = interrupted(tmp_path / "fit")
    la = Laplace(network(), "classification", "all", "kron")
    with pytest.raises(StateError, match="number of batches = 5"):
        la.fit(data[:5], resume=tmp_path / "fit")
    with pytest.raises(InvalidData, match="another order"):
        la.fit([data[1], data[0], *data[2:]], resume=tmp_path / "fit")
    with pytest.raises(InvalidData, match="another order"):
        la.fit(batches(seed=1), resume=tmp_path / "fit")

    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(data[:3])

    fewer = tmp_path / "of a stream"
    begun = Laplace(network(), "classification", "all", "kron")
    unsized: Any = (batch if number < 5 else 1 for number, batch in enumerate(data))
    with pytest.raises(InvalidData):
        begun.fit(unsized, resume=fewer, save_every=4)
    with pytest.raises(InvalidData, match="3 batches, fewer"):
        la.fit(Unsized(), resume=fewer)
    assert not la.is_fitted


class Drawn(Sampler[int]):
    """An order that nobody can have again."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())


def test_an_order_that_cannot_be_had_again_is_refused(tmp_path: Path) -> None:
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    data, la = TensorDataset(x, y), Laplace(network(), "classification", "all", "diag")
    workers = {"num_workers": 1, "persistent_workers": True}
    refused = [
        DataLoader(data, 4, shuffle=True),
        DataLoader(data, 4, sampler=Drawn(12)),
        DataLoader(data, batch_sampler=BatchSampler(Drawn(12), 4, drop_last=False)),
        DataLoader(data, 4, shuffle=True, generator=torch.Generator(), **workers),  # pyright: ignore
    ]
    for loader in refused:
        with pytest.raises(InvalidArgument, match=r"resume= needs a loader whose order"):
            la.fit(loader, resume=tmp_path / "fit")
    assert not la.is_fitted
    assert not list(tmp_path.iterdir())
    generator = torch.Generator().manual_seed(0)
    accepted = [
        DataLoader(data, 4),
        DataLoader(data, 4, sampler=list(Drawn(12))),
        DataLoader(data, 4, shuffle=True, generator=generator),
        DataLoader(data, batch_sampler=list(BatchSampler(Drawn(12), 4, drop_last=False))),
        DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0)),
        DataLoader(_Stream(x, y), 4),
    ]
    for loader in accepted:
        la.fit(loader, resume=tmp_path / "fit", save_every=1)


def test_entries_that_are_compared_are_not_those_of_a_border(tmp_path: Path) -> None:
    x, y = torch.zeros(2, 1024, 28, 28), torch.zeros(2, 1024, dtype=torch.long)
    x[:, :, 4:24, 4:24] = torch.randn(2, 1024, 20, 20)
    torch.manual_seed(0)
    la = Laplace(nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), "classification", "all", "diag")
    with pytest.raises(OSError, match="disk"):
        la.fit(Failing(list(zip(x, y, strict=True)), 2), resume=tmp_path / "fit", save_every=1)
    with pytest.raises(InvalidData, match="other data"):
        la.fit(list(zip(x.flip(-1), y, strict=True)), resume=tmp_path / "fit")


def test_a_file_that_was_being_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"fit.{uuid4().hex}.new").write_bytes(b"half")
    Laplace(network(), "classification", "all", "diag").fit(batches(), resume=tmp_path / "fit")
    assert not list(tmp_path.iterdir())


class _Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


class Erring(TensorDataset):
    """Data of which the read after so many is an error."""

    reads = 20

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.reads -= 1
        if self.reads < 0:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_a_loader_without_the_generator_is_refused(tmp_path: Path) -> None:
    data, la = Erring(torch.randn(30, 4), torch.randint(3, (30,))), Laplace(network(), "classification", "all", "diag")
    loader = DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(0))
    with pytest.raises(OSError, match="disk"):
        la.fit(loader, resume=tmp_path / "fit", save_every=1)
    with pytest.raises(StateError, match="number of generators"):
        la.fit(DataLoader(data, 5), resume=tmp_path / "fit")


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (InvalidType, "path of a file", {"resume": 3}),
        (InvalidArgument, "is a folder", {"resume": "."}),
        (InvalidArgument, "none that exists", {"resume": "no such folder/fit"}),
        (InvalidArgument, "without resume=", {"save_every": 3}),
        (InvalidArgument, "at least one batch", {"resume": "fit", "save_every": 0}),
        (InvalidArgument, "at least one batch", {"resume": "fit", "save_every": timedelta(0)}),
        (InvalidType, "number of batches", {"resume": "fit", "save_every": 1.5}),
        (InvalidType, "number of batches", {"resume": "fit", "save_every": True}),
        (UnsupportedError, "subset=3", {"resume": "fit", "subset": 3}),
    ],
)
def test_arguments_are_checked(
    error: type[Exception], match: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    la = Laplace(network(), "classification", "all", "diag")
    with pytest.raises(error, match=match):
        la.fit(batches(), **options)
    assert not list(tmp_path.iterdir())


def test_posteriors_that_choose_among_data_and_hooks_are_refused(tmp_path: Path) -> None:
    gp = Laplace(network(), "classification", "all", "gp", n_subset=5)
    with pytest.raises(UnsupportedError, match="resume="):
        gp.fit(batches(), resume=tmp_path / "fit")

    class Own(KronLaplace):
        def _curv_closure(self, x: Any, y: Tensor, N: int) -> Any:
            return self.curvature_of(x, y, N)

    with pytest.raises(UnsupportedError, match="HookedPass"):
        Own(network(), "classification").fit(batches(), resume=tmp_path / "fit")
    assert not list(tmp_path.iterdir())


def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    la, file = Laplace(network(), "classification", "all", "diag"), tmp_path / "fit"
    for content in (b"", b"some notes", _pickled({"weights": torch.ones(3)}), _pickled(network())):
        file.write_bytes(content)
        with pytest.raises(StateError, match="no checkpoint"):
            la.fit(batches(), resume=file)
        assert file.read_bytes() == content
    assert not la.is_fitted


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_file_that_could_not_be_written_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = interrupted(tmp_path / "fit")
    before = (tmp_path / "fit").read_bytes()

    def fails(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(resuming.torch, "save", fails)
        with pytest.raises(OSError, match="no space"):
            Laplace(network(), "classification", "all", "kron").fit(data, resume=tmp_path / "fit", save_every=1)
    assert (tmp_path / "fit").read_bytes() == before
    whole, again = (Laplace(network(), "classification", "all", "kron") for _ in range(2))
    whole.fit(data)
    again.fit(data, resume=tmp_path / "fit")
    assert_same_bits(whole, again)


# The progress bar.


def test_the_progress_bar_counts_data_and_says_what_is_left(tmp_path: Path) -> None:
    data = [*batches(), (torch.randn(2, 4), torch.tensor([0, 1]))]
    for options in ({}, {"resume": tmp_path / "fit"}):
        shown = io.StringIO()
        with redirect_stderr(shown):
            Laplace(network(), "classification", "all", "diag").fit(data, progress_bar=True, **options)
        assert "32/32" in shown.getvalue()
        assert "data/s" in shown.getvalue()
    shown = io.StringIO()
    with redirect_stderr(shown):
        Laplace(network(), "classification", "all", "diag").fit(iter(data), progress_bar=True)
    assert "32" in shown.getvalue()
