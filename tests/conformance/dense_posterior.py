"""A posterior by dense algebra, from a unit curvature and hyper-parameters as users give them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace import ParametricLaplace
from laplace.large_structures.ekfac import EkfacCurvature
from laplace.structures import KronCurvature
from tests.conformance.cases import Case, drawn, own_dense, truth
from tests.conformance.kron_truth import dense_of_factors
from tests.reference import curvature as reference
from tests.reference import evidence, kfac


def hyper_parameters(case: Case) -> dict[str, Tensor]:
    """A scalar prior, a prior mean of every entry, a temperature, and a noise where there is one."""
    values = {
        "prior_precision": torch.tensor(0.3, dtype=torch.float64),
        "prior_mean": 0.5 * drawn(case, "prior mean", len(case.columns)),
        "temperature": torch.tensor(1.6, dtype=torch.float64),
    }
    if case.problem.likelihood == "regression":
        values["sigma_noise"] = torch.tensor(0.45, dtype=torch.float64)
    return values


@dataclass(frozen=True)
class Dense:
    """P and the evidence.

    Attributes:
        precision: P, `[P, P]`.
        prior: δ, `[P]`.
        log_likelihood: 0-dim.
        scatter: 0-dim.
        evidence: 0-dim.
    """

    precision: Tensor
    prior: Tensor
    log_likelihood: Tensor
    scatter: Tensor
    evidence: Tensor

    @classmethod
    def of(
        cls,
        case: Case,
        la: ParametricLaplace,
        *,
        prior_precision: Tensor | None = None,
        prior_mean: Tensor | None = None,
        temperature: Tensor | None = None,
        sigma_noise: Tensor | None = None,
        exact: Tensor | None = None,
        kind: str = "ggn",
    ) -> Dense:
        """From the curvature that `la` holds, or from `exact` `[P, P]`, a unit curvature of that kind."""
        one = torch.ones((), dtype=torch.float64)
        sigma = one if sigma_noise is None else sigma_noise
        t = one if temperature is None else temperature.double()
        prior = expanded(case, one if prior_precision is None else prior_precision)
        mean = torch.zeros_like(prior) if prior_mean is None else prior_mean.expand_as(prior)
        unit = case.problem.likelihood != "regression"
        scale = 1 / t if unit else 1 / (sigma ** (4 if kind == "ef" else 2) * t)
        hessian = own_dense(la, scale.expand(la.fitted().curvature.n_terms)) if exact is None else exact * scale
        loglik = _log_likelihood(case, sigma, t)
        value = evidence.log_marginal_likelihood(hessian, case.mean, prior, mean, 1.0, loglik)
        if issubclass(la.structure, KronCurvature | EkfacCurvature) and _varies(case, prior):
            # In the eigenbasis of a Kronecker block a varying prior is not what it is here: see the test of its own.
            precision = la.evidence().precision.to_dense()
            value = value + 0.5 * ((hessian + torch.diag(prior)).logdet() - precision.logdet())
        else:
            precision = hessian + torch.diag(prior)
        return cls(precision, prior, loglik, (prior * (case.mean - mean).square()).sum(), value)

    @staticmethod
    def damped(la: ParametricLaplace, scale: float, form: bool | str = True) -> Tensor:
        """P of a Kron posterior with damping, `[P, P]`, for scalar and layerwise priors.

        Args:
            la: The posterior.
            scale: Of the curvature.
            form: True for factors as they are, a sum on the output side and a mean on the input side; "mean" for √N
                times a mean both, "sum" for sums.
        """
        n = la.n_data
        sides = {True: (1.0, 1.0), "mean": (n**-0.5, n**0.5), "sum": (1.0, float(n))}[form]
        held = la.fitted().curvature
        assert isinstance(held, KronCurvature)
        per_block = la.prior.per_block()
        whole = dense_of_factors(held)
        blocks: list[Tensor] = []
        for i, (factors, place) in enumerate(zip(held.kfacs, la.problem.layout.slices, strict=True)):
            delta = per_block[i].double()
            if held.parts.blocks[i].kind == "kron" and len(factors) == 2:
                of_sides = sides[::-1] if held.parts.blocks[i].input_first else sides
                blocks.append(_ritter(factors, delta.sqrt(), [side * scale**0.5 for side in of_sides]))
            else:
                matrix = whole[place, place]
                blocks.append(scale * matrix + delta * torch.eye(len(matrix), dtype=matrix.dtype))
        return torch.block_diag(*blocks)


def _ritter(factors: list[Tensor], root: Tensor, scales: list[float]) -> Tensor:
    groups = [factor if factor.ndim == 3 else factor.unsqueeze(0) for factor in factors]
    damped = [
        scale * side + root * torch.eye(side.shape[-1], dtype=side.dtype)
        for scale, side in zip(scales, groups, strict=True)
    ]
    count = max(len(side) for side in damped)
    pairs = zip(*[side.expand(count, -1, -1) for side in damped], strict=True)
    return torch.block_diag(*[kfac.kron(left, right) for left, right in pairs])


def expanded(case: Case, prior: Tensor) -> Tensor:
    """A prior precision of any form as `[P]`."""
    sizes = case.tensor_of.unique(return_counts=True)[1]
    if prior.numel() == 1:
        return prior.reshape(1).expand(len(case.columns))
    return prior if prior.numel() == len(case.columns) else prior.repeat_interleave(sizes)


def _varies(case: Case, prior: Tensor) -> bool:
    """Whether the prior varies within a tensor."""
    return any(len(prior[case.tensor_of == tensor].unique()) > 1 for tensor in case.tensor_of.unique())


def _log_likelihood(case: Case, sigma: Tensor, temperature: Tensor) -> Tensor:
    f, y, likelihood = truth(case.problem.name).f, case.problem.y, case.problem.likelihood
    counted = int((y != -100).sum()) if y.ndim == 1 else len(y)
    if likelihood == "regression":
        loss = 0.5 * (f - y).square().sum(0)
    else:
        loss = reference.loss(f, y, likelihood)
    return evidence.log_likelihood(loss, counted, f.shape[1], sigma, float(temperature), likelihood)
