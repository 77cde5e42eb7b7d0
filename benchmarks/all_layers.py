"""All layers, exact GGN with ten outputs, against R: one forward pass and one gradient per output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks import models, work
from benchmarks.timing import Case, Job

Network = tuple[Callable[[], nn.Module], tuple[int, ...]]
"""A network and the shape of one input."""

LENET: Network = (models.lenet, (1, 28, 28))
DIGITS: Network = (models.digits_lenet, (1, 8, 8))
MLP: Network = (partial(models.mlp, 784, 1024, 512, 256, 128, 10), (784,))


def _setup(network: Network, device: torch.device) -> tuple[nn.Module, models.Batches]:
    make, shape = network
    return make().to(device), models.data(shape, 10, 1024, 256, device)


def _fit(network: Network, structure: str, device: torch.device) -> Job:
    model, batches = _setup(network, device)
    run = partial(work.fitted, model, batches, "all", structure)
    return Job(lambda _: run(), work.per_output_gradients(model, batches))


def _encoder_fit(structure: str, device: torch.device) -> Job:
    """Sequences of 32 tokens, 64 wide, five classes, in batches of 32."""
    model, batches = models.Encoder(64, 5).to(device).eval(), models.data((32, 64), 5, 512, 32, device)
    return Job(lambda _: work.fitted(model, batches, "all", structure), work.per_output_gradients(model, batches))


def _residual_fit(structure: str, device: torch.device) -> Job:
    """A residual network with BatchNorm on images 3×32×32, in batches of 32."""
    model = models.wide_resnet(10, depth=10, width=1).to(device).eval()
    batches = models.data((3, 32, 32), 10, 128, 32, device)
    return Job(lambda _: work.fitted(model, batches, "all", structure), work.per_output_gradients(model, batches))


def _many_small_batches(device: torch.device) -> Job:
    """The diagonal of the MLP in batches of 128, against a forward pass."""
    make, shape = MLP
    model, batches = make().to(device), models.data(shape, 10, 4096, 128, device)
    return Job(lambda _: work.fitted(model, batches, "all", "diag"), work.forward(model, batches))


def _predict(network: Network, structure: str, device: torch.device) -> Job:
    model, batches = _setup(network, device)
    la = work.fitted(model, batches, "all", structure)
    note = work.factorised(la, batches[0][0])
    return Job(lambda _: work.predict(la, batches), work.per_output_gradients(model, batches), note=note)


def _full_ggn(device: torch.device) -> Job:
    """Σ JᵀΛJ of 1,257 points, against one GEMM [P, N·C] × [N·C, P]."""
    n_data, n_classes = 1257, 10
    model, batches = models.mlp(64, 50, 50, n_classes).to(device), models.data((64,), n_classes, n_data, 256, device)
    n_params = sum(p.numel() for p in model.parameters())
    factor = torch.randn(n_data * n_classes, n_params, device=device)
    return Job(lambda _: work.fitted(model, batches, "all", "full"), lambda: factor.T @ factor)


def _full_probit(device: torch.device) -> Job:
    """Probit predictions of 256 data, against one float32 product [B·C, P] × [P, P] of the Jacobian and a root."""
    n_data, n_classes = 256, 10
    model, batches = models.mlp(64, 50, 50, n_classes).to(device), models.data((64,), n_classes, n_data, 256, device)
    la = work.fitted(model, batches, "all", "full")
    note = work.factorised(la, batches[0][0])
    n_params = sum(p.numel() for p in model.parameters())
    rows, root = (torch.randn(n, n_params, device=device) for n in (n_data * n_classes, n_params))
    return Job(lambda _: work.predict(la, batches), lambda: rows @ root, note=note)


def cases() -> list[Case]:
    """The lines of the table."""
    lines: list[Case] = []
    fits = {"kron": (1.5, 1.1), "diag": (2.0, 1.1)}
    for structure, (lenet, mlp) in fits.items():
        lines += [
            Case(f"all layers, LeNet 28×28, {structure} fit", lenet, "× R", partial(_fit, LENET, structure)),
            Case(f"all layers, LeNet 8×8, {structure} fit", lenet, "× R", partial(_fit, DIGITS, structure)),
            Case(f"all layers, MLP 784-…-10, {structure} fit", mlp, "× R", partial(_fit, MLP, structure)),
        ]
    for structure, encoder in {"kron": 1.3, "diag": 1.6}.items():
        lines += [
            Case(f"all layers, encoder, {structure} fit", encoder, "× R", partial(_encoder_fit, structure)),
            Case(f"all layers, residual, {structure} fit", 1.2, "× R", partial(_residual_fit, structure)),
        ]
    lines.append(Case("all layers, MLP 784-…-10, batches of 128", 8.5, "× forward", _many_small_batches))
    for structure in fits:
        lines += [
            Case(f"all layers, LeNet 28×28, {structure} probit", 2.5, "× R", partial(_predict, LENET, structure)),
            Case(f"all layers, LeNet 8×8, {structure} probit", 2.5, "× R", partial(_predict, DIGITS, structure)),
            Case(f"all layers, MLP 784-…-10, {structure} probit", 2.0, "× R", partial(_predict, MLP, structure)),
        ]
    lines.append(Case("all layers, MLP 64-50-50-10, full fit", 0.15, "× GEMM", _full_ggn))
    lines.append(Case("all layers, MLP 64-50-50-10, full probit", 0.2, "× GEMM", _full_probit))
    return lines
