"""What a posterior knows besides its predictions, against refits, retraining and the numbers of another package.

    python -m benchmarks.quality.knows [--quick] [--only TEXT] [--keep]

Every check is a function of a seed that gives named figures. With `--keep` they are kept in knows.json, in place of
those of the same checks; `python -m benchmarks.quality.page` writes the table of docs/quality.md.
kronfluence and its einconv are asked for by `pip install --no-deps kronfluence==1.0.1 einconv`; one check needs them.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import laplace
from benchmarks.quality.rows import efficientnet
from benchmarks.quality.targets import Target
from laplace import Laplace
from laplace.curvature import NativeEF, NativeGGN

RESULTS = Path(__file__).parent / "knows.json"
Figures = dict[str, float]
DELTAS = (1.0, 3.0, 10.0, 30.0)
N_HALVES = 100


# Leave-one-out, deleting and merging: a new last layer of a frozen EfficientNet.


def digits_of_efficientnet(seed: int, n_classes: int, sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    """Features `[N, 1280]` and labels of some classes, to train with and to test on."""
    from examples import pretrained_data

    features, labels = pretrained_data.efficientnet_features()
    known = (labels < n_classes).nonzero().flatten()
    order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
    train, test = order[: sizes[0]], order[sizes[0] : sum(sizes)]
    return features[train], labels[train], features[test], labels[test]


def at_mode(x: Tensor, y: Tensor, delta: float, n_classes: int) -> nn.Linear:
    """A last layer at the mode of its prior."""
    layer = nn.Linear(x.shape[1], n_classes, dtype=torch.float64)
    x = x.double()
    for tensor in layer.parameters():
        nn.init.zeros_(tensor)
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=2000, tolerance_grad=1e-7, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        decay = torch.stack([tensor.square().sum() for tensor in layer.parameters()]).sum()
        loss = nn.functional.cross_entropy(layer(x), y, reduction="sum") + 0.5 * delta * decay
        loss.backward()
        return float(loss)

    optimizer.step(closure)
    return layer.float()


def of_head(layer: nn.Linear, x: Tensor, y: Tensor, delta: float, structure: str, **options: Any) -> Any:
    """The posterior of a last layer."""
    make: Any = Laplace
    la = make(layer, "classification", "all", structure, prior_precision=delta, **options)
    la.fit(list(zip(x.split(200), y.split(200), strict=True)))
    return la


def leave_one_out(seed: int) -> Figures:
    """Mean leave-one-out score over that of a test set, less 1, at the mode of four prior precisions."""
    split = efficientnet(seed)
    (x, y), (test, labels) = split.train, split.test
    found = {}
    for delta in DELTAS:
        la = of_head(at_mode(x, y, delta, 8), x, y, delta, "full")
        left = la.leave_one_out([(x, y)])
        score = la(test).gather(1, labels.unsqueeze(1)).log().mean()
        found[f"δ = {delta:g}"] = float(left.log_score.mean() / score) - 1
    return found


def flipped(seed: int) -> Figures:
    """Shares of 10 % flipped labels among the 20 % that are most suspicious."""
    (x, y), wrong = efficientnet(seed).train, torch.Generator().manual_seed(seed)
    places = torch.randperm(len(y), generator=wrong)[: len(y) // 10]
    y = y.clone()
    y[places] = (y[places] + torch.randint(1, 8, (len(places),), generator=wrong)) % 8
    errors = laplace.label_errors(of_head(at_mode(x, y, 10.0, 8), x, y, 10.0, "kron"), [(x, y)])
    is_flipped = torch.zeros(len(y)).index_fill(0, places, 1.0)

    def share(order: Tensor) -> float:
        return float(is_flipped[order[: len(y) // 5]].sum() / len(places))

    return {"self-influence": share(errors.indices), "training loss": share(errors.loss.argsort(descending=True))}


def logits(la: Any, x: Tensor) -> Tensor:
    """Means of the outputs."""
    return la.predictive_moments(x, diagonal_output=True)[0].detach()


def accuracy(outputs: Tensor, y: Tensor) -> float:
    return float((outputs.argmax(1) == y).float().mean())


def deleted(seed: int, delta: float = 10.0) -> Figures:
    """A head without 5 % of its data, and without a class, against one that was trained on the rest."""
    x, y, test, labels = digits_of_efficientnet(seed, 3, (400, 1000))
    la = of_head(at_mode(x, y, delta, 3), x, y, delta, "full")
    rest, retrained = [(x[20:], y[20:])], at_mode(x[20:], y[20:], delta, 3)(test).detach()
    less = copy.deepcopy(la)
    laplace.forget_with_mean(less, [(x[:20], y[:20])])
    whole = (logits(la, test) - retrained).norm()
    found = {"one step": float((logits(less, test) - retrained).norm() / whole)}
    less.refine(rest)
    found["and refined"] = float((logits(less, test) - retrained).norm() / whole)
    gone = y == seed % 3
    laplace.forget_with_mean(la, [(x[gone], y[gone])])
    retrained = at_mode(x[~gone], y[~gone], delta, 3)(test).detach()
    on_it = labels == seed % 3
    for name, rows in (("on the class", on_it), ("on the rest", ~on_it)):
        found[name] = accuracy(logits(la, test)[rows], labels[rows]) - accuracy(retrained[rows], labels[rows])
    return found


def merged(seed: int, delta: float = 10.0) -> Figures:
    """Accuracy of two heads merged, less that by a diagonal Fisher, and that of one head on all data less the same.

    The data of the two are halves that are alike, or of other classes.
    """
    x, y, test, labels = digits_of_efficientnet(seed, 8, (600, 1000))
    whole = accuracy(at_mode(x, y, delta, 8)(test), labels)
    halves = {"alike": torch.arange(len(y)) % 2 == 0, "of classes": y < 4}
    found = {}
    for name, half in halves.items():
        heads = [(at_mode(x[part], y[part], delta, 8), x[part], y[part], delta) for part in (half, ~half)]
        fisher = laplace.merge([of_head(*head, "diag", backend=NativeEF) for head in heads])
        least = accuracy(logits(fisher, test), labels)
        for structure in ("full", "kron"):
            ours = laplace.merge([of_head(*head, structure) for head in heads])
            found[f"{name}, {structure}"] = accuracy(logits(ours, test), labels) - least
        found[f"{name}, one head on all data"] = whole - least
    return found


# Influence: retraining, and kronfluence.


def digits(shape: tuple[int, ...] = (64,)) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    return pixels.float().view(-1, *shape) / 16, labels


def datamodelling(seed: int, n_halves: int = N_HALVES) -> Figures:
    """Linear datamodelling scores of an MLP 64-24-10 on 600 digits and 200 queries."""
    from examples import influence

    pixels, labels = digits()
    source = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=source)
    x, y, queries, targets = pixels[order[:600]], labels[order[:600]], pixels[order[600:800]], labels[order[600:800]]
    halves = torch.stack([(torch.randperm(600, generator=source) < 300).float() for _ in range(n_halves)])
    weights = influence.trained(x, y, torch.cat([halves, torch.ones(1, 600)]), 600)
    losses = influence.losses({name: value[:-1] for name, value in weights.items()}, queries, targets)
    model = influence.network()
    model.load_state_dict({name: value[-1] for name, value in weights.items()})
    make: Any = Laplace
    found: Figures = {}
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("identity", "diag", {"damping": 1e9}),
        ("kron", "kron", {}),
        ("ekfac", "ekfac", {}),
        ("ekfac, rank 64 of 200 queries", "ekfac", {"rank": 64}),
        ("ekfac, rank 32 of 200 queries", "ekfac", {"rank": 32}),
        ("exact", "matrix_free", {}),
    )
    for name, structure, options in cases:
        la = make(model, "classification", "all", structure, prior_precision=influence.DELTA)
        la.fit([(x, y)])
        scores = laplace.influence(la, [(x, y)], queries, targets, **options)
        found[name] = float(influence.spearman(losses, -halves @ scores.scores.T).mean())
        if "rank" in options:
            found[f"kept at rank {options['rank']}"] = scores.kept
        if structure == "matrix_free":
            found["residual"] = la.solve_reports["solutions"].residual
    return found


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 10, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(90, 10),
    )  # fmt: skip


def beside_kronfluence(seed: int) -> Figures:
    """Correlations of all scores of 600 digits on 100 queries with those of kronfluence, at the same damping.

    Its curvature is the empirical Fisher, or that of sampled labels, one for every input, where this library has the
    GGN. A bias is part of its layer's weight there, and a tensor of its own here, so that both are compared without
    biases too.
    """
    from examples import influence

    found = {}
    for name, make, shape in (("MLP", influence.network, (64,)), ("ConvNet", convnet, (1, 8, 8))):
        pixels, labels = digits(shape)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        x, y, queries, targets = (
            pixels[order[:600]],
            labels[order[:600]],
            pixels[order[600:700]],
            labels[order[600:700]],
        )
        for biases in ("", ", no biases"):
            torch.manual_seed(seed)
            model = _trained(make() if not biases else _without_biases(make()), x, y)
            ours = partial(_ekfac_scores, model, (x, y), (queries, targets))
            theirs = partial(_kronfluence, model, (x, y), (queries, targets), 1.0 / len(y))
            found[f"{name}, empirical Fisher{biases}"] = correlation(ours(NativeEF), theirs(empirical=True))
            if not biases:
                sampled = theirs(empirical=False)
                found[f"{name}, labels sampled there"] = correlation(ours(NativeGGN), sampled)
                found[f"{name}, their own of two seeds"] = correlation(sampled, theirs(empirical=False, seed=1))
    return found


def _without_biases(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            module.register_parameter("bias", None)
    return model


def _trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        decay = torch.stack([tensor.square().sum() for tensor in model.parameters()]).sum()
        (nn.functional.cross_entropy(model(x), y, reduction="sum") + 0.5 * decay).backward()
        optimizer.step()
    return model


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def _ekfac_scores(model: nn.Module, train: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor], backend: Any) -> Tensor:
    make: Any = Laplace
    la = make(model, "classification", "all", "ekfac", prior_precision=1.0, backend=backend)
    la.fit([train])
    return laplace.influence(la, [train], *asked).scores


def _kronfluence(
    model: nn.Module, train: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor], damping: float, *, empirical: bool,
    seed: int = 0,
) -> Tensor:  # fmt: skip
    """Scores `[B, N]` of kronfluence by EKFAC; raises `ImportError` where it is not installed."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class CrossEntropy(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            outputs, y = model(batch[0]), batch[1]
            if sample:
                y = torch.multinomial(outputs.detach().softmax(1), 1).flatten()
            return nn.functional.cross_entropy(outputs, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = CrossEntropy()
    data, queries = TensorDataset(*train), TensorDataset(*asked)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng([]):
        torch.manual_seed(seed)
        analyzer = Analyzer(
            "scores", prepare_model(copy.deepcopy(model), task), task, cpu=True, output_dir=folder, disable_tqdm=True,
            log_level=logging.ERROR,
        )  # fmt: skip
        analyzer.fit_all_factors(
            "factors", data, per_device_batch_size=100,
            factor_args=FactorArguments(strategy="ekfac", use_empirical_fisher=empirical),
        )  # fmt: skip
        analyzer.compute_pairwise_scores(
            "pairs", "factors", queries, data, per_device_query_batch_size=100, per_device_train_batch_size=100,
            score_args=ScoreArguments(damping_factor=damping),
        )  # fmt: skip
        return analyzer.load_pairwise_scores("pairs")["all_modules"]


# Intervals, and networks that keep the fit.


def tables() -> dict[str, tuple[Any, Any]]:
    """Six regressions: inputs and targets."""
    from mlxtend.data import autompg_data, boston_housing_data
    from sklearn import datasets

    found: dict[str, Any] = {
        "diabetes": datasets.load_diabetes(return_X_y=True),
        "Friedman 1": datasets.make_friedman1(600, noise=1.0, random_state=0),
        "Friedman 2": datasets.make_friedman2(600, noise=100.0, random_state=0),
        "Friedman 3": datasets.make_friedman3(600, noise=0.2, random_state=0),
        "Boston": boston_housing_data(),
        "auto-mpg": autompg_data(),
    }
    return found


def intervals(factor: float, n_splits: int = 20) -> Figures:
    """Jackknife+ of ridge regression at 90 %: pooled coverage over six tables, on how many it is narrower than split.

    Args:
        factor: By which the noise is wrong.
        n_splits: Splits of every table, 150 data to fit and 200 to test.
    """
    coverages: list[float] = []
    narrower = 0
    for x, y in (tuple(_standard(part) for part in pair) for pair in tables().values()):
        ours, split = [], []
        for seed in range(n_splits):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            train, test = order[:150], order[150:350]
            noise = factor * _residual_noise(x[train], y[train])
            la = _ridge(x[train], y[train], noise)
            lower, upper = laplace.conformal(la, [(x[train], y[train])]).interval(x[test], 0.9)
            coverages.append(float(((lower <= y[test]) & (y[test] <= upper)).double().mean()))
            ours.append(float((upper - lower).mean()))
            half = _ridge(x[train[:75]], y[train[:75]], noise)
            lower, upper = laplace.conformal(half, val_loader=[(x[train[75:]], y[train[75:]])]).interval(x[test], 0.9)
            split.append(float((upper - lower).mean()))
        narrower += statistics.mean(ours) <= statistics.mean(split)
    error = statistics.stdev(coverages) / len(coverages) ** 0.5
    return {"coverage": statistics.mean(coverages), "standard error": error, "narrower": float(narrower)}


def _standard(values: Any) -> Tensor:
    table = torch.as_tensor(values).double().view(len(values), -1)
    spread = table.std(0)
    return torch.nan_to_num((table - table.mean(0)) / torch.where(spread > 0, spread, 1.0))


def _with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def _residual_noise(x: Tensor, y: Tensor) -> float:
    rows = _with_ones(x)
    return float((y - rows @ torch.linalg.lstsq(rows, y).solution).std())


def _ridge(x: Tensor, y: Tensor, noise: float) -> Any:
    """The posterior of a linear regression at its mode, δ = 1."""
    rows = _with_ones(x)
    inner = rows.T @ rows + noise**2 * torch.eye(rows.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(inner, rows.T @ y)
    model = nn.Linear(x.shape[1], 1, dtype=x.dtype)
    with torch.no_grad():
        model.weight.copy_(weights[:-1].T)
        model.bias.copy_(weights[-1])
    make: Any = Laplace
    la = make(model, "regression", "all", "full", sigma_noise=noise, prior_precision=1.0)
    la.fit([(x, y)])
    return la


def projected(seed: int) -> Figures:
    """Networks 64-50-10 that keep the fit to 1,000 digits: their NLL over the trained one's, and gains of accuracy."""
    pixels, labels = digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y, test, targets = pixels[order[:1000]], labels[order[:1000]], pixels[order[1000:]], labels[order[1000:]]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(60):
        for batch in torch.randperm(1000).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    make: Any = Laplace
    la = make(model, "classification", "all", "kron", prior_precision=1.0)
    loader = list(zip(x.split(100), y.split(100), strict=True))
    la.fit(loader)
    source = torch.Generator().manual_seed(0)
    kept: Any = laplace.projected(la, loader, 20, generator=source)(test)
    network = model(test).detach().softmax(1)
    sampled = la(test, pred_type="nn", n_samples=20, generator=source)

    def nll(probs: Tensor) -> float:
        return float(-probs.gather(1, targets.unsqueeze(1)).log().mean())

    return {
        "NLL": nll(kept) / nll(network), "accuracy": accuracy(kept, targets) - accuracy(network, targets),
        "samples' NLL": nll(sampled) / nll(network),
        "samples' accuracy": accuracy(sampled, targets) - accuracy(network, targets),
    }  # fmt: skip


def of_report(seed: int) -> Figures:
    """Seconds and megabytes of a report on 10,000 predictions of ten classes beside a network's."""
    from laplace.extensions import report

    source = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(10_000, 10, generator=source)
    y = torch.distributions.Categorical(logits=outputs / 1.5).sample()
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "report.html", time.perf_counter()
        report.of_probabilities((outputs / 1.5).softmax(1), y, network=outputs.softmax(1)).save(path)
        return {"seconds": time.perf_counter() - start, "MB": path.stat().st_size / 1e6}


# The table.


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: What is checked, in words.
        measure: Figures of a seed.
        seeds: Arguments of `measure`.
        target: What is to be reached, in words.
        met: Whether a seed's figures reach it.
    """

    name: str
    measure: Callable[[Any], Figures]
    seeds: tuple[float, ...]
    target: str
    met: Callable[[Figures], bool]


def as_retrained(figures: Figures) -> bool:
    """Whether deleting comes close to training without the data."""
    return figures["one step"] <= 0.1 and figures["on the class"] <= 0.02 and figures["on the rest"] >= -0.01


def covers(figures: Figures) -> bool:
    """Whether intervals cover what they say, and are no wider than those of split conformal prediction."""
    return abs(figures["coverage"] - 0.9) <= 2 * figures["standard error"] and figures["narrower"] >= 4


THREE = (0, 1, 2)
CHECKS = (
    Check(
        "leave-one-out score over the test score, less 1: EfficientNet, 600 data, digits 0–7", leave_one_out, THREE,
        "within 5 %", lambda f: max(map(abs, f.values())) <= 0.05,
    ),
    Check(
        "10 % flipped labels, share in the most suspicious fifth: EfficientNet, 600 data", flipped, THREE,
        "self-influence ≥ 80 %", lambda f: f["self-influence"] >= 0.8,
    ),
    Check(
        f"influence: linear datamodelling score, {N_HALVES} halves of 600 digits, MLP", datamodelling, THREE,
        "ekfac ≥ identity + 0.15, exact ≥ ekfac − 0.01",
        lambda f: f["ekfac"] >= f["identity"] + 0.15 and f["exact"] >= f["ekfac"] - 0.01,
    ),
    Check(
        "influence: correlation with kronfluence 1.0.1, same damping, 600 digits × 100 queries", beside_kronfluence,
        (0,),
        "r ≥ 0.99 by the empirical Fisher, which draws nothing",
        lambda f: min(r for name, r in f.items() if "empirical" in name) >= 0.99,
    ),
    Check(
        "5 % of 400 data deleted, distance to the retrained logits over the original's; a class forgotten, accuracy "
        "less the retrained one's: EfficientNet, digits 0–2, δ = 10", deleted, THREE,
        "one step ≤ 0.1; on the class ≤ + 0.02, on the rest ≥ − 0.01", as_retrained,
    ),
    Check(
        "the same with δ = 1", partial(deleted, delta=1.0), THREE,
        "one step ≤ 0.1; on the class ≤ + 0.02, on the rest ≥ − 0.01", as_retrained,
    ),
    Check(
        "two halves merged, accuracy less that by a diagonal Fisher: EfficientNet, 600 data, digits 0–7", merged, THREE,
        "full ≥ + 0.03", lambda f: min(f["alike, full"], f["of classes, full"]) >= 0.03,
    ),
    Check(
        "jackknife+ intervals at 90 %, ridge, 6 tables × 20 splits", intervals, (1.0,),
        "within 2 standard errors; narrower than split on ≥ 4",
        covers,
    ),
    Check(
        "the same with σ three times too large", intervals, (3.0,),
        "within 2 standard errors; narrower than split on ≥ 4",
        covers,
    ),
    Check(
        "projected networks: NLL over the network's, accuracy less it: digits, MLP 64-50-10", projected, THREE,
        "NLL ≤ 1.1, accuracy ≥ − 0.005", lambda f: f["NLL"] <= 1.1 and f["accuracy"] >= -0.005,
    ),
    Check(
        "a report on 10,000 × 10", of_report, (0,), "< 5 s, < 1 MB", lambda f: f["seconds"] < 5 and f["MB"] < 1,
    ),
)  # fmt: skip


def run(checks: Iterable[Check], *, quick: bool = False) -> list[dict[str, Any]]:
    """Figures of every seed of checks; those whose packages are not installed are left out."""
    found = []
    for check in checks:
        start = time.process_time()
        try:
            figures = [check.measure(seed) for seed in check.seeds[: 1 if quick else None]]
        except ImportError as error:
            print(f"{check.name} is left out: {error}")
            continue
        seconds = time.process_time() - start
        print(f"{check.name}: {seconds:.0f} s, {figures}", flush=True)
        found.append({"name": check.name, "seconds": seconds, "seeds": figures})
    return found


def targets(results: list[dict[str, Any]]) -> list[Target]:
    """What was to be reached, and whether it was, on how many seeds."""
    kept = {row["name"]: row["seeds"] for row in results}
    told = [(check, *_judged(check, kept.get(check.name, []))) for check in CHECKS]
    return [Target(f"{check.name}: {check.target}", said, met) for check, said, met in told]


def _judged(check: Check, seeds: list[Figures]) -> tuple[str, bool | None]:
    """The figures of a check in words, and whether all seeds reach the target; None without any."""
    if not seeds:
        return "", None
    met = [check.met(figures) for figures in seeds]
    said = "; ".join(f"{name} {_several([figures[name] for figures in seeds])}" for name in seeds[0])
    return said + ("" if all(met) or len(met) == 1 else f" ({sum(met)} of {len(met)} seeds)"), all(met)


def _several(numbers: list[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers).replace("-", "−")


def table(results: list[dict[str, Any]]) -> str:
    """The checks as a table of Markdown."""
    lines = ["| what | to be reached | measured, by seed | |", "|---|---|---|---|"]
    kept = {row["name"]: row["seeds"] for row in results}
    for check in CHECKS:
        said, met = _judged(check, kept.get(check.name, []))
        verdict = "not run" if met is None else "met" if met else "**missed**"
        lines.append(f"| {check.name} | {check.target} | {said} | {verdict} |")
    return "\n".join(lines)


def checked(only: str = "", *, quick: bool = False, keep: bool = False) -> list[Target]:
    """Runs the checks whose name contains a text, and says what they reach, with those that were kept before."""
    rows = run([check for check in CHECKS if only in check.name], quick=quick)
    if keep:
        before = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
        found = {row["name"]: row for row in (*before, *rows)}
        rows = [found[check.name] for check in CHECKS if check.name in found]
        RESULTS.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return targets(rows)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument(
        "--keep", action="store_true", help="keep the results; the page follows by benchmarks.quality.page"
    )
    given = parser.parse_args()
    if given.quick and given.keep:
        parser.error("results of --quick are not kept")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for target in checked(given.only, quick=given.quick, keep=given.keep):
        print(target)


if __name__ == "__main__":
    main()
