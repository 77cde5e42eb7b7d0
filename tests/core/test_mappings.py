"""Mappings reach models by name or whole, of whatever type they are, through wrappers, with the right targets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, OnlineLaplace, marglik_training
from laplace.errors import InvalidData, MissingKey, TuningWarning
from laplace.network.model_guard import unwrap
from tests.reference.compare import assert_close

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(1))
KINDS = torch.randint(0, 2, (12,), generator=torch.Generator().manual_seed(2)).double()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


class Named(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class WithLoss(Holder):
    """Another thing is returned where targets are given."""

    def forward(self, x: Tensor, labels: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        f = self.net(x)
        return f if labels is None and target is None else f.sum()


class Whole(Holder):
    """One argument is no key, the other one is."""

    def forward(self, data: Any, labels: Tensor | None = None) -> Tensor:
        return self.net(data["x"])


class WholeUnderTheNameOfAKey(Holder):
    def forward(self, x: Any) -> Tensor:
        return self.net(x["x"])


class Passing(nn.Module):
    """Passes everything on, as PEFT's models without a task and `DistributedDataParallel` do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Conditional(Holder):
    """`label` is an input."""

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        return self.net(x if label is None else x + label[:, None])


MODELS = {
    "named": Named,
    "with_loss": WithLoss,
    "whole": Whole,
    "whole_under_the_name_of_a_key": WholeUnderTheNameOfAKey,
    "passing": lambda: Passing(WithLoss()),
    "passing_twice": lambda: Passing(Passing(Named())),
    "data_parallel": lambda: nn.DataParallel(WithLoss()),
}


def as_dict(**values: Tensor) -> Any:
    return values


def as_tensordict(**values: Tensor) -> Any:
    return pytest.importorskip("tensordict").TensorDict(values, batch_size=[len(Y)])


def fitted(model: nn.Module, data: Any, weights: str = "all", **options: Any) -> Any:
    la = Laplace(model, "classification", weights, "full", dict_key_x="x", **options)
    la.fit([data])
    return la


@pytest.mark.parametrize("mapping", [as_dict, as_tensordict])
@pytest.mark.parametrize("name", MODELS)
def test_mappings_are_pairs(name: str, mapping: Any) -> None:
    for weights in ("all", "last_layer"):
        expected = fitted(mlp(), (X, Y), weights)
        batch = mapping(x=X, labels=Y)
        la = fitted(MODELS[name](), batch, weights)
        assert_close(la.H, expected.H, "algebra")
        assert_close(la(batch), expected(X), "algebra")
        assert la(batch, pred_type="nn", n_samples=2).shape == (12, 3)
        la.fit([mapping(x=X, labels=Y.masked_fill(Y == 0, -100))])
        assert la.n_data == int((Y != 0).sum())


@pytest.mark.parametrize("mapping", [as_dict, as_tensordict])
@pytest.mark.parametrize("name", MODELS)
def test_only_the_targets_are_held_back(name: str, mapping: Any) -> None:
    expected = fitted(mlp(), (X, Y))
    assert_close(fitted(MODELS[name](), mapping(x=X, target=Y), dict_key_y="target").H, expected.H, "algebra")


@pytest.mark.parametrize("key", ["labels", "target"])
def test_an_input_of_the_name_label_is_one(key: str) -> None:
    expected = fitted(Conditional(), (X, KINDS, Y))
    la = fitted(Conditional(), {"x": X, "label": KINDS, key: Y}, dict_key_y=key)
    assert_close(la.H, expected.H, "algebra")


def test_targets_under_the_name_label_are_held_back() -> None:
    expected = fitted(mlp(), (X, Y))
    assert_close(fitted(Conditional(), {"x": X, "label": Y}, dict_key_y="label").H, expected.H, "algebra")


class Required(Holder):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.net(x + labels[:, None].to(x))


def test_a_forward_that_cannot_do_without_labels_gets_them() -> None:
    expected = fitted(Conditional(), (X, Y.double(), Y))
    assert_close(fitted(Required(), {"x": X, "labels": Y}).H, expected.H, "algebra")


def test_the_first_error_is_shown_where_neither_way_works() -> None:
    with pytest.raises(RuntimeError, match=r"'net.0'.*was given \[12, 2\]"):
        fitted(Named(), {"x": X[:, :2], "labels": Y})


def test_a_missing_key_is_a_key_error_too() -> None:
    la = Laplace(Named(), "classification", dict_key_x="x")
    for kind in (KeyError, InvalidData, MissingKey):
        with pytest.raises(kind) as caught:
            la.fit([{"x": X, "y": Y}])
        assert str(caught.value).startswith("batch 0: the batch is a mapping with keys ['x', 'y'], without dict_key_y")
        with pytest.raises(kind, match="batch 1"):
            la.fit([{"x": X, "labels": Y}, {"x": X}])


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one process."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_models_inside_distributed_data_parallel() -> None:
    parallel = nn.parallel.DistributedDataParallel
    model = parallel(WithLoss())
    assert unwrap(model) is model.module
    for weights in ("all", "last_layer"):
        expected = fitted(mlp(), (X, Y), weights)
        for data in ({"x": X, "labels": Y}, (X, Y)):
            la = fitted(model, data, weights)
            assert_close(la.H, expected.H, "algebra")
            assert_close(la(data if isinstance(data, dict) else X), expected(X), "algebra")
    assert la.model.model is model
    trained, plain = parallel(mlp()), mlp()
    found = marglik_training(trained, [(X, Y)], hessian_structure="diag", n_epochs=2)[2]
    expected = marglik_training(plain, [(X, Y)], hessian_structure="diag", n_epochs=2)[2]
    assert_close(torch.tensor(found), torch.tensor(expected), "algebra")


class OneOutput(nn.Module):
    """As a head of Hugging Face with one label: outputs `[B, n]`, targets `[B]` in the mapping."""

    def __init__(self, n_outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, n_outputs)).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.net(x)


NUMBERS = {"regression": X[:, 0] - 1, "poisson": Y.double(), "heteroscedastic": X[:, 1], "bernoulli": KINDS}


@pytest.mark.parametrize("likelihood", NUMBERS)
def test_targets_of_one_number_may_lack_a_dimension(likelihood: str) -> None:
    """In mappings alone; of pairs it would be guessed."""
    y, n_outputs = NUMBERS[likelihood], 2 if likelihood == "heteroscedastic" else 1
    flat = [{"x": X[i : i + 5], "labels": y[i : i + 5]} for i in (0, 5, 10)]
    columns = [batch | {"labels": batch["labels"].unsqueeze(1)} for batch in flat]

    def numbers(batches: list[dict[str, Tensor]]) -> Tensor:
        la = Laplace(OneOutput(n_outputs), likelihood, "all", "diag", dict_key_x="x")
        la.fit(batches)
        la.optimize_prior_precision(method="gridsearch", val_loader=batches, grid_size=3)
        refined = Laplace(OneOutput(n_outputs), likelihood, "all", "diag", dict_key_x="x")
        refined.fit(batches)
        refined.refine(batches)
        training = OnlineLaplace(OneOutput(n_outputs), batches, likelihood, "diag", dict_key_x="x")
        values = [la.log_marginal_likelihood(), la.prior_precision, la.loss, refined.log_marginal_likelihood()]
        return torch.cat(
            [torch.as_tensor(v).detach().double().reshape(1) for v in values] + [training.n_data + X[:1, 0]]
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        assert_close(numbers(flat), numbers(columns), "algebra")
    la = Laplace(OneOutput(n_outputs), likelihood, "all", "diag", dict_key_x="x")
    if likelihood != "bernoulli":
        for pairs in ([(X, y)], [({"x": X}, y)]):
            with pytest.raises(InvalidData, match="must be equal"):
                la.fit(pairs)
    wide = Laplace(OneOutput(4), likelihood, "all", "diag", dict_key_x="x")
    with pytest.raises(InvalidData, match="must be equal"):
        wide.fit(flat)


def test_an_assigned_loss_reads_targets_as_the_mapping_gives_them() -> None:
    batches = [{"x": X[i : i + 5], "labels": X[i : i + 5, 0]} for i in (0, 5, 10)]
    la, expected = (Laplace(OneOutput(), "regression", "all", "diag", dict_key_x="x") for _ in range(2))
    squared = nn.MSELoss(reduction="sum")
    la.backend.lossfunc = lambda f, y: squared(f.squeeze(1), y)
    for posterior in (la, expected):
        posterior.fit(batches)
    assert_close(la.H, expected.H, "algebra")
    assert_close(la.loss, expected.loss, "algebra")
