"""Batches, labels and calls as users have them at first: what can be read is read, the rest says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InvalidData, InvalidInputs
from laplace.likelihoods import Categorical
from tests.reference.compare import assert_close

N = 8


def network(n_outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_outputs)).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(N, 3, dtype=torch.float64), torch.randint(3, (N,))


def fitted(batches: list[Any], model: nn.Module | None = None, **options: Any) -> Any:
    la = Laplace(model or network(), "classification", "all", "kron", **options)
    la.fit(batches)
    return la


def test_webdatasets_keys_are_left_out() -> None:
    x, y = data()
    named = fitted([(x, y, [f"sample{i}" for i in range(N)])])
    plain = fitted([(x, y)])
    assert_close(named.log_marginal_likelihood(), plain.log_marginal_likelihood(), "exact")
    loader = [[x, y, [str(i) for i in range(N)]]]
    assert_close(next(iter(named.predict(loader))).mean, plain(x), "exact")


class Several(nn.Module):
    """A forward with one argument, a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, xs: list[Tensor]) -> Tensor:
        return self.head(torch.tanh(self.layers[0](xs[0]) + self.layers[1](xs[1])))


class Spread(Several):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward([a, b])


def test_a_list_of_tensors_goes_whole_to_a_forward_of_one_argument() -> None:
    torch.manual_seed(0)
    whole, spread = Several().double(), Spread().double()
    spread.load_state_dict(whole.state_dict())
    (x, y), other = data(), torch.randn(N, 3, dtype=torch.float64)
    la, expected = fitted([([x, other], y)], whole), fitted([(x, other, y)], spread)
    assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), "exact")
    assert_close(la((x, other)), expected((x, other)), "exact")


def test_parts_that_nobody_takes_are_refused_as_before() -> None:
    x, y = data()
    with pytest.raises(InvalidInputs, match="takes"):
        fitted([(x, x, y)])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_two_heads_are_told_how_they_go_together() -> None:
    torch.manual_seed(0)
    (x, _), model = data(), TwoHeads().double()
    targets = torch.randn(N, 2, dtype=torch.float64), torch.randn(N, 1, dtype=torch.float64)
    la = Laplace(model, "regression", "all", "full")
    with pytest.raises(InvalidData, match=r"torch\.cat\(model\(x\), -1\), with targets torch\.cat"):
        la.fit([(x, torch.cat(targets, -1))])
    joined = Laplace(model, "regression", "all", "full", forward_fn=lambda model, x: torch.cat(model(x), -1))
    joined.fit([(x, torch.cat(targets, -1))])
    assert joined(x)[0].shape == (N, 3)


def test_void_labels_name_ignore_index() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 1).double()
    x, y = torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.randint(3, (2, 4, 4))
    y[0, 1, 2] = 255
    la = Laplace(model, "classification", "all", "diag", channel_dim=1)
    with pytest.raises(InvalidData, match=r"Label 255 is out of range.*Categorical\(ignore_index=255\)"):
        la.fit([(x, y)])
    la = Laplace(model, Categorical(ignore_index=255), "all", "diag", channel_dim=1)
    la.fit([(x, y)])
    assert la.fitted().n_data == 31


def test_another_label_out_of_range_is_no_void() -> None:
    x, y = data()
    y[3] = 7
    with pytest.raises(InvalidData, match=r"Label 7 is out of range.*Correct the labels"):
        fitted([(x, y)])


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_a_row_of_nan_is_named(structure: Any, weights: Any) -> None:
    x, y = data()
    x[5, 1] = torch.nan
    la = Laplace(network(), "classification", weights, structure)
    with pytest.raises(InvalidData, match=r"batch 0: .*at row 5, of 8 rows"):
        la.fit([(x, y)])
    good = torch.zeros(N, 3, dtype=torch.float64)
    la.fit([(good, y)])
    for quantity in (lambda: la(x), lambda: la.predict(x).mean):
        with pytest.raises(InvalidData, match="at row 5, of 8 rows"):
            quantity()


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_targets_in_the_place_of_inputs_are_noticed(likelihood: Any, weights: Any) -> None:
    x, y = data()
    y = torch.randn(N, 2, dtype=torch.float64) if likelihood == "regression" else y
    la = Laplace(network(), likelihood, weights, "kron")
    with pytest.raises(InvalidInputs, match=r"do not fit the network.*takes the targets.*\(x, y\), not \(y, x\)"):
        la.fit([(y, x)])
    with pytest.raises(InvalidInputs) as caught:
        la.fit([(x[:, :2], y)])
    assert "not (y, x)" not in str(caught.value)


def test_a_target_of_nan_is_named() -> None:
    x, _ = data()
    y = torch.zeros(N, 1, dtype=torch.float64)
    y[2] = y[6] = torch.nan
    la = Laplace(network(1), "regression", "all", "full")
    with pytest.raises(InvalidData, match="Targets have NaN or infinite entries at row 2 and 1 more, of 8 rows"):
        la.fit([(x, y)])


def test_names_of_other_libraries_get_a_hint() -> None:
    x, y = data()
    la = fitted([(x, y)])
    with pytest.raises(AttributeError, match=r"'predict_proba': la\(x\) returns the class probabilities"):
        la.predict_proba(x)
    with pytest.raises(AttributeError, match=r"'predict_probs'"):
        la.predict_probs(x)
    prediction = la.predict(x)
    for name in ("argmax", "shape", "cpu"):
        with pytest.raises(AttributeError, match=rf"'{name}', it is no tensor: prediction\.mean is one"):
            getattr(prediction, name)
    with pytest.raises(AttributeError, match="'meann'"):
        prediction.meann  # noqa: B018  # pyright: ignore
    unfitted = Laplace(network(), "classification", "all", "kron")
    with pytest.raises(AttributeError, match="not fitted"):
        unfitted.coverage()
