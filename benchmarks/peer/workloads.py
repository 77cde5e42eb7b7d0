"""What both packages do, as tables. Imports PyTorch alone: the process that compares has neither package in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import models
from benchmarks.peer import networks

BACKENDS = ("CurvlinopsGGN", "BackPackGGN", "AsdlGGN")
"""Backends of laplace-torch that compute the GGN; the first is its default."""


@dataclass(frozen=True)
class Setting:
    """A network and its data.

    Attributes:
        network: Name in `networks.build`.
        n_data: Data, of the fit and of the predictions.
        batch_size: In batches of so many.
        sizes: Positional arguments of the network: widths of an MLP, classes of a WRN.
    """

    network: str
    n_data: int
    batch_size: int
    sizes: tuple[int, ...] = ()

    def build(self) -> nn.Module:
        """The network with random weights."""
        return networks.build(self.network, self.sizes)

    def save(self, path: Path) -> None:
        """Draws weights and data, and writes them to a file that both packages read."""
        torch.manual_seed(0)
        model = self.build()
        shape = self.sizes[:1] if self.network == "MLP" else networks.SHAPES[self.network]
        n_classes = self.sizes[-1] if self.sizes else 10
        batches = models.data(shape, n_classes, self.n_data, self.batch_size, torch.device("cpu"))
        torch.save({"weights": model.state_dict(), "batches": batches}, path)


@dataclass(frozen=True)
class Workload:
    """One line of the table.

    Attributes:
        name: Of the line.
        setting: Network and data.
        subset: Weights that are random.
        structure: Of the curvature.
        action: Name in `work.ACTIONS`: what is timed.
        options: Of the posterior.
        amount: Samples, candidates or steps of the action.
        axis: What grows, where the line is one of a series; else empty.
        size: How large it is.
    """

    name: str
    setting: Setting
    subset: str
    structure: str
    action: str
    options: dict[str, Any] = field(default_factory=dict)
    amount: int = 0
    axis: str = ""
    size: int = 0

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends of laplace-torch to choose from: classes in `laplace.curvature`; none where its default counts.

        Samples of the weights and evidence steps begin after the fit, and no backend has a part in them.
        """
        return () if self.action in ("nn", "evidence") or self.structure == "lowrank" else BACKENDS


LENET28, LENET8 = Setting("LeNet 28×28", 64, 32), Setting("LeNet 8×8", 128, 64)
MLP = Setting("MLP", 64, 32, (784, 256, 128, 64, 10))
SMALL = Setting("MLP", 256, 128, (16, 32, 32, 10))
HEAD = Setting("MLP", 256, 128, (64, 128, 128, 10))
RESIDUAL, RESNET = Setting("residual", 32, 16), Setting("ResNet, BatchNorm", 32, 16)
LINEAR, PACKED = Setting("encoder, linear", 64, 32), Setting("encoder, nn", 64, 32)


def _name(s: Setting) -> str:
    return "-".join(map(str, ("MLP", *s.sizes))).replace("MLP-", "MLP ") if s.network == "MLP" else s.network


def _last_layers() -> Iterator[Workload]:
    for n_classes in (10, 200, 1000, 3100):
        setting = Setting("WRN-16-4", 16, 8, (n_classes,))
        for structure in ("kron", "diag", "full") if n_classes == 10 else ("kron", "diag"):
            for action in ("fit", "probit"):
                name = f"last layer, WRN-16-4, C={n_classes}, {structure}, {action}"
                yield Workload(name, setting, "last_layer", structure, action)


def _all_layers() -> Iterator[Workload]:
    for setting in (LENET28, LENET8, MLP, RESIDUAL, RESNET, LINEAR, PACKED):
        for structure in ("kron", "diag"):
            for action in ("fit", "probit"):
                yield Workload(f"all, {_name(setting)}, {structure}, {action}", setting, "all", structure, action)
    for action in ("fit", "probit"):
        yield Workload(f"all, {_name(SMALL)}, full, {action}", SMALL, "all", "full", action)
    for action in ("fit", "probit"):
        yield Workload(f"all, {_name(SMALL)}, lowrank, {action}", SMALL, "all", "lowrank", action)


def _processes() -> Iterator[Workload]:
    ella = {"functional_approximation": "nystrom", "subsample_size": 100, "n_eigenvalues": 20}
    for setting in (SMALL, LENET8):
        for what, options in (("GP, 50 of the data", {"n_subset": 50}), ("ELLA, 100 → 20", ella)):
            for action, name in (("gp fit", "fit"), ("gp probit", "probit")):
                yield Workload(f"{what}, {_name(setting)}, {name}", setting, "all", "gp", action, options)


def _samples_and_tuning() -> Iterator[Workload]:
    wrn = Setting("WRN-16-4", 16, 16, (10,))
    for setting, structure in ((LENET8, "kron"), (LENET8, "diag"), (MLP, "kron"), (SMALL, "diag")):
        yield Workload(f"nn, 50 samples, {_name(setting)}, {structure}", setting, "all", structure, "nn", amount=50)
    yield Workload("nn, 10 samples, last layer, WRN-16-4, kron", wrn, "last_layer", "kron", "nn", amount=10)
    for setting, subset, structure in (
        (HEAD, "last_layer", "full"), (SMALL, "all", "full"), (LENET28, "all", "kron"), (LENET28, "all", "diag"),
    ):  # fmt: skip
        name = f"100 evidence steps, {subset.replace('_', ' ')}, {_name(setting)}, {structure}"
        yield Workload(name, setting, subset, structure, "evidence", amount=100)
    yield Workload("10 candidates, last layer, WRN-16-4, kron", wrn, "last_layer", "kron", "grid", amount=10)
    few = Setting("LeNet 8×8", 64, 64)
    for setting, subset, amount in ((HEAD, "last_layer", 100), (few, "all", 10)):
        name = f"{amount} candidates, {subset.replace('_', ' ')}, {_name(setting)}, kron"
        yield Workload(name, setting, subset, "kron", "grid", amount=amount)


def _scripts() -> Iterator[Workload]:
    """Whole scripts that fit once: small networks, whose fits take milliseconds, and a larger one."""
    small, few = Setting("MLP", 32, 16, (64, 32, 32, 10)), Setting("LeNet 8×8", 32, 32)
    wide = Setting("WRN-16-4", 16, 8, (10,))
    for setting, subset, structure in (
        (small, "all", "kron"), (few, "all", "kron"), (MLP, "all", "diag"), (wide, "last_layer", "kron"),
    ):  # fmt: skip
        weights = "last layer, " * (subset == "last_layer")
        yield Workload(f"script, {weights}{_name(setting)}, {structure}", setting, subset, structure, "script")


def _grown(axis: str, size: int) -> tuple[Setting, str, str]:
    """Setting, weights and structure of one point of a series."""
    match axis:
        case "N: LeNet 8×8, kron":
            return Setting("LeNet 8×8", size, 32), "all", "kron"
        case "C: last layer, 256 features, kron":
            return Setting("MLP", 32, 16, (64, 256, size)), "last_layer", "kron"
        case "P: MLP 64-w-w-10, kron":
            return Setting("MLP", 32, 16, (64, size, size, 10)), "all", "kron"
        case _:
            return Setting("MLP", 64, 32, (16, size, 10)), "all", "full"


GROWTH = {
    "N: LeNet 8×8, kron": (32, 64, 128, 256),
    "C: last layer, 256 features, kron": (10, 20, 40, 80, 160, 320),
    "P: MLP 64-w-w-10, kron": (32, 64, 128, 256, 512),
    "P: MLP 16-w-10, full": (9, 18, 37, 74, 148),
}
"""What grows, and how: data, classes, or the width w, of which P is counted."""


def _growth() -> Iterator[Workload]:
    for axis, sizes in GROWTH.items():
        for size in sizes:
            setting, subset, structure = _grown(axis, size)
            shown = sum(p.numel() for p in setting.build().parameters()) if axis.startswith("P") else size
            for action in ("fit", "probit"):
                name = f"growth with {axis}, {axis[0]}={shown}, {action}"
                yield Workload(name, setting, subset, structure, action, axis=axis, size=shown)


def workloads() -> list[Workload]:
    """Every line, in order."""
    return [*_last_layers(), *_all_layers(), *_processes(), *_samples_and_tuning(), *_scripts(), *_growth()]
