"""Batches of other lengths take the proof of the first, unless the network treats them in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import CurvatureError
from tests.core.test_synchronisations import _Reads
from tests.engines.test_proof_cache import proofs, pytestmark
from tests.reference.compare import assert_close

__all__ = ["proofs", "pytestmark"]

B, WIDTH = 6, 8


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(20, WIDTH), nn.Embedding(40, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.places(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.inner(h)).sum(1) / x.shape[1])


class Attention(nn.Module):
    """Products whose sizes are squares of the length, and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(20, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.queries, self.values, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.first.expand(len(x), -1, -1), self.table(x)], 1)
        scores = torch.softmax(self.queries(h) @ h.mT, -1)
        return self.head((scores @ self.values(h))[:, 0])


class Flat(nn.Module):
    """Rows of all data in one dimension on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.table(x).flatten(0, 1)))
        return self.head(h.view(*x.shape, -1).amax(1))


class Tagger(Flat):
    """Outputs for every position."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(x))))


class Sounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Conv1d(4, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.stack([x.sin(), x.cos()], 1).to(torch.get_default_dtype())).mean(2)


class Transformer(nn.Module):
    """Positions come first on the way, and heads beside the data."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        q, k, v = self.inner(h).view(*x.shape, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
        h = h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(h.shape)
        return self.head(self.outer(h).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tokens": Tokens, "attention": Attention, "flat": Flat, "tagger": Tagger, "sounds": Sounds
}  # fmt: skip


def data(length: int, n_data: int = B, seed: int = 0) -> Tensor:
    return torch.randint(20, (n_data, length), generator=torch.Generator().manual_seed(seed + length))


def targets(x: Tensor, model: nn.Module) -> Tensor:
    return torch.arange(x.numel() if isinstance(model, Tagger) else len(x)).reshape(model(x).shape[:-1]) % 3


def fitted(model: nn.Module, batches: list[Tensor], structure: Any = "diag") -> Any:
    la = Laplace(model, "classification", "all", structure)
    la.fit([(x, targets(x, model)) for x in batches])
    return la


def with_proofs_of_their_own(model: nn.Module, batches: list[Tensor]) -> Tensor:
    total = torch.zeros(())
    for x in batches:
        total = total + fitted(model, [x]).H
    return total


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.parametrize("sizes", ["one number of data", "other numbers"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_length_is_no_part_of_a_proof(name: str, sizes: str, proofs: list[int]) -> None:
    """Also where it is the width of a layer, or the number of data, but first."""
    model = made(NETWORKS[name])
    counts = [B] * 12 if sizes == "one number of data" else [11, 7, 5, 9, 3, 11, 5, 7, 9, 3, 5, 13]
    batches = [data(length, count) for length, count in zip(range(7, 19), counts, strict=True)]
    la = fitted(model, batches)
    assert len(proofs) == (
        2 if name in ("tokens", "attention", "transformer") else 1
    )  # the first of layers alone, which is not all
    for length in (6, 21):
        la(data(length))
    found = len(proofs)
    assert found <= 2
    assert_close(la.H, with_proofs_of_their_own(model, batches), "float32")


def test_data_are_followed_where_positions_come_first(proofs: list[int]) -> None:
    model = made(Transformer)
    batches = [data(length) for length in range(7, 15)]
    la = fitted(model, batches)
    assert len(proofs) <= 3
    assert_close(la.H, with_proofs_of_their_own(model, batches), "float32")


# Recurrent layers, whose steps are as many as a text is long.


class Recurrent(nn.Module):
    """What is read of a recurrence is said by `take`."""

    def __init__(self, layer: type[nn.RNNBase], take: Callable[[Any], Tensor], width: int = 5, **options: Any) -> None:
        super().__init__()
        self.table, self.head, self.take = nn.Embedding(20, WIDTH), nn.Linear(width, 3), take
        self.layer = layer(WIDTH, 5, **options)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer.batch_first
        h = self.table(x)
        return self.head(self.take(self.layer(h if first else h.transpose(0, 1))))


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM, lambda given: given[0][:, -1], batch_first=True),
    "two layers": lambda: Recurrent(nn.GRU, lambda given: given[0][:, -1], num_layers=2, batch_first=True),
    "both ways": lambda: Recurrent(nn.RNN, lambda given: given[0].mean(1), 10, bidirectional=True, batch_first=True),
    "states": lambda: Recurrent(nn.GRU, lambda given: torch.cat([given[1][0], given[1][1]], 1), 10, num_layers=2),
    "cells": lambda: Recurrent(nn.LSTM, lambda given: given[1][1][-1], batch_first=True),
    "time first": lambda: Recurrent(nn.LSTM, lambda given: given[0].mean(0)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_the_number_of_steps_is_no_part_of_a_proof(name: str, proofs: list[int]) -> None:
    model = made(RECURRENT[name])
    batches = [data(length) for length in (7, 3, 5, 2, 9, 4, 8)]
    la = fitted(model, batches)
    la(data(6))
    assert len(proofs) == 2  # the first of layers alone
    assert_close(la.H, with_proofs_of_their_own(model, batches), "float32")


def test_a_single_step_is_proven_by_itself() -> None:
    model = made(RECURRENT["LSTM"])
    batches = [data(length) for length in (1, 4, 1, 6)]
    assert_close(fitted(model, batches).H, with_proofs_of_their_own(model, batches), "float32")


def test_data_that_meet_behind_a_recurrence_for_some_lengths_are_found() -> None:
    def windows(given: Any) -> Tensor:
        out = given[0]
        return out.reshape(-1, 8, 5).cumsum(1).reshape(*out.shape).mean(1)

    model = made(lambda: Recurrent(nn.LSTM, windows, batch_first=True))
    fitted(model, [data(16)])
    with pytest.raises(CurvatureError, match="depends on the others"):
        fitted(model, [data(16), data(20)])


@pytest.mark.parametrize("make", [Sounds, RECURRENT["LSTM"], Attention], ids=["sounds", "LSTM", "attention"])
def test_reads_do_not_grow_with_lengths(make: Callable[[], nn.Module]) -> None:
    model = made(make)

    def reads(lengths: list[int]) -> int:
        la, batches = Laplace(model, "classification", "all", "diag"), [data(length) for length in lengths]
        with _Reads() as seen:
            la.fit([(x, torch.arange(len(x)) % 3) for x in batches])
        return seen.seen.total()

    assert reads(list(range(7, 19))) == reads([7] * 12)


# Networks that treat lengths in other ways.


class Branch(Flat):
    """Long inputs go through the layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        if x.shape[1] > 8:
            h = h + F.linear(torch.tanh(self.inner(h)), self.inner.weight.T)
        return self.head(torch.tanh(self.inner(h)).mean(1))


class Sliced(Flat):
    """As many columns of a weight as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.inner.weight[:, : x.shape[1]]
        return self.head(torch.tanh(F.linear(torch.tanh(self.table(x).mean(2)), columns, self.inner.bias)))


class Padded(Flat):
    """Lengths that are no multiple of four are filled up, and rows of four are one."""

    def __init__(self) -> None:
        super().__init__()
        self.fours = nn.Linear(4 * WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        if missing := -x.shape[1] % 4:
            h = F.pad(h, (0, 0, 0, missing))
        return self.head(torch.tanh(self.fours(h.unflatten(1, (-1, 4)).flatten(2))).amax(1))


class Gate(Flat):
    """A use that the factor of short inputs hides."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        again = torch.tanh(F.linear(h.flip(0), self.inner.weight)) * float(x.shape[1] > 8)
        return self.head(torch.tanh(self.inner(h) + again).mean(1))


class Scrambled(Flat):
    """Rows of positions are taken for those of data, which only shows with several positions."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.table(x)))
        return self.head(h.transpose(0, 1).reshape(*h.shape).amax(1))


@pytest.mark.parametrize("kind", [Branch, Sliced, Padded, Scrambled])
def test_numbers_are_those_of_proofs_of_their_own(kind: type[Flat]) -> None:
    model = made(kind)
    batches = [data(length) for length in (1, 5, 7, 8, 12, 9, 5)]
    found = fitted(model, batches).H
    assert_close(found, with_proofs_of_their_own(model, batches), "float32")


class Windows(Flat):
    """Windows of eight rows, whosever they are: of one datum for lengths that are multiples of eight."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.table(x)))
        mixed = h.reshape(-1, 8, 5).cumsum(1).reshape(*h.shape)
        return self.head(mixed.mean(1))


class Rest(Flat):
    """Data beyond the length, if there are such, meet all others."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.table(x)))
        return self.head(h.mean(1) + h[x.shape[1] :].sum((0, 1)))


class Pooled(Flat):
    """Windows of eight rows, of which a few that remain are dropped."""

    def windows(self, rows: Tensor) -> Tensor:
        return F.avg_pool1d(rows.T.unsqueeze(0), 8)[0].T

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.table(x)))
        return self.head(self.windows(h.flatten(0, 1)).reshape(len(x), -1, 5).mean(1))


class Unfolded(Pooled):
    def windows(self, rows: Tensor) -> Tensor:
        return rows.unfold(0, 8, 8).mean(2)


class Strided(Pooled):
    def windows(self, rows: Tensor) -> Tensor:
        return rows.as_strided((len(rows) // 8, 8, 5), (40, 5, 1)).mean(1)


class Sliced8(Pooled):
    def windows(self, rows: Tensor) -> Tensor:
        rows = rows.unsqueeze(0)
        return torch.cat([rows[:, 8 * i : 8 * i + 8].mean(1) for i in range(rows.shape[1] // 8)])


class Multiplied(Pooled):
    def windows(self, rows: Tensor) -> Tensor:
        window = torch.arange(len(rows)) // 8
        return (window == torch.arange(len(rows) // 8).unsqueeze(1)).to(rows) @ rows


@pytest.mark.parametrize("kind", [Pooled, Unfolded, Strided, Sliced8, Multiplied])
def test_windows_over_all_rows_are_proven_for_every_length(kind: type[Flat]) -> None:
    """Their number is that of a proof for some other lengths, for which they hold positions of several data."""
    model = made(kind)
    batches = [data(16), data(17)]
    assert_close(fitted(model, batches).H, with_proofs_of_their_own(model, batches), "float32")


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Windows, [(6, 16), (6, 20)]),
        (Windows, [(8, 16), (8, 20)]),
        (Windows, [(6, 16), (8, 12)]),
        (Windows, [(4, 16), (16, 4)]),
        (Windows, [(6, 8), (6, 4)]),
        (Rest, [(6, 10), (6, 4)]),
        (Gate, [(6, 5), (6, 12)]),
    ],
)
def test_data_that_meet_for_some_lengths_alone_are_found(kind: type[Flat], shapes: list[tuple[int, int]]) -> None:
    model = made(kind)
    (n_data, length), (more, other) = shapes
    fitted(model, [data(length, n_data)])
    with pytest.raises(CurvatureError, match="depends on the others"):
        fitted(model, [data(length, n_data), data(other, more)])


# Rows that are picked.


class LastToken(Flat):
    """As heads of language models for classification: the last token that is no padding, 0, of every text."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.table(x))))
        return logits[torch.arange(len(x)), (x != 0).cumsum(1).argmax(1)]


class AnotherRow(Flat):
    """The first token says whose last one is taken."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(x))))[x[:, 0], torch.full((len(x),), x.shape[1] - 1)]


def test_the_last_token_of_every_text_takes_no_new_proof(proofs: list[int]) -> None:
    model = made(LastToken)
    batches = [data(length) for length in range(9, 15)]
    la = fitted(model, batches)
    for x in (data(9, seed=1), data(17), data(9, n_data=1), data(11, n_data=4)):
        la(x)
    assert len(proofs) == 1
    assert_close(la.H, with_proofs_of_their_own(model, batches), "float32")


def test_rows_in_the_place_of_others_are_found_in_every_batch(proofs: list[int]) -> None:
    model, x = made(AnotherRow), data(9)
    x[:, 0] = torch.arange(B)
    turned, repeated = x.clone(), x.clone()
    turned[:, 0] = torch.arange(B).flip(0)
    repeated[:, 0] = torch.tensor([0, 0, 1, 2, 3, 4])
    la = fitted(model, [x, x, turned])
    assert len(proofs) == 2  # of rows in another order each is the datum's own, once it is known which
    assert_close(la.H, with_proofs_of_their_own(model, [x, x, turned]), "float32")
    with pytest.raises(CurvatureError, match="depends on the others"):
        fitted(model, [x, repeated])
