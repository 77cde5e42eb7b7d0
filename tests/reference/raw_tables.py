"""Variances of a float32 network on a table with a raw column, in float64 from the very rows that the network computes.

What a layer sees, and what of the output arrives there, is float32 here as in the library: the forward pass of a
network rounds, and nobody after it can know better. All sums, factorisations and products are float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "metres": lambda z: 2000 + 1500 * (z % 1),  # an elevation
    "prices": lambda z: torch.exp(6 + 1.5 * z),  # heavy tails
    "years": lambda z: 2010 + 5 * (z % 1),  # a large mean, a small spread
}


def table(kind: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs `[n, 3]`, a raw column beside two standardised ones, and targets `[n, 1]`."""
    z = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return torch.cat([COLUMNS[kind](z[:, :1]), z[:, 1:]], 1), z[:, 1:2].sin() + 0.3 * z[:, :1]


def trained(x: Tensor, y: Tensor, n_steps: int = 60) -> nn.Sequential:
    """A network 3-8-1 after some steps of Adam."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(n_steps):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net.eval()


def rows(net: nn.Sequential, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Inputs a `[n, I]` and output gradients g `[n, O]` of both layers, which float32 rounds, in float64."""
    first, _, second = net
    with torch.no_grad():
        z = first(x)
        hidden, g = z.relu(), second.weight * (z > 0)
    return [(x.double(), g.double()), (hidden.double(), torch.ones(len(x), 1).double())]


def jacobian(net: nn.Sequential, x: Tensor) -> Tensor:
    """Derivatives of the output in all weights, in their order, `[n, P]`."""
    parts = [part for a, g in rows(net, x) for part in ((g.unsqueeze(2) * a.unsqueeze(1)).flatten(1), g)]
    return torch.cat(parts, 1)


def full_variance(net: nn.Sequential, x: Tensor, new: Tensor, sigma: float) -> Tensor:
    """J P⁻¹ Jᵀ of the generalised Gauss–Newton matrix over all weights at prior precision 1, `[m]`."""
    seen, asked = jacobian(net, x) / sigma, jacobian(net, new)
    # By a singular value decomposition of the rows: their Gram matrix would square the condition.
    _, values, vectors = torch.linalg.svd(seen, full_matrices=False)
    inside = asked @ vectors.T
    outside = asked - inside @ vectors
    return outside.square().sum(1) + (inside.square() / (1 + values.square())).sum(1)


def kron_variance(
    net: nn.Sequential, x: Tensor, new: Tensor, sigma: float, *, last: bool = False, corrected: bool = False
) -> Tensor:
    """The same of Kronecker factors of every layer, or of the last one, `[m]`.

    Eigenvalues are squares of singular values; corrected ones the exact diagonal in the basis (George et al., 2018).
    """
    layers = list(zip(rows(net, x), rows(net, new), strict=True))[1 if last else 0 :]
    total = torch.zeros(len(new)).double()
    for (a, g), (new_a, new_g) in layers:
        (inputs, in_vectors), (outputs, out_vectors) = eigenpairs(a), eigenpairs(g)
        weight = outputs.unsqueeze(1) * inputs / len(a)
        if corrected:
            weight = (g @ out_vectors.T).square().T @ (a @ in_vectors.T).square()
        of_a, of_g = (new_a @ in_vectors.T).square(), (new_g @ out_vectors.T).square()
        total = total + torch.einsum("mo,mi,oi->m", of_g, of_a, 1 / (1 + weight / sigma**2))
        total = total + of_g @ (1 / (1 + outputs / sigma**2))
    return total


def eigenpairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[n]` and eigenvectors, in rows, of Σ x xᵀ, by singular values of a triangle of at least n rows."""
    _, values, vectors = torch.linalg.svd(torch.linalg.qr(rows, mode="r")[1])
    return values.square(), vectors
