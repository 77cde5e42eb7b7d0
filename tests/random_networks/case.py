"""What a seed draws: a network of a table of layers, data, and a posterior."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.random_networks.layers import LAYERS, D
from tests.random_networks.oracle import Truth, truth

LIKELIHOODS = ("regression", "classification", "bernoulli", "poisson", "heteroscedastic", "log cosh")
STRUCTURES = ("full", "block", "diag", "kron", "ekfac", "lowrank", "lowrank_kron", "matrix_free")
BACKENDS = ("NativeGGN",) * 6 + ("NativeEF", "NativeEF", "NativeHessian", "CurvlinopsGGN", "BackPackGGN", "AsdlGGN")
OFFERED = {
    "NativeHessian": (("full", "diag", "block"), LIKELIHOODS),
    **dict.fromkeys(("CurvlinopsGGN", "BackPackGGN", "AsdlGGN"), (("full", "diag", "kron"), LIKELIHOODS[:2])),
}
"""Structures and likelihoods of backends that do not have all of them."""
PRIORS = ("scalar", "scalar", "layerwise", "diag")
ORDERS = ("drawn", "closed first", "closed first")
"""The order of data: as drawn, or first those for which gates are closed."""
HEADS = ("linear", "linear", "no bias", "capped", "scaled")


@dataclass(frozen=True)
class Case:
    """One network with its data and its posterior; the seed stands for all real numbers.

    Attributes:
        layers: Names in `LAYERS`; `"again"` calls the layer before it once more, `"tied"` uses its first matrix.
        frozen: Bits: parameter tensors that require no gradient.
        sizes: Sizes of the batches.
    """

    seed: int
    layers: tuple[str, ...] = ("linear",)
    head: str = "linear"
    likelihood: str = "regression"
    weights: str = "all"
    structure: str = "full"
    backend: str = "NativeGGN"
    prior: str = "scalar"
    mean: float = 0.0
    sigma: float = 1.0
    temperature: float = 1.0
    dtype: str = "float64"
    frozen: int = 0
    order: str = "drawn"
    sizes: tuple[int, ...] = (4,)

    @property
    def kind(self) -> str:
        """`"ggn"`, `"ef"` or `"hessian"`."""
        return {"NativeEF": "ef", "NativeHessian": "hessian"}.get(self.backend, "ggn")

    @property
    def n_data(self) -> int:
        return sum(self.sizes)

    @property
    def scale(self) -> float:
        """Factor of the curvature at noise 1: 1 / (σ² T), or 1 / (σ⁴ T) of squares of gradients."""
        return self.sigma ** (-4 if self.kind == "ef" else -2) / self.temperature

    def network(self) -> nn.Module:
        """The network, in evaluation mode; every call gives the same numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Network(self.layers, self.head, 4 if self.likelihood == "heteroscedastic" else 2 + self.seed % 2)
        trainable = [tensor for name, tensor in model.named_parameters() if not name.startswith("last.")]
        for i, tensor in enumerate(trainable):
            tensor.requires_grad_(tensor.requires_grad and not self.frozen >> i & 1)
        return model.to(getattr(torch, self.dtype)).eval()

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs `[N, 4]` and targets."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.n_data, D, dtype=torch.float64, generator=generator)
        if self.order == "closed first":
            x = x[x[:, 0].argsort()]
        x = x.to(getattr(torch, self.dtype))
        C = 2 if self.likelihood == "heteroscedastic" else 2 + self.seed % 2
        if self.likelihood == "classification":
            return x, torch.randint(C, (self.n_data,), generator=generator)
        y = torch.randn(self.n_data, C, dtype=torch.float64, generator=generator).to(x)
        if self.likelihood == "bernoulli":
            return x, (y > 0).to(x)
        return x, y.abs().round() if self.likelihood == "poisson" else y

    def batches(self, sizes: tuple[int, ...] | None = None) -> list[tuple[Tensor, Tensor]]:
        """The data in batches."""
        x, y = self.data()
        sizes = self.sizes if sizes is None else sizes
        return list(zip(x.split(sizes), y.split(sizes), strict=True))

    def chosen(self, model: nn.Module) -> tuple[list[str], Tensor]:
        """Names of the random parameters, and entries of these, `[P]`."""
        names = [name for name, tensor in model.named_parameters() if tensor.requires_grad]
        if self.weights == "last_layer":
            names = [name for name in names if name.startswith("last.")]
        total = sum(dict(model.named_parameters())[name].numel() for name in names)
        if self.weights == "subnetwork":
            generator = torch.Generator().manual_seed(self.seed)
            return names, torch.randperm(total, generator=generator)[: max(2, total // 2)].sort().values
        return names, torch.arange(total)

    def truth(self, model: nn.Module | None = None) -> Truth:
        """The truth about a network, or about that of the case."""
        model = self.network() if model is None else model
        return truth(model, *self.data(), self.likelihood, *self.chosen(model))

    def delta(self, known: Truth) -> tuple[Tensor, Tensor]:
        """Prior precision as users give it, and as a diagonal `[P]`."""
        counts = known.tensor_of.unique(return_counts=True)[1]
        size = {"scalar": 1, "layerwise": len(counts), "diag": len(known.theta)}[self.prior]
        given = 0.3 + 2 * torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed))
        if self.prior == "layerwise":
            return given, given.repeat_interleave(counts)
        return given, given.expand(len(known.theta))

    def options(self, known: Truth, model: nn.Module) -> dict[str, Any]:
        """Arguments of `Laplace(...)` beside the names."""
        found: dict[str, Any] = {
            "prior_precision": self.delta(known)[0], "prior_mean": self.mean, "temperature": self.temperature,
        }  # fmt: skip
        if self.likelihood == "regression":
            found["sigma_noise"] = self.sigma
        if self.weights == "subnetwork":
            found["subnetwork_indices"] = self.chosen(model)[1]
        if self.weights == "last_layer":
            found["last_layer_name"] = "last"
        if self.structure in ("lowrank", "lowrank_kron"):
            found["structure_kwargs"] = {"rank": len(known.theta)}
        elif self.kind == "hessian":
            found["structure_kwargs"] = {"indefinite": "clamp"}
        return found


class Network(nn.Module):
    """A chain of layers, and a linear last layer whose outputs may be changed after it."""

    def __init__(self, names: tuple[str, ...], head: str, n_outputs: int) -> None:
        super().__init__()
        self.head, self.chain = head, nn.ModuleList()
        for name in names:
            self.chain.append(self.following(name))
        self.last = nn.Linear(D, n_outputs, bias=head != "no bias")
        if head == "scaled":
            self.scale = nn.Parameter(torch.rand(n_outputs))

    def following(self, name: str) -> nn.Module:
        """The layer of that name, which may be, or share a matrix with, one before it."""
        if name == "again" and len(self.chain):
            return self.chain[-1]
        matrices = [tensor for tensor in self.chain.parameters() if tensor.shape == (D, D) and tensor.requires_grad]
        if name == "tied" and matrices:
            layer = nn.Linear(D, D)
            layer.weight = matrices[0]
            return layer
        return LAYERS.get(name, LAYERS["linear"])()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.chain:
            x = layer(x)
        f = self.last(x)
        if self.head == "capped":
            return 5 * torch.tanh(f / 5)
        return f * self.scale.exp() if self.head == "scaled" else f


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    layers = tuple(rng.choice([*LAYERS, "again", "again", "tied", "tied"]) for _ in range(rng.randint(1, 3)))
    # Batches of one size may be served by what was learned of the first one, for which gates may be closed.
    equal = [rng.randint(1, 3)] * rng.randint(2, 4)
    sizes = rng.choice([equal, equal, [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]])
    backend = rng.choice(BACKENDS)
    structures, likelihoods = OFFERED.get(backend, (STRUCTURES, LIKELIHOODS))
    structure, likelihood = rng.choice(structures), rng.choice(likelihoods)
    return Case(
        seed=seed,
        layers=layers,
        head=rng.choice(HEADS),
        likelihood=likelihood,
        weights=rng.choice(["all", "all", "all", "last_layer", "subnetwork"]),
        structure=structure,
        backend=backend,
        prior="scalar" if structure not in ("full", "diag") else rng.choice(PRIORS),
        mean=rng.choice([0.0, 0.0, 0.3]),
        sigma=rng.choice([1.0, 0.5, 2.0]) if likelihood == "regression" else 1.0,
        temperature=rng.choice([1.0, 1.0, 0.5]),
        dtype=rng.choice(["float64", "float64", "float32"]),
        frozen=rng.choice([0, 0, rng.getrandbits(8)]),
        order=rng.choice(ORDERS),
        sizes=tuple(sizes),
    )
