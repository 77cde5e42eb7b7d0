"""Whatever gives batches and whatever a batch is: pairs, tuples, mappings, streams, samplers, positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

from laplace import Laplace
from laplace.core import batch as batches
from laplace.errors import InvalidData, LaplaceError
from laplace.network import next_token
from tests import grid
from tests.reference.compare import assert_close

X, Y = grid.data()


def posterior(
    loader: Iterable[Any], weights: str, structure: str, model: nn.Module | None = None, **options: Any
) -> Any:
    la = grid.make(weights, structure, model=model, **options)
    la.fit(loader)
    return la


def assert_equal_posteriors(la: Any, other: Any) -> None:
    """The same data in other clothes: equal up to the order of sums."""
    assert la.n_data == other.n_data
    assert_close(la.loss, other.loss, "float32")
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), "float32")
    assert_close(la.posterior_variance, other.posterior_variance, "float32")


# Loaders.


class Stream(IterableDataset):
    """Reads its source once: a second iterator goes on where the first one stopped."""

    def __init__(self) -> None:
        self.source = iter(zip(X, Y, strict=True))

    def __iter__(self) -> Iterator[Any]:
        return self.source


class Once:
    """An iterable, not an iterator, behind which there is a stream."""

    def __init__(self) -> None:
        self.batches = (batch for batch in grid.batches())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


LOADERS = {
    "list": lambda: grid.batches(),
    "generator": lambda: (batch for batch in grid.batches()),
    "iterator": lambda: iter(grid.batches()),
    "once": Once,
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=5),
    "shuffled": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=5),
    "lists": lambda: [list(batch) for batch in grid.batches()],
    "all data": lambda: [(X, Y)],
    "one by one": lambda: DataLoader(TensorDataset(X, Y), batch_size=1),
    "eleven and one": lambda: DataLoader(TensorDataset(X, Y), batch_size=11),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
def test_loaders(weights: str, structure: str, name: str) -> None:
    assert_equal_posteriors(posterior(LOADERS[name](), weights, structure), grid.fitted(weights, structure))


@pytest.mark.parametrize("name", ["generator", "iterator", "once", "stream"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", grid.REREAD)
def test_data_that_can_be_read_once_are_refused_by_name(structure: str, weights: str, name: str) -> None:
    """Also where the first batch was taken to find the last layer, and of a stream behind an iterable."""
    few = {"structure_kwargs": {"rank": 2, "oversampling": 2}} if structure == "lowrank" else {}
    la = grid.make(weights, structure, **few)
    loader = LOADERS[name]()
    with pytest.raises(LaplaceError, match=f"(?s)read only once.*'{structure}'|'{structure}'.*read only once"):
        la.fit(loader)
    assert not la.is_fitted
    if isinstance(loader, Iterator):
        assert len(list(loader)) == 3, "the loader lost a batch"


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data are dropped, and count twice
@pytest.mark.parametrize("weights", grid.WEIGHTS)
def test_n_data_is_the_number_seen(weights: str) -> None:
    """Not the length of a dataset: with drop_last and samplers the two differ."""
    dataset = TensorDataset(X, Y)
    loaders = {
        10: DataLoader(dataset, batch_size=5, drop_last=True),
        7: DataLoader(dataset, batch_size=4, sampler=SubsetRandomSampler(range(7))),
        30: DataLoader(dataset, batch_size=7, sampler=RandomSampler(dataset, replacement=True, num_samples=30)),
        5: [(X[:5], Y[:5])],
    }
    for n_data, loader in loaders.items():
        la = grid.make(weights, "kron", "regression")
        la.fit([(x, grid.data("regression")[1][: len(x)].expand(len(x), -1)) for x, _ in loader])
        assert la.n_data == n_data
        la = posterior(loader, weights, "kron")
        assert la.n_data == n_data
        la.fit(loader, override=False)
        assert la.n_data == 2 * n_data
        la.fit(loader)
        assert la.n_data == n_data


def test_ignored_labels_are_not_seen() -> None:
    y = Y.clone()
    y[[0, 3, 4, 11]] = -100
    y[5:10] = -100
    for weights, structure in grid.CELLS:
        keep = y != -100
        la = posterior(list(zip(X.split(5), y.split(5), strict=True)), weights, structure)
        assert la.n_data == int(keep.sum())
        assert_equal_posteriors(la, posterior([(X[keep], Y[keep])], weights, structure))


def test_labels_of_eight_bits_are_not_taken_for_the_ignored_one() -> None:
    """As a uint8, −100 is 156: a class like the others."""
    model, y = nn.Linear(3, 200), torch.tensor([156, 3, 199, 156, 0])
    x = torch.randn(5, 3)
    of_bytes, of_integers = (Laplace(model, "classification", "all", "diag") for _ in range(2))
    of_bytes.fit([(x, y.to(torch.uint8))])
    of_integers.fit([(x, y)])
    assert of_bytes.n_data == 5
    assert torch.equal(of_bytes.log_marginal_likelihood(), of_integers.log_marginal_likelihood())


def test_a_progress_bar_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    la = grid.make("last_layer", "kron")
    la.fit(grid.batches())
    assert capsys.readouterr().err == ""
    la.fit(grid.batches(), progress_bar=True)
    assert "fit" in capsys.readouterr().err


# Batches.


class Wrapper(nn.Module):
    """Takes the whole mapping."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, data: Any) -> Tensor:
        return self.net(data["input_ids"])


class Named(Wrapper):
    """Names its inputs, as the models of a language library do."""

    def forward(self, input_ids: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.net(input_ids if scale is None else input_ids * scale)


class Passing(Wrapper):
    """Names one input and passes the others on."""

    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        assert others.keys() == {"scale"}
        return self.net(input_ids * others["scale"])


def mapped(kind: type, *keys: str, size: int = 5) -> list[Any]:
    parts = {"input_ids": X, "labels": Y, "scale": torch.full((12, 1), 2.0)}
    chosen = {key: parts[key].split(size) for key in keys}
    return [kind(dict(zip(chosen, values, strict=True))) for values in zip(*chosen.values(), strict=True)]


@pytest.mark.parametrize("wrapper", [Named, Passing])
def test_no_key_that_the_model_takes_is_dropped(wrapper: type) -> None:
    la = posterior(mapped(dict, "input_ids", "scale", "labels"), "all", "kron", wrapper(grid.network()))
    assert_equal_posteriors(la, posterior([(X * 2, Y)], "all", "kron"))


def test_other_keys() -> None:
    class Other(Wrapper):
        def forward(self, data: Any) -> Tensor:
            return self.net(data["pixels"])

    batches = [{"pixels": x, "target": y} for x, y in grid.batches()]
    la = posterior(batches, "last_layer", "kron", Other(grid.network()), dict_key_x="pixels", dict_key_y="target")
    assert_equal_posteriors(la, grid.fitted("last_layer", "kron"))


class Two(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = grid.network()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.net(torch.cat([a, b], 1))


@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
def test_batches_of_three_parts(weights: str, structure: str) -> None:
    triples = [(x[:, :1], x[:, 1:], y) for x, y in grid.batches()]
    la = posterior(triples, weights, structure, Two())
    pairs = grid.fitted(weights, structure)
    assert_equal_posteriors(la, pairs)
    both = (X[:, :1], X[:, 1:])
    assert_close(la(both), pairs(X), "float32")
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert_close(la(both, "nn", generator=seeds[0]), pairs(X, "nn", generator=seeds[1]), "float32")
    nested = [((x[:, :1], x[:, 1:]), y) for x, y in grid.batches()]
    assert_equal_posteriors(posterior(nested, weights, structure, Two()), pairs)


@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
def test_forward_fn(weights: str, structure: str) -> None:
    """A model that needs another call than `model(x)`, and returns more than its outputs."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = grid.network()

        def forward(self, features: Tensor, *, flip: bool) -> tuple[Tensor, str]:
            return self.net(features.flip(1) if flip else features), "more"

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.flip(1), flip=True)[0]

    la = posterior(grid.batches(), weights, structure, Odd(), forward_fn=forward)
    pairs = grid.fitted(weights, structure)
    assert_equal_posteriors(la, pairs)
    assert_close(la(X), pairs(X), "float32")
    assert la(X, "nn", n_samples=2).shape == (12, 3)
    with pytest.raises(TypeError, match="flip"):
        posterior(grid.batches(), weights, structure, Odd())


def test_a_model_that_returns_a_tuple_needs_a_forward_fn() -> None:
    class Pair(Wrapper):
        def forward(self, data: Tensor) -> Any:
            return self.net(data), None

    with pytest.raises(InvalidData, match="forward_fn"):
        posterior(grid.batches(), "all", "diag", Pair(grid.network()))


def test_model_kwargs_reach_the_model_of_sampled_predictions() -> None:
    class Scaled(Wrapper):
        def forward(self, data: Tensor, scale: float = 1.0) -> Tensor:
            return self.net(data) * scale

    for weights in grid.WEIGHTS:
        la = posterior(grid.batches(), weights, "diag", Scaled(grid.network()))
        seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
        one = la.functional_samples(X, "nn", n_samples=3, generator=seeds[0])
        two = la.functional_samples(X, "nn", n_samples=3, generator=seeds[1], scale=2.0)
        assert_close(two, 2 * one, "float32")


# A language model.


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=10,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def encoded(size: int = 6) -> list[Any]:
    from transformers import BatchEncoding

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (6, 5), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 3:] = 0
    parts = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask,
             "labels": torch.randint(3, (6,), generator=generator)}  # fmt: skip
    return [BatchEncoding({key: value[i : i + size] for key, value in parts.items()}) for i in range(0, 6, size)]


class TakesMapping(nn.Module):
    """The wrapper of the usual examples."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: Any) -> Tensor:
        return self.model(
            input_ids=data["input_ids"], token_type_ids=data["token_type_ids"], attention_mask=data["attention_mask"]
        ).logits


@pytest.mark.parametrize(("weights", "structure"), [("all", "kron"), *grid.DIAGONAL])
def test_a_language_model(bert: nn.Module, weights: str, structure: str) -> None:
    """Raw and wrapped, with BatchEncoding and dict; predictions are those of its own outputs."""
    found = []
    for model, kind in ((bert, None), (TakesMapping(bert), None), (TakesMapping(bert), dict)):
        loader = encoded(4) if kind is None else [kind(batch) for batch in encoded(4)]
        la = posterior(loader, weights, structure, model)
        if weights == "last_layer":
            assert la.last_layer_name.endswith("classifier")
        batch = encoded()[0]
        found.append((la.log_marginal_likelihood(), la(batch), la.posterior_variance))
        assert la(batch, "nn", n_samples=2).shape == (6, 3)
        la.prior_precision = 1e12
        bert.eval()
        with torch.no_grad():
            expected = TakesMapping(bert)(batch).softmax(1)
        bert.train()
        assert_close(la(batch), expected, "float32")
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert_close(mine, theirs, "float32")


@pytest.mark.filterwarnings("ignore:grid search")
def test_a_language_model_with_frozen_trunk_and_tuning(bert: nn.Module) -> None:
    for parameter in bert.bert.parameters():
        parameter.requires_grad_(False)
    try:
        la = posterior(encoded(4), "all", "full", bert)
        assert la.n_params == 27
        other = posterior(encoded(4), "last_layer", "full", bert)
        assert_close(la.H, other.H, "float32")
        la.optimize_prior_precision(method="gridsearch", val_loader=encoded(3), grid_size=5, log_prior_prec_max=8)
    finally:
        for parameter in bert.bert.parameters():
            parameter.requires_grad_(True)


# Positions.


class Tokens(nn.Module):
    """A head on features with positions, `[B, T, D]`, of which the model then picks or averages."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.reduction = reduction

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(torch.tanh(self.trunk(x)))
        if self.reduction == "average":
            return f.mean(1)
        return f[:, 0] if self.reduction == "pick_first" else f[:, -1]


class Reduced(Tokens):
    """The same, reduced before the head."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        if self.reduction == "average":
            return self.head(h.mean(1))
        return self.head(h[:, 0] if self.reduction == "pick_first" else h[:, -1])


FACTORED = ("kron", "ekfac", "lowrank_kron")


@pytest.mark.parametrize("size", [6, 1])
@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average"])
@pytest.mark.parametrize("structure", grid.STRUCTURES)
@pytest.mark.turns
def test_feature_reduction(structure: str, reduction: str, size: int) -> None:
    """Equal to a network that reduces its features itself; batches of one keep their dimension."""
    torch.manual_seed(0)
    tokens, reduced = Tokens(reduction), Reduced(reduction)
    reduced.load_state_dict(tokens.state_dict())
    x, y = torch.randn(6, 5, 3), torch.randint(3, (6,))
    loader = list(zip(x.split(size), y.split(size), strict=True))
    expected = posterior(loader, "last_layer", structure, reduced)
    for options in ({"feature_reduction": reduction}, {}):
        la = posterior(loader, "last_layer", structure, tokens, **options)
        if options or structure not in FACTORED:  # without the hint factors see the positions that share the head
            assert_equal_posteriors(la, expected)
            assert_close(la(x), expected(x), "float32")
        assert la(x[:1]).shape == (1, 3)
        assert la(x[:1], "nn", n_samples=3).shape == (1, 3)
        assert la.functional_samples(x[:1], n_samples=2).shape == (2, 1, 3)


@pytest.mark.parametrize("structure", grid.STRUCTURES)
def test_a_wrong_feature_reduction_does_no_harm(structure: str) -> None:
    """The hint is proved on the data; a model that does otherwise is differentiated as it is."""
    torch.manual_seed(0)
    model = Tokens("average")
    x, y = torch.randn(6, 5, 3), torch.randint(3, (6,))
    la = posterior([(x, y)], "last_layer", structure, model, feature_reduction="pick_first")
    exact = posterior([(x, y)], "last_layer", structure, model)
    assert_close(la(x), exact(x), "float32") if structure not in FACTORED else la(x)
    if structure != "lowrank":  # products with vectors follow no rule of a layer
        assert "fallback" in la.coverage()["head.weight"]


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_two_hundred_classes(structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 200))
    x, y = torch.randn(40, 3), torch.randint(200, (40,))
    la = posterior([(x, y)], "last_layer", structure, model)
    for link in ("probit", "bridge"):
        assert_close(la(x, link_approx=link).sum(1), torch.ones(40), "float32")
    assert la.log_marginal_likelihood().isfinite()
    assert la(x, "nn", n_samples=3).shape == (40, 200)


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_one_datum(weights: str, structure: str) -> None:
    la = grid.fitted(weights, structure)
    for link in ("probit", "mc", "bridge", "bridge_norm"):
        assert la(X[:1], link_approx=link).shape == (1, 3)
    assert_close(la(X[:1]), la(X)[:1], "float32")
    regression = grid.fitted(weights, structure, "regression")
    mean, covariance = regression(X[:1], joint=True)
    assert (mean.shape, covariance.shape) == ((3,), (3, 3))
    one = Laplace(grid.network(n_outputs=1), "regression", weights, structure,
                  **({"subnetwork_indices": torch.tensor([0, 5])} if weights == "subnetwork" else {}))  # fmt: skip
    one.fit([(X, grid.data("regression", n_outputs=1)[1])])
    mean, variance = one(X[:1], diagonal_output=True)
    assert (mean.shape, variance.shape) == ((1, 1), (1, 1))
    mean, covariance = one(X[:1], joint=True)
    assert (mean.shape, covariance.shape) == ((1,), (1, 1))
    assert one.functional_samples(X[:1], n_samples=2, joint=True).shape == (2, 1, 1)


@pytest.mark.parametrize("pinned", [True, False])
def test_nobody_waits_for_the_copy_of_pinned_memory(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, whatever holds them, and targets; what is there already is not copied."""
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: pinned)
    copies: list[bool] = []

    class Copies(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.to:
                copies.append(bool((kwargs or {}).get("non_blocking")))
            return func(*args, **(kwargs or {}))

    card, x, y = torch.device("meta"), torch.ones(3, 2), torch.tensor([0, 1, 0])
    rules = grid.fitted("all", "diag", "classification").snapshot().engine.target_rules
    with Copies():
        batches.to_device({"x": x, "mask": x}, card)
        next_token.weighted((x, y), "labels", card, rules, nn.Linear(2, 2), all_count=True)
    assert copies == [pinned] * 4
    with Copies():
        batches.to_device(x, torch.device("cpu"))
    assert len(copies) == 4
