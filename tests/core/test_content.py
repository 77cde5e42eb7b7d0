"""Data that were read before are told by their content, in any order and batches; others are not."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.core.content import Content, ContentReader
from laplace.errors import DataWarning
from tests.reference.compare import assert_close

N = 200


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data(seed: int = 0, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def loader(x: Tensor, y: Tensor, size: int = 16, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=size, **options)


def fitted(*args: Any, **options: Any) -> Any:
    la = Laplace(network(), "classification", "all", "diag")
    la.fit(loader(*args, **options))
    return la


def content(x: Tensor, y: Tensor, size: int) -> Content:
    reader = ContentReader()
    for part in zip(x.split(size), y.split(size), strict=True):
        reader.see(*part)
    return reader.content


@pytest.fixture
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("size", [8, 50, 500])
@pytest.mark.parametrize("n", [20, 200, 20_000])
def test_digests_tell_data_apart(n: int, size: int) -> None:
    x, y = data(n=n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    known = content(x, y, size)
    if known.n_hashed**2 > 20 * n:  # of so few of so many hardly any are met twice, and nothing is said
        assert known.holds(content(x[order], y[order], size))
    assert known.holds(content(x.clone(), y.int(), size))
    assert not known.holds(content(*data(1, n), size))
    assert not known.holds(content(x, (y + 1) % 3, size))
    assert not content(*data(1, n), size).holds(known)


def test_a_part_is_among_the_whole_and_not_the_other_way_round() -> None:
    x, y = data()
    whole, part = content(x, y, 50), content(x[:40], y[:40], 10)
    assert whole.holds(part)
    assert not part.holds(whole)


def test_equal_rows_say_nothing() -> None:
    """Inputs that are one-hot, or bits, are equal by chance."""
    x, y = torch.eye(4).repeat(20, 1), torch.zeros(80, dtype=torch.long)
    assert not content(x, y, 16).holds(content(x, y, 16))


def test_many_small_fits_take_bounded_memory() -> None:
    total = content(*data(0, 10), 10)
    for seed in range(1, 2000):
        total = total + content(*data(seed, 10), 10)
        assert len(total.hashes) <= 64  # an update looks at every part
    assert total.n_kept == sum(map(len, total.hashes)) <= 2 * 4096
    assert total.n_data == 20_000


def test_data_that_are_added_twice() -> None:
    x, y = data()
    la = fitted(x, y)
    with pytest.warns(DataWarning, match="were fitted before, and count twice"):
        la.fit(loader(x, y, 32, shuffle=True), override=False)
    assert la.fitted().n_data == 2 * N


def test_other_data_are_added_in_silence(no_warnings: None) -> None:
    x, y = data()
    la = fitted(x[:100], y[:100])
    la.fit(loader(x[100:], y[100:]), override=False)
    la.fit(loader(*data(7)), override=False)
    la.fit(loader(x, y))
    assert la.fitted().n_data == N


def test_forgotten_data_may_be_added_again(no_warnings: None) -> None:
    x, y = data()
    la = fitted(x, y)
    la.forget(loader(x[:50], y[:50]))
    la.fit(loader(x[:50], y[:50]), override=False)
    assert la.fitted().n_data == N


def test_copies_and_casts_remember() -> None:
    x, y = data()
    la = copy.deepcopy(fitted(x, y))
    with pytest.warns(DataWarning, match="count twice"):
        la.fit(loader(x, y), override=False)


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")
@pytest.mark.parametrize("method", ["grid", "lbfgs"])
def test_validation_by_the_training_data(method: Any) -> None:
    x, y = data()
    la = fitted(x, y)

    def tune(val_loader: Any) -> None:
        la.optimize_hyperparameters(objective="nll", method=method, val_loader=val_loader)

    with pytest.warns(DataWarning, match="the validation data are training data"):
        tune(loader(x[:100], y[:100], 25, shuffle=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        tune(loader(*data(5)))


def test_data_that_are_dropped() -> None:
    x, y = data()
    with pytest.warns(DataWarning, match="leaves 8 of the data out"):
        fitted(x, y, 16, drop_last=True)


def test_drop_last_of_whole_batches(no_warnings: None) -> None:
    x, y = data()
    assert_close(fitted(x, y, 50, drop_last=True).H, fitted(x, y, 50).H, "exact")
