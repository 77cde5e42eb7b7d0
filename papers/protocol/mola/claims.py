"""What Eschenhagen et al. (2021) claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from protocol.claims import Cause, Claim, Premise, check, higher, lower
from protocol.corruptions import SEVERITIES
from protocol.records import Records, Scores

OTHERS = ("MAP", "DE", "SWAG", "MSWAG", "LLLA")
AUROC = {
    "corrupted": {
        "MAP": "91.7, 94.3, 90.0", "DE": "95.4, 96.0, 91.3", "SWAG": "91.6, 94.0, 88.2", "MSWAG": "95.6, 95.6, 91.1",
        "LLLA": "93.6, 95.4, 90.8", "MoLA": "96.2, 96.9, 92.0",
    },
    "rotated": {
        "MAP": "99.0, 93.7, 97.1", "DE": "99.3, 95.2, 98.4", "SWAG": "99.0, 93.6, 97.1", "MSWAG": "99.3, 95.2, 98.5",
        "LLLA": "99.2, 94.4, 97.5", "MoLA": "99.5, 95.7, 98.5",
    },
}  # fmt: skip
CONFIDENCE = {
    "corrupted": {
        "MAP": "77.5, 71.7, 79.2", "DE": "62.8, 59.2, 70.7", "SWAG": "69.3, 62.2, 73.0", "MSWAG": "57.0, 56.3, 65.5",
        "LLLA": "60.5, 54.5, 64.8", "MoLA": "52.3, 48.3, 61.2",
    },
    "rotated": {
        "MAP": "64.1, 83.6, 77.4", "DE": "55.2, 75.8, 66.0", "SWAG": "64.6, 84.2, 78.6", "MSWAG": "55.6, 76.1, 66.3",
        "LLLA": "48.2, 71.5, 63.3", "MoLA": "44.0, 67.4, 56.8",
    },
}  # fmt: skip
SMALL = {
    ("rotated", "NLL", "LLLA"): 0.05, ("rotated", "NLL", "MSWAG"): 0.05, ("rotated", "Brier", "MSWAG"): 0.01,
    ("rotated", "ECE", "MSWAG"): 0.01,
}  # fmt: skip
"""Margins of what the paper calls "only marginally better" (D.2, H.2)."""
SIMILAR = {"NLL": 0.05, "ECE": 0.01}
"""Margins by which MSWAG may be better at severities 1 and 2, where it "performs similarly to MoLA" (D.2)."""
ITEMS = {"corrupted": ("tables 1, 3", "figures 2, 4, 8"), "rotated": ("table 4", "figures 4, 7")}


def _against(numbers: dict[str, str], better: str, worse: str) -> str:
    return f"{numbers[better]} against {numbers[worse]}"


def _premise(task: str, theirs: str) -> Claim:
    def statistic(scores: Scores) -> float:
        condition = f"{task}, test"
        return scores[condition, "MAP", "confidence"] - scores[condition, "MAP", "accuracy"]

    return Claim("premise", f"{task}: MAP is more confident than it is accurate", statistic, theirs)


def _keeps_confidence(task: str, theirs: str) -> Claim:
    def statistic(scores: Scores) -> float:
        condition = f"{task}, test"
        return scores[condition, "MoLA", "confidence"] - scores[condition, "MAP", "accuracy"] + 0.02

    text = f"{task}, test: confidence of MoLA > accuracy of MAP − 0.02"
    return Claim(ITEMS[task][0], text, statistic, theirs)


def _where_over_confident(task: str, claims: Sequence[Claim]) -> list[Claim]:
    """Claims that suppose that MAP is over-confident."""
    return [replace(claim, premise=Premise(f"{task}, test")) for claim in claims]


def _of_ood(task: str) -> list[Claim]:
    """Tables 1, 3 and 4: all ensembles above all single networks, and MoLA above all."""
    item, condition = ITEMS[task][0], f"{task}, OOD"
    confident = [("MoLA", other) for other in OTHERS] + [("LLLA", "MAP"), ("DE", "MAP")]
    apart = [("MoLA", other) for other in OTHERS] + [("DE", "MAP"), ("DE", "LLLA"), ("MSWAG", "LLLA"), ("LLLA", "MAP")]
    claims = [
        lower(item, condition, "confidence", better, worse, _against(CONFIDENCE[task], better, worse))
        for better, worse in confident
    ]
    claims += [
        higher(item, condition, "AUROC", better, worse, _against(AUROC[task], better, worse)) for better, worse in apart
    ]
    return _where_over_confident(task, claims)


def _of_shift(task: str, pairs: Sequence[tuple[str, str, str]]) -> list[Claim]:
    """Figures: (measure, better, worse), means over all levels of the shift; a small margin of the paper is one."""
    item, condition = ITEMS[task][1], f"{task}, shifted"
    claims = [
        lower(item, condition, measure, better, worse, margin=SMALL.get((task, measure, worse), 0.0))
        for measure, better, worse in pairs
    ]
    return _where_over_confident(task, claims)


def _every_severity(measure: str) -> Claim:
    def lead(scores: Scores, severity: int, other: str) -> float:
        level = f"corrupted, level {severity}"
        margin = SIMILAR[measure] if other == "MSWAG" and severity <= 2 else 0.0
        return scores[level, other, measure] - scores[level, "MoLA", measure] + margin

    def statistic(scores: Scores) -> float:
        return min(lead(scores, severity, other) for severity in SEVERITIES for other in OTHERS)

    text = (
        f"corrupted: MoLA has the smallest {measure} at every severity, but for {SIMILAR[measure]:g} beside MSWAG's at "
        "1 and 2 (least lead)"
    )
    return Claim("D.2", text, statistic, "MultiSWAG performs similarly for low corruption levels")


def _multi_swag_falls_behind(scores: Scores) -> float:
    lead = {s: scores[f"corrupted, level {s}", "MSWAG", "NLL"] - scores[f"corrupted, level {s}", "MoLA", "NLL"]
            for s in SEVERITIES}  # fmt: skip
    return lead[SEVERITIES[-1]] - lead[SEVERITIES[0]]


def _by_number(text: str, method: str, measure: str, few: int, many: int) -> Claim:
    """More components are better."""

    def statistic(scores: Scores) -> float:
        value = {n: scores[f"K = {n}: corrupted, shifted", method, measure] for n in (few, many)}
        return value[few] - value[many]

    return Claim("figure 10", text, statistic)


def _power_law(scores: Scores) -> float:
    nll = {n: scores[f"K = {n}: corrupted, shifted", "MoLA", "NLL"] for n in (1, 2, 5, 10)}
    return (nll[1] - nll[2]) - (nll[5] - nll[10])


def _one_against_ten(measure: str) -> Claim:
    def statistic(scores: Scores) -> float:
        return (
            scores["K = 10: corrupted, shifted", "DE", measure] - scores["K = 1: corrupted, shifted", "MoLA", measure]
        )

    return Claim("figure 10, G.1", f"corrupted, shifted: {measure} of LLLA < DE of ten", statistic)


def _number_claims() -> list[Claim]:
    shifted = "K = 10: corrupted, shifted"
    return [
        *(_one_against_ten(measure) for measure in ("NLL", "ECE", "confidence")),
        _by_number("NLL of MoLA is smaller with 5 components than with 1", "MoLA", "NLL", 1, 5),
        _by_number("NLL of MoLA is smaller with 10 components than with 5", "MoLA", "NLL", 5, 10),
        _by_number("NLL of DE is smaller with 10 components than with 5", "DE", "NLL", 5, 10),
        Claim("figure 10", "the second component gains more NLL than the sixth to the tenth", _power_law),
        lower("figure 10", shifted, "NLL", "MoLA", "DE"),
        lower("figure 10", shifted, "ECE", "MoLA", "DE"),
        higher("figure 10", shifted, "accuracy", "DE", "MoLA", "by a very small margin", margin=0.005),
    ]


def _variant_claims() -> list[Claim]:
    condition, item = "variants: corrupted, shifted", "figure 6, H.1"
    names = [f"{structure}, {link}" for structure in ("diag", "kron", "full") for link in ("mc", "probit")]

    def extreme(text: str, method: str, measure: str, sign: int, margin: float = 0.0, theirs: str = "") -> Claim:
        def statistic(scores: Scores) -> float:
            own = scores[condition, method, measure]
            return margin + min(sign * (scores[condition, other, measure] - own) for other in names if other != method)

        return Claim(item, text + (f", but for {margin:g}" if margin else ""), statistic, theirs)

    return [
        extreme("diag, probit has the lowest accuracy of the six", "diag, probit", "accuracy", 1),
        extreme("diag, probit has the largest Brier score", "diag, probit", "Brier", -1),
        extreme("full, mc has the smallest NLL", "full, mc", "NLL", 1, 0.05, "by a small margin"),
        extreme("full, mc has the smallest Brier score", "full, mc", "Brier", 1),
        lower(item, condition, "ECE", "full, mc", "kron, mc", margin=0.01),
        lower("figure 3, B.2", condition, "NLL", "kron, probit", "full, probit", margin=0.1,
              theirs="the difference is relatively small"),
        lower("figure 3, B.2", condition, "NLL", "kron, probit", "kron, mc", margin=0.1,
              theirs="probit is competitive"),
    ]  # fmt: skip


def _cost(text: str, measure: str, cheap: str, dear: str, factor: float, theirs: str) -> Claim:
    """By how much a ratio of costs exceeds a factor."""

    def statistic(scores: Scores) -> float:
        return scores["cost", dear, measure] / scores["cost", cheap, measure] - factor

    return Claim("table 2", text, statistic, theirs)


COSTS = [
    _cost("inference of SWAG / LLLA, less 10", "inference", "LLLA", "SWAG", 10, "1311 s / 42.6 s = 31"),
    _cost("inference of MSWAG / MoLA, less 10", "inference", "MoLA", "MSWAG", 10, "6718 s / 156 s = 43"),
    _cost("prediction of SWAG / MAP, less 10", "prediction", "MAP", "SWAG", 10, "21.9 s / 1.17 s = 19"),
    _cost("prediction of MAP / LLLA, less 0.8", "prediction", "LLLA", "MAP", 0.8, "1.17 s / 1.14 s"),
    _cost("prediction of DE / MoLA, less 0.8", "prediction", "MoLA", "DE", 0.8, "3.80 s / 4.04 s"),
    _cost("memory of SWAG / LLLA, less 5", "memory", "LLLA", "SWAG", 5, "440 MB / 12 MB"),
    _cost("memory of MSWAG / MoLA, less 5", "memory", "MoLA", "MSWAG", 5, "2200 MB / 58 MB"),
    _cost("memory of DE / MoLA, less 0.8", "memory", "MoLA", "DE", 0.8, "55 MB / 58 MB"),
]


def _mimo_claims() -> list[Claim]:
    item, condition = "figure 4, B.2", "corrupted, shifted"
    pairs = [("NLL", "MIMO"), ("ECE", "MIMO"), ("NLL", "MAP"), ("NLL", "SWAG"), ("NLL", "LLLA"), ("ECE", "LLLA")]
    return [lower(item, condition, measure, "MIMO-MoLA", worse) for measure, worse in pairs]


def _below_the_bound(scores: Scores) -> float:
    return 1.0 if scores["corrupted, far", "MoLA", "least distance to the bound"] >= 0 else -1.0


THEORY = [
    Claim("theorem 2", "at 1000 x no confidence of MoLA is above its bound (1 where none is)", _below_the_bound),
    lower("section 1, figure 1", "corrupted, far", "confidence", "MoLA", "MAP"),
    lower("section 1, figure 1", "corrupted, far", "confidence", "MoLA", "DE"),
    Claim(
        "equation 10, B.2",
        "corrupted: the standard deviation of the log evidences is below 5 % of their mean",
        lambda scores: 0.05 - scores["corrupted, weights", "MoLA", "spread of log evidences"],
        "the marginal likelihoods only vary minimally",
    ),
    Claim(
        "equation 10, B.2",
        "corrupted: no component has more than half of the weight by the evidence",
        lambda scores: 0.5 - scores["corrupted, weights", "MoLA", "largest weight"],
        "leads to uniform weights",
    ),
]

_CLAIMS: list[Claim] = [
    _premise("corrupted", "97.2 with 94.8 % accuracy"),
    _premise("rotated", "99.4 with 99.2 % accuracy"),
    *_of_ood("corrupted"),
    _keeps_confidence("corrupted", "93.8 with 94.8 % accuracy of MAP"),
    *_of_ood("rotated"),
    _keeps_confidence("rotated", "98.3 with 99.2 % accuracy of MAP"),
    *_of_shift("corrupted", [
        *((measure, "MoLA", other) for measure in ("NLL", "ECE", "Brier") for other in OTHERS),
        ("NLL", "LLLA", "MAP"), ("NLL", "LLLA", "SWAG"), ("NLL", "LLLA", "DE"), ("ECE", "LLLA", "DE"),
        ("NLL", "LLLA", "MSWAG"), ("NLL", "DE", "MAP"), ("NLL", "MSWAG", "DE"),
    ]),
    _every_severity("NLL"),
    _every_severity("ECE"),
    Claim("D.2", "corrupted: the lead of MoLA over MSWAG in NLL grows with the severity", _multi_swag_falls_behind),
    higher("H.3", "corrupted, shifted", "accuracy", "MoLA", "MSWAG", margin=0.01),
    *_of_shift("rotated", [
        *((measure, "MoLA", other) for measure in ("NLL", "ECE", "Brier", "confidence") for other in OTHERS),
        ("NLL", "LLLA", "DE"), ("NLL", "LLLA", "MAP"),
    ]),
    higher("H.2", "rotated, shifted", "accuracy", "MSWAG", "MoLA", "by a small margin", margin=0.005),
    *_mimo_claims(),
    *_variant_claims(),
    *_number_claims(),
    *COSTS,
    *THEORY,
]  # fmt: skip

# Why a claim fails, or does not show, with the numbers behind it; by the claims' texts.

SHIFTED = "corrupted, shifted"


def _numbers(why: str, condition: str, measure: str, methods: Sequence[str]) -> Callable[[Records], str]:
    """A sentence, and what methods have by a measure."""

    def note(records: Records) -> str:
        found = ", ".join(f"{method} {records.estimate(condition, method, measure)}" for method in methods)
        return f"{why} {condition}: {measure} of {found}."

    return note


_ACCURACY = _numbers(
    "Five networks are more accurate under corruption than one, which no posterior of one network mends.",
    SHIFTED, "accuracy", ("MAP", "LLLA", "DE", "MSWAG"),
)  # fmt: skip
_MSWAG = _numbers(
    "The paper says both: only MoLA and MultiSWAG are better (D.2), only MoLA is (H.3). Here five networks are more "
    "accurate under corruption than one.", SHIFTED, "accuracy", ("LLLA", "MSWAG", "MoLA"),
)  # fmt: skip
_MORE_NETWORKS = _numbers(
    "MSWAG averages 150 networks, of other weights than the five, and is a little more accurate under corruption.",
    SHIFTED, "accuracy", ("DE", "MSWAG", "MoLA"),
)  # fmt: skip
_TEN = _numbers(
    "Ten networks are more accurate under corruption than one, which no posterior of one network mends.",
    "K = 10: corrupted, shifted", "accuracy", ("DE", "MoLA"),
)  # fmt: skip
_UNDERCONFIDENT = _numbers(
    "The threshold is the accuracy of MAP, above which the mixture is, so that it is under-confident.",
    "corrupted, test", "confidence", ("MAP", "DE", "MSWAG", "MoLA"),
)  # fmt: skip
_MIMO = _numbers(
    "MIMO is not over-confident by itself, so that its posterior has little to mend.",
    "corrupted, test", "confidence", ("MIMO", "MIMO-MoLA"),
)  # fmt: skip
_EVIDENCE = _numbers(
    "Of N data log evidences differ by nats that grow with N, and weights by their exponentials.",
    "corrupted, weights", "spread of log evidences", ("MoLA",),
)  # fmt: skip
CAUSES: dict[str, tuple[Cause, Callable[[Records], str]]] = {
    "corrupted, shifted: NLL of LLLA < DE": ("baseline", _ACCURACY),
    "corrupted, shifted: ECE of LLLA < DE": ("baseline", _ACCURACY),
    "corrupted, shifted: NLL of LLLA < MSWAG": ("baseline", _MSWAG),
    "corrupted, shifted: NLL of LLLA < DE of ten": ("baseline", _TEN),
    "corrupted, shifted: ECE of LLLA < DE of ten": ("baseline", _TEN),
    "corrupted, shifted: confidence of LLLA < DE of ten": ("baseline", _TEN),
    "corrupted, shifted: Brier of MoLA < MSWAG": ("baseline", _MORE_NETWORKS),
    "corrupted, shifted: ECE of MoLA < DE": ("baseline", _UNDERCONFIDENT),
    "corrupted, shifted: ECE of MoLA < MSWAG": ("baseline", _UNDERCONFIDENT),
    _every_severity("ECE").text: ("baseline", _UNDERCONFIDENT),
    "K = 10: corrupted, shifted: ECE of MoLA < DE": ("baseline", _UNDERCONFIDENT),
    "corrupted, shifted: ECE of MIMO-MoLA < MIMO": ("premise", _MIMO),
    "corrupted: the standard deviation of the log evidences is below 5 % of their mean": ("real", _EVIDENCE),
    "corrupted: no component has more than half of the weight by the evidence": ("real", _EVIDENCE),
}


def claims(records: Records) -> list[Claim]:
    """All of them, those that do not hold with their cause."""
    found = []
    for claim in _CLAIMS:
        known = CAUSES.get(claim.text)
        named = replace(claim, cause=known[0], note=known[1]) if known else claim
        found.append(named if check(claim, records).verdict in ("fails", "undecided") else claim)
    return found
