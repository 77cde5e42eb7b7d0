"""What uncertainty looks like in the plane: predictives of networks with one, two and three layers on two bananas.

Appendix B.2 of Immer et al. (2021), figures 4 and B.3 to B.5: 265 points in the plane, tanh networks with 50 units in
every hidden layer, ten prior precisions chosen on 265 other points (of MAP for all Laplace posteriors, of mean-field
variational inference for itself). For the full and diagonal Laplace-GGN posteriors, sampled weights ("nn"), the
linearised network ("GLM") and, with two layers, its variational refinement: mean, standard deviation, aleatoric and
epistemic part (equation B.1) on a grid over [−4, 4]². The paper's data set, "banana", is read from a .csv or .npz
(`--data`); else `make_moons` gives two bananas that overlap.

    python papers/banana.py            # 7 seeds
    python papers/banana.py --small    # small networks and few points, to try it out
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.extensions.plotting import COLOURS, new_figure
from laplace.metrics import nll
from protocol.baselines.mean_field import MeanField, mean_field
from protocol.claims import Claim, lower
from protocol.data import Part, Split, read
from protocol.measures import SMALLEST, class_probabilities
from protocol.options import parse
from protocol.records import Scores
from protocol.report import Table, finish, table
from protocol.stacked import Steps, map_networks, sizes_of

REACH = 4.0
SPREAD = 1.5
NOISE = 0.3
N_LEVELS = 10
MAPS = ("mean", "standard deviation", "aleatoric", "epistemic")
PROTOCOL = """Two bananas by `make_moons` with noise 0.3 in place of the data set "banana" (`--data` takes it): 265
points for training, 265 for validation, 500 for tests. Tanh networks with 50 units per hidden layer and prior
precisions from grids of ten, 3,000 steps of Adam on all data and 1,000 samples are the paper's; maps have 30 × 30
points (100 × 100). "far" are those more than 1 from every training point, "near" the others. "std" is the mean standard
deviation of y. Mean-field VI ("MFVI") starts at standard deviations of 0.05, which the paper leaves open; with three
layers "MFVI, narrow" has 5 units per layer."""
UNDERFITS = (
    "Mean-field VI underfits here from two layers on, so that it is nowhere confident. It is no matter of training: on "
    "a tuning seed smaller starts and rates of 0.01 and 0.03 found the same bounds and the same NLL of 0.40, and of "
    "these seeds 1,200 steps in place of 3,000 the same of 0.41 with two layers."
)

SPLIT = (
    "The diagonal refined posterior is overconfident in its aleatoric part alone, a third of that of the full one near "
    "the data; its epistemic part is several times larger."
)


HALF = (
    "With two layers sampled weights predict nearly 1/2 everywhere, whose NLL is log 2 = 0.693; with one they are "
    "less uncertain, as the paper says, but in places surely wrong."
)


@dataclass(frozen=True)
class Settings:
    """How large everything is.

    Attributes:
        n_hidden: Units of each hidden layer.
        n_narrow: The same, of the mean-field network with three layers that the paper shows.
        n_steps: Of full-batch Adam; the rate falls by ten after 80 % and after 93 % of them.
        n_precisions: Prior precisions that are tried.
        n_grid: Points per axis of the maps.
        n_samples: Of weights and outputs.
        n_data: Of the training and the validation set.
        n_test: Of the test set.
    """

    n_hidden: int = 50
    n_narrow: int = 5
    n_steps: int = 3000
    n_precisions: int = 10
    n_grid: int = 30
    n_samples: int = 1000
    n_data: int = 265
    n_test: int = 500


SMALL = Settings(5, 3, 20, 2, 8, 20, 30, 30)


@dataclass(frozen=True)
class Maps:
    """A predictive at B inputs: p(y = 1), and the two parts of its variance, `[B]` each."""

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @classmethod
    def of_samples(cls, p: Tensor) -> Maps:
        """Of samples of p(y = 1), `[S, B]`."""
        return cls(p.mean(0), (p * (1 - p)).mean(0), p.var(0, correction=0))

    def map(self, name: str) -> Tensor:
        """One of `MAPS`."""
        return (self.aleatoric + self.epistemic).sqrt() if name == "standard deviation" else getattr(self, name)

    def __getitem__(self, part: slice) -> Maps:
        return Maps(self.mean[part], self.aleatoric[part], self.epistemic[part])


@dataclass(frozen=True)
class Method:
    """A posterior and how it predicts.

    Attributes:
        structure: Of the curvature.
        pred_type: "nn" or "glm".
        refined: Whether a variational Gaussian of the linearised network takes the posterior's place.
    """

    structure: str
    pred_type: str = "glm"
    refined: bool = False


METHODS = {
    "nn": Method("full", "nn"),
    "nn diag": Method("diag", "nn"),
    "GLM": Method("full"),
    "GLM diag": Method("diag"),
    "GLM refined": Method("full", refined=True),
    "GLM refined diag": Method("diag", refined=True),
}
REFINED_LAYERS = 2
"""The depth whose refinement the paper shows."""


def make_points(settings: Settings, seed: int, path: Path | None) -> Split:
    """Inputs `[N, 2]` with mean 0 and standard deviation 1.5, labels 0 and 1, `[N]`."""
    n = 2 * settings.n_data + settings.n_test
    if path is None:
        x, y = (torch.tensor(each) for each in make_moons(n, noise=NOISE, random_state=seed))
    else:
        data = read(path)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:n]
        x, y = data.x[order].double(), (data.y == data.y.max()).long()[order]
    data = Part(SPREAD * (x - x.mean(0)) / x.std(0), y)
    first = settings.n_data
    return Split(data[:first], data[first : 2 * first], data[2 * first :])


def loss(p: Tensor, data: Part) -> float:
    """Negative log likelihood of labels under p(y = 1) `[B]`."""
    return float(nll(class_probabilities(p.unsqueeze(1)).clamp(SMALLEST, 1), data.y))


def map_model(settings: Settings, data: Split, n_layers: int, seed: int) -> tuple[nn.Module, float]:
    """The MAP network that is best on the validation data, and its prior precision."""
    largest = 0.4 if n_layers == 1 else 2.0
    precisions = torch.linspace(largest / 20, largest, settings.n_precisions).tolist()
    sizes = sizes_of(2, settings.n_hidden, n_layers, 2)
    models = map_networks(sizes, data.train, precisions, Steps(settings.n_steps), seed)
    pairs = list(zip(models, precisions, strict=True))
    return min(pairs, key=lambda pair: loss(map_probability(pair[0], data.validation.x), data.validation))


def map_probability(model: nn.Module, x: Tensor) -> Tensor:
    """p(y = 1 | x) of the network, `[B]`."""
    with torch.no_grad():
        return model(x).sigmoid().squeeze(1)


def variational_network(settings: Settings, data: Split, n_layers: int, n_hidden: int, seed: int) -> MeanField:
    """The mean-field network that is best on the validation data."""
    precisions = torch.logspace(-3, 0, settings.n_precisions).tolist()
    sizes = sizes_of(2, n_hidden, n_layers, 2)
    found = mean_field(sizes, data.train, precisions, Steps(settings.n_steps, 0.1), seed)
    generator = torch.Generator().manual_seed(seed)
    p = found.predict(data.validation.x, settings.n_samples // 5, generator).squeeze(2)
    losses = [loss(each, data.validation) for each in p]
    return found.picked(losses.index(min(losses)))


def posterior(method: Method, model: nn.Module, data: Part, prior_precision: float) -> ParametricLaplace:
    """The posterior of a method."""
    la = Laplace(model, "bernoulli", "all", method.structure, prior_precision=prior_precision)
    loader = [(data.x, data.y.double().unsqueeze(1))]
    la.fit(loader)
    if method.refined:
        la.refine(loader, "variational", tolerance=1e-6)
    return la


def maps(la: ParametricLaplace, method: Method, x: Tensor, n_samples: int, seed: int) -> Maps:
    """The predictive at x. The mean is over samples of f, the parts of "glm" are by quadrature."""
    generator = torch.Generator().manual_seed(seed)
    prediction = la.predict(x, method.pred_type, n_samples=n_samples, link_approx="mc", generator=generator)
    parts = prediction.decomposition
    return Maps(prediction.probabilities.squeeze(1), parts.aleatoric.squeeze(1), parts.epistemic.squeeze(1))


def grid(n_grid: int) -> Tensor:
    """The points of the maps, `[n_grid², 2]`, with the first coordinate slowest."""
    line = torch.linspace(-REACH, REACH, n_grid, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


def predictives(settings: Settings, data: Split, n_layers: int, x: Tensor, seed: int) -> dict[str, Maps]:
    """The predictives of all methods with a number of hidden layers."""
    model, delta = map_model(settings, data, n_layers, seed)
    p = map_probability(model, x)
    found = {"MAP": Maps(p, p * (1 - p), torch.zeros_like(p))}
    widths = {"MFVI": settings.n_hidden}
    if n_layers > REFINED_LAYERS:
        widths[NARROW] = settings.n_narrow
    for name, width in widths.items():
        q = variational_network(settings, data, n_layers, width, seed)
        samples = q.samples(x, settings.n_samples, torch.Generator().manual_seed(seed))
        found[name] = Maps.of_samples(samples[:, 0, :, 0].double())
    posteriors: dict[tuple[str, bool], ParametricLaplace] = {}
    for name, method in METHODS.items():
        if method.refined and n_layers != REFINED_LAYERS:
            continue
        key = (method.structure, method.refined)
        if key not in posteriors:
            posteriors[key] = posterior(method, model, data.train, delta)
        found[name] = maps(posteriors[key], method, x, settings.n_samples, seed)
    return found


def numbers(found: Maps, n_grid_points: int, test: Part, far: Tensor) -> dict[str, float]:
    """What a predictive at the grid and the test data comes to; `far` says which points of the grid are far."""
    drawn = found[:n_grid_points]
    deviation = drawn.map("standard deviation")
    return {
        "NLL": loss(found.mean[n_grid_points:], test),
        "std": float(deviation.mean()),
        "std near": float(deviation[~far].mean()),
        "std far": float(deviation[far].mean()),
        "aleatoric near": float(drawn.aleatoric[~far].mean()),
        "epistemic near": float(drawn.epistemic[~far].mean()),
        "epistemic far": float(drawn.epistemic[far].mean()),
    }


def depth(n_layers: int) -> str:
    """The name of a condition."""
    return f"{n_layers} layer" + ("s" if n_layers > 1 else "")


def change(found: dict[str, Maps], n_grid_points: int, one: str, other: str) -> float:
    """Mean change of the standard deviation on the grid."""
    maps_of = [found[name][:n_grid_points].map("standard deviation") for name in (one, other)]
    return float((maps_of[0] - maps_of[1]).abs().mean())


# What the paper claims.

FITS = "MFVI"
NARROW = "MFVI, narrow"


def deeper(measure: str, method: str, small: int, large: int, item: str, text: str) -> Claim:
    """A measure of a method is smaller with one depth than with another."""
    one, other = depth(small), depth(large)
    words = f"{text}: {measure} of {method}, {one} < {other}"
    return Claim(item, words, lambda scores: scores[other, method, measure] - scores[one, method, measure])


def grows(item: str, where: str) -> Claim:
    """The epistemic part is larger far from the data."""

    def statistic(scores: Scores) -> float:
        return scores[where, "GLM", "epistemic far"] - scores[where, "GLM", "epistemic near"]

    return Claim(item, f"{where}: epistemic part of GLM grows away from the data", statistic)


def claims() -> list[Claim]:
    """Those of appendix B.2."""
    found = []
    for n_layers, item in ((1, "figure B.4"), (2, "figure 4"), (3, "figure B.5")):
        where = depth(n_layers)
        mean_field_name = NARROW if n_layers == 3 else FITS
        found += [
            lower(item, where, "std", "GLM", "nn"),
            lower(item, where, "std near", "GLM", "nn"),
            lower(item, where, "NLL", "GLM", "nn"),
            lower(item, where, "NLL", "GLM diag", "nn diag"),
            lower(item, where, "std far", "MAP", "GLM"),
            lower(
                item,
                where,
                "std far",
                mean_field_name,
                "GLM",
                note=UNDERFITS if n_layers > 1 else "",
                cause="baseline" if n_layers > 1 else "",
            ),
            grows(item, where),
        ]
    found += [
        replace(deeper("NLL", "nn", 1, 2, "figure B.4", "fewer weights improve sampled weights"), note=HALF),
        deeper("std", "GLM", 2, 1, "figure B.4", "one layer is less confident"),
        deeper("std", "MAP", 2, 1, "figure B.4", "one layer is less confident"),
        deeper("std", "GLM", 3, 2, "figure B.5", "three layers are more confident"),
        deeper("std", "MAP", 3, 2, "figure B.5", "three layers are more confident"),
        deeper("NLL", "nn diag", 2, 3, "figure B.5", "three layers make sampled weights fail"),
        deeper("NLL", FITS, 2, 3, "figure B.5", "three layers of 50 units are hard to fit"),
        lower("figure B.5", depth(3), "NLL", NARROW, FITS, note=UNDERFITS, cause="baseline"),
    ]
    where, item = depth(REFINED_LAYERS), "figure B.3"
    found += [
        lower(item, where, "std", "GLM refined", "GLM"),
        lower(item, where, "std", "GLM refined diag", "GLM diag"),
        lower(item, where, "NLL", "GLM", "GLM diag"),
        lower(item, where, "NLL", "GLM refined", "GLM refined diag"),
        lower(item, where, "std", "GLM", "GLM diag"),
        lower(item, where, "std", "GLM refined diag", "GLM refined", note=SPLIT),
        Claim(
            item, f"{where}: refinement changes the std less with a full covariance",
            lambda scores: scores[where, "GLM refined diag", "change"] - scores[where, "GLM refined", "change"],
        ),
    ]  # fmt: skip
    return found


def draw(found: dict[str, dict[str, Maps]], data: Part, n_grid: int, output: Path) -> None:
    """Saves the maps: of two layers all four, of one and three layers mean and standard deviation."""
    rows = [(depth(REFINED_LAYERS), what) for what in MAPS]
    rows += [(where, what) for where in found if where != depth(REFINED_LAYERS) for what in MAPS[:2]]
    n_columns = max(map(len, found.values()))
    figure, axes = new_figure(n_columns=n_columns, n_rows=len(rows), width=1.1, height=1.1)
    line = torch.linspace(-REACH, REACH, n_grid).tolist()
    largest = {"mean": 1.0, "standard deviation": 0.5, "aleatoric": 0.25, "epistemic": 0.25}
    for row, (where, what) in enumerate(rows):
        panels = axes[row * n_columns : (row + 1) * n_columns]
        for panel in panels[len(found[where]) :]:
            panel.set_axis_off()
        for panel, (name, maps_of) in zip(panels, found[where].items(), strict=False):
            image = maps_of[: n_grid**2].map(what).view(n_grid, n_grid).T.tolist()
            levels = [largest[what] * k / N_LEVELS for k in range(N_LEVELS + 1)]
            colours = "RdBu_r" if what == "mean" else "viridis"
            panel.contourf(line, line, image, levels=levels, cmap=colours, extend="both")
            if what == "mean":
                for label, colour in ((0, COLOURS[2]), (1, COLOURS[0])):
                    panel.plot(*data.x[data.y == label].T.tolist(), ".", markersize=0.8, color=colour)
                panel.set_title(name, fontsize=7)
            panel.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=[], yticks=[])
            if name == "MAP":
                panel.set_ylabel(f"{where}\n{what}", fontsize=6)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=75)


def run(settings: Settings, seed: int, path: Path | None, output: Path | None) -> Scores:
    """All depths with one seed; where `output` is given the maps are drawn."""
    data = make_points(settings, seed, path)
    x = torch.cat([grid(settings.n_grid), data.test.x])
    n_points = settings.n_grid**2
    far = torch.cdist(x[:n_points], data.train.x).amin(1) > 1
    scores, drawn = Scores(), {}
    for n_layers in (1, 2, 3):
        where = depth(n_layers)
        drawn[where] = predictives(settings, data, n_layers, x, seed)
        for name, found in drawn[where].items():
            scores.add(where, name, numbers(found, n_points, data.test, far))
    refined = drawn[depth(REFINED_LAYERS)]
    for name in ("GLM", "GLM diag"):
        after = name.replace("GLM", "GLM refined")
        scores.add(depth(REFINED_LAYERS), after, {"change": change(refined, n_points, name, after)})
    if output is not None:
        draw(drawn, data.train, settings.n_grid, output)
    return scores


def main() -> None:
    """Runs the experiment."""
    options = parse(__doc__, "banana", range(7))
    settings = SMALL if options.small else Settings()

    def one_seed(seed: int) -> Scores:
        return run(settings, seed, options.data, options.output if seed == options.seeds[0] else None)

    records = options.run(settings, one_seed)
    figures = {depth(1): "figure B.4", depth(2): "figures 4 and B.3", depth(3): "figure B.5"}
    tables: list[Table] = [table(records, where, f"{where} ({item})") for where, item in figures.items()]
    finish(
        options, records, script="banana", paper="Immer et al. (2021), B.2", protocol=PROTOCOL, tables=tables,
        claims=claims(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
