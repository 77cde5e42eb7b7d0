"""Which inputs of a pool to label next: greedy batches by joint information gain, of linearised outputs.

With F the outputs at S samples of the weights, centred and over √S, Λ = R Rᵀ the expected output Hessian over σ²T at
the mean and A_x = Rᵀ F_x, a label at x tells of the weights, in nats,

    BALD(x) = ½ log det(I + A_xᵀ A_x)          (MacKay, 1992; Houlsby et al., 2011),

and of labels at other inputs z the mean of BALD(z) less what is left of it once x is labelled, EPIG(x) (Bickford Smith
et al., 2023). A batch is chosen one by one: what is chosen counts as labelled, with a label that a Gaussian need not
know, so that near copies are not chosen twice (Kirsch et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import eigen
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import in_parts
from laplace.core.checks import are_finite, require, where_not_finite
from laplace.core.positions import require_none
from laplace.core.precision_policy import widened
from laplace.core.progress import DataBar
from laplace.core.random_numbers import check_generator
from laplace.errors import InvalidArgument, InvalidData
from laplace.extensions.asked import Asked, posterior_of
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import jacobians

AcquisitionScore = Literal["bald", "epig"]

_SAME = 1e-9
"""Relative difference of scores that is rounding: the first of equal inputs is chosen, whatever the processor."""

_ENTRIES = 2**23
"""Entries of covariances between inputs and targets that are held at once."""

_N_TARGETS = 100
"""Targets that are drawn from the pool where none are given: the work is that of pool × targets."""


@dataclass(frozen=True, eq=False)
class Acquired:
    """Inputs to label next, in the order of their choice.

    Attributes:
        indices: Their numbers in the pool, `[n]`.
        gains: Information gained by each, given those before it, `[n]`, in nats.
    """

    indices: Tensor
    gains: Tensor


@checked
def acquire(
    la: Asked,
    pool: Any,
    n: int,
    score: AcquisitionScore = "bald",
    *,
    targets: Any = None,
    n_samples: int = 500,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Acquired:
    """Chooses n inputs of a pool to label next: a batch by joint information, so that no two tell the same.

    `"bald"` is the information of a label on the weights (Houlsby et al., 2011), `"epig"` on the labels of other
    inputs, `targets`, which leaves out what is only strange (Bickford Smith et al., 2023); both of the linearised
    network, with covariances between inputs by samples of the weights. Afterwards `la.fit(new, override=False)` of
    a network that was trained on.

    Args:
        la: A fitted posterior.
        pool: Inputs without labels: a tensor, tuple or mapping, or a loader, whose labels are not read.
        n: Number of inputs to choose.
        score: `"bald"` or `"epig"`.
        targets: Of `"epig"`: inputs as those whose labels are to be predicted; None for a hundred inputs drawn
            from the pool, or all of a smaller one. The work is that of pool × targets.
        n_samples: Samples of the weights, at least 2.
        generator: Random generator of these samples and targets.
        progress_bar: Show a progress bar.

    Returns:
        `.indices` `[n]` in the pool, in the order of their choice, and `.gains` `[n]`, in nats.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: n is larger than the pool, another score, or targets of `"bald"`.
        InvalidData: No inputs, or outputs of the network that are NaN or infinite.
        UnsupportedError: Outputs with positions.
        ModelChangedError: The network was trained further after `fit`.
    """
    posterior = posterior_of(la).predictive()
    return _acquire(posterior, pool, n, score, targets, n_samples, generator, progress_bar=progress_bar)


def _acquire(
    posterior: Posterior, pool: Any, n: int, score: str, targets: Any, n_samples: int,
    generator: torch.Generator | None, *, progress_bar: bool = False,
) -> Acquired:  # fmt: skip
    """Chooses n inputs of a pool; arguments are those of `laplace.acquire`."""
    check_counts(n=n)
    check_counts(2, n_samples=n_samples)
    check_generator(generator)
    if score not in ("bald", "epig"):
        raise InvalidArgument(f"score={score!r}; accepted are 'bald' and 'epig'.")
    if targets is not None and score == "bald":
        raise InvalidArgument("targets= are inputs whose labels are to be predicted, which score='epig' takes.")
    posterior.require_fitted()
    posterior.check_unchanged()
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        steps = posterior.sampler()(n_samples, generator) - posterior.mean
        found = _whitened(posterior, pool, steps, "pool", progress_bar)
        size = found.shape[1]
        if n > size:
            raise InvalidArgument(f"n={n}; the pool has {size} inputs, of which at most all can be chosen.")
        if targets is not None:
            others = _whitened(posterior, targets, steps, "targets", progress_bar)
        else:
            others = found[:, _drawn(size, generator)] if score == "epig" else found[:, :0]
        chosen, gains = [], []
        taken = torch.zeros(size, dtype=torch.bool, device=found.device)
        for _ in range(n):
            scores = _information(found) if score == "bald" else _about(found, others)
            scores = scores.masked_fill(taken, -torch.inf)
            best = int((scores >= scores.max() - _SAME * scores.max().abs()).nonzero()[0])
            chosen.append(best)
            gains.append(scores[best])
            taken[best] = True
            shrink = _shrinkage(found[:, best])
            found, others = shrink(found), shrink(others)
    return Acquired(torch.tensor(chosen, device=found.device), torch.stack(gains))


def _drawn(size: int, generator: torch.Generator | None) -> Tensor:
    """Places of some of the pool, which stand for all of it as targets; all of a small one."""
    if size <= _N_TARGETS:
        return torch.arange(size)
    device = None if generator is None else generator.device
    return torch.randperm(size, generator=generator, device=device)[:_N_TARGETS].cpu()


def _whitened(posterior: Posterior, pool: Any, steps: Tensor, name: str, progress_bar: bool) -> Tensor:
    """A = Rᵀ F of all inputs, `[S, N, K]`, float64."""
    likelihood, engine, hypers = posterior.likelihood, posterior.engine, posterior.hypers
    scale = widened(likelihood.curvature_scale("ggn", hypers.sigma_noise, hypers.temperature).detach()).sqrt()
    parts = []
    bar = DataBar(f"acquire, {name}", pool, shown=progress_bar)
    for x in in_parts(pool, name):
        for jacobian, f in jacobians(engine, x, None, create_graph=False):
            require_none(
                jacobian.positions, "laplace.acquire", "Score inputs by la.predict(x).decomposition.mutual_information"
            )
            step = posterior.refined_step
            f = widened(f) if step is None else widened(f) + widened(jacobian.apply(step.unsqueeze(0))[0])
            moved = widened(jacobian.apply(steps)) / len(steps) ** 0.5
            root = scale * likelihood.hessian(f).root()  # [K, B, C], one scale or one per output
            parts.append(torch.einsum("sbc,kbc->sbk", moved, root))
        bar.add(batches.size(x, ""))
    bar.close()
    if not sum(part.shape[1] for part in parts):
        raise InvalidData(f"{name} holds no inputs; give a tensor, tuple or mapping of inputs, or a loader of batches.")
    found = torch.cat(parts, 1)
    require(
        are_finite(found),
        lambda: InvalidData(
            f"{name}: outputs of the network, or their derivatives, are NaN or "
            f"infinite{where_not_finite(found.transpose(0, 1))}; look at the inputs and at the network's weights."
        ),
    )
    return found


def _information(found: Tensor) -> Tensor:
    """½ log det(I + A_xᵀ A_x), `[N]`."""
    return 0.5 * torch.logdet(_identity_and(found))


def _identity_and(found: Tensor) -> Tensor:
    """I + A_xᵀ A_x, `[N, K, K]`."""
    return torch.einsum("snk,snl->nkl", found, found) + _identity(found)


def _identity(found: Tensor) -> Tensor:
    return torch.eye(found.shape[2], dtype=found.dtype, device=found.device)


def _about(found: Tensor, targets: Tensor) -> Tensor:
    """Mean information of each label on those of the targets, −½ log det(I − M Mᵀ) for correlations M, `[N]`."""
    others = _standardised(targets)
    width = targets.shape[1] * targets.shape[2] * found.shape[2]
    gains = []
    for part in _standardised(found).split(max(1, _ENTRIES // width), 1):
        correlation = torch.einsum("smk,snl->nmkl", others, part).contiguous()  # or products take thrice the time
        left = _identity(others) - correlation @ correlation.mT
        gains.append(-0.5 * torch.logdet(left).mean(1))
    return torch.cat(gains)


def _standardised(found: Tensor) -> Tensor:
    """A with labels of unit variance: A L⁻ᵀ with L Lᵀ = I + AᵀA, `[S, N, K]`."""
    root = torch.linalg.cholesky(_identity_and(found))
    return torch.linalg.solve_triangular(root, found.permute(1, 2, 0), upper=False).permute(2, 0, 1)


def _shrinkage(labelled: Tensor) -> Any:
    """What labels at an input leave of all others: (I + B Bᵀ)^(−½) A for its B `[S, K]`."""
    values, vectors = eigen.eigh(labelled.T @ labelled)
    values = values.clamp(min=0)
    safe = torch.where(values > 0, values, 1.0)
    inner = (vectors * torch.where(values > 0, (1 - (1 + values).rsqrt()) / safe, 0.5)) @ vectors.T
    return lambda found: found - torch.einsum("sk,kl,tl,tnj->snj", labelled, inner, labelled, found)
