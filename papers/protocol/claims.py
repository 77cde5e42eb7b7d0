"""What a paper claims, as a number that is positive where the claim holds, and the verdict of the seeds.

A claim is a statistic of the scores of one seed, so that methods are compared on the same data, networks and samples.
Its mean over n seeds and the standard error s / √n give t = mean / error. With t above the 95 % quantile of Student's
distribution with n − 1 degrees of freedom the claim holds, below minus that it fails; else the seeds do not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from protocol.records import Estimate, Records, Scores, estimate

Verdict = Literal["holds", "fails", "undecided"]
LEVEL = 0.95
LARGE_IS_GOOD = ("accuracy", "AUROC")


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        item: Table, figure or section.
        text: The claim, in a sentence.
        statistic: Of the scores of one seed; positive where the claim holds.
        theirs: The paper's numbers, as it prints them.
        note: Why it fails or cannot show here, written after the run.
    """

    item: str
    text: str
    statistic: Callable[[Scores], float]
    theirs: str = ""
    note: str = ""


def lower(
    item: str,
    condition: str,
    measure: str,
    better: str,
    worse: str,
    theirs: str = "",
    note: str = "",
    margin: float = 0,
) -> Claim:
    """`better` has a smaller `measure` than `worse`, or one that is larger by less than `margin`."""

    def statistic(scores: Scores) -> float:
        return scores[condition, worse, measure] - scores[condition, better, measure] + margin

    relation = "<" if margin == 0 else f"< {margin:g} +"
    return Claim(item, f"{condition}: {measure} of {better} {relation} {worse}", statistic, theirs, note)


def higher(
    item: str,
    condition: str,
    measure: str,
    better: str,
    worse: str,
    theirs: str = "",
    note: str = "",
    margin: float = 0,
) -> Claim:
    """`better` has a larger `measure` than `worse`, or one that is smaller by less than `margin`."""

    def statistic(scores: Scores) -> float:
        return scores[condition, better, measure] - scores[condition, worse, measure] + margin

    relation = ">" if margin == 0 else f"> −{margin:g} +"
    return Claim(item, f"{condition}: {measure} of {better} {relation} {worse}", statistic, theirs, note)


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
    """A claim, its number here and the verdict."""

    claim: Claim
    ours: Estimate
    verdict: Verdict


def check(claim: Claim, records: Records) -> Checked:
    """The verdict of the seeds: by a one-sided t test, whose two directions are "holds" and "fails"."""
    ours = estimate([claim.statistic(scores) for scores in records.scores])
    verdict: Verdict = "undecided"
    if ours.n_seeds > 1 and ours.mean != 0:
        threshold = float(stats.t.ppf(LEVEL, ours.n_seeds - 1)) * ours.error
        if ours.mean > threshold:
            verdict = "holds"
        elif ours.mean < -threshold:
            verdict = "fails"
    return Checked(claim, ours, verdict)
