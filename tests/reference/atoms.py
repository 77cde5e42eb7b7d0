"""A small message-passing potential, periodic or not, and the dense float64 posterior of its energies and forces."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

N_SPECIES = 2


class MessagePassing(nn.Module):
    """Energies `[B]` of configurations: positions `[B, n, 3]`, species `[B, n]` (−1: no atom), cells `[B, 3, 3]`.

    Cells of zeros are none: then an atom meets no images.
    """

    def __init__(self, width: int = 4, n_radial: int = 3, cutoff: float = 2.5, rounds: int = 2) -> None:
        super().__init__()
        self.cutoff, self.rounds = cutoff, rounds
        self.species = nn.Linear(N_SPECIES, width)
        self.radial = nn.Linear(n_radial, width)
        self.mix = nn.Linear(width, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)
        self.centres: Tensor
        self.register_buffer("centres", torch.linspace(0.5, cutoff, n_radial))

    def pairs(self, positions: Tensor, species: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Distances and smooth cutoffs, `[B, n, n, images]`."""
        images = torch.tensor(list(itertools.product((-1, 0, 1), repeat=3))).to(positions)
        shifts = images @ cell  # [B, 27, 3]
        apart = (positions[:, :, None] - positions[:, None]).unsqueeze(3) + shifts[:, None, None]
        squares = apart.square().sum(-1)
        is_atom = species >= 0
        meet = (is_atom[:, :, None] & is_atom[:, None]).unsqueeze(3)
        own = torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)[None, :, :, None]
        at_home = (images == 0).all(1)
        in_cell = (cell.abs().sum((1, 2)) > 0)[:, None, None, None] | at_home
        meet = meet & in_cell & ~(own & at_home) & (squares < self.cutoff**2)
        distances = torch.where(meet, squares, 1.0).sqrt()
        smooth = 0.5 * (1 + torch.cos(torch.pi * distances / self.cutoff))
        return distances, torch.where(meet, smooth, 0.0)

    def features(self, positions: Tensor, species: Tensor, cell: Tensor) -> Tensor:
        """Features of every atom that the head reads, `[B, n, D]`."""
        distances, smooth = self.pairs(positions, species, cell)
        radial = torch.exp(-2 * (distances.unsqueeze(-1) - self.centres).square())
        filters = (self.radial(radial) * smooth.unsqueeze(-1)).sum(3)  # [B, n, n, D]
        h = self.species(torch.eye(N_SPECIES).to(positions)[species.clamp(min=0)])
        for _ in range(self.rounds):
            h = h + self.mix((filters * h.unsqueeze(1)).sum(2)).tanh()
        return self.hidden(h).tanh()

    def forward(self, positions: Tensor, species: Tensor, cell: Tensor) -> Tensor:
        is_atom = (species >= 0).unsqueeze(2)
        return (self.head(self.features(positions, species, cell)) * is_atom).sum((1, 2))


def energies_and_forces(model: nn.Module, x: Mapping[str, Tensor]) -> Tensor:
    """(E, −∂E/∂x) `[B, 1 + 3n]`, differentiable in the weights."""
    positions = x["positions"].detach().requires_grad_()
    energies = model(**{**x, "positions": positions})
    (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
    return torch.cat([energies.unsqueeze(1), -gradient.flatten(1)], 1)


def jacobian(model: nn.Module, x: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Of energies and forces with respect to some tensors, one output after the other, `[B, 1 + 3n, P]`."""
    tensors = [model.get_parameter(name) for name in names]
    f = energies_and_forces(model, x)
    rows = []
    for output in f.flatten():
        found = torch.autograd.grad(output, tensors, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows).unflatten(0, f.shape)


def curvature(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_bc w_bc J_bc J_bcᵀ `[P, P]` of Jacobians `[B, C, P]`, with the weight 0 of what was not observed, `[B, C]`."""
    return torch.einsum("bcp,bc,bcq->pq", rows, weights, rows)


def species_factors(model: MessagePassing, x: Mapping[str, Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Kronecker factors of `species.weight` whose positions are averaged, with B ⊗ A its curvature.

    It is read once, and not by the forces' pass, for no position enters it. A = (1/N) Σ_n ā āᵀ with the mean ā over
    atoms, B = Σ_nc w_nc (Σ_t g)(Σ_t g)ᵀ.
    """
    seen: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend((args[0], output))

    handle = model.species.register_forward_hook(note)
    f = energies_and_forces(model, x)
    handle.remove()
    a, z = seen
    mean = a.detach().mean(1)
    gradients = torch.stack(
        [torch.autograd.grad(f[:, c].sum(), z, retain_graph=True)[0].sum(1) for c in range(f.shape[1])], 1
    )
    return mean.T @ mean / len(mean), torch.einsum("nco,nc,ncp->op", gradients, weights, gradients)


def covariance(rows: Tensor, precision: Tensor) -> Tensor:
    """J P⁻¹ Jᵀ `[B, C, C]`."""
    return rows @ torch.linalg.inv(precision) @ rows.mT
