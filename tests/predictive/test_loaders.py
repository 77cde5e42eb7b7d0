"""Predictions of a loader: those of its inputs, batch by batch, as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace, MixtureLaplace
from laplace.errors import InvalidArgument, InvalidData, LaplaceError, NotFittedError
from laplace.likelihoods import LikelihoodFromLoss
from laplace.parametric import ParametricLaplace

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(10) % 4


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


@pytest.fixture(scope="module")
def la() -> ParametricLaplace:
    la = Laplace(network(), "classification", "all", "kron")
    la.fit([(X, Y)])
    return la


def mappings() -> Iterator[dict[str, Tensor]]:
    """A stream of mappings with labels."""
    for part in (slice(0, 4), slice(4, 8), slice(8, 10)):
        yield {"input": X[part], "labels": Y[part]}


LOADERS: dict[str, Any] = {
    "data loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=4),
    "pairs": lambda: [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    "inputs": lambda: [X[:4], X[4:8], X[8:]],
    "tuples of one": lambda: iter([(X[:4],), (X[4:8],), (X[8:],)]),
    "stream of mappings": mappings,
}


@pytest.mark.parametrize("kind", LOADERS)
def test_stream_is_the_predictions_of_its_inputs(la: ParametricLaplace, kind: str) -> None:
    stream = la.predict(LOADERS[kind](), link_approx="bridge")
    assert isinstance(stream, Iterator)
    parts = [prediction.probabilities for prediction in stream]
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.allclose(torch.cat(parts), la.predict(X, link_approx="bridge").probabilities, atol=1e-6)


def test_mixture_streams_too() -> None:
    mixture = MixtureLaplace([Laplace(network(), "classification", "all", "kron") for _ in range(2)])
    mixture.fit([(X, Y)])
    parts = [prediction.probabilities for prediction in mixture.predict(LOADERS["pairs"]())]
    assert torch.allclose(torch.cat(parts), mixture.predict(X).probabilities, atol=1e-6)


def test_batches_are_read_one_by_one(la: ParametricLaplace) -> None:
    read: list[int] = []

    def batches() -> Iterator[Tensor]:
        for number in range(3):
            read.append(number)
            yield X

    stream = la.predict(batches())
    assert read == []
    next(stream)
    assert read == [0]


def test_equal_seeds_give_equal_bits(la: ParametricLaplace) -> None:
    def drawn(seed: int) -> list[Tensor]:
        source = torch.Generator().manual_seed(seed)
        stream = la.predict(LOADERS["pairs"](), link_approx="mc", generator=source)
        return [prediction.probabilities for prediction in stream]

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[0] - la.predict(X[:4]).probabilities, first[1] - la.predict(X[4:8]).probabilities)


def test_bar_counts_data(la: ParametricLaplace, capsys: pytest.CaptureFixture[str]) -> None:
    list(la.predict(LOADERS["data loader"](), progress_bar=True))
    shown = capsys.readouterr().err
    assert "predict" in shown
    assert "10/10" in shown
    list(la.predict(mappings(), progress_bar=True))
    shown = capsys.readouterr().err
    assert "data/s" in shown or "s/ data" in shown
    list(la.predict(LOADERS["data loader"]()))
    assert not capsys.readouterr().err


def test_results_over_all_inputs_are_refused(la: ParametricLaplace) -> None:
    with pytest.raises(InvalidArgument, match="joint=True"):
        la.predict(LOADERS["pairs"](), joint=True)
    with pytest.raises(InvalidArgument, match="outputs="):
        la.predict(LOADERS["pairs"](), outputs=torch.zeros(10, 1, dtype=torch.long))
    assert next(la.predict(LOADERS["pairs"](), outputs=[0, 2])).probabilities.shape == (4, 2)


def test_batches_without_inputs_are_named(la: ParametricLaplace) -> None:
    with pytest.raises(InvalidData, match="batch 1"):
        list(la.predict([(X, Y), 3]))


@pytest.mark.parametrize("given", [X.numpy(), [1.0, 2.0], "abc", 3])
def test_what_is_neither_inputs_nor_a_loader_is_refused_as_before(la: ParametricLaplace, given: Any) -> None:
    with pytest.raises(LaplaceError):
        _ = la.predict(given).probabilities


def test_stream_before_a_fit_is_refused() -> None:
    with pytest.raises(NotFittedError):
        list(Laplace(network(), "classification", "all", "kron").predict([X]))


class Counts(LikelihoodFromLoss):
    """A likelihood of a user's own, whose decomposition is sampled throughout."""

    name = "counts"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f).sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp().expand(n, *f.shape), generator=generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.exp()


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize(
    "likelihood", ["classification", "regression", "bernoulli", "poisson", "heteroscedastic", Counts()]
)
def test_decomposition_is_seeded_by_the_generator(likelihood: Any, pred_type: str) -> None:
    y = Y if likelihood == "classification" else (Y % 2).float().unsqueeze(1).expand(-1, 4)
    y = y[:, :2] if likelihood == "heteroscedastic" else y
    la = Laplace(network(), likelihood, "all", "kron", prior_precision=10.0)
    la.fit([(X, y)])

    def parts(seed: int, global_seed: int) -> list[Tensor]:
        torch.manual_seed(global_seed)
        prediction = la.predict(X, pred_type=pred_type, generator=torch.Generator().manual_seed(seed))
        found = prediction.decomposition
        return [found.aleatoric, found.epistemic, found.predictive_entropy, found.mutual_information]

    with torch.random.fork_rng(devices=[]):
        assert all(map(torch.equal, parts(0, 1), parts(0, 2)))
        if pred_type == "nn":
            assert not all(map(torch.equal, parts(0, 1), parts(1, 1)))
