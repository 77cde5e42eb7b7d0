"""The full curvature without its matrix: products that solutions take, and solutions of networks of 10⁵ to 10⁷ weights.

Networks are trained for a moment on labels that depend on the inputs: of a network at random the curvature is nothing
that a preconditioner could miss.
"""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import models
from benchmarks.timing import Case, Job
from laplace import Laplace, ParametricLaplace
from laplace.structures import krylov as cg

_RESIDUAL = 1e-2


class _Residual(nn.Module):
    """Two convolutions with batch norm beside the identity, or beside every other pixel and zeros (He et al., 2016)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        stride = 1 if inputs == width else 2
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.more = width - inputs

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, width, H/s, W/s]`."""
        beside = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more)) if self.more else x
        return torch.relu(beside + self.inner(x))


def resnet(width: int, blocks: int = 3) -> nn.Module:
    """A ResNet for images `[B, 3, 32, 32]` with three stages; of 16 channels and three blocks each it is ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for _ in range(blocks):
            layers.append(_Residual(inputs, width * 2**stage))
            inputs = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)).eval()


def _learnable(shape: tuple[int, ...], n_data: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs, and labels that a linear function of them says."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_data, *shape, generator=generator)
    return x.to(device), (x.flatten(1) @ torch.randn(x[0].numel(), 10, generator=generator)).argmax(1).to(device)


def _trained(model: nn.Module, x: Tensor, y: Tensor, n_steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(n_steps):
        part = slice(64 * step % len(x), 64 * step % len(x) + 64)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return model


def _fitted(model: nn.Module, x: Tensor, y: Tensor, size: int, **options: Any) -> ParametricLaplace:
    la = Laplace(model, "classification", "all", "matrix_free", structure_kwargs=options)
    la.fit(list(zip(x.split(size), y.split(size), strict=True)))
    return la


class _Reached(Exception):
    """Signal of a residual that is small enough."""


def products_to(product: cg.Linear, right: Tensor, precondition: cg.Linear, residual: float, most: int) -> int:
    """Products with blocks after which every residual ‖b − P x‖ is this share of ‖b‖; `most` if it takes as many."""
    norms: list[float] = []

    def noted(vectors: Tensor) -> Tensor:
        norms.append(float((vectors.norm(dim=1) / right.norm(dim=1)).max()))
        if norms[-1] <= residual:
            raise _Reached
        return precondition(vectors)

    with contextlib.suppress(_Reached):
        cg.solve(product, right, noted, relative=1e-30, max_iterations=most, verified=False)
    return len(norms) - 2  # the first two are of the right-hand side


def _lenet_products(delta: float, device: torch.device) -> Job:
    """Not a time: the products that both take, as a note; the times are those of the same solutions."""
    x, y = _learnable((1, 8, 8), 100, device)
    la = _fitted(_trained(models.digits_lenet().to(device), x, y, 100), x, y, 50)
    la.prior_precision = delta
    precision: Any = la.posterior()
    ((jacobian, _),) = la.snapshot().engine.jacobian(x[:1])
    rows = jacobian.dense().flatten(0, 1)[:2].contiguous()
    sketched = partial(products_to, precision.product, rows, precision._preconditioned, _RESIDUAL)
    plain = partial(products_to, precision.product, rows, lambda v: v.clone(), _RESIDUAL)
    counts = sketched(600), plain(600)
    note = f"{counts[0]} products, {counts[1]} without a preconditioner: {counts[0] / counts[1]:.2f}"
    return Job(lambda _: sketched(counts[0]), lambda: plain(counts[1]), note=note)


def _resnet_answers(device: torch.device) -> Job:
    """Four samples, and the variances of two inputs: 24 right-hand sides."""
    x, y = _learnable((3, 32, 32), 512, device)
    model = _trained(resnet(10).to(device), x, y, 60)
    size = sum(p.numel() for p in model.parameters())
    la = _fitted(model, x, y, 64, tolerance=_RESIDUAL, kept_bytes=int(2.4 * 2**30))

    def run(_: object) -> None:
        la.sample(4)
        la(x[:2])

    return Job(run, note=f"{size:,} weights, prior precision 1")


def large_iterations(n_data: int, n_iterations: int, device: torch.device) -> Job:
    """A few products with two right-hand sides, and what is made of them: nothing converges."""
    x, y = _learnable((3, 32, 32), n_data, device)
    options = {"tolerance": _RESIDUAL, "max_iterations": n_iterations, "kept_bytes": 0, "rank": 0}
    la = _fitted(resnet(102).to(device), x, y, 16, **options)
    rows = torch.randn(2, la.n_params or 0, generator=torch.Generator().manual_seed(0)).to(device)

    def run(_: object) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return la.posterior().solve(rows)

    return Job(run, note=f"{la.n_params:,} weights")


def cases() -> list[Case]:
    """The lines of the table."""
    lines = [
        Case(f"solutions, LeNet 8×8, 100 data, δ = {delta:g}, time", 1.0, "× plain CG", partial(_lenet_products, delta))
        for delta in (0.01, 1.0)
    ]
    lines.append(Case("4 samples and variances at 2 inputs, ResNet 0.1 M, 512 images", 600, "s", _resnet_answers))
    large = partial(large_iterations, 64, 3)
    lines.append(Case("2 right-hand sides, 3 iterations, ResNet 11 M, 64 images", 8, "GiB", large))
    return lines
