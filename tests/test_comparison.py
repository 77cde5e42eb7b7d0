"""Comparisons of two predictive distributions: errors by resampled data, tables and verdicts."""

from __future__ import annotations

import html
import math
import pickle
from collections import OrderedDict
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Comparison, Laplace, comparison
from laplace.comparison import N_RESAMPLES, ComparisonRow, resampled
from laplace.core.random_numbers import drawn_seed
from laplace.errors import (
    DataWarning,
    InvalidArgument,
    InvalidData,
    InvalidType,
)
from laplace.metrics import compare_probabilities
from tests import grid
from tests.reference import comparison as reference
from tests.reference.compare import assert_close
from tests.tuning.test_comparing import assert_same, check, double, fitted, seeded

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")


@pytest.mark.parametrize("per_datum", [1, 3])
def test_errors_of_rankings_are_spreads_over_resampled_data(per_datum: int) -> None:
    probs, y = _calibrated(60)
    datum = [i // per_datum for i in range(60)]
    shape = (60 // per_datum, per_datum) if per_datum > 1 else (60,)
    other = (0.5 * probs.log()).softmax(1)
    found = compare_probabilities(probs.view(*shape, 3), other.view(*shape, 3), y.view(shape), generator=seeded(5))
    network, posterior = reference.class_scores(probs, y), reference.class_scores(other, y)
    check(found, network, posterior, datum)
    source = seeded(drawn_seed(seeded(5)))
    drawn_seed(source)  # of the floors
    counts = torch.cat(list(resampled(torch.tensor(datum), source)))
    assert len(counts) == N_RESAMPLES and bool((counts.sum(1) == 60).all())
    first, second = reference.statistics(network), reference.statistics(posterior)
    for name in first:
        samples = [[i for i, n in enumerate(row) for _ in range(int(n))] for row in counts.tolist()]
        spread = torch.tensor([second[name](rows) - first[name](rows) for rows in samples], dtype=torch.float64).std()
        assert_close(found.rows[name].standard_error, spread, "algebra", label=name)


def _calibrated(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities of three classes, and labels drawn from them."""
    probs = torch.randn(n, 3, generator=seeded(seed), dtype=torch.float64).mul(2).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=seeded(seed + 1)).squeeze(1)


@pytest.mark.nightly
def test_standard_errors_are_those_of_new_data() -> None:
    """Over 200 sets of data: the spread of a difference, and its mean standard error; both known to 5 to 10 %."""
    found = []
    for seed in range(200):
        probs, y = _calibrated(150, seed)
        found.append(compare_probabilities(probs, (0.3 * probs.log()).softmax(1), y).rows)
    for name in ("nll", "brier", "ece", "aurc"):
        spread = torch.tensor([rows[name].difference for rows in found]).std()
        error = torch.tensor([rows[name].standard_error for rows in found]).mean()
        assert 0.7 < float(error / spread) < 1.4, name


def test_probabilities_alone_have_the_same_table() -> None:
    model, x, y = double()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    expected = la.compare([(x, y)])
    found = compare_probabilities(model(x).softmax(1), la(x), y, names=("temperature scaling", "Laplace"))
    assert_same(expected, found)
    assert found.names == ("temperature scaling", "Laplace")
    assert repr(found).splitlines()[0].split() == ["temperature", "scaling", "Laplace", "difference"]


def test_ignored_labels_and_probabilities_of_zero() -> None:
    probs, y = _calibrated(20)
    marked = y.clone()
    marked[::4] = -100
    kept = marked != -100
    first, second = (
        compare_probabilities(probs, probs, marked),
        compare_probabilities(probs[kept], probs[kept], y[kept]),
    )
    assert_same(first, second)
    certain = torch.nn.functional.one_hot((y + 1) % 3, 3).float()
    assert math.isfinite(compare_probabilities(probs, certain, y).rows["nll"].posterior)


def test_probabilities_that_cannot_be_compared() -> None:
    probs, y = _calibrated(6)
    with pytest.raises(InvalidData, match=r"\[6, 3\] and \[6, 4\]"):
        compare_probabilities(probs, torch.full((6, 4), 0.25), y)
    with pytest.raises(InvalidData, match="not logits"):
        compare_probabilities(probs, probs.log(), y)
    with pytest.raises(InvalidData, match="no label is left"):
        compare_probabilities(probs, probs, torch.full((6,), -100))
    with pytest.raises(InvalidArgument, match="names='ab'"):
        compare_probabilities(probs, probs, y, names="ab")  # pyright: ignore
    with pytest.raises(InvalidType, match="generator"):
        compare_probabilities(probs, probs, y, generator=3)  # pyright: ignore


def table(difference: float, error: float, n_data: int = 300) -> Comparison:
    return Comparison({"nll": ComparisonRow(0.5, 0.5 + difference, difference, error)}, n_data, n_data)


@pytest.mark.parametrize(
    ("comparison", "verdict"),
    [
        (table(0.1234, 0.0123), "use the network: its NLL is lower by 0.123 ± 0.012 on 300 data"),
        (table(-0.1234, 0.0123), "use the posterior: its NLL is lower by 0.123 ± 0.012 on 300 data"),
        (
            table(-0.01, 0.02, 12),
            "no difference beyond two standard errors: the NLL of the posterior is lower by 0.010 ± 0.020 on 12 data",
        ),
        (
            table(-0.1234, 0.0123, 19),
            "too few data for a verdict: the NLL of the posterior is lower by 0.123 ± 0.012 on 19 data",
        ),
        (table(1e-7, 1e-9), "no difference: the NLL is the same on 300 data"),
        (table(0.1, 0.0), "use the network: its NLL is lower by 0.1 ± 0 on 300 data"),
        (table(0.1, math.nan, 1), "no verdict: a difference on one datum has no standard error"),
        (table(math.inf, math.nan), "no verdict: the NLL is 0.5000 and inf on 300 data"),
    ],
)
def test_verdicts(comparison: Comparison, verdict: str) -> None:
    assert comparison.verdict == verdict
    assert repr(comparison).endswith(f"\n{verdict[0].upper()}{verdict[1:]}.")


def test_a_table_is_text_html_and_data() -> None:
    row = ComparisonRow(0.1221, 0.1943, 0.0722, 0.0106)
    rows = OrderedDict(
        nll=row, ece_floor=ComparisonRow(0.01, 0.02, 0.01, math.nan), aurc=ComparisonRow(0.0, 12345.0, 5e-5, 0.0)
    )
    comparison = Comparison(rows, 20, 5120, ("a <b>", "posterior"))
    assert repr(comparison).splitlines() == [
        "                  a <b>  posterior  difference",
        "NLL              0.1221     0.1943  +0.0722 ± 0.0106",
        "ECE noise floor  0.0100     0.0200",
        "AURC             0.0000   1.23e+04  +5e-05 ± 0.0000",
        "Differences ± one paired standard error, on 20 data with 5,120 labels.",
        "Use a <b>: its NLL is lower by 0.072 ± 0.011 on 20 data.",
    ]
    shown = comparison._repr_html_()
    assert "<b>" not in shown and "a &lt;b&gt;" in shown
    assert shown.count("<tr>") == 4 and "0.0722 ± 0.0106" in html.unescape(shown)
    assert shown.count("padding:") == 4 * 4  # or cells run together where a page has no style of its own
    assert repr(pickle.loads(pickle.dumps(comparison))) == repr(comparison)
    with pytest.raises(AttributeError):
        comparison.n_data = 3  # pyright: ignore


def test_one_class_and_one_datum() -> None:
    la, x, y = fitted()
    one = la.compare([(x, torch.zeros_like(y))])
    assert math.isfinite(one.rows["aurc"].posterior)
    single = la.compare([(x[:1], y[:1])])
    assert all(math.isnan(row.standard_error) for row in single.rows.values())
    assert single.verdict == "no verdict: a difference on one datum has no standard error"


def test_many_rows_of_few_data_are_resampled_by_datum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of every datum serve all samples: standard errors are those of rows, to the width of a group."""
    draws, n, size = torch.Generator().manual_seed(0), 40, 500
    y = torch.randint(3, (n, size), generator=draws)
    logits = torch.randn(n, size, 3, generator=draws) + 2 * torch.nn.functional.one_hot(y, 3) * torch.rand(n, 1, 1)
    probs = logits.double().softmax(2), (0.5 * logits).double().softmax(2)
    by_rows = compare_probabilities(*probs, y)
    monkeypatch.setattr(comparison, "_AT_ONCE", n)
    by_data = compare_probabilities(*probs, y)
    for name, row in by_rows.rows.items():
        assert (row.network, row.posterior) == (by_data.rows[name].network, by_data.rows[name].posterior)
        if name != "ece_floor":
            assert abs(by_data.rows[name].standard_error - row.standard_error) <= 0.05 * row.standard_error + 2e-4


def test_what_is_no_number_is_in_no_verdict() -> None:
    """Predictions of a user's own that are NaN are neither hits nor misses, and nobody wins."""

    class Gaps(type(grid.fitted("all", "full", "regression"))):
        def __call__(self, x: Any, *arguments: Any, **options: Any) -> Any:
            mean, variance = super().__call__(x, *arguments, **options)
            return mean.index_fill(0, torch.tensor([1]), math.nan), variance

    x, y = grid.data("regression")
    la = Gaps(grid.network("regression"), "regression")
    la.fit([(x, y)])
    found = la.compare([(grid.data("regression", seed=9)[0], y)])
    assert found.verdict.startswith("no verdict: 1 of 12")
    assert all(math.isnan(row.posterior) for row in found.rows.values())
    assert all(math.isfinite(row.network) for row in found.rows.values())


@pytest.mark.parametrize("call", ["compare", "calibrate", "report"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_worse_than_chance_is_said(call: str, likelihood: str) -> None:
    """Labels in another order, and targets in other units."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=draws)
    model = nn.Linear(3, 3)
    model.load_state_dict({"weight": 5 * torch.eye(3), "bias": torch.zeros(3)})
    y = x.argmax(1) if likelihood == "classification" else 5 * x + 0.1 * torch.randn(100, 3, generator=draws)
    la: Any = Laplace(model, cast("Any", likelihood), "all", "full", **({} if y.ndim == 1 else {"sigma_noise": 0.1}))
    la.fit([(x[:50], y[:50])])
    asked = partial(laplace.report, la) if call == "report" else getattr(la, call)
    asked([(x[50:], y[50:])])
    if call == "calibrate":
        la.calibration.undo()
    with pytest.warns(DataWarning, match="same class order, same preprocessing"):
        asked([(x[50:], 2 - y[50:] if y.ndim == 1 else 1000 * y[50:])])
