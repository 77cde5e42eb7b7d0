"""The methods of Eschenhagen et al. (2021), as what they predict on everything that is measured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from laplace import MimoBatches, MixtureLaplace, ParametricLaplace, from_mimo, mimo_loss, mimo_outputs
from laplace.enums import StructureName
from laplace.errors import TuningWarning
from laplace.grid import from_names
from laplace.metrics import accuracy
from protocol.baselines.ensemble import mean_probabilities
from protocol.baselines.swag import RATES, SwagSettings, choose_rate
from protocol.data import Part, Split
from protocol.networks import cnn
from protocol.training import Training

CHUNK = 1000
LARGEST = 1e3
AVERAGE, BATCH = 0.95, 128
"""β and the batches of algorithm 1; the paper does not say which β it took."""
STRUCTURES: tuple[StructureName, ...] = ("diag", "kron", "full")
Link = Literal["mc", "probit"]
LINKS: tuple[Link, ...] = ("mc", "probit")


@dataclass(frozen=True)
class MethodSettings:
    """What the methods take.

    Attributes:
        n_components: Networks of DE, MSWAG and MoLA.
        n_most: The most networks of DE and MoLA in figure 10.
        n_precisions: Candidates of the prior precision, from 1e-4 to 1e3.
        margin: By which the threshold of the mean confidence is below the accuracy of MAP (F.4: 0.98 and 0.94).
        n_samples: Of the Monte-Carlo link.
        n_swag_samples: Of SWAG, per network.
        swag_rates: Candidates of its learning rate.
        swag: How its iterates are made.
        n_heads: Inputs and heads of MIMO.
        batch_repetition: Of its training.
    """

    n_components: int = 5
    n_most: int = 10
    n_precisions: int = 100
    margin: float = 0.01
    n_samples: int = 100
    n_swag_samples: int = 30
    swag_rates: tuple[float, ...] = RATES
    swag: SwagSettings = field(default_factory=lambda: SwagSettings(batch_size=128))
    n_heads: int = 3
    batch_repetition: int = 4


@dataclass
class Predictions:
    """What methods predict.

    Attributes:
        p: Probabilities `[·, C]` of everything.
        chosen: The numbers that were chosen on the validation data.
    """

    p: dict[str, Tensor] = field(default_factory=dict)
    chosen: dict[str, dict[str, float]] = field(default_factory=dict)


def in_chunks(predict: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Predictions of many inputs, a chunk at a time."""
    with torch.no_grad():
        return torch.cat([predict(part) for part in x.split(CHUNK)])


def _softmax(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).softmax(1)


def threshold(model: nn.Module, validation: Part, margin: float) -> float:
    """The mean confidence that is asked for: slightly below the network's accuracy on the validation data."""
    p = in_chunks(partial(_softmax, model), validation.x)
    return float(accuracy(p, validation.y)) - margin


def tune(
    la: ParametricLaplace | MixtureLaplace,
    validation: Part,
    wanted: float,
    n_precisions: int,
    link: Link = "probit",
    n_samples: int = 100,
    seed: int = 0,
) -> float:
    """Sets the smallest prior precision of the grid with the wanted mean confidence; the largest if none has it."""

    def missed(p: Tensor, _y: Tensor) -> Tensor:
        """0 from the threshold on: of the candidates that reach it the first is taken."""
        return (wanted - p.amax(1).double().mean()).clamp(min=0)

    grid = {"prior_precision": torch.logspace(-4, 3, n_precisions)}
    generator = torch.Generator().manual_seed(seed) if link == "mc" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)  # the smallest candidate may do
        found = la.optimize_hyperparameters(
            objective=missed, val_loader=[(validation.x, validation.y)], grid=grid, link_approx=link,
            n_samples=n_samples, generator=generator,
        )  # fmt: skip
    if found.value > 0:  # the ensemble itself is less confident
        la.prior_precision = LARGEST
    return float(la.prior_precision)


def _report(prior_precision: float, wanted: float) -> dict[str, float]:
    """What was chosen, and whether it met the threshold."""
    return {"log10 δ": math.log10(prior_precision), "threshold": wanted, "met": float(prior_precision < LARGEST)}


def last_layers(
    networks: Sequence[nn.Module], data: Part, structure: StructureName = "kron", average: float = AVERAGE
) -> list[ParametricLaplace]:
    """Fitted last-layer posteriors of trained networks.

    Kronecker factors are those of algorithm 1: running averages over batches, as if of all N data, and damped; but the
    averages do not begin at zero.
    """
    if structure != "kron":
        made = [from_names(model, "classification", "last_layer", structure) for model in networks]
        for la in made:
            la.fit([(data.x, data.y)])
        return made
    made = [from_names(model, "classification", "last_layer", structure, damping="mean") for model in networks]
    for la in made:
        for batch in zip(data.x.split(BATCH), data.y.split(BATCH), strict=True):
            la.fit([batch], override=False, decay=average)
        la.temperature = la.n_data / len(data)
    return made


def six(networks: Sequence[nn.Module], parts: Split, x: Tensor, how: MethodSettings, seed: int) -> Predictions:
    """MAP, DE, SWAG, MSWAG, LLLA and MoLA of all networks (tables 1, 3, 4; figures 2, 4, 7, 8)."""
    found = Predictions()
    wanted = threshold(networks[0], parts.validation, how.margin)
    found.p["MAP"] = in_chunks(partial(_softmax, networks[0]), x)
    found.p["DE"] = in_chunks(lambda x: mean_probabilities(networks, x), x)
    sampled, rates = [], how.swag_rates
    for k, model in enumerate(networks):
        rate, drawn = choose_rate(
            model, parts.train, parts.validation, how.swag, seed + k, wanted, rates, how.n_swag_samples
        )
        for each in drawn:
            convert_conv2d_weight_memory_format(each, torch.channels_last)  # twice as fast
        sampled.append(in_chunks(partial(mean_probabilities, drawn), x))
        rates = tuple(r for r in rates if r <= rate)  # smaller ones where a network would diverge
        found.chosen.setdefault("SWAG", {"rate": rate})
    found.p["SWAG"], found.p["MSWAG"] = sampled[0], torch.stack(sampled).mean(0)
    components = last_layers(networks, parts.train)
    for name, la in (("LLLA", components[0]), ("MoLA", MixtureLaplace(components))):
        found.chosen[name] = _report(tune(la, parts.validation, wanted, how.n_precisions), wanted)
        found.p[name] = in_chunks(la, x)
    return found


def variants(model: nn.Module, parts: Split, x: Tensor, how: MethodSettings, seed: int) -> Predictions:
    """LLLA with three structures and two links, each with a prior precision of its own (figures 3 and 6)."""
    found = Predictions()
    wanted = threshold(model, parts.validation, how.margin)
    for structure in STRUCTURES:
        (la,) = last_layers([model], parts.train, structure)
        for link in LINKS:
            name = f"{structure}, {link}"
            chosen = tune(la, parts.validation, wanted, how.n_precisions, link, how.n_samples, seed)
            found.chosen[name] = _report(chosen, wanted)
            options = {"link_approx": link, "n_samples": how.n_samples}
            generator = torch.Generator().manual_seed(seed)
            found.p[name] = in_chunks(partial(la, generator=generator, **options), x)
    return found


def by_number(
    networks: Sequence[nn.Module], parts: Split, x: Tensor, how: MethodSettings
) -> Iterator[tuple[int, Predictions]]:
    """DE and MoLA of 1, 2, … networks (figure 10)."""
    wanted = threshold(networks[0], parts.validation, how.margin)
    components, total = last_layers(networks[: how.n_most], parts.train), torch.zeros(())
    for n, model in enumerate(networks[: how.n_most], 1):
        total = total + in_chunks(partial(_softmax, model), x)
        mixture = MixtureLaplace(components[:n])
        chosen = tune(mixture, parts.validation, wanted, how.n_precisions)
        yield n, Predictions({"DE": total / n, "MoLA": in_chunks(mixture, x)}, {"MoLA": _report(chosen, wanted)})


# One network of several inputs and heads.


@dataclass(frozen=True)
class _Shuffled:
    """Batches in a new order at every reading."""

    data: Part
    size: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.data.batches(self.size, self.generator)


def train_mimo(n_channels: int, data: Part, training: Training, how: MethodSettings, seed: int) -> nn.Module:
    """A network of M inputs and M heads, trained like the others (Havasi et al., 2021; ρ = 0, batch repetition 4)."""
    n_classes, size = int(data.y.max()) + 1, data.x.shape[-1]
    model = cnn(how.n_heads * n_classes, seed, n_channels, how.n_heads * data.x.shape[1], size)
    convert_conv2d_weight_memory_format(model, torch.channels_last)
    generator = torch.Generator().manual_seed(seed)
    batches = MimoBatches(
        _Shuffled(data, training.batch_size, generator), how.n_heads, 0.0, how.batch_repetition, generator
    )
    optimizer = torch.optim.SGD(
        model.parameters(), training.rate, training.momentum or 0.0, weight_decay=training.weight_decay,
        nesterov=training.momentum is not None, foreach=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.n_epochs)
    for _ in range(training.n_epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            mimo_loss(mimo_outputs(model, inputs, how.n_heads), targets).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def heads(model: nn.Module, parts: Split, x: Tensor, how: MethodSettings) -> Predictions:
    """MIMO and MIMO-MoLA (F.5: the full GGN of every head), tuned to the accuracy of MIMO."""

    def predict(x: Tensor) -> Tensor:
        return mimo_outputs(model, x, how.n_heads).softmax(2).mean(1)

    found = Predictions({"MIMO": in_chunks(predict, x)})
    reached = in_chunks(predict, parts.validation.x)
    wanted = float(accuracy(reached, parts.validation.y)) - how.margin
    mixture = from_mimo(model, how.n_heads, example=parts.train.x[:1])
    mixture.fit([(parts.train.x, parts.train.y)])
    chosen = tune(mixture, parts.validation, wanted, how.n_precisions)
    found.chosen["MIMO-MoLA"] = _report(chosen, wanted)
    found.p["MIMO-MoLA"] = in_chunks(mixture, x)
    return found
