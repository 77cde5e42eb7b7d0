"""The native backend against BackPACK, ASDL and curvlinops, where they compute a quantity themselves.

A ratio below 1 says that the native backend is faster. Every fit is by the public interface, the package's own share of
it included: its copy of the network, its hooks, its conversions.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.all_layers import DIGITS, LENET, MLP, Network
from benchmarks.timing import Case, Job
from laplace import curvature
from laplace.grid import from_names

SMALL: Network = (partial(models.mlp, 50, 100, 10), (50,))
NETWORKS = {"MLP 50-100-10": SMALL, "MLP 784-…-10": MLP, "LeNet 8×8": DIGITS, "LeNet 28×28": LENET}
N_DATA, BATCH = 512, 128

# What each package computes itself: backend, its native peer, structure, networks.
WORK: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("curvlinops", "CurvlinopsGGN", "NativeGGN", "full", ("MLP 50-100-10",)),
    ("curvlinops", "CurvlinopsGGN", "NativeGGN", "kron", tuple(NETWORKS)),
    ("curvlinops", "CurvlinopsGGN", "NativeGGN", "lowrank", tuple(NETWORKS)),
    ("curvlinops", "CurvlinopsEF", "NativeEF", "full", ("MLP 50-100-10",)),
    ("curvlinops", "CurvlinopsEF", "NativeEF", "kron", tuple(NETWORKS)),
    ("curvlinops", "CurvlinopsHessian", "NativeHessian", "full", ("MLP 20-10-3",)),
    ("backpack", "BackPackGGN", "NativeGGN", "diag", tuple(NETWORKS)),
    ("backpack", "BackPackGGN", "NativeGGN", "full", ("MLP 50-100-10",)),
    ("backpack", "BackPackGGN", "NativeGGN", "kron", ("MLP 50-100-10", "MLP 784-…-10")),
    ("backpack", "BackPackEF", "NativeEF", "diag", tuple(NETWORKS)),
    ("asdl", "AsdlGGN", "NativeGGN", "diag", tuple(NETWORKS)),
    ("asdl", "AsdlGGN", "NativeGGN", "full", ("MLP 50-100-10",)),
    ("asdl", "AsdlGGN", "NativeGGN", "kron", tuple(NETWORKS)),
    ("asdl", "AsdlEF", "NativeEF", "diag", tuple(NETWORKS)),
    ("asdl", "AsdlEF", "NativeEF", "kron", tuple(NETWORKS)),
    ("asdl", "AsdlHessian", "NativeHessian", "full", ("MLP 20-10-3",)),
]
NETWORKS["MLP 20-10-3"] = (partial(models.mlp, 20, 10, 3), (20,))


def _fit(name: str, backend: str, peer: str, structure: str, device: torch.device) -> Job:
    make, shape = NETWORKS[name]
    model = make().to(device)
    n_classes = 3 if name == "MLP 20-10-3" else 10
    batches = models.data(shape, n_classes, N_DATA, BATCH, device)
    options: dict[str, Any] = {"structure_kwargs": {"indefinite": "clamp"}} if peer == "NativeHessian" else {}

    def fit(cls: str) -> None:
        la = from_names(model, "classification", "all", structure, backend=getattr(curvature, cls), **options)
        la.fit(batches)

    return Job(lambda _: fit(peer), lambda: fit(backend))


def cases() -> list[Case]:
    """The lines of the table: those of the packages that are installed."""
    return [
        Case(f"{backend}, {structure} fit, {name}", 1.0, "× " + package, partial(_fit, name, backend, peer, structure))
        for package, backend, peer, structure, names in WORK
        if importlib.util.find_spec(package) is not None
        for name in names
    ]
