"""Everything that runs on a second device and on the CPU, to be compared: a script that prints one line of JSON.

Of every case: what is wrong with it, nothing if the second device gave the CPU's numbers; and of fits and predictions
how often the host waited for the device, and copied between the two.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laplace
from laplace import FunctionalLaplace, Laplace, MixtureLaplace, continual_training, marglik_training, metrics
from laplace.curvature import NativeEF, NativeGGN, NativeHessian
from laplace.errors import LaplaceError
from laplace.structures import STRUCTURES
from laplace.weights.masks import (
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    LastLayerSubnetMask,
    RandomSubnetMask,
)
from tests import grid
from tests.other_device import device as other
from tests.pairs import turns

Values = list[Any]
"""Tensors and numbers that have to be equal on both devices."""
Run = Callable[[str], Values]

CASES: dict[str, Run] = {}
"""What is computed on a device, by name."""
CARD_CASES: dict[str, Run] = {}
"""What only a card is asked for: the device in software has none of its fused kernels."""
READINGS = {"ekfac": 2, "lowrank": 4, "lowrank_kron": 2}
"""How often a fit reads the data, where that is more than once."""
COUNTED = [("classification", *cell) for cell in grid.TURNS]
COUNTED += [(likelihood, "all", "diag") for likelihood in grid.LIKELIHOODS if likelihood != "classification"]
"""Fits and predictions whose reads and copies are counted."""


def moved(value: Any, device: str) -> Any:
    """Tensors in lists and tuples, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(moved(x, device) for x in value) if isinstance(value, list | tuple) else value


def seeded(device: str) -> torch.Generator:
    """The software's device draws the CPU's numbers; a card draws others, and is given the host's."""
    return torch.Generator(device=device if device == other.NAME else "cpu").manual_seed(3)


def data(likelihood: str, device: str, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    return moved(grid.batches(likelihood, seed=seed), device)


def trainable(device: str, likelihood: str = "classification") -> nn.Module:
    """A network without dropout, whose numbers a card draws itself."""
    model = grid.network(likelihood)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(device)


def made(device: str, weights: str, structure: str, likelihood: str = "classification", **options: Any) -> Any:
    return grid.make(weights, structure, likelihood, grid.network(likelihood).to(device), **options)


def fitted(device: str, weights: str, structure: str, likelihood: str = "classification", **options: Any) -> Any:
    la = made(device, weights, structure, likelihood, **options)
    la.fit(data(likelihood, device))
    return la


def flat(value: Any) -> Values:
    return [part for x in value for part in flat(x)] if isinstance(value, list | tuple) else [value]


def case(name: str) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        CASES[name] = run
        return run

    return add


# The grid.


def cell(likelihood: str, weights: str, structure: str) -> Run:
    """A fit, its evidence with gradients, and predictions of both kinds."""

    def run(device: str) -> Values:
        la = fitted(device, weights, structure, likelihood, prior_precision=0.7)
        x = data(likelihood, device)[0][0]
        delta = torch.tensor([0.9], device=device, requires_grad=True)
        evidence = la.log_marginal_likelihood(delta)
        values = [*flat(la(x)), evidence.detach(), *torch.autograd.grad(evidence, [delta])]
        values += flat(la(x, pred_type="nn", link_approx="mc", n_samples=3, generator=seeded(device)))
        values += [
            la.sample(2, generator=seeded(device)),
            la.predictive_samples(x, n_samples=2, generator=seeded(device)),
        ]
        return values

    return run


GRID = [(likelihood, *cell) for cell, likelihood in turns(product(grid.WEIGHTS, STRUCTURES), grid.LIKELIHOODS)]
for key in GRID:
    CASES[", ".join(key)] = cell(*key)


# Families of posteriors over functions, mixtures.


FAMILIES: dict[str, dict[str, Any]] = {
    "sod": {"n_subset": 8},
    "nystrom": {"subsample_size": 8, "n_eigenvalues": 4},
    "variational": {"num_inducing": 4, "inducing_locations": "random"},
}


def gp(family: str, weights: str, likelihood: str) -> Run:
    def run(device: str) -> Values:
        model, options = grid.network(likelihood).to(device), {"functional_approximation": family, **FAMILIES[family]}
        la = Laplace(model, likelihood, weights, "gp", **options)
        la.fit(data(likelihood, device), **({"iterations": 3} if family == "variational" else {}))
        x = data(likelihood, device, 5)[0][0]
        values = [*flat(la(x)), la.log_marginal_likelihood()]
        return [*values, la.functional_samples(x, n_samples=2, generator=seeded(device))]

    return run


for family in FAMILIES:
    for weights in ("all", "last_layer"):
        for likelihood in ("regression", "classification"):
            CASES[f"gp {family}, {weights}, {likelihood}"] = gp(family, weights, likelihood)


def mixture(device: str) -> MixtureLaplace:
    parts = [made(device, *cell) for cell in [("all", "kron"), ("last_layer", "full"), ("all", "diag")]]
    return MixtureLaplace(parts, weights="evidence")


@case("mixture")
def _mixture(device: str) -> Values:
    la = mixture(device)
    la.fit(data("classification", device))
    x, _ = data("classification", device, 5)[0]
    values = [la(x), la(x, pred_type="nn", n_samples=3, generator=seeded(device)), la.log_marginal_likelihood()]
    la.calibrate(data("classification", device, 5), generator=seeded(device))
    return [*values, la(x), la.predict(x).entropy]


# States.

SAVED = [*grid.DIAGONAL, ("all", "lowrank_kron")]


@case("states")
def _states(device: str) -> Values:
    values: Values = []
    for weights, structure in SAVED:
        la = fitted(device, weights, structure, prior_precision=0.7)
        x = data("classification", device)[0][0]
        file = io.BytesIO()
        torch.save(moved_state(la.state_dict(), "cpu"), file)
        file.seek(0)
        again = made(device, weights, structure)
        again.load_state_dict(torch.load(file, weights_only=False))
        values += [la(x), again(x)]
    return values


def moved_state(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return type(value)((key, moved_state(x, device)) for key, x in value.items())
    return type(value)(moved_state(x, device) for x in value) if type(value) in (list, tuple) else moved(value, device)


@case("one file")
def _one_file(device: str) -> Values:
    values: Values = []
    with tempfile.TemporaryDirectory() as folder:
        for weights, structure in SAVED:
            la = fitted(device, weights, structure, prior_precision=0.7)
            x = data("classification", device)[0][0]
            la.save(Path(folder) / "la.safetensors")
            again = laplace.load(Path(folder) / "la.safetensors", grid.network().to(device))
            values += [la(x), again(x)]
    return values


@case("a state of the device on the host")
def _to_host(device: str) -> Values:
    values: Values = []
    with tempfile.TemporaryDirectory() as folder:
        for weights, structure in SAVED:
            la = fitted(device, weights, structure, prior_precision=0.7)
            la.save(Path(folder) / "la.safetensors")
            again = laplace.load(Path(folder) / "la.safetensors", grid.network())
            x = data("classification", "cpu")[0][0]
            values += [la(x.to(device)), again(x).to(device)]
    return values


@case("moved")
def _moved(device: str) -> Values:
    values: Values = []
    for weights, structure in SAVED:
        la = fitted("cpu", weights, structure, prior_precision=0.7)
        la.to(device)
        x = data("classification", device)[0][0]
        values += [la(x), la.log_marginal_likelihood()]
        la.fit(data("classification", device), override=False)
        values += [la(x)]
    return values


# Data and generators of the host, as loaders have them.


@case("data of the host")
def _host_data(device: str) -> Values:
    values: Values = []
    for weights, structure in SAVED:
        la = made(device, weights, structure)
        la.fit(data("classification", "cpu"))
        values += [la(data("classification", device)[0][0])]
        la.optimize_prior_precision(
            method="gridsearch", val_loader=data("classification", "cpu", 5), grid_size=3, pred_type="glm"
        )
        values += [la.prior_precision]
    return values


@case("a generator of the host")
def _host_generator(device: str) -> Values:
    la = fitted(device, "all", "kron")
    x = data("classification", device)[0][0]
    values = [la.sample(2, generator=seeded("cpu")), la(x, link_approx="mc", generator=seeded("cpu"))]
    return [*values, la(x, pred_type="nn", link_approx="mc", n_samples=3, generator=seeded("cpu"))]


# Tuning, calibration, comparison, training, refinement.


@case("tuning")
def _tuning(device: str) -> Values:
    values: Values = []
    for likelihood in ("classification", "regression"):
        for weights, structure in [("all", "kron"), ("last_layer", "full"), ("subnetwork", "diag")]:
            la = fitted(device, weights, structure, likelihood)
            la.optimize_prior_precision(n_steps=3, prior_structure="layerwise" if weights == "all" else "scalar")
            values += [la.prior_precision]
            la.optimize_prior_precision(
                method="gridsearch", val_loader=data(likelihood, device, 5), grid_size=4, pred_type="glm"
            )
            values += [la.prior_precision]
    return values


@case("calibrate and compare")
def _calibrate(device: str) -> Values:
    values: Values = []
    cells = [
        ("classification", "last_layer", "full"),
        ("regression", "all", "kron"),
        ("bernoulli", "subnetwork", "diag"),
    ]
    for likelihood, weights, structure in cells:
        la = fitted(device, weights, structure, likelihood)
        held_out = data(likelihood, device, 5)
        record = la.calibrate(held_out, generator=seeded(device))
        values += [record.scale, record.prior_precision, *flat(la(held_out[0][0]))]
        table = la.compare(data(likelihood, device, 6), generator=seeded(device))
        values += [number for row in table.rows.values() for number in (row.network, row.posterior, row.difference)]
    return values


@case("calibration by folds")
def _folds(device: str) -> Values:
    la = fitted(device, "last_layer", "diag")
    record = la.calibrate(train_loader=data("classification", device), folds=2, generator=seeded(device))
    return [record.scale, record.prior_precision, la(data("classification", device)[0][0])]


@case("online training")
def _online(device: str) -> Values:
    values: Values = []
    for likelihood in ("classification", "regression"):
        for structure in ("diag", "kron", "full"):
            model = trainable(device, likelihood)
            la, *_ = marglik_training(
                model, data(likelihood, device), likelihood, structure, n_epochs=2, n_hypersteps=2
            )
            values += [la.prior_precision, la.sigma_noise, *flat(la(data(likelihood, device)[0][0]))]
    return values


@case("refinement")
def _refinement(device: str) -> Values:
    values: Values = []
    for structure, method in [("full", "map"), ("kron", "map"), ("diag", "variational")]:
        la = fitted(device, "last_layer", structure)
        la.refine(data("classification", device), method, max_steps=2, n_samples=4, generator=seeded(device))
        values += [la(data("classification", device)[0][0]), la.log_marginal_likelihood()]
    gp = FunctionalLaplace(grid.network().to(device), "classification", n_subset=8)
    gp.fit(data("classification", device))
    gp.refine(data("classification", device), max_steps=3)
    return [*values, gp(data("classification", device)[0][0])]


# Curvatures, choices of weights, tasks, and what is read off a prediction.


@case("curvatures")
def _curvatures(device: str) -> Values:
    values: Values = []
    for backend in (NativeGGN, NativeEF, NativeHessian):
        for structure in ("full", "diag") if backend is NativeHessian else ("kron", "diag"):
            options = {"stochastic": True, "generator": seeded(device)} if backend is NativeGGN else {}
            la = fitted(device, "all", structure, prior_precision=5.0, backend=backend, backend_kwargs=options)
            values += [la(data("classification", device)[0][0])]
    return values


@case("masks")
def _masks(device: str) -> Values:
    values: Values = []
    train = data("classification", device)
    model = trainable(device)
    scored = Laplace(model, "classification", "all", "diag")
    masks = [
        RandomSubnetMask(model, 5, generator=seeded("cpu")),
        LargestMagnitudeSubnetMask(model, 5),
        LargestVarianceDiagLaplaceSubnetMask(model, 5, diag_laplace_model=scored),
        LargestVarianceSWAGSubnetMask(model, 5, swag_n_snapshots=3),
        LastLayerSubnetMask(model),
    ]
    for mask in masks:
        indices = mask.select(train)
        la = Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=indices)
        la.fit(train)
        values += [la(train[0][0]), la.sample(2, generator=seeded(device))]
    return values


@case("tasks")
def _tasks(device: str) -> Values:
    values: Values = []
    for weights, structure in [("all", "kron"), ("last_layer", "full"), ("subnetwork", "diag")]:
        options = {"last_layer_name": "3"} if weights == "last_layer" else {}
        la = grid.make(weights, structure, model=trainable(device), **options)
        tasks = [data("classification", device, seed) for seed in (3, 4)]
        found = continual_training(la, tasks, n_epochs=1)
        values += [task.log_marginal_likelihood for task in found] + [la(tasks[0][0][0])]
    return values


@case("predictions")
def _predictions(device: str) -> Values:
    values: Values = []
    for likelihood in grid.LIKELIHOODS:
        la = fitted(device, "last_layer", "kron", likelihood)
        x = data(likelihood, device)[0][0]
        prediction = la.predict(x, generator=seeded("cpu"))  # whose numbers no global generator of a device has
        values += [prediction.latent.mean, prediction.latent.covariance, prediction.variance, prediction.entropy]
        if likelihood not in ("classification", "reward_modeling"):
            values += [*prediction.interval()]
        if likelihood == "classification":
            values += [la(x, link_approx=link, generator=seeded(device)) for link in ("mc", "bridge", "bridge_norm")]
            values += flat(la.predict(x, joint=True).latent.covariance)
    return values


@case("metrics")
def _metrics(device: str) -> Values:
    la = fitted(device, "last_layer", "kron")
    x, y = data("classification", device)[0]
    probs = la(x)
    scores = [metrics.nll, metrics.brier, metrics.accuracy, metrics.expected_calibration_error, metrics.aurc]
    values = [score(probs, y) for score in (*scores, metrics.mean_calibration_error, metrics.coverage_at_risk)]
    values += [metrics.auroc(probs[:, 0], probs[:, 1]), metrics.fpr95(probs[:, 0], probs[:, 1])]
    mean, y = torch.linspace(0, 1, 5, device=device).unsqueeze(1), torch.ones(5, 1, device=device)
    scores = [metrics.gaussian_nll, metrics.gaussian_crps, metrics.regression_calibration_error]
    return [*values, *(score(mean, 0.5 * y, y) for score in scores)]


# Networks with other layers.


class Encoder(nn.Module):
    """Embedding, attention, norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)).mean(1))


def images() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1, stride=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))


class Recurrent(nn.Module):
    """Two layers in both directions, and a head on the last step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(2, 3, 2, batch_first=True, bidirectional=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


def series(kind: type[nn.RNNBase], structure: str, weights: str) -> Run:
    def run(device: str) -> Values:
        torch.manual_seed(0)
        model, x = Recurrent(kind).eval().to(device), torch.randn(6, 4, 2).to(device)
        la = Laplace(model, "classification", weights, structure)
        la.fit([(x, (torch.arange(6) % 3).to(device))])
        values = [la(x), la.log_marginal_likelihood(), la(x, pred_type="nn", n_samples=2, generator=seeded(device))]
        return [*values, la.predict(x).latent.covariance, model(x).detach()]

    return run


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    for weights, structure in [("all", "kron"), ("all", "full"), ("last_layer", "kron")]:
        CARD_CASES[f"{kind.__name__}, {weights}, {structure}"] = series(kind, structure, weights)


def layers(make: Callable[[], nn.Module], structure: str, weights: str) -> Run:
    def run(device: str) -> Values:
        torch.manual_seed(0)
        model = make().eval().to(device)
        x = torch.randint(7, (6, 5)) if make is Encoder else torch.randn(6, 2, 4, 4)
        la = Laplace(model, "classification", weights, structure)
        la.fit(moved([(x, torch.arange(6) % 3)], device))
        x = x.to(device)
        return [la(x), la.log_marginal_likelihood(), la(x, pred_type="nn", n_samples=2, generator=seeded(device))]

    return run


for make in (Encoder, images):
    for structure in ("full", "diag", "kron", "ekfac", "lowrank_kron"):
        CASES[f"{make.__name__.lower()}, all, {structure}"] = layers(make, structure, "all")
    CASES[f"{make.__name__.lower()}, last_layer, kron"] = layers(make, "kron", "last_layer")


@case("many outputs")
def _many_outputs(device: str) -> Values:
    """More than a device decomposes in batches: roots by products, other eigenvectors on the host."""
    values: Values = []
    torch.manual_seed(0)
    head, x, y = nn.Linear(5, 36), torch.randn(7, 5).to(device), (torch.arange(7) % 36).to(device)
    model = nn.Sequential(head).to(device)
    for structure in ("full", "kron"):
        la = Laplace(model, "classification", "last_layer", structure, last_layer_name="0")
        la.fit([(x, y)])
        values += [la(x, link_approx="mc", generator=seeded(device))]
        values += [la.functional_samples(x, n_samples=2, generator=seeded(device))]
    return values


class Spread(nn.Module):
    """The head lies on the device, and the rest does not."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3).to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.cpu()).to(self.head.weight.device))


# Comparing and counting.


def outcome(run: Run, device: str) -> Values | str:
    """What a run gives, or the error that ends it."""
    torch.manual_seed(0)
    try:
        return run(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]


def difference(found: Values | str, expected: Values | str) -> str:
    """What is wrong with the numbers of the second device; nothing if they are right."""
    if isinstance(found, str) or isinstance(expected, str):
        return f"{found!s:.600} (cpu: {expected!s:.200})"
    if len(found) != len(expected):
        return f"{len(found)} values instead of {len(expected)}"
    for place, (one, truth) in enumerate(zip(found, expected, strict=True)):
        if isinstance(one, Tensor) and not isinstance(one, other.OtherTensor):
            return f"value {place} lies on {one.device}"
        if not torch.allclose(torch.as_tensor(one).cpu(), torch.as_tensor(truth), 1e-5, 1e-7, equal_nan=True):
            return f"value {place} is {one}, not {truth}"
    return ""


def counts(likelihood: str, weights: str, structure: str) -> dict[str, dict[str, int]]:
    """Reads and copies of three more batches of a fit, and of a prediction of either kind."""

    def fit(n_batches: int, place: str) -> tuple[Any, Counter[str]]:
        la, batches = made(other.NAME, weights, structure, likelihood), data(likelihood, place)[:1] * n_batches
        other.SEEN.clear()
        la.fit(batches)
        return la, other.SEEN.copy()

    # The contents of batches 0, 1, 2, 4, 8, … are looked at, of none of the three that one fit has more than the other.
    (_, few), (la, many) = fit(5, other.NAME), fit(8, other.NAME)
    seen = {"fit": many - few, "fit to data of the host": fit(8, "cpu")[1] - fit(5, "cpu")[1]}
    x = data(likelihood, other.NAME)[0][0]
    for name, options in {"glm": {}, "nn": {"pred_type": "nn", "link_approx": "mc", "n_samples": 3}}.items():
        la(x, **options)  # what is computed once per posterior
        other.SEEN.clear()
        la(x, **options)
        seen[name] = other.SEEN.copy()
    return {name: dict(counted) for name, counted in seen.items()}


def counts_of_training() -> dict[str, dict[str, int]]:
    """Reads and copies of two more epochs of online training, of three batches each."""

    def train(n_epochs: int) -> Counter[str]:
        model, batches = grid.network().to(other.NAME), data("classification", other.NAME)
        other.SEEN.clear()
        marglik_training(model, batches, n_epochs=n_epochs, n_epochs_burnin=0, marglik_frequency=100)
        return other.SEEN.copy()

    few, many = train(3), train(5)
    return {"training": dict(many - few)}


def counts_of_tuning() -> dict[str, dict[str, int]]:
    """Reads and copies of steps of the evidence, beyond those of a single one."""
    counted: dict[str, dict[str, int]] = {}
    for weights, structure in [("all", "kron"), ("last_layer", "full"), ("subnetwork", "diag")]:
        la = fitted(other.NAME, weights, structure)
        seen = []
        for n_steps in (1, 40):
            la.optimize_prior_precision(n_steps=n_steps)  # what is computed once per posterior
            other.SEEN.clear()
            la.optimize_prior_precision(n_steps=n_steps)
            seen.append(other.SEEN.copy())
        counted[f"tuning, {weights}, {structure}"] = dict(seen[1] - seen[0])
    return counted


def refusals() -> dict[str, Any]:
    """What the device accepts and should not, and what it counts of a few operations."""
    there, here = torch.ones(3, device=other.NAME), torch.ones(3)
    mixed: dict[str, Callable[[], Any]] = {
        "a sum": lambda: there + here,
        "a product": lambda: torch.outer(here, there),
        "a concatenation": lambda: torch.cat([there, here]),
        "a number in a product of matrices": lambda: torch.stack([there.sum(), here.sum()]),
        "in place": lambda: here.add_(there),
        "a generator of the host": lambda: torch.randn(3, device=other.NAME, generator=torch.Generator()),
        "an array": lambda: there.numpy(),
        "a network on both": lambda: Laplace(Spread(other.NAME), "classification", "last_layer", "kron"),
    }
    accepted: list[str] = []
    for name, run in mixed.items():
        try:
            run()
        except (RuntimeError, TypeError):
            continue
        except LaplaceError as error:
            assert "on cpu and" in str(error) and "device_map={'': 0}" in str(error)
            continue
        accepted.append(name)
    other.SEEN.clear()
    there = torch.tensor([1.0, 2.0], device=other.NAME) + torch.ones(2).to(other.NAME)
    (there[[0]] * torch.tensor(2.0)).cpu()  # numbers of the host are none of the copies
    bool(there.sum() > 1)
    return {"accepted": accepted, "seen": dict(other.SEEN)}


def main() -> None:
    """Prints the reports: of the device itself, of counts and of numbers."""
    other.set_up()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"device": refusals()}
    found["counts"] = {", ".join(key): counts(*key) for key in COUNTED} | {"online": counts_of_training()}
    found["tuning"] = counts_of_tuning()
    found["numbers"] = {name: difference(outcome(run, other.NAME), outcome(run, "cpu")) for name, run in CASES.items()}
    print(json.dumps(found))
