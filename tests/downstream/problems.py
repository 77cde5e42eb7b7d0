"""Small problems for the scripts of other people's projects, and the dense truth of their posteriors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.reference import curvature, evidence, kfac, predictive

N_DATA = 12
HEAD = ("2.weight", "2.bias")
ROOT = Path(__file__).parents[2]


def fails(why: str) -> pytest.MarkDecorator:
    """The mark of a script that does not run yet; whoever mends that has to take it away."""
    return pytest.mark.xfail(strict=True, reason=why)


def documented(text: str) -> bool:
    """Whether a row of the table of differences holds this text, spaces aside."""
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    rows = [re.sub(r"\s+", " ", line) for line in page.splitlines() if line.startswith("|")]
    return any(text in row for row in rows)


def network(n_in: int = 2, n_out: int = 3, width: int = 4, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A trained network, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(n_in, width), nn.Tanh(), nn.Linear(width, n_out)).to(dtype).eval()


def classes(n_out: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs `[N, 2]` and labels `[N]`."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N_DATA, 2, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(n_out, (N_DATA,), generator=generator)


def numbers(n_out: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs `[N, 2]` and targets `[N, C]`."""
    x, _ = classes()
    slopes = torch.linspace(-1, 1, 2 * n_out, dtype=torch.float64).view(2, n_out)
    return x.to(dtype), (torch.sin(x) @ slopes + 0.3).to(dtype)


def loader(x: Tensor, y: Tensor, batch_size: int = 5) -> DataLoader:
    """Batches in order, the last one smaller."""
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def new_inputs(n: int = 6, n_in: int = 2) -> Tensor:
    """Inputs that were not fitted, `[n, n_in]`."""
    return torch.randn(n, n_in, generator=torch.Generator().manual_seed(17), dtype=torch.float64)


def held_out() -> tuple[Tensor, Tensor]:
    """Inputs `[10, 2]` and labels `[10]` to choose a prior by."""
    return new_inputs(10), torch.randint(3, (10,), generator=torch.Generator().manual_seed(0))


class Truth:
    """A posterior by dense matrices in float64, with nothing of the library in it.

    Args:
        model: The network.
        x: Inputs that were fitted.
        y: Their targets.
        likelihood: `"classification"` or `"regression"`.
        structure: `"full"`, `"diag"` or `"kron"`.
        names: The random parameters; all of them if None.
        prior: δ.
        sigma: σ.
        kind: `"ggn"` or `"ef"`.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        likelihood: str,
        structure: str = "full",
        names: tuple[str, ...] | None = None,
        prior: float | Tensor = 1.0,
        sigma: float = 1.0,
        kind: str = "ggn",
    ) -> None:
        self.model, self.likelihood, self.sigma = model, likelihood, sigma
        self.names = tuple(curvature.trainable_names(model)) if names is None else names
        self.mean = curvature.flat_parameters(model, self.names)
        self.prior = torch.as_tensor(prior, dtype=torch.float64).expand(len(self.mean))
        if structure == "kron":
            self.factors = kfac.kfac(model, x, y, self.names, likelihood, kind=kind)
            H = kfac.dense_kfac(self.factors, self.names)
        else:
            matrix: Callable = curvature.ggn if kind == "ggn" else curvature.empirical_fisher
            H = matrix(model, x, y, self.names, likelihood)
        self.H = torch.diag(H.diagonal()) if structure == "diag" else H
        self.loss = curvature.loss(curvature.outputs(model, x), y, likelihood).detach()
        self.n_data, self.n_outputs = len(x), curvature.outputs(model, x[:1]).shape[1]
        self.scale = sigma**-4 if kind == "ef" and likelihood == "regression" else sigma**-2

    @property
    def precision(self) -> Tensor:
        """P, `[P, P]`."""
        return evidence.posterior_precision(self.H, self.prior, self.scale)

    @property
    def covariance(self) -> Tensor:
        """P⁻¹, `[P, P]`."""
        return torch.linalg.inv(self.precision)

    @property
    def log_evidence(self) -> Tensor:
        """Laplace's log evidence, 0-dim."""
        loglik = evidence.log_likelihood(self.loss, self.n_data, self.n_outputs, self.sigma, likelihood=self.likelihood)
        return evidence.log_marginal_likelihood(self.H, self.mean, self.prior, 0.0, self.scale, loglik)

    def jacobian(self, x: Tensor) -> Tensor:
        """J, `[B, C, P]`."""
        return curvature.flat_jacobian(self.model, x, self.names)[0]

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `[B, C]` and covariance `[B, C, C]` of the linearised network's outputs."""
        J, f = curvature.flat_jacobian(self.model, x, self.names)
        return f, predictive.functional_variance(J, self.covariance)

    def joint(self, x: Tensor) -> Tensor:
        """Covariance of all outputs of all data, `[B·C, B·C]`."""
        return predictive.functional_covariance(self.jacobian(x), self.covariance)

    def probit(self, x: Tensor) -> Tensor:
        """Class probabilities `[B, C]`."""
        return predictive.probit(*self.latent(x))


def sine(seed: int, steps: int = 150) -> tuple[nn.Module, Tensor, Tensor]:
    """A network fitted to a sine until its curvature is badly conditioned, float32."""
    torch.manual_seed(seed)
    x = 8 * torch.rand(150, 1)
    y = torch.sin(x) + 0.3 * torch.randn(150, 1)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    return model, x, y


def best_prior(candidates: tuple[float, ...], *problem: Any) -> float:
    """The δ whose probabilities of the held-out labels are best; `problem` are the arguments of `Truth`."""
    x, y = held_out()
    rows = torch.arange(len(y))
    losses = {delta: -Truth(*problem, prior=delta).probit(x)[rows, y].log().mean() for delta in candidates}
    return min(losses, key=losses.__getitem__)


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a network, to see later whether one was written to."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def untouched(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether the network is bit for bit what it was."""
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
