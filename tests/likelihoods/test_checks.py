"""Bad data given on purpose, and the door to likelihoods by name, enum or object."""

from __future__ import annotations

from enum import Enum

import pytest
import torch

from laplace.enums import Likelihood as Name
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods import LIKELIHOODS, Bernoulli, Categorical, Gaussian, Preference, get_likelihood
from tests.reference.compare import assert_close

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "message"),
    [
        (Gaussian(), torch.zeros(3, 1), torch.zeros(3), r"unsqueeze\(-1\)"),
        (Gaussian(), torch.zeros(3, 2), torch.zeros(3, 1), "nothing is broadcast"),
        (Gaussian(), torch.zeros(3, 2), torch.zeros(2, 2), "must be equal"),
        (Gaussian(), torch.zeros(2, 1), torch.tensor([[0.0], [NAN]]), "Targets have NaN"),
        (Gaussian(), torch.zeros(2, 1), torch.tensor([[0.0], [INF]]), "Targets have NaN or infinite"),
        (Gaussian(), torch.tensor([[NAN]]), torch.zeros(1, 1), "outputs have NaN"),
        (Gaussian(), torch.zeros(2, 3, 1), torch.zeros(2, 3, 1), r"\[B, C\] is accepted"),
        (Gaussian(), torch.zeros(2, 1), [[0.0], [1.0]], "of type list"),
        (Gaussian(), torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.complex64), "complex"),
        (Categorical(class_weight=(1, 1, 1)), torch.zeros(2, 3), 2 * torch.eye(3)[:2], "sum must be 1"),
        (Categorical(class_weight=(1, 1, 1)), torch.zeros(2, 3), torch.eye(3)[:2] - 1e-3, "at least 0"),
        (
            Categorical(class_weight=(1, 1, 1)),
            torch.zeros(2, 3),
            torch.tensor([[1.5, -0.5, 0], [1.0, 0, 0]]),
            "smallest is -0.5",
        ),
        (Categorical(), torch.zeros(2, 3), torch.tensor([[NAN, 0.0, 1.0], [1.0, 0.0, 0.0]]), "NaN or infinite"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([[INF, 0.0, 1.0], [1.0, 0.0, 0.0]]), "NaN or infinite"),
        (Categorical(class_weight=(1, 1, 1)), torch.zeros(2, 3), torch.zeros(2, 3), "sum must be 1"),
        (Categorical(), torch.zeros(2, 3), torch.ones(2, 3).long(), "sum must be 1"),
        (Categorical(), torch.zeros(2, 3), torch.full((2, 3), -100), "at least 0"),
        (Categorical(), torch.zeros(2, 3), torch.eye(4)[:2], r"shape \[2, 3\], are accepted"),
        (Preference(), torch.zeros(2, 2), torch.ones(2, 2), "sum must be 1"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(2, 1).long(), "squeeze"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(3).long(), "accepted"),
        (Categorical(), torch.zeros(2, 3), torch.zeros(2), r"y\.long\(\)"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "Label 3 is out of range"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, -1]), "Label -1 is out of range"),
        (Categorical(ignore_index=None), torch.zeros(2, 3), torch.tensor([0, -100]), "Label -100"),
        (Categorical(), torch.zeros(2, 1), torch.tensor([0, 1]), "bernoulli"),
        (Categorical(), torch.full((2, 3), INF), torch.tensor([0, 1]), "outputs have NaN or infinite"),
        (Preference(), torch.zeros(2, 3), torch.tensor([0, 1]), r"\[B, 2, \.\.\.\]"),
        (Preference(), torch.zeros(2, 1), torch.tensor([0, 1]), "pairs"),
        (Preference(), torch.zeros(2, 2), torch.tensor([0, 2]), "out of range"),
        (Preference(), torch.zeros(2, 2), torch.tensor([0, -100]), "out of range"),
        (Bernoulli(), torch.zeros(2, 3), torch.zeros(2), "must be equal"),
        (Bernoulli(), torch.zeros(2, 1), torch.tensor([-1, 1]), r"\(y \+ 1\) / 2"),
        (Bernoulli(), torch.zeros(2, 1), torch.tensor([0.0, 1.5]), "1.5"),
        (Bernoulli(), torch.zeros(2, 1), torch.tensor([0.0, NAN]), "NaN"),
    ],
)
def test_bad_data_is_refused(likelihood, f, y, message) -> None:
    with pytest.raises(InvalidData, match=message):
        likelihood.check_targets(f, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_soft_labels_of_every_precision(dtype: torch.dtype) -> None:
    """Rows that were rounded sum to 1 up to that rounding, and exactly afterwards."""
    rows = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0)).mul(3).softmax(1).to(dtype)
    q = Categorical().check_targets(torch.zeros(50, 1000, dtype=torch.float64), rows)
    assert q.dtype == torch.float64
    assert_close(q.sum(1), torch.ones(50), "algebra")
    assert_close(q, rows.double() / rows.double().sum(1, keepdim=True), "exact")
    for hot in (torch.eye(3)[:2].to(dtype), torch.eye(3)[:2].int(), torch.eye(3)[:2].bool()):
        checked = Categorical().check_targets(torch.zeros(2, 3, dtype=torch.float32), hot)
        assert checked.dtype == torch.float32
        assert torch.equal(checked, torch.eye(3)[:2])


def test_targets_are_cast_to_what_the_methods_take() -> None:
    f = torch.zeros(2, 1, dtype=torch.float64)
    assert Gaussian().check_targets(f, torch.tensor([[1], [2]])).dtype == torch.float64
    assert torch.equal(Bernoulli().check_targets(f, torch.tensor([True, False])), torch.tensor([[1.0], [0.0]]).double())
    two = torch.zeros(2, 2)
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.bool):
        for likelihood in (Categorical(), Preference()):
            labels = likelihood.check_targets(two, torch.tensor([1, 0], dtype=dtype))
            assert labels.dtype == torch.long
            assert labels.tolist() == [1, 0]


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_names_enums_and_objects(name: str) -> None:
    likelihood = get_likelihood(name)
    assert likelihood.name == name
    assert type(get_likelihood(Name(name))) is type(likelihood)
    assert type(get_likelihood(Enum("Own", {"X": name}).X)) is type(likelihood)
    assert get_likelihood(likelihood) is likelihood


@pytest.mark.parametrize("spec", ["poison", Categorical, 3, None])
def test_unknown_likelihoods(spec) -> None:
    with pytest.raises(InvalidArgument, match="'regression', 'classification', 'reward_modeling', 'bernoulli'"):
        get_likelihood(spec)
