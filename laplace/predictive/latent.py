"""From a posterior over weights to the network's outputs: linearised, or by sampled weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace import batch as batches
from laplace.batch import Inputs
from laplace.curvature.engine import CurvatureEngine, detached
from laplace.curvature.jacobian import Jacobian
from laplace.enums import PredType
from laplace.errors import InvalidArgument, InvalidData, InvalidType
from laplace.gaussian import Gaussian
from laplace.lending import lent
from laplace.positions import unrolled
from laplace.predictive.links import LINKS
from laplace.structures.base import Precision
from laplace.weights.problem import Problem


def linearised(
    engine: CurvatureEngine, precision: Precision, x: Inputs, form: str, *, create_graph: bool = False
) -> Gaussian:
    """N(f(x, θ*), J P⁻¹ Jᵀ), the GLM predictive's latent (Immer et al., 2021).

    Args:
        engine: Gives Jacobians.
        precision: P.
        x: Inputs of B data.
        form: `"full"` (covariance `[B, C, C]`), `"diagonal"` (`[B, C]`) or `"joint"` (`[B·C, B·C]`); of outputs with
            positions, B are rows, data × positions.
        create_graph: Whether mean and covariance can be differentiated with respect to x.

    Raises:
        InvalidData: No data, or outputs that are not finite.
    """
    x = batches.to_device(x, engine.problem.device)
    parts = list(engine.jacobian(x, create_graph=create_graph)) if form == "joint" else None
    if parts is not None:
        jacobian = parts[0][0] if len(parts) == 1 else _joined(parts)
        mean = torch.cat([f for _, f in parts])
        covariance = precision.functional_covariance(jacobian)
        return _checked(Gaussian(mean.to(_dtype(mean)), covariance, parts[0][0].positions))
    contract: Callable[[Jacobian], Tensor] = (
        precision.functional_diagonal if form == "diagonal" else precision.functional_variance
    )
    with closing(engine.jacobian(x, create_graph=create_graph)) as pieces:
        found = [(f.to(_dtype(f)), contract(jacobian), jacobian.positions) for jacobian, f in pieces]
    if not found:
        raise InvalidData("the inputs hold no data to predict.")
    means, variances, positions = zip(*found, strict=True)
    return _checked(Gaussian(torch.cat(means), torch.cat(variances), positions[0]))


def _checked(gaussian: Gaussian) -> Gaussian:
    if not bool(gaussian.mean.detach().isfinite().all()) or bool(gaussian.variance.detach().isnan().any()):
        raise InvalidData(
            "the network's outputs or their variances are NaN or infinite; look at the inputs and at the network's "
            "weights."
        )
    return gaussian


def _dtype(f: Tensor) -> torch.dtype:
    return torch.promote_types(f.dtype, torch.float32)


def _joined(parts: list[tuple[Jacobian, Tensor]]) -> Jacobian:
    sizes = tuple(block.size for block in parts[0][0].blocks)
    return Jacobian.from_dense(torch.cat([jacobian.dense() for jacobian, _ in parts]), sizes)


def with_noise(gaussian: Gaussian, sigma: Tensor) -> Gaussian:
    """The Gaussian of noisy targets: σ² added to every variance."""
    noise = sigma.square().expand(gaussian.mean.shape[1])
    if gaussian.is_diagonal:
        return replace(gaussian, covariance=gaussian.covariance + noise)
    if gaussian.is_joint:
        return replace(gaussian, covariance=gaussian.covariance + torch.diag(noise.repeat(len(gaussian.mean))))
    return replace(gaussian, covariance=gaussian.covariance + torch.diag(noise))


Sampler = Callable[[Tensor], Tensor]
"""Maps weights `[S, P]` to outputs `[S, B, C]`, or `[S, B, *positions, C]`."""


def sampler(
    engine: CurvatureEngine, mean: Tensor, x: Inputs, model_kwargs: dict[str, Any], *, create_graph: bool = False
) -> Sampler:
    """Outputs of the network on x at sampled weights, none of which is ever written into the model.

    A head on frozen features is linear in its weights, so that one pass of the trunk serves all samples.

    Args:
        engine: Knows the problem.
        mean: θ*, `[P]`.
        x: Inputs of B data.
        model_kwargs: Further arguments of the model.
        create_graph: Whether outputs can be differentiated with respect to x.
    """
    problem = engine.problem
    x = batches.to_device(x, problem.device)
    if problem.head is not None and not model_kwargs:
        parts = engine.head_jacobian(x, create_graph=create_graph)
        if parts is not None:
            positions = parts[0][0].positions
            return lambda thetas: unrolled(
                torch.cat([_at_samples(jacobian, f, thetas - mean) for jacobian, f in parts], 1), positions, 1
            )
    problem = _with_arguments(problem, model_kwargs)
    x = x if create_graph else detached(x)

    def run(thetas: Tensor) -> Tensor:
        with lent(problem.module):
            stacked = torch.stack([problem.run(problem.substituted(theta), x) for theta in thetas])
        return stacked.to(_dtype(stacked))

    return run


def moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance `[B, …]` of samples `[S, B, …]`.

    Raises:
        InvalidArgument: One sample, which has no variance.
    """
    if len(samples) < 2:
        raise InvalidArgument("n_samples=1: the variance of a sampled prediction needs at least 2 samples.")
    return samples.mean(0), samples.var(0)


def _at_samples(jacobian: Jacobian, f: Tensor, steps: Tensor) -> Tensor:
    """F + J (θ_s − θ*), `[S, B, C]`."""
    sizes = [block.size for block in jacobian.blocks]
    steps_of = steps.split(sizes, 1)
    return f.to(_dtype(f)) + jacobian.sum_over_blocks(lambda i, block: block.apply(steps_of[i]))


def _with_arguments(problem: Problem, model_kwargs: dict[str, Any]) -> Problem:
    if not model_kwargs:
        return problem
    call = problem.forward_fn or batches.call

    def forward(model: torch.nn.Module, x: Inputs) -> Any:
        return call(_Partial(model, model_kwargs), x)

    return replace(problem, forward_fn=forward)


class _Partial(torch.nn.Module):
    """A model with some arguments of its forward filled in."""

    def __init__(self, model: torch.nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs, **self.arguments)


def needs_variances_only(link: str) -> bool:
    """Whether a link reads no covariance between outputs."""
    return LINKS[link].diagonal


def refuse_model_kwargs(model_kwargs: dict[str, Any]) -> None:
    """Raises if arguments were given that only sampled predictions pass on.

    Raises:
        InvalidArgument: There are some.
    """
    if model_kwargs:
        raise InvalidArgument(
            f"unexpected arguments {sorted(model_kwargs)}: pred_type='glm' passes none to the model; use "
            "pred_type='nn', or bind them with forward_fn=."
        )


def check_options(
    pred_type: PredType | str,
    link_approx: str | None,
    n_samples: int,
    generator: torch.Generator | None,
) -> PredType:
    """Validates what a prediction was asked for.

    Raises:
        InvalidArgument: Unknown predictive or link, or no samples.
        InvalidType: The generator is no `torch.Generator`.
    """
    if pred_type not in (PredType.GLM, PredType.NN):
        raise InvalidArgument(
            f"pred_type={str(pred_type)!r}; accepted are 'glm' and 'nn' ('gp' is the predictive of "
            "hessian_structure='gp')."
        )
    if link_approx is not None and str(link_approx) not in LINKS:
        raise InvalidArgument(f"link_approx={str(link_approx)!r}; accepted are {list(LINKS)}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InvalidType(f"generator must be a torch.Generator; {type(generator).__name__} was given.")
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        raise InvalidArgument(f"n_samples={n_samples}; it must be a positive integer.")
    return PredType(pred_type)
