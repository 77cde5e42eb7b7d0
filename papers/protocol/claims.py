"""What a paper claims, as a number that is positive where the claim holds, and the verdict of the seeds.

A claim is a statistic of the scores of one seed, so that methods are compared on the same data, networks and samples.
Its mean over n seeds and the standard error s / √n give t = mean / error. With t above the 95 % quantile of Student's
distribution with n − 1 degrees of freedom the claim holds, below minus that it fails; else the seeds do not decide.

Most claims say how MAP's over-confidence is mended. They suppose that there is some: a claim with a `Premise` is not
judged where its network is not over-confident or has learnt its training data by heart. And a posterior that is wide
enough is less confident everywhere: a claim of a `Wide` one "holds trivially" where the posterior spoils the test data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scipy import stats

from protocol.records import Estimate, Records, Scores

Verdict = Literal["holds", "holds trivially", "fails", "undecided", "premise absent"]
Cause = Literal["", "data", "premise", "baseline", "real"]
LEVEL = 0.95
LARGE_IS_GOOD = ("accuracy", "AUROC")
LEAST_GAP = 0.02
LEAST_LOSS = 0.02
LARGEST_COST = 0.02
MOST_SEEDS = 1000


def t_statistic(ours: Estimate) -> float:
    """Of the mean, mean / error; infinite where every seed has the same number."""
    return ours.mean / ours.error if ours.error else math.copysign(math.inf, ours.mean)


def is_positive(ours: Estimate) -> bool:
    """Whether the mean is significantly above 0, by a one-sided t test."""
    if ours.n_seeds < 2 or ours.mean <= 0:
        return False
    return t_statistic(ours) > float(stats.t.ppf(LEVEL, ours.n_seeds - 1))


@dataclass(frozen=True)
class Premise:
    """The network is over-confident by `LEAST_GAP` and its training loss, in nats, is above `LEAST_LOSS`.

    Attributes:
        condition: Of the scores "confidence", "accuracy" and "training loss" of the network.
        method: Its name there.
    """

    condition: str
    method: str = "MAP"

    def gap(self, scores: Scores) -> float:
        """Confidence less accuracy."""
        return scores[self.condition, self.method, "confidence"] - scores[self.condition, self.method, "accuracy"]

    def loss(self, scores: Scores) -> float:
        """Of the training data."""
        return scores[self.condition, self.method, "training loss"]

    def holds(self, records: Records) -> bool:
        """Of both numbers, by a one-sided t test over seeds."""
        return all(
            is_positive(records.of(lambda scores, number=number, least=least: number(scores) - least))
            for number, least in ((self.gap, LEAST_GAP), (self.loss, LEAST_LOSS))
        )

    def measured(self, records: Records) -> str:
        """Both numbers."""
        return f"confidence − accuracy {records.of(self.gap)}, training loss {records.of(self.loss)}"


@dataclass(frozen=True)
class Wide:
    """A posterior of which a claim would hold if it were only wide enough.

    Attributes:
        condition: Of the "NLL" of test data that are not shifted.
        method: The posterior.
        reference: Whose NLL it may exceed by `LARGEST_COST`.
    """

    condition: str
    method: str
    reference: str = "MAP"

    def cost(self, records: Records) -> float:
        """Its NLL less that of the reference, a mean over seeds."""
        mine, other = (records.estimate(self.condition, name, "NLL").mean for name in (self.method, self.reference))
        return mine - other


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        item: Table, figure or section.
        text: The claim, in a sentence.
        statistic: Of the scores of one seed; positive where the claim holds.
        theirs: The paper's numbers, as it prints them.
        note: Why it fails or cannot show here, written after the run; a function of the records for its numbers.
        cause: Why it does not hold: "data" (too few seeds or images), "premise" (what the paper supposes is not so
            here), "baseline" (the method that it is compared with is better or worse than the paper's) or "real" (the
            claim is not true here). If not given, "data" of what is undecided, "real" of what fails.
        premise: Without which the claim is not judged.
        wide: The posterior whose width alone would do.
    """

    item: str
    text: str
    statistic: Callable[[Scores], float]
    theirs: str = ""
    note: str | Callable[[Records], str] = ""
    cause: Cause = ""
    premise: Premise | None = None
    wide: Wide | None = None


def because(claims: Sequence[Claim], cause: Cause, note: str | Callable[[Records], str]) -> list[Claim]:
    """The claims with a cause and a note."""
    return [replace(claim, cause=cause, note=note) for claim in claims]


def lower(
    item: str,
    condition: str,
    measure: str,
    better: str,
    worse: str,
    theirs: str = "",
    note: str | Callable[[Records], str] = "",
    margin: float = 0,
    cause: Cause = "",
) -> Claim:
    """`better` has a smaller `measure` than `worse`, or one that is larger by less than `margin`."""

    def statistic(scores: Scores) -> float:
        return scores[condition, worse, measure] - scores[condition, better, measure] + margin

    relation = "<" if margin == 0 else f"< {margin:g} +"
    return Claim(item, f"{condition}: {measure} of {better} {relation} {worse}", statistic, theirs, note, cause)


def higher(
    item: str,
    condition: str,
    measure: str,
    better: str,
    worse: str,
    theirs: str = "",
    note: str | Callable[[Records], str] = "",
    margin: float = 0,
    cause: Cause = "",
) -> Claim:
    """`better` has a larger `measure` than `worse`, or one that is smaller by less than `margin`."""

    def statistic(scores: Scores) -> float:
        return scores[condition, better, measure] - scores[condition, worse, measure] + margin

    relation = ">" if margin == 0 else f"> −{margin:g} +"
    return Claim(item, f"{condition}: {measure} of {better} {relation} {worse}", statistic, theirs, note, cause)


def orders(
    item: str, condition: str, cells: dict[str, dict[str, str]], pairs: Sequence[tuple[str, str]], note: str = ""
) -> list[Claim]:
    """The orders of pairs of methods in a table of the paper, where they differ by more than both standard errors.

    Args:
        item: The table.
        condition: Of the scores.
        cells: "mean±standard error" by measure and method.
        pairs: Of methods.
        note: Of every claim.
    """
    found = []
    for measure, row in cells.items():
        for pair in pairs:
            (one, its_error), (other, other_error) = (map(float, row[method].split("±")) for method in pair)
            if abs(one - other) <= its_error + other_error:
                continue
            first, second = pair if one < other else pair[::-1]  # the smaller before the larger
            if measure in LARGE_IS_GOOD:
                theirs = f"{row[second]} > {row[first]}"
                found.append(higher(item, condition, measure, second, first, theirs, note))
            else:
                found.append(lower(item, condition, measure, first, second, f"{row[first]} < {row[second]}", note))
    return found


@dataclass(frozen=True)
class Checked:
    """A claim, its number here and the verdict.

    Attributes:
        claim: What is checked.
        ours: Its number.
        verdict: Of the seeds.
        cause: Why it does not hold; empty where it does.
        measured: The measurement behind the cause.
        note: In words.
    """

    claim: Claim
    ours: Estimate
    verdict: Verdict
    cause: Cause
    measured: str
    note: str


def check(claim: Claim, records: Records) -> Checked:
    """The verdict of the seeds: by a one-sided t test, whose two directions are "holds" and "fails"."""
    ours = records.of(claim.statistic)
    note = claim.note if isinstance(claim.note, str) else claim.note(records)
    if claim.premise is not None and ours.n_seeds > 1 and not claim.premise.holds(records):
        return Checked(claim, ours, "premise absent", "premise", claim.premise.measured(records), note)
    if is_positive(ours):
        cost = claim.wide.cost(records) if claim.wide is not None else 0.0
        if cost > LARGEST_COST:
            return Checked(claim, ours, "holds trivially", "", f"test NLL {cost:.3f} above MAP's", note)
        return Checked(claim, ours, "holds", "", "", note)
    if is_positive(replace(ours, mean=-ours.mean)):
        return Checked(claim, ours, "fails", claim.cause or "real", _shown(t_statistic(ours)), note)
    return Checked(claim, ours, "undecided", claim.cause or "data", _seeds_to_decide(ours), note)


def _shown(t: float) -> str:
    """Of what all seeds agree on, but for rounding, no more than that it is large."""
    return f"t = {t:.1f}" if abs(t) < 1000 else "the same on all seeds"


def _seeds_to_decide(ours: Estimate) -> str:
    """How many seeds would decide a claim, were mean and spread to stay as they are."""
    if ours.mean == 0 or ours.n_seeds < 2:
        return "equal on all seeds" if ours.n_seeds > 1 else "one seed"
    spread = ours.error * math.sqrt(ours.n_seeds)
    t = _shown(t_statistic(ours))
    for n in range(ours.n_seeds + 1, MOST_SEEDS + 1):
        if abs(ours.mean) * math.sqrt(n) > spread * float(stats.t.ppf(LEVEL, n - 1)):
            return f"{t}, {n} seeds would decide"
    return f"{t}, more than {MOST_SEEDS} seeds would decide"
