"""Predictive uncertainty of MAP, ensembles, variational Bayes, HMC, SWAG and Laplace approximations on shifted images.

Daxberger et al. (2021, "Laplace Redux"), section 4.2: tables 1, 3 and 4, figures 4 and 9. Their MNIST is here 200 noisy
8×8 digits of seven classes, LeNet a CNN of 3,600 weights; their CIFAR-10 is 700 coloured digits before a background,
the Wide ResNet a CNN with batch normalisation, trained by SGD. Test digits are rotated, coloured ones noisy and
blurred; other data are digits of the three classes left out and images that are no digits. So few data make the
MAP of both overconfident, as the paper's are: the mean confidence on test data is above the accuracy.

As in the paper: MAP with weight decay 5e-4, a cosine schedule and 100 epochs; an ensemble of five; variational Bayes
with flipout, that prior and KL × 0.1; SWAG with 40 iterates, 30 samples, its learning rate from the paper's grid by the
threshold on confidence; LA (last layer, Kronecker GGN, probit) and LA* (last layer, full empirical Fisher, probit),
both with the prior precision of the largest evidence, which needs no validation data (the paper does not say how its
own was chosen); besides, in no claim, LA with that of the smallest NLL on validation data. What differs besides the
data: HMC is exact HMC with five chains instead of the cyclical stochastic one, on a network of 199 weights, for which
all methods are run once more; batches are smaller, so that 100 epochs are some 1,000 steps; variational Bayes is
always trained by Adam.

    python papers/redux.py            # 5 seeds
    python papers/redux.py --small    # one seed, few data and epochs, to try it out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from torch import Tensor, nn
from torch.nn import functional as F

from laplace.plotting import COLOURS, new_figure
from protocol.baselines.hmc import HmcSettings
from protocol.baselines.swag import SwagSettings
from protocol.claims import Claim, higher, lower
from protocol.measures import classification, detection
from protocol.methods import BY_VALIDATION, MethodSettings, fit_all
from protocol.networks import cnn, cnn_with_batch_norm, mlp
from protocol.options import Options, parse
from protocol.records import Records, Scores
from protocol.report import Table, finish, table
from protocol.shifts import N_CLASSES, ShiftedTask, coloured_digits, rotated_digits
from protocol.training import Training

PAPER = "Daxberger et al. (2021), 4.2"
TASKS = ("digits", "coloured", "small network")
SHIFT_MEASURES = ("NLL", "ECE", "Brier", "accuracy")


ADAM = Training(100, 16, 3e-3)
SGD = Training(100, 64, 1e-1, momentum=0.9)
ADAM_FAST = Training(100, 64, 1e-2)
ADAM_SMALL = Training(100, 16, 1e-2)
SWAG = SwagSettings()
HMC = HmcSettings(200, 200, 40)


@dataclass(frozen=True)
class Settings:
    """How large everything is; chosen on other seeds than those of the report.

    Attributes:
        n_digits: Training data of the first task.
        n_coloured: Of the second.
        n_small: Of the third.
        noise: Standard deviation of the noise on all images of the first task; a white pixel is 1.
        noise_small: On those of the third.
        n_channels: Of the first convolution.
        n_hidden: Units of the small network.
        adam: Training of the first task.
        sgd: Of the second.
        adam_variational: Of variational Bayes in the second.
        adam_small: Of the third.
        swag: Iterates of SWAG.
        hmc: Chains.
        n_samples: Networks of variational Bayes and SWAG.
        n_members: Of the ensemble, and chains of HMC.
    """

    n_digits: int = 200
    n_coloured: int = 700
    n_small: int = 150
    noise: float = 0.3
    noise_small: float = 0.2
    n_channels: int = 8
    n_hidden: int = 8
    adam: Training = ADAM
    sgd: Training = SGD
    adam_variational: Training = ADAM_FAST
    adam_small: Training = ADAM_SMALL
    swag: SwagSettings = SWAG
    hmc: HmcSettings = HMC
    n_samples: int = 30
    n_members: int = 5


SMALL = Settings(
    40, 40, 40, 0.3, 0.2, 2, 3, Training(1, 20), Training(1, 20, 1e-1, momentum=0.9), Training(1, 20),
    Training(1, 20), SwagSettings(n_snapshots=2, rank=2), HmcSettings(4, 4, 2), 2, 2,
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
    first = rotated_digits(s.n_digits, s.noise, seed, path)
    second = coloured_digits(s.n_coloured, 0.0, seed, path)
    third = rotated_digits(s.n_small, s.noise_small, seed, path).mapped(lambda x: F.adaptive_avg_pool2d(x, 4))
    size = first.parts.train.x.shape[-1]

    def how(training: Training, variational: Training, hmc: HmcSettings | None = None) -> MethodSettings:
        swag = replace(s.swag, batch_size=training.batch_size)
        return MethodSettings(training, variational, swag=swag, hmc=hmc, n_samples=s.n_samples, n_members=s.n_members)

    return {
        "digits": Setup(first, lambda k: cnn(N_CLASSES, k, s.n_channels, size=size), how(s.adam, s.adam)),
        "coloured": Setup(
            second, lambda k: cnn_with_batch_norm(N_CLASSES, k, s.n_channels), how(s.sgd, s.adam_variational)
        ),
        "small network": Setup(
            third, lambda k: mlp((16, s.n_hidden, N_CLASSES), k, nn.Tanh), how(s.adam_small, s.adam_small, s.hmc)
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
    levels = {
        level: mean_of([classification(predict(x), test.y) for x in kinds]) for level, kinds in task.shifted.items()
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
    for name, setup in setups(settings, path, seed).items():
        fitted = fit_all(setup.make, setup.task.parts, setup.how, seed)
        for method, predict in fitted.predict.items():
            score(name, setup.task, method, predict, scores)
        for method, numbers in fitted.checks.items():
            scores.add(f"{name}, choices", method, numbers)
    return scores


# What the paper claims.

METHODS: tuple[str, ...] = ("MAP", "DE", "VB", "HMC", "SWAG", "LA", "LA*")
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
ORDERS = [(la, other) for la in ("LA", "LA*") for other in ("MAP", "VB", "HMC", "SWAG")] + [
    ("LA*", "LA"), ("LA*", "DE"), ("DE", "MAP"), ("DE", "LA"), ("DE", "LA*")
]  # fmt: skip


def claims_in_distribution(task: str) -> list[Claim]:
    """Figure 4 (a): LA is calibrated best and keeps MAP's accuracy, unlike VB and CSGHMC."""
    others = ("MAP", "DE", "VB", "SWAG") if task != "small network" else ("MAP", "HMC")
    less_accurate = "VB" if task != "small network" else "HMC"
    return [
        *(lower("figure 4a", task, "ECE", "LA", other) for other in others),
        higher("figure 4a", task, "accuracy", "LA", "MAP", margin=0.005),
        higher("figure 4a", task, "accuracy", "MAP", less_accurate),
        lower("figure 4a", task, "ECE", "LA", "LA*"),
    ]


def claims_of_shifts(task: str) -> list[Claim]:
    """Figures 4 (b, c) and 9: all Bayesian methods improve on MAP, LA* most."""
    condition = f"{task}, shifted"
    others = ("DE", "VB", "SWAG", "LA", "LA*") if task != "small network" else ("HMC", "LA", "LA*")
    claims = []
    for item, measure in (("figure 4b", "NLL"), ("figure 4c", "ECE"), ("figure 9", "Brier")):
        claims += [lower(item, condition, measure, other, "MAP") for other in others]
        if measure != "Brier":
            claims += [lower(item, condition, measure, "LA*", other) for other in others if other != "LA*"]
    return claims


def claims_of_others(task: str) -> list[Claim]:
    """Table 1, where the paper's means have the order: HMC on the small network, after MNIST."""
    small = task == "small network"
    claims = []
    for measure, numbers in TABLE_1["digits" if small else task].items():
        paper = dict(zip(METHODS, numbers, strict=True))
        for better, worse in ORDERS:
            a, b = paper[better], paper[worse]
            if ("HMC" in (better, worse)) != small or not (a < b if measure == "confidence" else a > b):
                continue
            make, sign = (lower, "<") if measure == "confidence" else (higher, ">")
            claims.append(make("table 1", f"{task}, others", measure, better, worse, f"{a} {sign} {b}"))
    return claims


def claims() -> list[Claim]:
    """All that are checked."""
    kinds = (claims_in_distribution, claims_of_shifts, claims_of_others)
    made = [claim for task in TASKS for kind in kinds for claim in kind(task)]
    return [replace(claim, note=NOTES.get(claim.text, "")) for claim in made]


_EVIDENCE = (
    "From so few data the evidence chooses a small prior precision, and the probit predictions are less confident than "
    "they are accurate. With that of the smallest NLL on validation data, 16 times as large on digits and 54 times on "
    "coloured ones, the ECE is 0.03 (last rows of the tables)."
)
_FISHER = (
    "The network fits its training data, so that the gradients of the loss nearly vanish there, and with them the "
    "empirical Fisher: on seeds 100 and 101 its trace was 1.3 and 1.1, that of the GGN 199 and 190. What remains is a "
    "prior of precision 0.1, and a confidence of 0.28 on test data."
)
NOTES = {
    **{f"{task}: ECE of LA < {other}": _EVIDENCE for task in ("digits", "coloured") for other in ("MAP", "DE", "SWAG")},
    **{f"{task}, others: confidence of DE < LA": _EVIDENCE for task in ("digits", "coloured")},
    "digits: ECE of LA < VB": _EVIDENCE,
    **{f"coloured, shifted: NLL of LA* < {other}": _FISHER for other in ("MAP", "DE", "VB", "SWAG", "LA")},
    **{f"coloured, shifted: ECE of LA* < {other}": _FISHER for other in ("MAP", "DE", "VB", "SWAG", "LA")},
    "coloured, shifted: Brier of LA* < MAP": _FISHER,
}
"""Why claims fail, written after the run."""


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
    colours = dict(zip((*METHODS, BY_VALIDATION), ("0.2", *COLOURS, "#E69F00", "#56B4E9", "0.7"), strict=True))
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


PROTOCOL = (
    "Theirs: 100 epochs with weight decay 5e-4 and a cosine schedule, five members, flipout with KL × 0.1, SWAG with "
    "40 iterates and 30 samples, LA and LA*, whose prior precision is here that of the largest evidence. Different: "
    "200 noisy digits and 700 coloured ones of seven classes for MNIST and CIFAR-10, CNNs for LeNet and the Wide "
    "ResNet (with batch normalisation and SGD for the latter), exact HMC with five chains on a network of 199 weights, "
    "for which all methods are run once more on 150 digits of 4 × 4 pixels."
)
MISSING = (
    ("CSGHMC", "exact HMC on the small network stands in for it"),
    ("figure 5, table 5", "in `cost.py`"),
)


if __name__ == "__main__":
    main(parse(__doc__, "redux"))
