"""What uncertainty looks like in the plane: predictives of a network on two interleaved bananas.

Appendix B.2 of Immer et al. (2021), figures 4 and B.3: 265 points in the plane, a network with two hidden layers of 20
tanh units (the paper: 50), its prior precision chosen on 265 others. For the full and diagonal Laplace-GGN posteriors,
sampled weights ("nn"), the linearised network ("glm") and its variational refinement: mean, standard deviation,
aleatoric and epistemic part (equation B.1) on a grid over [−4, 4]². The paper's data set, "banana", is not one that
comes with scikit-learn; here `make_moons` gives two bananas that overlap.

    python examples/experiments/banana.py            # 3 seeds
    python examples/experiments/banana.py --small    # a small network and few points, to try it out
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.metrics import nll
from laplace.plotting import COLOURS, new_figure

REACH = 4.0
NOISE = 0.3
MAPS = ("mean", "standard deviation", "aleatoric", "epistemic")
Scores = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        n_hidden: Units of each of the two hidden layers.
        n_epochs: Of full-batch Adam; the rate falls by ten after 80 % and after 93 % of them.
        n_precisions: Prior precisions that are tried.
        n_grid: Points per axis of the maps.
        n_samples: Of the weights, for "nn".
        n_data: Of the training set, and of the validation and test sets each.
    """

    n_hidden: int = 20
    n_epochs: int = 3000
    n_precisions: int = 5
    n_grid: int = 50
    n_samples: int = 1000
    n_data: int = 265


SMALL = Size(5, 50, 1, 8, 20, 40)


@dataclass(frozen=True)
class Points:
    """Inputs `[N, 2]` and labels 0 and 1, `[N, 1]`."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Maps:
    """A predictive at B inputs: p(y = 1), and the two parts of its variance, `[B]` each."""

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    def map(self, name: str) -> Tensor:
        """One of `MAPS`."""
        return (self.aleatoric + self.epistemic).sqrt() if name == "standard deviation" else getattr(self, name)


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


def make_points(size: Size, seed: int) -> tuple[Points, Points, Points]:
    """Training, validation and test data with mean 0 and standard deviation 1.5."""
    x, y = make_moons(3 * size.n_data, noise=NOISE, random_state=seed)
    inputs = torch.tensor(x, dtype=torch.float64)
    inputs = 1.5 * (inputs - inputs.mean(0)) / inputs.std(0)
    labels = torch.tensor(y, dtype=torch.float64).unsqueeze(1)
    one, two, three = (Points(a, b) for a, b in zip(inputs.chunk(3), labels.chunk(3), strict=True))
    return one, two, three


def train(data: Points, prior_precision: float, size: Size, seed: int) -> nn.Module:
    """The MAP network of a prior precision."""
    h = size.n_hidden
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps = [int(0.8 * size.n_epochs), int(0.93 * size.n_epochs)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps, gamma=0.1)
    for _ in range(size.n_epochs):
        optimizer.zero_grad()
        misfit = nn.functional.binary_cross_entropy_with_logits(model(data.x), data.y, reduction="sum")
        (misfit + 0.5 * prior_precision * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
        schedule.step()
    return model


def map_probability(model: nn.Module, x: Tensor) -> Tensor:
    """p(y = 1 | x) of the network, `[B]`."""
    with torch.no_grad():
        return model(x).sigmoid().squeeze(1)


def loss(probability: Tensor, data: Points) -> float:
    """Negative log likelihood of labels under p(y = 1) `[B]`."""
    return float(nll(torch.stack([1 - probability, probability], 1), data.y.squeeze(1).long()))


def posterior(method: Method, model: nn.Module, data: Points, prior_precision: float) -> ParametricLaplace:
    """The posterior of a method."""
    la = Laplace(model, "bernoulli", "all", method.structure, prior_precision=prior_precision)
    loader = [(data.x, data.y)]
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


def grid(size: Size) -> Tensor:
    """The points of the maps, `[n_grid², 2]`, with the first coordinate slowest."""
    line = torch.linspace(-REACH, REACH, size.n_grid, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


def numbers(found: Maps, at_test: Tensor, test: Points, far: Tensor) -> dict[str, float]:
    """What a map comes to: means over the points near the training data and far from them (`far` says which)."""
    deviation = found.map("standard deviation")
    return {
        "test NLL": loss(at_test, test),
        "std": float(deviation.mean()),
        "std near": float(deviation[~far].mean()),
        "std far": float(deviation[far].mean()),
        "aleatoric near": float(found.aleatoric[~far].mean()),
        "aleatoric far": float(found.aleatoric[far].mean()),
        "epistemic near": float(found.epistemic[~far].mean()),
        "epistemic far": float(found.epistemic[far].mean()),
    }


def run(seed: int, size: Size) -> tuple[dict[str, dict[str, float]], dict[str, Maps], Points]:
    """Numbers and maps of all methods at one seed, and the training data."""
    training, validation, test = make_points(size, seed)
    candidates = torch.linspace(0.1, 2.0, size.n_precisions).tolist()
    trained = [(train(training, delta, size, seed), delta) for delta in candidates]
    model, delta = min(trained, key=lambda pair: loss(map_probability(pair[0], validation.x), validation))
    x = grid(size)
    far = torch.cdist(x, training.x).amin(1) > 1
    p = map_probability(model, x)
    found = {"MAP": Maps(p, p * (1 - p), torch.zeros_like(p))}
    scores = {"MAP": numbers(found["MAP"], map_probability(model, test.x), test, far)}
    posteriors: dict[tuple[str, bool], ParametricLaplace] = {}
    for name, method in METHODS.items():
        key = (method.structure, method.refined)
        if key not in posteriors:
            posteriors[key] = posterior(method, model, training, delta)
        found[name] = maps(posteriors[key], method, x, size.n_samples, seed)
        at_test = maps(posteriors[key], method, test.x, size.n_samples, seed).mean
        scores[name] = numbers(found[name], at_test, test, far)
    print(f"seed {seed}: prior precision {delta:.2g}", flush=True)
    for name, found_scores in scores.items():
        alike = {"GLM refined": "GLM", "GLM refined diag": "GLM diag"}.get(name, name)
        difference = found[name].map("standard deviation") - found[alike].map("standard deviation")
        found_scores["change of std"] = float(difference.abs().mean())
    return scores, found, training


# What the paper claims.

CLAIMS: list[tuple[str, str, str, str]] = [
    # measure, the smaller one, the larger one, the claim
    ("std", "GLM refined", "GLM", "Laplace is less confident than the refined posterior"),
    ("std", "GLM refined diag", "GLM diag", "the same with diagonal covariances"),
    ("test NLL", "GLM", "GLM diag", "a diagonal posterior is worse"),
    ("test NLL", "GLM refined", "GLM refined diag", "a diagonal refined posterior is worse"),
    ("std", "GLM", "GLM diag", "the diagonal Laplace posterior is underconfident"),
    ("std", "GLM refined diag", "GLM refined", "the diagonal refined posterior is overconfident"),
    ("change of std", "GLM refined", "GLM refined diag", "refinement changes less with a full covariance"),
    ("std", "GLM", "nn", "sampled weights overestimate the variance"),
    ("std near", "GLM", "nn", "also near the data: they underfit"),
    ("test NLL", "GLM", "nn", "sampled weights are worse"),
    ("test NLL", "GLM diag", "nn diag", "the same with diagonal covariances"),
]


def average(values: list[float]) -> float:
    """Mean over seeds."""
    return sum(values) / len(values)


def check_claims(scores: Scores) -> list[str]:
    """One line per claim of appendix B.2: whether the means over seeds agree."""
    lines = []
    for measure, small, large, text in CLAIMS:
        a, b = average(scores[small][measure]), average(scores[large][measure])
        lines.append(f"{'holds' if a < b else 'FAILS'}  {text}: {measure}, {small} < {large}: {a:.4g}, {b:.4g}")
    a, b = average(scores["GLM"]["epistemic near"]), average(scores["GLM"]["epistemic far"])
    lines.append(
        f"{'holds' if a < b else 'FAILS'}  GLM: epistemic uncertainty grows away from the data: {a:.4g}, {b:.4g}"
    )
    return lines


def print_table(scores: Scores) -> None:
    """Means over seeds and standard errors."""
    columns = list(next(iter(scores.values())))
    print(f"\n{'':<17}" + "".join(f"{column:>17}" for column in columns))
    for name, found in scores.items():
        cells = []
        for column in columns:
            values = torch.tensor(found[column], dtype=torch.float64)
            error = f" ± {values.std() / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.3f}{error}")
        print(f"{name:<17}" + "".join(f"{cell:>17}" for cell in cells))


def draw(found: dict[str, Maps], data: Points, n_grid: int, output: Path) -> None:
    """Saves the maps of figure B.3, with MAP and sampled weights: one column per method."""
    figure, axes = new_figure(n_columns=len(found), n_rows=len(MAPS), width=1.9, height=1.8)
    extent = (-REACH, REACH, -REACH, REACH)
    largest = {"mean": 1.0, "standard deviation": 0.5, "aleatoric": 0.25, "epistemic": 0.25}
    for row, what in enumerate(MAPS):
        for column, (name, maps_of) in enumerate(found.items()):
            panel = axes[row * len(found) + column]
            image = maps_of.map(what).view(n_grid, n_grid).T.tolist()
            style = {"cmap": "RdBu_r" if what == "mean" else "viridis", "vmin": 0, "vmax": largest[what]}
            panel.imshow(image, origin="lower", extent=extent, **style)
            for label, colour in ((0, COLOURS[2]), (1, COLOURS[0])):
                x = data.x[data.y.squeeze(1) == label]
                panel.plot(*x.T.tolist(), ".", markersize=1, color=colour)
            panel.set(
                xlim=extent[:2],
                ylim=extent[2:],
                xticks=[],
                yticks=[],
                ylabel=what if column == 0 else "",
                title=name if row == 0 else "",
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=90)


def main(
    small: bool = False, seeds: tuple[int, ...] = (0, 1, 2), output: Path = Path("outputs/banana.png")
) -> tuple[Scores, list[str]]:
    """Runs everything; returns the numbers by method and name, one per seed, and the lines of the checks.

    Args:
        small: A small network, few points and the first seed only, to try the script out.
        seeds: Of the data, the network and the samples; the last one is drawn.
        output: Where the plot goes.
    """
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    size = SMALL if small else Size()
    scores: Scores = {}
    found: dict[str, Maps] = {}
    for seed in seeds[:1] if small else seeds:
        measured, found, data = run(seed, size)
        for name, row in measured.items():
            for measure, value in row.items():
                scores.setdefault(name, {}).setdefault(measure, []).append(value)
        draw(found, data, size.n_grid, output)
    print_table(scores)
    checks = check_claims(scores)
    print("\nWhat the paper claims:", *checks, sep="\n")
    print(f"\nplot: {output}")
    return scores, checks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small network, few points, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("outputs/banana.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, tuple(arguments.seeds), arguments.output)
