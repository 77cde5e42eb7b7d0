"""What every quantity is, by dense float64 algebra on curvatures from plain loops. Knows neither package."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tests.parity import work
from tests.parity.work import NOISE, PRIOR, PRIOR_MEAN, SAMPLES, TEMPERATURE, WEIGHT_SAMPLES, Posterior
from tests.reference import curvature, evidence, kfac, predictive

LINKS = {"probit": predictive.probit, "bridge": predictive.bridge, "bridge_norm": predictive.bridge_norm}


class Truth(NamedTuple):
    """A value, and the standard errors of an estimate of it by samples (zero for what is computed)."""

    value: Tensor
    standard_error: Tensor | None = None


class Oracle:
    """The truth about one posterior.

    Args:
        p: Which one.
        state: File of weights and data.
    """

    def __init__(self, p: Posterior, state: Path) -> None:
        self.p = p
        self.model, self.data = work.load(state, p.model), work.data(state, p.model, p.likelihood)
        self.names = [n for n in curvature.trainable_names(self.model) if p.subset != "last_layer" or _head(n, p)]
        flat = curvature.flat_parameters(self.model, self.names)
        self.kept = work.subnetwork(len(flat)) if p.subset == "subnetwork" else torch.arange(len(flat))
        self.mean = flat[self.kept]
        self.f = self.model(self.data.x).detach()
        self.loss = curvature.loss(self.f, self.data.y, p.likelihood)
        self.regression = p.likelihood == "regression"

    @cached_property
    def unit(self) -> Tensor:
        """Curvature of the unit negative log likelihood in the posterior's structure, `[P, P]`."""
        kind = curvature.empirical_fisher if self.p.empirical else curvature.ggn
        arguments = (self.model, self.data.x, self.data.y, self.names, self.p.likelihood)
        if self.p.structure == "kron":
            factors = kfac.kfac(*arguments, kind="ef" if self.p.empirical else "ggn")
            return kfac.dense_kfac(factors, self.names)
        whole = kind(*arguments)[self.kept][:, self.kept]
        return whole.diagonal().diag() if self.p.structure == "diag" else whole

    def scale(self, sigma: Tensor | float) -> Tensor:
        """Factor of the unit curvature: gradients carry 1/σ², so that an outer product of two carries 1/σ⁴."""
        power = (4 if self.p.empirical else 2) if self.regression else 0
        return torch.as_tensor(sigma, dtype=torch.float64) ** -power / TEMPERATURE

    def evidence(self, prior: Tensor, sigma: Tensor | float = NOISE) -> Tensor:
        """Log evidence under a prior precision `[1]` or `[P]`."""
        loglik = evidence.log_likelihood(self.loss, len(self.f), 3, sigma, TEMPERATURE, self.p.likelihood)
        return evidence.log_marginal_likelihood(
            self.unit, self.mean, prior.expand(len(self.mean)), PRIOR_MEAN, self.scale(sigma), loglik
        )

    @cached_property
    def precision(self) -> Tensor:
        """P, `[P, P]`."""
        return self.scale(NOISE) * self.unit + PRIOR * torch.eye(len(self.mean), dtype=torch.float64)

    @cached_property
    def covariance(self) -> Tensor:
        """Σ = P⁻¹, `[P, P]`."""
        return torch.linalg.inv(self.precision)

    @cached_property
    def jacobian(self) -> Tensor:
        """Jacobian at the test inputs, `[B, C, P]`."""
        return curvature.flat_jacobian(self.model, self.data.test, self.names)[0][:, :, self.kept]

    @cached_property
    def variance(self) -> Tensor:
        """Variances of the outputs, `[B, C, C]`."""
        return predictive.functional_variance(self.jacobian, self.covariance)

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs at the test inputs, `[B, C]`."""
        return self.model(self.data.test).detach()

    def gradient(self, of: str) -> Tensor:
        """Derivative of the evidence by log δ or log σ, `[1]`."""
        log = torch.tensor([PRIOR if of == "δ" else NOISE], dtype=torch.float64).log().requires_grad_()
        value = self.evidence(log.exp()) if of == "δ" else self.evidence(_prior(), log.exp())
        return torch.autograd.grad(value, log)[0]

    def layerwise(self) -> Tensor:
        """The evidence under one prior per tensor."""
        sizes = torch.tensor([self.model.get_parameter(name).numel() for name in self.names])
        return self.evidence(work.priors(len(sizes)).repeat_interleave(sizes))

    def tuned(self) -> tuple[Tensor, Tensor]:
        """The best prior precision on Adam's path, and the last one, `[1]`."""
        log = _prior().log().requires_grad_()
        adam = torch.optim.Adam([log], lr=work.RATE)
        path: list[tuple[float, Tensor]] = []
        for _ in range(work.STEPS + 1):
            adam.zero_grad()
            loss = -self.evidence(log.exp())
            loss.backward()
            path.append((loss.item(), log.detach().exp()))
            adam.step()
        return min(path, key=lambda pair: pair[0])[1], path[-1][1]

    def sampled(self, n: int) -> Tensor:
        """Weights of the posterior, `[n, P]`, all of the network's."""
        root = torch.linalg.cholesky(self.covariance)
        noise = torch.randn(n, len(self.mean), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return self.mean + noise @ root.T

    def by_weights(self) -> Truth:
        """Mean of predictions by sampled weights, `[B, C]`."""
        shapes = {n: w.shape for n, w in self.model.named_parameters()}
        everything = curvature.flat_parameters(self.model, list(shapes)).repeat(WEIGHT_SAMPLES, 1)
        offset = sum(shape.numel() for n, shape in shapes.items() if n not in self.names)  # a head stands last
        everything[:, self.kept + offset] = self.sampled(WEIGHT_SAMPLES)
        sizes = [shape.numel() for shape in shapes.values()]

        def run(theta: Tensor) -> Tensor:
            pieces = zip(shapes, theta.split(sizes), strict=True)
            return torch.func.functional_call(self.model, {n: t.view(shapes[n]) for n, t in pieces}, (self.data.test,))

        draws = torch.func.vmap(run)(everything).detach()
        draws = draws if self.regression else draws.softmax(-1)
        return Truth(draws.mean(0), draws.std(0) * math.sqrt(2 / WEIGHT_SAMPLES))

    def truths(self) -> dict[str, Callable[[], Truth]]:
        """Every quantity, by name."""
        loglik = evidence.log_likelihood(self.loss, len(self.f), 3, NOISE, TEMPERATURE, self.p.likelihood)
        prior, n = _prior().expand(len(self.mean)), SAMPLES
        diagonal = self.p.structure == "diag"
        marginal = self.variance.diagonal(dim1=1, dim2=2)
        spread = self.covariance.diagonal()
        plain: dict[str, Callable[[], Tensor]] = {
            "mean": lambda: self.mean,
            "precision": lambda: self.precision.diagonal() if diagonal else self.precision,
            "loss": lambda: self.loss,
            "n_data": lambda: torch.tensor(float(len(self.f))),
            "log likelihood": lambda: loglik,
            "log det ratio": lambda: self.precision.logdet() - prior.log().sum(),
            "scatter": lambda: (prior * (self.mean - PRIOR_MEAN).square()).sum(),
            "evidence": lambda: self.evidence(prior),
            "output variance": lambda: self.variance,
            "prediction: mean": lambda: self.outputs,
            "prediction: variance": lambda: self.variance,
            "prediction: joint covariance": lambda: predictive.functional_covariance(self.jacobian, self.covariance),
            "evidence gradient: δ": lambda: self.gradient("δ"),
            "evidence gradient: σ": lambda: self.gradient("σ"),
            "evidence, layerwise prior": self.layerwise,
            "tuned δ": lambda: self.tuned()[0],
            "tuned δ, last": lambda: self.tuned()[1],
        }
        for link, probabilities in LINKS.items():
            plain[f"probabilities: {link}"] = lambda f=probabilities: f(self.outputs, self.variance)
        return {
            **{name: lambda compute=compute: Truth(compute()) for name, compute in plain.items()},
            "samples: mean": lambda: Truth(self.mean, (spread / n).sqrt()),
            "samples: variance": lambda: Truth(spread, spread * math.sqrt(2 / n)),
            "latent samples: mean": lambda: Truth(self.outputs, (marginal / n).sqrt()),
            "latent samples: variance": lambda: Truth(marginal, marginal * math.sqrt(2 / n)),
            "probabilities: mc": self.by_outputs,
            "nn samples: mean": self.by_weights,
        }

    def by_outputs(self) -> Truth:
        """Mean softmax under the Gaussian of the outputs, `[B, C]`."""
        draws = torch.Generator().manual_seed(2)
        mean, error = predictive.monte_carlo(self.outputs, self.variance, SAMPLES, draws)
        return Truth(mean, error * math.sqrt(2))


@cache
def oracle(p: Posterior, state: Path) -> dict[str, Callable[[], Truth]] | None:
    """All truths about a posterior; None where no Kronecker factors are defined for a layer."""
    if p.structure == "kron" and p.subset == "all" and p.model == "encoder layer":
        return None
    return Oracle(p, state).truths()


def _prior() -> Tensor:
    return torch.tensor([PRIOR], dtype=torch.float64)


def _head(name: str, p: Posterior) -> bool:
    return name.startswith({"mlp": "4.", "lenet": "9."}.get(p.model, "head."))
