"""Mixtures of Laplace approximations on noisy glyphs: rotated, corrupted, and images that are no digits.

Eschenhagen et al. (2021, "Mixtures of Laplace approximations for improved post-hoc uncertainty in deep learning"):
tables 1 to 4, figures 2 to 4, 6 to 8 and 10, theorem 2, equation 10 and MIMO. Their MNIST-R is here rotated digits in
the fonts of matplotlib, their CIFAR-10-C digits with eight corruptions at five severities, their OOD data sets inverted
digits, digits of shuffled pixels, and smooth noise. Every image of 8 × 8 pixels has noise of its own, so that the
networks are over-confident, as theirs are. 5,000 images are to train on, 2,000 to tune on and 3,000 to test on, of
which 600 are shifted; 600 are of no class. The rest is their protocol:

- networks by Adam (rotated) and by SGD with Nesterov's momentum (corrupted), a cosine schedule, 100 and 60 epochs of
  batches of 128, weight decay 5e-4; five to an ensemble, in figure 10 one to ten;
- LLLA and MoLA with Kronecker factors, running averages over batches with β = 0.95 and damped (algorithm 1), and the
  probit link, one prior precision for all components, the smallest of 100 candidates whose mean confidence on
  validation data reaches the accuracy of MAP there less 0.01 (F.4); the six variants each with their own;
- SWAG and Multi-SWAG with 40 iterates, 30 samples, and a learning rate of their grid chosen by the same threshold;
- MIMO with three heads, no input repetition, batch repetition 4, and its mixture with the full GGN of every head.

What differs: a small convolutional network instead of LeNet and a wide ResNet. It has no batch normalisation, and with
SGD's rate of 0.1 networks differ as theirs do not: on seed 100 the log evidences of five spread by 12 % of their mean.
Here the rate is 0.03, with which they spread by 4 %. Adam's rate is 3e-3, for there are few steps; MIMO's network is
twice as wide, since the smaller one underfits (its threshold is its own accuracy); costs are processor time of a
core, on a wider network that is not trained, and the memory of WRN-16-4, which is theirs.

    python papers/mixtures.py            # five seeds
    python papers/mixtures.py --small    # one seed, tiny networks, to try it out
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from protocol.baselines.ensemble import deep_ensemble
from protocol.baselines.swag import SwagSettings
from protocol.mola.claims import claims
from protocol.mola.costs import CostSettings, costs
from protocol.mola.methods import MethodSettings, Predictions, by_number, heads, six, train_mimo, variants
from protocol.mola.plot import draw
from protocol.mola.tables import tables
from protocol.mola.tasks import DataSettings, Task, corrupted_task, rotated_task
from protocol.mola.theory import add_theory
from protocol.networks import cnn
from protocol.options import parse
from protocol.records import Scores
from protocol.report import finish
from protocol.training import Training


@dataclass(frozen=True)
class Settings:
    """What the scores depend on besides the seed.

    Attributes:
        data: How many, how noisy.
        n_channels: Of the networks' first convolution.
        n_mimo_channels: Of MIMO's.
        rotated: Training on the first task.
        corrupted: Training on the second.
        mimo: Training of MIMO, on the second.
        rotated_methods: What the methods take on the first task.
        corrupted_methods: What they take on the second.
        cost: What table 2 measures.
    """

    data: DataSettings = field(default_factory=DataSettings)
    n_channels: int = 16
    n_mimo_channels: int = 32
    rotated: Training = field(default_factory=lambda: Training(100, 128, 3e-3))
    corrupted: Training = field(default_factory=lambda: Training(60, 128, 0.03, momentum=0.9))
    mimo: Training = field(default_factory=lambda: Training(60, 128, 0.03, momentum=0.9))
    rotated_methods: MethodSettings = field(default_factory=MethodSettings)
    corrupted_methods: MethodSettings = field(default_factory=MethodSettings)
    cost: CostSettings = field(default_factory=CostSettings)


_FEW = MethodSettings(
    2, 10, 5, n_samples=5, n_swag_samples=2, swag_rates=(0.01,), swag=SwagSettings(n_snapshots=3, rank=2)
)
SMALL = Settings(
    DataSettings(100, 60, 30, 20), 4, 4, Training(2, 64, 3e-3), Training(2, 64, 0.05, momentum=0.9),
    Training(1, 64, 0.05, momentum=0.9), _FEW, _FEW, CostSettings(4, 1, 1, 10),
)  # fmt: skip


def one_seed(settings: Settings, path: Path | None, seed: int) -> Scores:
    """All numbers of one seed."""
    scores = Scores()
    how = settings.rotated_methods
    task = rotated_task(settings.data, seed, path)
    networks = ensemble(task, settings.n_channels, settings.rotated, seed, how.n_components)
    add(scores, task, six(networks, task.parts, task.everything(), how, seed))
    add_training_loss(scores, task, networks[0])

    how = settings.corrupted_methods
    task = corrupted_task(settings.data, seed, path)
    networks = ensemble(task, settings.n_channels, settings.corrupted, seed, how.n_most)
    few, x = networks[: how.n_components], task.everything()
    add(scores, task, six(few, task.parts, x, how, seed))
    add_training_loss(scores, task, networks[0])
    mimo = train_mimo(settings.n_mimo_channels, task.parts.train, settings.mimo, how, seed)
    add(scores, task, heads(mimo, task.parts, x, how))
    add(scores, task, variants(networks[0], task.parts, x, how, seed), "variants: ")
    for n, predictions in by_number(networks, task.parts, x, how):
        add(scores, task, predictions, f"K = {n}: ")
    add_theory(scores, task.name, few, task.parts, how)
    for name, measures in costs(task.parts, how, settings.cost, seed).items():
        scores.add("cost", name, measures)
    return scores


def ensemble(task: Task, n_channels: int, training: Training, seed: int, n_members: int) -> list[nn.Module]:
    """Trained networks; the first is MAP."""
    train = task.parts.train
    n_classes, size = int(train.y.max()) + 1, train.x.shape[-1]
    return deep_ensemble(
        lambda own: cnn(n_classes, own, n_channels, train.x.shape[1], size), train, training, seed, n_members
    )


@torch.no_grad()
def add_training_loss(scores: Scores, task: Task, model: nn.Module) -> None:
    """Of MAP, whose claims suppose that it has not learnt its data by heart."""
    train = task.parts.train
    scores.add(f"{task.name}, test", "MAP", {"training loss": float(F.cross_entropy(model(train.x), train.y))})


def add(scores: Scores, task: Task, predictions: Predictions, prefix: str = "") -> None:
    """Puts the measures of predictions, and what was chosen, under conditions that begin with a prefix."""
    for method, p in predictions.p.items():
        for condition, measures in task.scores(p).items():
            scores.add(prefix + condition, method, measures)
    for method, chosen in predictions.chosen.items():
        scores.add(f"{prefix}{task.name}, chosen", method, chosen)


PROTOCOL = (__doc__ or "").split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
MISSING = (
    ("figures 5, 9 (ImageNet-C)", "no data of that size, nor the wide ResNet 50-2"),
    ("real MNIST and CIFAR-10 with their OOD data sets", "not at hand; MNIST is read by --data"),
)


def main() -> None:
    """Runs all seeds, prints and keeps the results, saves the plot."""
    options = parse(__doc__, "mixtures", range(5))
    settings = SMALL if options.small else Settings()
    records = options.run(settings, lambda seed: one_seed(settings, options.data, seed))
    finish(
        options, records, script="mixtures", paper="Eschenhagen et al. (2021)", protocol=PROTOCOL,
        tables=tables(records), claims=claims(records), missing=MISSING,
    )  # fmt: skip
    draw(records, options.output)
    print(f"\nplot: {options.output}")


if __name__ == "__main__":
    main()
