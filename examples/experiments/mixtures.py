"""Mixtures of Laplace approximations on digits: rotated ones, and images that are no digits.

Tables 2 to 4 and figure 4 of Eschenhagen et al. (2021, "Mixtures of Laplace approximations") and the comparison of
Daxberger et al. (2021, section 4.2), in small: scikit-learn's 8×8 digits instead of MNIST, a network with two hidden
layers, rotated test images, and three kinds of images from elsewhere. MAP, a deep ensemble of five, last-layer Laplace
(LA: Kronecker-factored GGN; LA*: full empirical Fisher), their mixture (MoLA), and as baselines temperature scaling,
diagonal SWAG and mean-field variational inference. The prior precisions of LA, LA* and MoLA are the smallest whose mean
confidence on validation data reaches the accuracy of MAP there less a hundredth (appendix F.4), one for all components;
where none of the grid does, for MAP itself is less confident than that, the largest.

At the end the order that the papers claim is checked; a check that fails is printed as such.

    python examples/experiments/mixtures.py            # 3 seeds
    python examples/experiments/mixtures.py --small    # 1 seed, few epochs, to try it out
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from laplace import Laplace, MixtureLaplace, ParametricLaplace
from laplace.curvature import NativeEF
from laplace.errors import InvalidArgument, TuningWarning
from laplace.metrics import (
    accuracy,
    auroc,
    brier,
    expected_calibration_error,
    mean_calibration_error,
    mean_confidence,
    nll,
)
from laplace.plotting import new_figure
from laplace.tuning import Thresholds
from laplace.weights.swag import fit_diagonal_swag_var

WIDTH, BATCH_SIZE, N_COMPONENTS, N_SAMPLES = 100, 64, 5, 30
ANGLES = (0, 15, 30, 45, 60, 90, 120, 150, 180)
Predict = Callable[[Tensor], Tensor]
Scores = dict[str, dict[str, list[float]]]  # method -> measure -> one number per seed


@dataclass(frozen=True)
class Data:
    """Images `[N, 64]` in [0, 1] with labels `[N]`; `foreign` images are no digits."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    foreign: dict[str, Tensor]

    def batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Training data in random order."""
        x, y = self.train
        for index in torch.randperm(len(y), generator=generator).split(BATCH_SIZE):
            yield x[index], y[index]


@dataclass(frozen=True)
class Method:
    """What predicts, and what it took: seconds after the training of the networks, and of the training."""

    predict: Predict
    fit_seconds: float


def make_data(seed: int) -> Data:
    """50 % training, 20 % validation, 30 % test. Foreign: inverted digits, digits of shuffled pixels, smooth noise."""
    generator = torch.Generator().manual_seed(seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=generator)
    x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    a, b = int(0.5 * len(x)), int(0.7 * len(x))
    test = x[b:]
    smooth = F.interpolate(torch.rand(len(test), 1, 4, 4, generator=generator), (8, 8), mode="bilinear").flatten(1)
    foreign = {
        "inverted": 1 - test,
        "shuffled": test[:, torch.randperm(64, generator=generator)],
        "noise": smooth,
    }
    return Data((x[:a], y[:a]), (x[a:b], y[a:b]), (test, y[b:]), foreign)


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images `[N, 64]` turned around their centre, bilinear."""
    turn = torch.deg2rad(torch.tensor(float(degrees)))
    matrix = torch.tensor([[turn.cos(), -turn.sin(), 0.0], [turn.sin(), turn.cos(), 0.0]])
    images = x.view(-1, 1, 8, 8)
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).flatten(1)


def network(seed: int) -> nn.Sequential:
    """64 pixels, two hidden layers, ten classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )  # fmt: skip


def train(data: Data, seed: int, n_epochs: int) -> nn.Sequential:
    """MAP, as appendix F.3 trains MNIST: Adam, cosine schedule, weight decay 5e-4."""
    model, generator = network(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_epochs)
    for _ in range(n_epochs):
        for x, y in data.batches(generator):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def probabilities(model: nn.Module, x: Tensor, temperature: float = 1.0) -> Tensor:
    """Softmax of a network, `[N, 10]`."""
    return (model(x) / temperature).softmax(1)


def seconds(function: Callable[[], object], repeats: int = 1) -> float:
    """Wall-clock time of one call, the shortest of some."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return min(found)


# Methods. Each takes the networks of the ensemble, the first of which is MAP.


def tune(la: ParametricLaplace | MixtureLaplace, data: Data, threshold: float) -> None:
    """One prior precision from a grid of 100 between 1e-4 and 1e3 (appendix F.4)."""
    thresholds, grid = Thresholds(confidence=threshold), {"prior_precision": torch.logspace(-4, 3, 100)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)  # the smallest candidate may do
        try:
            la.optimize_hyperparameters(objective=thresholds, val_loader=[data.validation], grid=grid)
        except InvalidArgument:
            print("no prior precision is confident enough; the largest is used")
            la.prior_precision = 1e3


def temperature_scaling(model: nn.Module, data: Data) -> Predict:
    """The temperature with the smallest validation loss (Guo et al., 2017), from a grid."""
    x, y = data.validation
    values = torch.logspace(-1, 1, 201).tolist()
    best = min(values, key=lambda t: float(nll(probabilities(model, x, t), y)))
    return lambda x: probabilities(model, x, best)


def averaged(model: nn.Module, mean: list[Tensor], scale: list[Tensor], seed: int) -> Predict:
    """Mean softmax over weights θ = μ + σ ε."""
    names = [name for name, _ in model.named_parameters()]

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(len(x), 10)
        for _ in range(N_SAMPLES):
            drawn = [m + s * torch.randn(m.shape, generator=generator) for m, s in zip(mean, scale, strict=True)]
            total += torch.func.functional_call(model, dict(zip(names, drawn, strict=True)), (x,)).softmax(1)
        return total / N_SAMPLES

    return predict


def swag(model: nn.Module, data: Data, seed: int, n_snapshots: int) -> Predict:
    """Diagonal SWAG: the variance along SGD around MAP, which stays the mean."""
    loader = list(data.batches(torch.Generator().manual_seed(seed)))
    variance = fit_diagonal_swag_var(
        model, loader, nn.CrossEntropyLoss(), n_snapshots, lr=1e-2, generator=torch.Generator().manual_seed(seed)
    )
    parameters = list(model.parameters())
    parts = variance.sqrt().split([p.numel() for p in parameters])
    mean = [p.detach() for p in parameters]
    return averaged(model, mean, [s.view_as(p) for s, p in zip(parts, mean, strict=True)], seed)


def variational(data: Data, seed: int, n_epochs: int) -> Predict:
    """Mean-field VI by the reparameterised ELBO (Blundell et al., 2015), prior N(0, 1/10), from random weights."""
    model, generator = network(seed), torch.Generator().manual_seed(seed)
    names = [name for name, _ in model.named_parameters()]
    mean = [p.detach().clone().requires_grad_() for p in model.parameters()]
    rho = [torch.full_like(p, -5.0).requires_grad_() for p in mean]
    optimizer = torch.optim.Adam([*mean, *rho], lr=1e-3)
    prior, n_data = 10.0, len(data.train[1])
    for _ in range(n_epochs):
        for x, y in data.batches(generator):
            scale = [F.softplus(r) for r in rho]
            drawn = [m + s * torch.randn(m.shape, generator=generator) for m, s in zip(mean, scale, strict=True)]
            f = torch.func.functional_call(model, dict(zip(names, drawn, strict=True)), (x,))
            divergence = sum(
                0.5 * (prior * (s**2 + m**2) - 1 - (prior * s**2).log()).sum() for m, s in zip(mean, scale, strict=True)
            )
            optimizer.zero_grad()
            (F.cross_entropy(f, y) + divergence / n_data).backward()
            optimizer.step()
    return averaged(model, [m.detach() for m in mean], [F.softplus(r).detach() for r in rho], seed)


def make_methods(data: Data, seed: int, n_epochs: int, n_components: int) -> tuple[dict[str, Method], float]:
    """All methods, with the seconds that they took besides MAP's training, and those of the latter."""
    start = time.perf_counter()
    models = [train(data, 100 * seed + k, n_epochs) for k in range(n_components)]
    training = (time.perf_counter() - start) / n_components
    model = models[0]
    threshold = float(accuracy(probabilities(model, data.validation[0]), data.validation[1])) - 0.01
    loader = [data.train]
    methods: dict[str, Method] = {}

    def add(name: str, make: Callable[[], Predict], more: float = 0.0) -> None:
        begin = time.perf_counter()
        predict = make()
        methods[name] = Method(predict, time.perf_counter() - begin + more)

    def laplace(la: ParametricLaplace | MixtureLaplace) -> Predict:
        la.fit(loader)
        tune(la, data, threshold)
        return la

    others = (n_components - 1) * training
    add("MAP", lambda: lambda x: probabilities(model, x))
    add("temperature", lambda: temperature_scaling(model, data))
    add("SWAG", lambda: swag(model, data, seed, min(40, n_epochs)))
    add("VI", lambda: variational(data, seed, 2 * n_epochs), -training)  # no MAP is needed
    add("LA", lambda: laplace(Laplace(model, "classification", "last_layer", "kron")))
    add("LA*", lambda: laplace(Laplace(model, "classification", "last_layer", "full", backend=NativeEF)))
    add("DE", lambda: lambda x: torch.stack([probabilities(m, x) for m in models]).mean(0), others)
    add("MoLA", lambda: laplace(MixtureLaplace(models, "classification")), others)
    return methods, training


# Measures.


def measures(predict: Predict, data: Data) -> dict[str, float]:
    """All numbers of one method but its times."""
    x, y = data.test
    found: dict[str, float] = {}
    inside = predict(x).max(1).values
    for angle in ANGLES:
        p = predict(rotated(x, angle))
        found[f"NLL {angle}"] = float(nll(p, y))
        found[f"ECE {angle}"] = float(expected_calibration_error(p, y))
        if angle == 0:
            found |= {"accuracy": float(accuracy(p, y)), "Brier": float(brier(p, y)), "MMC": float(mean_confidence(p))}
            found["mean CE"] = float(mean_calibration_error(p, y))
    for name, foreign in data.foreign.items():
        p = predict(foreign)
        found[f"MMC {name}"] = float(mean_confidence(p))
        found[f"AUROC {name}"] = float(auroc(inside, p.max(1).values))
    turned = [angle for angle in ANGLES if angle]
    for measure, keys in (
        ("NLL turned", [f"NLL {angle}" for angle in turned]),
        ("ECE turned", [f"ECE {angle}" for angle in turned]),
        ("MMC out", [f"MMC {name}" for name in data.foreign]),
        ("AUROC out", [f"AUROC {name}" for name in data.foreign]),
    ):
        found[measure] = sum(found[key] for key in keys) / len(keys)
    return found


def run(seed: int, n_epochs: int, n_components: int, repeats: int) -> dict[str, dict[str, float]]:
    """All numbers of all methods at one seed; the shortest time of some repeated predictions."""
    data = make_data(seed)
    methods, training = make_methods(data, seed, n_epochs, n_components)
    x = data.test[0]
    unit = seconds(lambda: methods["MAP"].predict(x), repeats)
    found: dict[str, dict[str, float]] = {}
    for name, method in methods.items():
        found[name] = measures(method.predict, data)
        found[name]["fit"] = 1 + method.fit_seconds / training
        found[name]["predict"] = seconds(lambda m=method: m.predict(x), repeats) / unit
    return found


# What the papers claim.

CLAIMS: list[tuple[str, str, str, str]] = [
    # the better one, the worse one, measure, where it is claimed
    ("MoLA", "DE", "NLL turned", "Eschenhagen et al., figure 4"),
    ("MoLA", "LA", "NLL turned", "Eschenhagen et al., figure 4"),
    ("MoLA", "MAP", "NLL turned", "Eschenhagen et al., figure 4"),
    ("LA", "DE", "NLL turned", "Eschenhagen et al., section D.2"),
    ("MoLA", "DE", "ECE turned", "Eschenhagen et al., figure 4"),
    ("MoLA", "LA", "ECE turned", "Eschenhagen et al., figure 4"),
    ("MoLA", "DE", "MMC out", "Eschenhagen et al., table 4"),
    ("MoLA", "LA", "MMC out", "Eschenhagen et al., table 4"),
    ("LA", "MAP", "MMC out", "Eschenhagen et al., table 4"),
    ("DE", "MAP", "MMC out", "Eschenhagen et al., table 4"),
    ("MoLA", "DE", "AUROC out", "Eschenhagen et al., table 4"),
    ("MoLA", "LA", "AUROC out", "Eschenhagen et al., table 4"),
    ("LA", "MAP", "AUROC out", "Eschenhagen et al., table 4"),
    ("DE", "LA", "AUROC out", "Eschenhagen et al., table 4"),
    ("LA", "SWAG", "AUROC out", "Eschenhagen et al., table 4"),
    ("LA*", "VI", "AUROC out", "Daxberger et al., table 1"),
    ("LA*", "LA", "AUROC out", "Daxberger et al., table 1"),
    ("LA", "MAP", "ECE turned", "Daxberger et al., figure 4"),
    ("LA", "SWAG", "fit", "Eschenhagen et al., table 2"),
    ("LA", "SWAG", "predict", "Eschenhagen et al., table 2"),
    ("LA", "DE", "predict", "Eschenhagen et al., table 2"),
]
LARGE_IS_GOOD = ("AUROC out",)


def average(values: list[float]) -> float:
    """Mean over seeds."""
    return sum(values) / len(values)


def check_claims(scores: Scores) -> list[str]:
    """One line per claim: whether the means over seeds are in its order."""
    lines = []
    for better, worse, measure, source in CLAIMS:
        a, b = average(scores[better][measure]), average(scores[worse][measure])
        holds = a > b if measure in LARGE_IS_GOOD else a < b
        sign = ">" if measure in LARGE_IS_GOOD else "<"
        verdict = "holds " if holds else "FAILS "
        lines.append(f"{verdict} {measure:<11} {better:>5} {sign} {worse:<5} {a:.4g} vs {b:.4g}   ({source})")
    return lines


COLUMNS = (
    ("accuracy", "NLL 0", "Brier", "ECE 0", "mean CE", "MMC", "NLL turned", "ECE turned"),
    ("MMC inverted", "MMC shuffled", "MMC noise", "AUROC inverted", "AUROC shuffled", "AUROC noise", "fit", "predict"),
)


def print_tables(scores: Scores) -> None:
    """Means over seeds and standard errors; times relative to MAP."""
    for columns in COLUMNS:
        print(f"\n{'':<12}" + "".join(f"{column:>16}" for column in columns))
        for name, found in scores.items():
            cells = []
            for column in columns:
                values = torch.tensor(found[column])
                error = f"±{values.std() / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
                cells.append(f"{values.mean():>10.3f}{error:>6}")
            print(f"{name:<12}" + "".join(cells))


def draw(scores: Scores, output: Path) -> None:
    """Saves NLL and ECE against the angle (figure 4, top), and AUROC of foreign images."""
    figure, axes = new_figure(n_columns=3, width=12, height=3.6)
    for name, found in scores.items():
        for panel, measure in zip(axes, ("NLL", "ECE"), strict=False):
            means = [average(found[f"{measure} {angle}"]) for angle in ANGLES]
            panel.plot(ANGLES, means, marker="o", markersize=3, label=name)
    for panel, measure in zip(axes, ("NLL", "ECE"), strict=False):
        panel.set(xlabel="rotation in degrees", ylabel=measure)
    axes[0].legend(frameon=False, fontsize=7)
    axes[2].bar(list(scores), [average(found["AUROC out"]) for found in scores.values()])
    axes[2].set(ylabel="AUROC of foreign images", ylim=(0.5, 1))
    axes[2].tick_params(axis="x", labelrotation=60)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main(
    small: bool = False, seeds: tuple[int, ...] = (0, 1, 2), output: Path = Path("outputs/mixtures.png")
) -> tuple[Scores, list[str]]:
    """Runs everything; returns the scores by method and measure, one per seed, and the lines of the checks.

    Args:
        small: A few epochs and the first seed only, to try the script out.
        seeds: Of the split, the networks and the order of the batches.
        output: Where the plot goes.
    """
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    scores: Scores = {}
    for seed in seeds[:1] if small else seeds:
        for name, found in run(seed, *((3, 2, 1) if small else (100, N_COMPONENTS, 10))).items():
            for measure, value in found.items():
                scores.setdefault(name, {}).setdefault(measure, []).append(value)
        print(f"seed {seed} done", flush=True)
    print_tables(scores)
    checks = check_claims(scores)
    print("\nThe order that the papers claim:", *checks, sep="\n")
    draw(scores, output)
    print(f"\nplot: {output}")
    return scores, checks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few epochs, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("outputs/mixtures.png"), help="where the plot goes")
    arguments = parser.parse_args()
    main(arguments.small, tuple(arguments.seeds), arguments.output)
