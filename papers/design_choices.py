"""Which weights, structure, curvature, tuning and link of a Laplace approximation: all combinations on small networks.

Daxberger et al. (2021, "Laplace Redux"), section 4.1 and appendix C.1: figures 3 and 8, and table 2. A CNN and an MLP
of some 1,000 weights learn 5,000 noisy glyphs of seven digits, with and without augmentation (images rotated by up to
ten degrees); out of distribution are digits of the three classes left out and images that are no digits. After training
("post-hoc", δ by the evidence): all weights or the last layer × diagonal, Kronecker or full × GGN or empirical Fisher.
During training ("online", one δ per tensor): all weights × the three structures, GGN, and the last layer, Kronecker.
Each predicts by the network alone ("map"), probit, Monte Carlo (100 samples of the linearised network's outputs) and
the Laplace bridge.

What differs from the paper: the data (CIFAR-10 for figures 3 and 8, FashionMNIST for table 2), networks small enough
for full curvature of all weights. With augmentation curvature and evidence are those of the data without it. In a
second table are 300 of scikit-learn's digits, on three of the seeds.

    python papers/design_choices.py            # 5 seeds
    python papers/design_choices.py --small    # one seed, few data and epochs, to try it out
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from laplace import Laplace, OnlineLaplace, ParametricLaplace
from laplace.curvature import NativeEF, NativeGGN
from laplace.extensions.plotting import COLOURS, new_figure
from laplace.likelihoods.links import LINKS, softmax
from protocol.choices import (
    LINK_NAMES,
    ONLINE,
    POST_HOC,
    STRUCTURES,
    Configuration,
    StructureName,
    WeightsName,
    kron,
    names,
)
from protocol.claims import Cause, Claim, Premise
from protocol.data import Part, digits, noisy, rotated
from protocol.measures import classification, detection
from protocol.networks import cnn, mlp
from protocol.options import Options, one_of_three, parse
from protocol.records import Records, Scores
from protocol.report import Table, finish, table
from protocol.shifts import N_CLASSES, ShiftedTask, Sizes, digit_glyphs, rotated_digits
from protocol.training import Training, train

PAPER = "Daxberger et al. (2021), 4.1 and C.1"
MEASURES = ("accuracy", "NLL", "ECE", "AUROC")
N_PIXELS = 10
WARP = 0.5
"""How far the glyphs are moved and turned: the networks are small."""


@dataclass(frozen=True)
class Settings:
    """How large everything is; chosen on other seeds than those of the report.

    Attributes:
        size: Pixels per axis of the glyphs; None for scikit-learn's digits.
        n_train: Training data.
        n_test: Test data.
        n_others: Of every other kind of data.
        noise: Standard deviation of the noise on all images; a white pixel is 1.
        n_channels: Of the first convolution.
        n_hidden: Units of the MLP's two layers.
        training: Of all networks; the weight decay is that of the networks that are not trained online.
        n_epochs_burnin: Before the first estimate of the evidence.
        marglik_frequency: Epochs between estimates.
        n_hypersteps: Steps on the prior precisions per estimate.
        n_samples: Of the Monte-Carlo link.
    """

    size: int | None
    n_train: int
    n_test: int
    n_others: int
    noise: float
    n_channels: int
    n_hidden: int
    training: Training
    n_epochs_burnin: int = 10
    marglik_frequency: int = 10
    n_hypersteps: int = 10
    n_samples: int = 100


FULL = Settings(N_PIXELS, 5000, 3000, 500, 0.25, 4, 16, Training(50, 128, 1e-2, 1e-5))
DIGITS = Settings(None, 300, 300, 300, 0.2, 3, 8, Training(60, 16, 1e-2))
SMALL = Settings(8, 40, 40, 40, 0.2, 1, 2, Training(1, 20, 1e-2), 1, 1, 1, 5)


def slightly_rotated(x: Tensor, generator: torch.Generator) -> Tensor:
    """A batch of images rotated by up to ten degrees."""
    return rotated(x, float(torch.rand((), generator=generator) * 20 - 10))


@dataclass(frozen=True)
class Setting:
    """A network, with or without augmentation.

    Attributes:
        name: The condition of the scores.
        make: An untrained network of a seed.
        augment: Of the inputs.
    """

    name: str
    make: Callable[[int], nn.Module]
    augment: Callable[[Tensor, torch.Generator], Tensor] | None


def settings_of_networks(s: Settings, size: int) -> Iterator[Setting]:
    """CNN and MLP, without augmentation and with it."""
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "CNN": lambda seed: cnn(N_CLASSES, seed, s.n_channels, size=size),
        "MLP": lambda seed: mlp((size**2, s.n_hidden, s.n_hidden, N_CLASSES), seed),
    }
    for name, make in kinds.items():
        yield Setting(name, make, None)
        yield Setting(f"{name}, augmented", make, slightly_rotated)


ALL = "four networks"
REAL = "scikit-learn's digits, "
"""Of conditions on them, before the network's name."""
CONDITIONS = tuple(f"{name}{end}" for name in ("CNN", "MLP") for end in ("", ", augmented"))


def post_hoc(model: nn.Module, data: Part, choice: Configuration) -> ParametricLaplace:
    """A posterior at a trained network, with the prior precision of the largest evidence."""
    backend = NativeEF if choice.curvature == "EF" else NativeGGN
    la = Laplace(model, "classification", choice.weights, choice.structure, backend=backend)
    la.fit([(data.x, data.y)])
    la.optimize_hyperparameters()
    return la


def online(setting: Setting, data: Part, choice: Configuration, s: Settings, seed: int) -> ParametricLaplace:
    """A network trained together with its prior precisions, one per tensor."""
    generator = torch.Generator().manual_seed(seed)
    model = setting.make(seed)
    evidence = OnlineLaplace(
        model, [(data.x, data.y)], "classification", choice.structure, subset_of_weights=choice.weights,
        n_epochs_burnin=s.n_epochs_burnin, marglik_frequency=s.marglik_frequency, n_hypersteps=s.n_hypersteps,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), s.training.rate, foreach=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.training.n_epochs)
    model.train()
    for epoch in range(1, s.training.n_epochs + 1):
        for x, y in data.batches(s.training.batch_size, generator):
            optimizer.zero_grad()
            evidence.loss(model(x if setting.augment is None else setting.augment(x, generator)), y).backward()
            optimizer.step()
        evidence.step(epoch)
        schedule.step()
    model.eval()
    return evidence.finish()


def probabilities(mean: Tensor, covariance: Tensor, link: str, n_samples: int, seed: int) -> Tensor:
    """The predictive distribution of Gaussian outputs `[B, C]`, `[B, C, C]`, by a link."""
    if link == "map":
        return softmax(mean)
    return LINKS[link].apply(mean, covariance, softmax, n_samples, torch.Generator().manual_seed(seed))


def score(
    la: ParametricLaplace,
    choice: Configuration,
    condition: str,
    task: ShiftedTask,
    s: Settings,
    seed: int,
    scores: Scores,
) -> None:
    """All numbers of a posterior, one method per link; the outputs' moments are computed once."""
    test = task.parts.test
    sets = {"test": test.x, **task.others}
    moments = {name: la.predictive_moments(x) for name, x in sets.items()}
    for link in LINK_NAMES:
        p = {name: probabilities(*moment, link, s.n_samples, seed) for name, moment in moments.items()}
        found = classification(p["test"], test.y)
        apart = [detection(p["test"], p[name])["AUROC"] for name in task.others]
        scores.add(condition, choice.method(link), {**found, "AUROC": fmean(apart)})


def prediction_time(la: ParametricLaplace, task: ShiftedTask, n_samples: int) -> float:
    """Milliseconds of processor time per datum of Monte-Carlo predictions, the least of three."""
    x, times = task.parts.test.x, []
    for _ in range(3):
        start = time.process_time()
        la(x, link_approx="mc", n_samples=n_samples, generator=torch.Generator().manual_seed(0))
        times.append(time.process_time() - start)
    return 1000 * min(times) / len(x)


def make_task(s: Settings, seed: int, path: Path | None) -> ShiftedTask:
    """Noisy digits of seven classes."""
    sizes = Sizes(s.n_train, s.n_train, s.n_test, s.n_others)
    if s.size is None or path is not None:
        data = digits(path)
        data = Part(noisy(data.x, s.noise, torch.Generator().manual_seed(seed)), data.y)
    else:
        data = digit_glyphs(sizes, s.size, s.noise, seed, WARP)
    return rotated_digits(data, sizes, seed)


def add_scores(scores: Scores, prefix: str, s: Settings, path: Path | None, seed: int) -> None:
    """All numbers of a kind of images."""
    task = make_task(s, seed, path)
    data, test, of_map = task.parts.train, task.parts.test, []
    for setting in settings_of_networks(s, data.x.shape[-1]):
        condition = prefix + setting.name
        model = train(setting.make(seed), data, s.training, seed, setting.augment)
        with torch.no_grad():
            found = classification(softmax(model(test.x)), test.y)
            of_map.append(found | {"training loss": classification(softmax(model(data.x)), data.y)["NLL"]})
        for choice in POST_HOC:
            score(post_hoc(model, data, choice), choice, condition, task, s, seed, scores)
        for choice in ONLINE:
            la = online(setting, data, choice, s, seed)
            score(la, choice, condition, task, s, seed, scores)
            spent = {"milliseconds": prediction_time(la, task, s.n_samples)}
            scores.add(condition, choice.method("mc"), spent)
    scores.add(f"{prefix}{ALL}", "MAP", {measure: fmean(row[measure] for row in of_map) for measure in of_map[0]})


def one_seed(every: dict[str, Settings], path: Path | None, seed: int) -> Scores:
    """All numbers of a seed: of glyphs, and on some seeds of scikit-learn's digits."""
    scores = Scores()
    for prefix, s in every.items():
        if not prefix or one_of_three(seed):
            add_scores(scores, prefix, s, path, seed)
    return scores


# What the paper claims.


def average(scores: Scores, conditions: Iterable[str], methods: Sequence[str], measure: str) -> float:
    """The mean of a measure over conditions and methods."""
    return fmean(scores[condition, method, measure] for condition in conditions for method in methods)


Note = str | Callable[[Records], str]


def better(
    item: str, text: str, measure: str, first: Sequence[str], second: Sequence[str],
    conditions: Sequence[str] = CONDITIONS, theirs: str = "", margin: float = 0.0, note: Note = "",
    cause: Cause = "",
) -> Claim:  # fmt: skip
    """The first methods have a better mean than the second, or one that is worse by less than the margin."""
    sign = 1 if measure in ("accuracy", "AUROC") else -1

    def statistic(scores: Scores) -> float:
        difference = average(scores, conditions, first, measure) - average(scores, conditions, second, measure)
        return sign * difference + margin

    return Claim(item, f"{measure}: {text}", statistic, theirs, note, cause)


PLAIN, AUGMENTED = CONDITIONS[::2], CONDITIONS[1::2]


def shared(records: Records) -> str:
    """Why richer covariances have the worse NLL by probit."""

    def both(tuning: str, weights: WeightsName, structure: StructureName) -> str:
        of_links = []
        for link in ("probit", "mc"):
            methods = names((tuning,), (weights,), (structure,), ("GGN",), (link,))
            found = records.of(lambda scores, methods=methods: average(scores, CONDITIONS, methods, "NLL"))
            of_links.append(f"{found.mean:.3f}")
        return f"{tuning} {weights.replace('_', ' ')}, {structure}, {' and '.join(of_links)}"

    shown = [both("post-hoc", "last_layer", each) for each in STRUCTURES]
    shown += [both("post-hoc", "all", each) for each in STRUCTURES]
    shown += [both("online", "all", "kron"), both("online", "last_layer", "kron")]
    return (
        "A number added to all outputs changes no probability. The data do not determine it, so that its variance is "
        "the prior's, which only diagonal posteriors take for determined. A softmax does not see it, the probit "
        f"approximation counts it. NLL by probit and by Monte Carlo, means over the networks: {'; '.join(shown)}; MAP "
        f"{records.estimate(ALL, 'MAP', 'NLL').mean:.3f}. By Monte Carlo none is far above MAP."
    )


WEIGHTS = (
    "It is the weights, not how δ is tuned: post-hoc posteriors of all weights have nearly the AUROC of online ones in "
    "the tables above, last layers less."
)


def claims() -> list[Claim]:
    """Section 4.1 in its order, then table 2."""
    last, on, on_map = kron("last_layer"), kron("all", tuning="online"), kron("all", "map", "online")
    made = [
        better(
            "figure 3", "post-hoc last layer > post-hoc all weights, less underfitting", "NLL", last, kron("all"),
            note=shared,
        ),
        better("4.1", "online, MAP alone predicts well in distribution: > post-hoc last layer", "NLL", on_map, last),
        better("4.1", "online, probit > MAP alone out of distribution", "AUROC", on, on_map),
        better("4.1", "online, MC > MAP alone out of distribution", "AUROC", kron("all", "mc", "online"), on_map),
    ]  # fmt: skip
    made += [
        better("C.1", "online, all weights > last layer", measure, on, kron("last_layer", tuning="online"), note=note)
        for measure, note in (("NLL", shared), ("AUROC", ""))
    ]
    for measure in ("accuracy", "AUROC"):
        text = "without augmentation online > post-hoc last layer"
        made.append(better("figure 3", text, measure, on, last, PLAIN))
        text, note = "augmented, post-hoc last layer reaches online, up to 0.01", WEIGHTS if measure == "AUROC" else ""
        made.append(better("figure 3", text, measure, last, on, AUGMENTED, margin=0.01, note=note))
    made += [*claims_of_structures(), *claims_of_links(), *claims_of_table_2()]
    return [*(replace(claim, premise=Premise(ALL)) for claim in made), *claims_of_times()]


def claims_of_structures() -> list[Claim]:
    """More expressive covariances are better; the EF is better out of distribution, the GGN within."""
    pairs: tuple[tuple[StructureName, StructureName], ...] = (("kron", "diag"), ("full", "kron"))
    made = []
    for measure, (first, second) in product(("NLL", "AUROC"), pairs):
        methods = [names(structure=(each,), curvature=("GGN",)) for each in (first, second)]
        note = shared if measure == "NLL" else ""
        made.append(better("figure 8a, b", f"{first} > {second}", measure, methods[0], methods[1], note=note))
    ef, ggn = names(curvature=("EF",)), names(curvature=("GGN",))
    return [
        *made,
        better("4.1", "EF > GGN out of distribution", "AUROC", ef, ggn),
        better("4.1", "GGN > EF in distribution", "NLL", ggn, ef),
    ]


def claims_of_links() -> list[Claim]:
    """Probit is best for the last layer, the bridge typically inferior."""
    probit, bridge = kron("last_layer"), kron("last_layer", "bridge")
    text = "probit > bridge"
    return [
        better("figure 8c, d", text, "NLL", probit, bridge, note=shared),
        better("figure 8c, d", text, "AUROC", probit, bridge),
    ]


CNN = ("CNN",)
TABLE_2 = tuple(names(("online",), ("all",), (structure,), link=("mc",)) for structure in STRUCTURES)


def claims_of_table_2() -> list[Claim]:
    """Online Laplace on the CNN without augmentation, Monte-Carlo predictions."""
    diag, middle, full = TABLE_2
    return [
        better("table 2", "kron > diag", "NLL", middle, diag, CNN, "0.282 < 0.302"),
        better("table 2", "kron as full, up to 0.02", "NLL", middle, full, CNN, "0.282, 0.285", margin=0.02),
        better("table 2", "kron as full, up to 0.01", "accuracy", middle, full, CNN, "0.899, 0.898", margin=0.01),
        better("table 2", "full > kron", "AUROC", full, middle, CNN, "0.876 > 0.836"),
        better("table 2", "full > diag", "AUROC", full, diag, CNN, "0.876 > 0.832"),
    ]


def claims_of_times() -> list[Claim]:
    """Of predictions in table 2, which suppose nothing of the network."""
    diag, middle, full = TABLE_2

    def faster(scores: Scores) -> float:
        return 1.5 - average(scores, CNN, middle, "milliseconds") / average(scores, CNN, diag, "milliseconds")

    return [
        Claim("table 2", "prediction time: kron < 1.5 diag", faster, "30.6 < 1.5 · 29.5"),
        better("table 2", "kron < full", "milliseconds", middle, full, CNN, "30.6 < 62.8"),
    ]


def select(records: Records, condition: str, title: str, methods: Sequence[str], measures: Sequence[str]) -> Table:
    """Some methods of a condition."""
    rows = tuple((m, *(str(records.estimate(condition, m, measure)) for measure in measures)) for m in methods)
    return Table(title, ("method", *measures), rows)


def tables(records: Records) -> list[Table]:
    """MAP, structures by probit in every condition, links of two posteriors, table 2, and scikit-learn's digits."""
    made = [table(records, ALL, "MAP, mean over the four networks")]
    methods = names() + names(("online",)) + names(("online",), link=("map",))
    made += [select(records, each, f"{each} (figures 3, 8a, 8b)", methods, MEASURES) for each in CONDITIONS]
    posteriors: tuple[tuple[WeightsName, str], ...] = (
        ("last_layer", "post-hoc"), ("all", "post-hoc"), ("all", "online")
    )  # fmt: skip
    links = [name for weights, tuning in posteriors for link in LINK_NAMES for name in kron(weights, link, tuning)]
    made.append(select(records, "CNN", "CNN, links (figure 8c, d)", links, MEASURES))
    of_table_2 = [name for each in TABLE_2 for name in each]
    made.append(
        select(records, "CNN", "table 2: CNN, online, MC", of_table_2, ("NLL", "accuracy", "AUROC", "milliseconds"))
    )
    if (f"{REAL}{ALL}", "MAP", "NLL") in records:
        made.append(table(records, f"{REAL}{ALL}", f"{REAL}MAP, mean over the four networks"))
        made.append(table_of_digits(records, methods))
    return made


def table_of_digits(records: Records, methods: Sequence[str]) -> Table:
    """Structures by probit on scikit-learn's digits, means over the four networks."""
    conditions = [f"{REAL}{name}" for name in CONDITIONS]

    def cell(method: str, measure: str) -> str:
        return str(records.of(lambda scores: average(scores, conditions, [method], measure)))

    rows = tuple((method, *(cell(method, measure) for measure in MEASURES)) for method in methods)
    return Table(f"{REAL}mean over the four networks", ("method", *MEASURES), rows)


def draw(records: Records, output: Path) -> None:
    """Figure 8: accuracy against AUROC, a dot per posterior and link; colours are structures, links, or weights."""
    figure, axes = new_figure(n_columns=len(CONDITIONS), n_rows=2, width=3.4, height=2.8)
    for row, parts in enumerate((STRUCTURES, LINK_NAMES)):
        for column, condition in enumerate(CONDITIONS):
            panel = axes[row * len(CONDITIONS) + column]
            for part, colour in zip(parts, COLOURS, strict=False):
                for tuning, weights, marker in (
                    ("post-hoc", "all", "o"), ("post-hoc", "last layer", "^"), ("online", "all", "s")
                ):  # fmt: skip
                    chosen = [
                        m for m in records.methods(condition)
                        if m.startswith(f"{tuning}, {weights}") and part in m.split(", ")
                    ]  # fmt: skip
                    points = [[records.estimate(condition, m, measure).mean for m in chosen]
                              for measure in ("accuracy", "AUROC")]  # fmt: skip
                    panel.plot(*points, marker, color=colour, ms=5, alpha=0.6, label=f"{part}, {tuning} {weights}")
            panel.set(xlabel="accuracy", ylabel="AUROC", title=condition)
        axes[row * len(CONDITIONS)].legend(frameon=False, fontsize=5)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=70)


PROTOCOL = (
    "Theirs: weights × structure × curvature × tuning × link, networks with and without augmentation, δ by the "
    "evidence, online Laplace of all weights only. Different: a CNN of 983 weights and an MLP of 2,007, so that full "
    "curvature of all of them is affordable, on 5,000 noisy glyphs of seven digits, 10 × 10 pixels, rotated by up to "
    "ten degrees as augmentation; 3,000 for tests, 500 of every kind of other data. The noise was chosen on seeds from "
    "100 on so that MAP is over-confident. In a last table are 300 of scikit-learn's digits, on three seeds. A claim "
    "is of means over the four networks where it names none, and over all posteriors with the choice that it names: of "
    "the GGN where it is about structures; “>” means better, of the NLL too."
)
MISSING = (("functional (GP) posteriors and low rank", "in other scripts; the paper's figure has none either"),)


def main(options: Options) -> None:
    """Runs everything.

    Args:
        options: Of the command line.
    """
    every = {"": SMALL} if options.small else {"": FULL, REAL: DIGITS}
    records = options.run(every, lambda seed: one_seed(every, options.data, seed))
    draw(records, options.output)
    finish(
        options, records, script="design_choices", paper=PAPER, protocol=PROTOCOL, tables=tables(records),
        claims=claims(), missing=MISSING,
    )  # fmt: skip


if __name__ == "__main__":
    main(parse(__doc__, "design_choices"))
