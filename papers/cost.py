"""Time and memory of every method over MAP: Daxberger et al. (2021), figure 5 and table 5.

Times are processor time on one core, over that of MAP in the same run: of training (of Laplace approximations MAP's
included, with fit and tuning of the prior) and of predictions for the test data. A convolutional network on digits; the
ratios of epochs are the paper's: SWAG takes 0.4 as many as MAP, one snapshot each, CSGHMC twice as many, in four cycles
with three samples each. SWAG predicts with 30 samples, VB with five (the paper does not say how many). Memory is that
of all tensors that predictions are made of; the second table has it for WRN-16-4 and ten classes, the paper's network.

LA is the last layer, Kronecker-factored, by the evidence; LA* the last layer, full empirical Fisher, by the NLL of
validation data (the paper: with out-of-distribution data). The other Laplace approximations are not in the figure.

    python papers/cost.py
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.curvature import NativeEF
from laplace.errors import LaplaceWarning
from laplace.extensions.plotting import new_figure
from protocol.baselines.csghmc import CyclicalSettings, sample_networks
from protocol.baselines.ensemble import deep_ensemble, mean_probabilities
from protocol.baselines.flipout import FlipoutSettings, fit_flipout
from protocol.baselines.swag import SwagSettings, fit_swag
from protocol.claims import Claim, lower
from protocol.data import Part, Split, digits, glyphs, split
from protocol.networks import cnn
from protocol.options import Options, parse
from protocol.records import Records, Scores
from protocol.report import finish, table
from protocol.training import Training, train
from protocol.wide_resnet import wide_resnet

DIGITS, WRN = "digits", "WRN-16-4"
SAMPLED = {"VB": 5, "SWAG": 30}
"""Samples of weights in predictions."""
THEIRS = {"MAP": "11", "LA": "12", "VB": "22", "DE": "55", "CSGHMC": "132", "SWAG": "440"}


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        n_train: Training data; there are a fifth as many for validation.
        n_test: Data to predict.
        n_channels: Of the network.
        how: MAP is trained.
        swag: Its iterates.
        cyclical: The chain of CSGHMC.
        n_repeats: The smallest time of so many predictions counts.
        depth: Of the wide residual network whose memory is shown.
        width: Of it.
    """

    n_train: int
    n_test: int
    n_channels: int
    how: Training
    swag: SwagSettings
    cyclical: CyclicalSettings
    n_repeats: int
    depth: int
    width: int


FULL = Settings(
    1000, 3000, 16, Training(30), SwagSettings(n_snapshots=12), CyclicalSettings(n_epochs=15), 5, 16, 4
)  # fmt: skip
SMALL = Settings(
    250, 60, 2, Training(1), SwagSettings(n_snapshots=2), CyclicalSettings(1, 1, 1, 1), 1, 10, 1
)  # fmt: skip
Predict = Callable[[Tensor], Tensor]
"""Probabilities `[N, C]` of inputs."""


@dataclass(frozen=True)
class Posterior:
    """A Laplace approximation, as `Laplace` takes it.

    Attributes:
        weights: Which of them are random.
        structure: Of the curvature.
        options: Further arguments.
        validated: The prior precision by validation data, instead of the evidence.
    """

    weights: str
    structure: str
    options: tuple[tuple[str, Any], ...] = ()
    validated: bool = False

    def fitted(self, model: nn.Module, data: Split) -> ParametricLaplace:
        """Fitted and tuned."""
        la = Laplace(model, "classification", self.weights, self.structure, **dict(self.options))
        la.fit([(data.train.x, data.train.y)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaplaceWarning)  # edges of grids: scores are not what is measured here
            if self.validated:
                loader = [(data.validation.x, data.validation.y)]
                la.optimize_hyperparameters(objective="nll", val_loader=loader)
            else:
                la.optimize_hyperparameters()
        return la


LA_MC = "LA, MC"
"""LA that predicts by 100 samples of the outputs."""
POSTERIORS = {
    "LA": Posterior("last_layer", "kron"),
    "LA*": Posterior("last_layer", "full", (("backend", NativeEF),), validated=True),
    "LA, all weights, diag": Posterior("all", "diag"),
    "LA, all weights, Kron": Posterior("all", "kron"),
}


def seconds(run: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and its processor time."""
    start = time.process_time()
    result = run()
    return result, time.process_time() - start


def trained(settings: Settings, data: Split, seed: int) -> tuple[nn.Sequential, dict[str, Callable[[], Predict]]]:
    """MAP, and of every other method a function that trains it and returns its predictions."""
    make = partial(cnn, 10, n_channels=settings.n_channels, size=data.train.x.shape[-1])
    train_data, how = data.train, settings.how

    def of_networks(networks: list[nn.Module]) -> Predict:
        return partial(mean_probabilities, networks)

    def variational() -> Predict:
        posterior = fit_flipout(make(seed), train_data, how, FlipoutSettings(), seed)
        return lambda x: mean_probabilities(posterior.networks(SAMPLED["VB"]), x)

    model = make(seed)

    def swag() -> Predict:
        posterior, generator = fit_swag(model, train_data, settings.swag, seed), torch.Generator().manual_seed(seed)
        return lambda x: mean_probabilities(posterior.networks(SAMPLED["SWAG"], train_data, generator), x)

    methods: dict[str, Callable[[], Predict]] = {
        "MAP": lambda: of_networks([train(model, train_data, how, seed)]),
        **{name: partial(_laplace, each, model, data) for name, each in POSTERIORS.items()},
        "VB": variational,
        "DE": lambda: of_networks(deep_ensemble(make, train_data, how, seed)),
        "CSGHMC": lambda: of_networks(sample_networks(make(seed), train_data, settings.cyclical, seed)),
        "SWAG": swag,
    }
    return model, methods


def _laplace(posterior: Posterior, model: nn.Module, data: Split) -> Predict:
    return posterior.fitted(model, data)


AFTER_MAP = (*POSTERIORS, "SWAG")
"""Methods that start from MAP's weights: its training is a part of theirs."""


def n_bytes(state: object) -> int:
    """Of all tensors of a state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for part in state.values():
            yield from _tensors(part)
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _tensors(part)


def memory(model: nn.Module, data: Split, settings: Settings) -> dict[str, int]:
    """Bytes of what predictions are made of; of sampling methods whole networks."""
    one = n_bytes(model.state_dict())
    n_weights = sum(4 * p.numel() for p in model.parameters())
    n_samples = settings.cyclical.n_cycles * settings.cyclical.n_samples
    return {
        "MAP": one,
        **{name: one + n_bytes(each.fitted(model, data).state_dict()) for name, each in POSTERIORS.items()},
        "VB": one + n_weights,
        "DE": 5 * one,
        "CSGHMC": n_samples * one,
        "SWAG": one + n_weights * (1 + settings.swag.rank),  # mean, variance, deviations
    }


def make_data(settings: Settings, path: Path | None, seed: int) -> Split:
    """Noisy glyphs, or the same parts of a real data set; times depend on the size of an image alone."""
    parts = (settings.n_train, settings.n_train // 5, settings.n_test)
    data = digits(path) if path else glyphs(sum(parts), 14, seed=seed, noise=0.3)
    shares = (parts[0] / sum(parts), parts[1] / sum(parts))
    return split(data, shares, torch.Generator().manual_seed(seed))


def one_seed(settings: Settings, path: Path | None, seed: int) -> Scores:
    """Times on digits, memory there and of the wide residual network."""
    scores = Scores()
    data = make_data(settings, path, seed)
    model, methods = trained(settings, data, seed)
    network = cnn(10, seed, settings.n_channels, size=data.train.x.shape[-1])
    warm = train(network, data.train[:200], Training(1), seed)  # first calls are slower
    POSTERIORS["LA"].fitted(warm, Split(data.train[:200], data.validation, data.test))
    training: dict[str, float] = {}
    predicting: dict[str, float] = {}
    for name, method in methods.items():
        predict, training[name] = seconds(method)
        if name in AFTER_MAP:
            training[name] += training["MAP"]
        predicting[name] = min(seconds(partial(predict, data.test.x))[1] for _ in range(settings.n_repeats))
        if name == "LA":
            sampled = partial(predict, data.test.x, link_approx="mc", n_samples=100)
            spent = min(seconds(sampled)[1] for _ in range(settings.n_repeats))
            scores.add(DIGITS, LA_MC, {"prediction": spent / predicting["MAP"]})
        p = predict(data.test.x)
        accuracy = float((p.argmax(1) == data.test.y).float().mean())
        scores.add(DIGITS, name, {"training": training[name] / training["MAP"]})
        scores.add(DIGITS, name, {"prediction": predicting[name] / predicting["MAP"], "accuracy": accuracy})
    for condition, network, parts in (
        (DIGITS, model, data),
        (WRN, wide_resnet(10, seed, settings.depth, settings.width).eval(), _like_cifar(seed)),
    ):
        for name, size in memory(network, parts, settings).items():
            of_map = n_bytes(network.state_dict())
            if condition == WRN:
                scores.add(WRN, name, {"MB": size / 1e6})
            scores.add(condition, name, {"memory": size / of_map})
    return scores


def _like_cifar(seed: int, n_data: int = 8) -> Split:
    """A few random images: sizes of states do not depend on data."""
    generator = torch.Generator().manual_seed(seed)
    part = Part(torch.randn(n_data, 3, 32, 32, generator=generator), torch.arange(n_data) % 10)
    return Split(part, part, part)


def claims() -> list[Claim]:
    """What the text says of figure 5 and table 5."""
    rivals = ("VB", "DE", "CSGHMC", "SWAG")
    found = [
        lower("figure 5", DIGITS, measure, method, "MAP", "negligible overhead", margin=0.1, note=note)
        for method in ("LA", "LA*")
        for measure, note in (("training", ""), ("prediction", SMALL_NETWORK))
    ]
    found.append(lower("table 5", WRN, "memory", "LA", "MAP", "12 and 11 MB", margin=0.1))
    for measure in ("training", "prediction"):
        found += [lower("figure 5", DIGITS, measure, "LA", rival, "the cheapest of all") for rival in rivals]
    for rival in ("VB", "DE", "CSGHMC"):
        for measure in ("training", "prediction"):
            text = f"{DIGITS}: {measure} of {rival} > 2 × MAP"
            note = SHORT_STEPS if (rival, measure) == ("CSGHMC", "training") else ""
            found.append(
                Claim(
                    "figure 5",
                    text,
                    partial(_above, rival, measure, 2),
                    "two to five times",
                    note,
                    "baseline" if note else "",
                )
            )
    for measure, times, text in (("training", 1.25, "almost twice"), ("prediction", 10, "more than ten times")):
        statistic = partial(_above, "SWAG", measure, times)
        found.append(Claim("figure 5", f"{DIGITS}: {measure} of SWAG > {times} × MAP", statistic, text))
    found.append(Claim("C.2.3", f"{DIGITS}: prediction of {LA_MC} < 1.4 × LA", _costs_little, "around 20 % slower"))
    theirs = "still significantly faster than all other methods"
    found += [lower("C.2.3", DIGITS, "prediction", LA_MC, rival, theirs) for rival in rivals]
    order = ("LA", "VB", "DE", "CSGHMC", "SWAG")
    found += [lower("table 5", WRN, "memory", less, more, f"{THEIRS[less]} and {THEIRS[more]} MB")
              for less, more in pairwise(order)]  # fmt: skip
    return found


def _costs_little(scores: Scores) -> float:
    """How far samples of the outputs are from taking 1.4 times as long as the probit link."""
    return 1.4 - scores[DIGITS, LA_MC, "prediction"] / scores[DIGITS, "LA", "prediction"]


def _above(method: str, measure: str, times: float, scores: Scores) -> float:
    return scores[DIGITS, method, measure] - times


def draw(records: Records, output: Path) -> None:
    """Figure 5: bars of training and prediction over MAP."""
    figure, axes = new_figure(n_columns=2, width=4.5, height=3.2)
    methods = [name for name in records.methods(DIGITS) if (DIGITS, name, "training") in records]
    for axis, measure in zip(axes, ("training", "prediction"), strict=True):
        found = [records.estimate(DIGITS, method, measure) for method in methods]
        axis.barh(methods[::-1], [e.mean for e in found][::-1], xerr=[e.error for e in found][::-1])
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=f"{measure}: time over MAP's", xscale="linear" if measure == "training" else "log")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)


SMALL_NETWORK = """The network is small: of 719 images MAP takes some 6 ms and the variances of the last layer 2 ms. \
Of 32 random images, the network being WRN-16-4, LA and LA* took 0.94 and 1.01 times as long as MAP (seed 100)."""
SHORT_STEPS = """In so small a network the optimiser counts: an epoch of SGHMC took 0.8 times as long as one of Adam \
(seed 100), so that twice as many take 1.6 times as long."""
PROTOCOL = """A convolutional network on 1,000 glyphs of the ten digits, 14 × 14 pixels, processor time on one core
over MAP's in the same run; 3,000 are predicted. Epochs over MAP's are the paper's (SWAG 0.4, CSGHMC 2), which trains
for 100 and here for 30. "LA, MC" predicts by 100 samples of the outputs. Memory is that of all tensors that
predictions are made of, for WRN-16-4 in MB with the paper's numbers in brackets. The paper counts 40 snapshots of
SWAG; here mean, variance and 20 deviations are kept, as by its authors."""


def main(options: Options) -> None:
    """Runs and reports.

    Args:
        options: Of the command line.
    """
    settings = SMALL if options.small else FULL
    records = options.run(settings, lambda seed: one_seed(settings, options.data, seed))
    theirs = {method: {"MB": number} for method, number in THEIRS.items()}
    finish(
        options, records, script="cost", paper="Daxberger et al. (2021), 4.2, C.5", protocol=PROTOCOL,
        tables=[
            table(records, DIGITS, "figure 5, and table 5 on digits: over MAP", ("training", "prediction", "memory")),
            table(records, WRN, "table 5: WRN-16-4", ("MB", "memory"), theirs),
        ],
        claims=claims(),
        missing=[("figure 5", "times of a WRN-16-4 on CIFAR-10: hours of training on one core")],
    )  # fmt: skip
    draw(records, options.output)


if __name__ == "__main__":
    main(parse(__doc__, "cost"))
