"""Predictions of every input of a fit without that input, from the fit alone: one Newton step in the linearised model.

Without the input n, whose outputs f_n have the covariance Σ_n under the posterior, the loss the gradient g_n and the
Hessian Λ_n (both over σ²T), the posterior of f_n is (Nickl et al., 2023, and the identity of Woodbury)

    Σ₋ₙ = Σ_n (I − Λ_n Σ_n)⁻¹ = Σ_n + Σ_n S (I − Sᵀ Σ_n S)⁻¹ Sᵀ Σ_n,   S Sᵀ = Λ_n,        μ₋ₙ = f_n + Σ₋ₙ g_n.

For squared loss and a full precision it is that of a fit to all other inputs, exactly; elsewhere the step is one of
Newton's from the mode with all data. It takes a covariance from which an input can be removed: I − Sᵀ Σ_n S is positive
where the precision holds all of what the input added. Kronecker factors do not in general; such inputs are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.enums import LinkApprox, LinkName
from laplace.errors import ApproximationWarning, InvalidArgument, UnsupportedError, warn
from laplace.gp.nystrom import NystromCurvature
from laplace.gp.subset import SubsetCurvature
from laplace.large_structures.low_rank import LowRankCurvature
from laplace.large_structures.lowrank_kron import LowRankKronCurvature
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.posterior.posterior import Posterior
from laplace.refinement.linear_model import RefineOptions
from laplace.refinement.process import ProcessRefiner
from laplace.refinement.weight_space import WeightRefiner
from laplace.structures.diag import DiagCurvature

COMPRESSED = (DiagCurvature, LowRankCurvature, LowRankKronCurvature, NystromCurvature)
"""Structures that do not hold all that one input adds to the precision, so that none can be removed again."""

_MOST_CLIPPED = 0.01
"""Share of inputs that may be left at the posterior with all data."""

_REST = 1e-9
"""Smallest eigenvalue of I − Sᵀ Σ S of an input that can be removed."""

_FAR = 0.5
"""Posterior standard deviations from the mode at which a warning is due."""


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Predictions of the N inputs of a fit, each without itself: `la.leave_one_out(loader)`.

    Inputs whose label is ignored are left out. Tensors are in the order of the loader, float64.

    Attributes:
        mean: Means of the outputs f, `[N, C]`.
        covariance: Their covariances, `[N, C, C]`, without observation noise.
        log_score: log p(y_n | all other data), `[N]`, in nats; of classes by the link approximation of the call.
        leverage: tr(Λ_n Σ_n), `[N]`: how many parameters the input takes by itself.
        self_influence: g_nᵀ Σ₋ₙ g_n, `[N]`, in nats: about how much more the input's own loss would be without it.
        distance: How far the posterior's mean is from the mode of this prior, in posterior standard deviations.
        clipped: Inputs that could not be removed, `[N]`, bool; they have the moments with all data.
        targets: Their targets, `[N]` or `[N, C]`, as the likelihood reads them.
    """

    mean: Tensor
    covariance: Tensor
    log_score: Tensor
    leverage: Tensor
    self_influence: Tensor
    distance: float
    clipped: Tensor
    targets: Tensor

    @property
    def is_at_mode(self) -> bool:
        """Whether the mean is so close to the mode of its prior that a step from there removes an input."""
        return self.distance <= _FAR

    def __repr__(self) -> str:
        """Number of inputs, mean score with its standard error, and what was left."""
        n = len(self.log_score)
        error = float(self.log_score.std()) / math.sqrt(n) if n > 1 else math.nan
        clipped = f", clipped={int(self.clipped.sum())}" if bool(self.clipped.any()) else ""
        return f"LeaveOneOut(n={n:,}, log_score={float(self.log_score.mean()):.4f} ± {error:.4f}{clipped})"


def computed(posterior: Posterior, loader: Iterable[Any], link: LinkName, *, progress_bar: bool = False) -> LeaveOneOut:
    """Predictions of all inputs of a fit, each without itself; errors: see `la.leave_one_out`."""
    posterior.require_fitted()
    structure, likelihood = posterior.choices.structure, posterior.likelihood
    if issubclass(structure, COMPRESSED):
        raise UnsupportedError(
            f"hessian_structure={structure.name!r} has no leave-one-out predictions: it does not hold all that an "
            "input adds to the precision, so that none can be removed. Use 'full', over all weights or a last layer, "
            "or 'gp' with functional_approximation='sod' and all data."
        )
    _check_link(likelihood, link)
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        posterior.check_unchanged()
        if issubclass(structure, SubsetCurvature) and posterior.map_fit.curvature.share < 1:  # type: ignore[attr-defined]
            raise UnsupportedError(
                "the process holds a subset of the data; leave-one-out predictions take n_subset of all of them."
            )
        make = ProcessRefiner if issubclass(structure, SubsetCurvature) else WeightRefiner
        refiner = make(posterior, loader, RefineOptions(progress_bar=progress_bar))
        refiner.require_same_loss()
        covariance = refiner.covariance()
        gradient = refiner.model.gradient(refiner.start)
        distance = math.sqrt(max(0.0, float(gradient @ covariance.solve(gradient))))
        moved = refiner.model.data.push(refiner.start)
        parts = [
            _without_each(likelihood, refiner.scale, batch.f + step, batch.y, widened(joint), posterior, link)
            for batch, step, joint in zip(
                refiner.model.data.batches, moved, covariance.of_outputs(diagonal=False), strict=True
            )
        ]
    mean, joint, score, leverage, influence, clipped = (torch.cat(column) for column in zip(*parts, strict=True))
    n_clipped = int(clipped.sum())
    if n_clipped > _MOST_CLIPPED * len(clipped):
        raise UnsupportedError(
            f"{n_clipped} of {len(clipped)} inputs cannot be removed from hessian_structure={structure.name!r}, which "
            "knows less of them than they add. Use 'full' or 'gp', or calibrate with refits of the head."
        )
    return LeaveOneOut(
        mean,
        joint,
        score,
        leverage,
        influence,
        distance,
        clipped,
        torch.cat([batch.y for batch in refiner.model.data.batches]),
    )


def leave_one_out(
    posterior: Posterior, loader: Iterable[Any], link: LinkName, *, progress_bar: bool = False
) -> LeaveOneOut:
    """The same, with a warning where the mean is far from the mode."""
    found = computed(posterior, loader, link, progress_bar=progress_bar)
    if not found.is_at_mode:
        warn(
            f"the posterior's mean is {found.distance:.2g} standard deviations from the mode of its prior: "
            "leave-one-out predictions are steps from a mode. Call la.refine(train_loader) first, which finds it.",
            ApproximationWarning,
        )
    return found


def _without_each(
    likelihood: Likelihood, scale: Tensor, f: Tensor, y: Tensor, covariance: Tensor, posterior: Posterior, link: str
) -> tuple[Tensor, ...]:
    """Moments, score, leverage and influence of every input of a batch without it, and whether it was clipped."""
    weight = scale.expand(f.shape[1])
    gradient = weight * likelihood.gradient(f, y)
    root = weight.sqrt().unsqueeze(1) * widened(likelihood.hessian(f, y).root().permute(1, 2, 0))
    seen = covariance @ root  # Σ S, `[B, C, K]`
    inside = root.mT @ seen
    identity = torch.eye(inside.shape[-1], dtype=inside.dtype, device=inside.device)
    rest = identity - 0.5 * (inside + inside.mT)
    clipped = torch.linalg.cholesky_ex(rest - _REST * identity).info != 0  # an eigenvalue of the rest is below
    factor = torch.linalg.cholesky_ex(identity.where(clipped.view(-1, 1, 1), rest)).L
    half = torch.linalg.solve_triangular(factor, seen.mT, upper=False)
    more = half.mT @ half
    kept = ~clipped
    without = covariance + torch.where(kept.view(-1, 1, 1), more, 0.0)
    shift = torch.where(kept.unsqueeze(1), (without @ gradient.unsqueeze(2)).squeeze(2), 0.0)
    influence = (gradient.unsqueeze(1) @ without @ gradient.unsqueeze(2)).flatten()
    mean = f + shift
    score = _log_score(likelihood, mean, without, y, widened(posterior.sigma_noise.detach()), link)
    return mean, without, score, inside.diagonal(dim1=1, dim2=2).sum(1), influence, clipped


def _log_score(likelihood: Likelihood, mean: Tensor, covariance: Tensor, y: Tensor, sigma: Tensor, link: str) -> Tensor:
    if likelihood.has_noise:
        return -likelihood.predictive_nll(mean, covariance.diagonal(dim1=1, dim2=2), y, sigma)
    return -likelihood.predictive_nll(likelihood.predict(mean, covariance, link), None, y, sigma)


def _check_link(likelihood: Likelihood, link: str) -> None:
    if likelihood.moment_prediction or not (likelihood.has_noise or likelihood.links):
        raise UnsupportedError(
            f"likelihood={likelihood.name!r} has no leave-one-out score in closed form; 'regression', 'classification' "
            "and Bernoulli labels have one."
        )
    if not likelihood.has_noise and (link == LinkApprox.MC or link not in likelihood.links):
        accepted = [name for name in likelihood.links if name != LinkApprox.MC]
        raise InvalidArgument(f"link_approx={link!r}; leave-one-out scores accept {accepted}.")
