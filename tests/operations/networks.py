"""Networks of the benchmarks, narrower, and what is counted of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.operations import Counted
from laplace import ParametricLaplace
from laplace.errors import LaplaceWarning
from tests import grid
from tests.operations.budgets import Budget

Batches = list[tuple[Tensor, Tensor]]
N_CLASSES, BATCH = 10, 16


@dataclass(frozen=True)
class Network:
    """A network with random weights, and data of its inputs."""

    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]  # Shape of one input

    def __call__(self) -> tuple[nn.Module, Batches]:
        """The network and some batches."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().eval()
            data = [(torch.randn(BATCH, *self.inputs), torch.randint(N_CLASSES, (BATCH,))) for _ in range(2)]
        return model, data


WIDE_RESNET = Network(lambda: models.wide_resnet(depth=10, width=1), (3, 8, 8))
NETWORKS = {
    "MLP": Network(lambda: models.mlp(20, 30, 30, N_CLASSES), (20,)),
    "narrow MLP": Network(lambda: models.mlp(24, 16, 16, N_CLASSES), (24,)),
    "LeNet": Network(models.digits_lenet, (1, 8, 8)),
    "encoder": Network(lambda: models.Encoder(16, N_CLASSES), (6, 16)),
    "wide ResNet": WIDE_RESNET,
}


def of_one_pass(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Operations of a forward pass, and R: with a backward pass for every output, one after the other."""
    parameters = list(model.parameters())
    with Counted() as forward:
        f = model(x)
    with Counted() as backward:
        for output in range(N_CLASSES):
            torch.autograd.grad(f[:, output].sum(), parameters, retain_graph=True)
    return forward.operations, forward.operations + backward.operations


def counted(network: Network, weights: str, structure: str) -> Budget:
    """What a fit takes for one more batch, and what is asked of it afterwards."""
    model, batches = network()

    def made() -> ParametricLaplace:
        return grid.make(weights, structure, "classification", model)

    def fit(n_batches: int) -> ParametricLaplace:
        la = made()
        la.fit([batches[i % 2] for i in range(n_batches)])
        return la

    new = made()
    with Counted() as first:
        new.fit(batches[:1])  # proves how the network uses its weights
    with Counted() as few:
        fit(5)
    with Counted() as many:
        la = fit(8)
    x, prior = batches[0][0], torch.ones(1)
    la(x)
    la.log_marginal_likelihood(prior)
    calls: list[Callable[[], object]] = [
        lambda: la(x),
        lambda: la(x, link_approx="mc", n_samples=20),
        lambda: la(x, pred_type="nn", n_samples=10),
        lambda: la.log_marginal_likelihood(2 * prior),
        lambda: la.sample(10),
    ]
    found: list[int] = []
    for call in calls:
        with Counted() as operations:
            call()
        found.append(operations.operations)
    with Counted() as tuning, warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)  # of random networks that a posterior makes worse
        la.optimize_prior_precision(n_steps=100)
    return Budget(round((many.operations - few.operations) / 3), *found, tuning.operations, tuning.reads, first.reads)
