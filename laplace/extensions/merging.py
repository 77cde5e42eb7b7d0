"""Posteriors made of others: merged from networks that were trained apart, or of an optimizer's squared gradients.

With the precisions P_k = s·H_k + P₀ around the weights m_k of K networks,

    (Σ_k P_k − (K − 1) P₀) m = Σ_k P_k m_k − (K − 1) P₀ μ₀.

For a linear Gaussian model this is one fit to all data; for networks it approximates it (Matena and Raffel, 2022).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from laplace.core.arguments import check_counts
from laplace.curvature import NativeEF
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidType, UnsupportedError, warn
from laplace.extensions.distances import other_weights
from laplace.extensions.removal import loss_of_part
from laplace.gp.subset import SubsetCurvature
from laplace.grid import Laplace
from laplace.large_structures.krylov import solve
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.parametric import ParametricLaplace
from laplace.posterior.posterior import Posterior
from laplace.structures.precision import Precision
from laplace.weights.problem import Problem

L = TypeVar("L", bound=ParametricLaplace)

_SOLVED = 1e-10
"""Relative residual of a merged mean, in float64; of float32 the largest that its rounding leaves."""

_MOST_STEPS = 500


def merge(posteriors: Sequence[L]) -> L:
    """One posterior of several, of networks that were trained apart on parts of the data: Σ_k P_k − (K − 1) P₀.

    Each P_k = s·H_k + P₀ is the precision around its own trained weights m_k, all with the same prior. The result has
    the curvature Σ_k H_k around the mean that solves (Σ_k P_k − (K − 1) P₀) m = Σ_k P_k m_k − (K − 1) P₀ μ₀, and a
    network of its own with these weights. Clients that start from it and are merged again make rounds of federated
    learning. For a linear Gaussian model it is one fit to all data; for networks it is an approximation whose quality
    falls as their weights grow apart. The loss of the result is that of the parts, expanded to second order.

    Args:
        posteriors: At least two fitted posteriors over weights, with the same kind of network, weights, structure,
            likelihood, prior, noise and temperature. They and their networks are not touched.

    Returns:
        A posterior of the class of the first; its `la.model` is a copy with the merged weights.

    Raises:
        InvalidType: An object that is no posterior over weights.
        InvalidArgument: Fewer than two, or posteriors that differ in what they must share; the message names it.
        NotFittedError: One is not fitted.
        ModelChangedError: A network changed after its fit.
        UnsupportedError: A structure that is no sum over data, or a head whose weights are used
            elsewhere in the network.

    Warns:
        ApproximationWarning: The merged mean was found inexactly.
    """
    first, *others = _checked_to_merge(posteriors)
    parts = [la.snapshot() for la in (first, *others)]
    with autograd_mode(), torch.no_grad(), same_random_state(first.model):
        fit = parts[0].fit
        for part in parts[1:]:
            fit = fit + part.fit
        together = replace(parts[0].with_fit(fit), root=None)
        mean = _merged_mean(together, parts)
        losses = [loss_of_part(part, mean) for part in parts]
        fit = replace(fit, loss_terms=torch.stack(losses).sum(0))
        merged = copy.deepcopy(first)
        problem = merged.problem
        for slot, tensor in problem.stacked(mean.unsqueeze(0)).items():
            problem.tensor(slot).copy_(tensor[0])
        merged.set_posterior(merged.snapshot().with_data(fit, None))
    return merged


def _merged_mean(together: Posterior, parts: Sequence[Posterior]) -> Tensor:
    """The mean of a merged posterior, `[P]`, by products with each P_k: Kronecker factors add up inexactly."""
    prior, dtype = together.prior, together.expansion_point.dtype
    delta, precisions = prior.diagonal().detach(), [part.precision() for part in parts]
    means = [part.mean for part in parts]
    centre = torch.stack(means).mean(0)
    right = sum(_product(p, m - centre) for p, m in zip(precisions, means, strict=True))
    right = right - (len(parts) - 1) * delta * (prior.mean.detach() - centre)

    def product(vectors: Tensor) -> Tensor:
        return sum(p.product(vectors) for p in precisions) - (len(parts) - 1) * delta * vectors  # pyright: ignore

    precision = together.precision()
    relative = max(_SOLVED, 10 * torch.finfo(dtype).eps)
    found = solve(product, right.unsqueeze(0), precision.solve, relative=relative, max_iterations=_MOST_STEPS)
    if bool((found.relative > 1e-3).any()):
        warn(
            f"the merged mean was found to a relative residual of {float(found.relative.max()):.2g} after "
            f"{found.n_iterations} steps: the posteriors are far apart in scale; give a larger prior_precision.",
            ApproximationWarning,
        )
    return centre + found.x[0]


def _product(precision: Precision, vector: Tensor) -> Tensor:
    return precision.product(vector.unsqueeze(0))[0]


def _checked_to_merge(posteriors: Sequence[L]) -> Sequence[L]:
    given: list[L] = list(posteriors) if isinstance(posteriors, Sequence) else [posteriors]
    for la in given:
        if not isinstance(la, ParametricLaplace):
            raise InvalidType(f"merge takes a list of posteriors over weights; a {type(la).__name__} was given.")
    if len(given) < 2:
        raise InvalidArgument(f"merge takes at least two posteriors; {len(given)} was given.")
    for number, la in enumerate(given):
        la.fitted()
        la.check_unchanged()
        structure = la.structure
        structure.require_stored("merge")
        if issubclass(structure, SubsetCurvature):
            raise UnsupportedError(
                f"merge with hessian_structure={structure.name!r}, whose curvature is no sum over data; use 'kron', "
                "'ekfac', 'diag', 'block' or 'full'."
            )
        difference = _difference(given[0], la)
        if difference:
            raise InvalidArgument(
                f"posterior {number} cannot be merged with the first: {difference}. All must have the same structure, "
                "network, weights, likelihood, prior, noise and temperature."
            )
    if len({id(la) for la in given}) < len(given):
        raise InvalidArgument("posteriors holds the same one twice: its data would count twice.")
    _require_untied(given[0].problem)
    return given


def _difference(one: ParametricLaplace, other: ParametricLaplace) -> str | None:
    """What two posteriors differ in of all that they must share; None for nothing."""
    facts = {
        "structure and weights": [type(la).__name__ for la in (one, other)],
        "likelihood": [la.likelihood_object.name for la in (one, other)],
        "parameters of the likelihood": [_parameters(la.likelihood_object) for la in (one, other)],
        "kind of curvature": [la.backend_cls.kind for la in (one, other)],
        "number of outputs": [la.n_outputs for la in (one, other)],
    }
    for name, (expected, value) in facts.items():
        if value != expected:
            return f"its {name} is {value!r}, not {expected!r}"
    for name in ("prior_precision", "prior_mean", "sigma_noise", "temperature"):
        value, expected = getattr(other, name).detach(), getattr(one, name).detach()
        if value.numel() != expected.numel() or not bool((value == expected).all()):
            return f"its {name} is another one"
    difference = other_weights(one.problem, other.problem)
    if difference:
        return difference
    fixed, theirs = _fixed_tensors(one.problem), _fixed_tensors(other.problem)
    if fixed.keys() != theirs.keys():
        return f"its network has other tensors, of which {min(fixed.keys() ^ theirs.keys())!r} is one"
    for name, tensor in fixed.items():
        if tensor.shape != theirs[name].shape or not torch.equal(tensor, theirs[name].to(tensor)):
            return (
                f"{name!r} of its network has other values, and no distribution (give the networks the same frozen "
                "weights and buffers before their fits)"
            )
    return None


def _parameters(likelihood: Likelihood) -> dict[str, Any]:
    """What a likelihood holds besides its class, tensors as lists."""
    return {name: v.tolist() if isinstance(v, Tensor) else v for name, v in sorted(vars(likelihood).items())}


def _fixed_tensors(problem: Problem) -> dict[str, Tensor]:
    """Weights and buffers of a network, with zeros in the place of the weights with a distribution."""
    zeros = torch.zeros(problem.layout.n_params, dtype=problem.dtype, device=problem.device)
    return {**problem.substituted(zeros), **dict(problem.module.named_buffers())}


def _require_untied(problem: Problem) -> None:
    """Refuses a head whose weight another layer shares: merged values of the head would change the features."""
    tensors = [tensor for _, tensor in problem.module.named_parameters(remove_duplicate=False)]
    for slot in problem.slots if problem.head is not None else ():
        own = problem.tensor(slot.name)
        if sum(tensor is own for tensor in tensors) > 1:
            raise UnsupportedError(
                f"merge of a last layer whose {slot.name!r} is a weight of another layer, too: merged weights would "
                "change the features. Use subset_of_weights='all'."
            )


# From an optimizer.


def from_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    n_data: int,
    likelihood: Any = "classification",
    *,
    batch_size: int | None = None,
    n_outputs: int = 0,
    **options: Any,
) -> ParametricLaplace:
    """A diagonal posterior around trained weights from the squared gradients that their optimizer averaged; no pass.

    Of Adam and its kin, H = N·B·v̂ with v̂ the bias-corrected average of squared gradients of the mean loss of B data,
    whose expectation at the mode is the empirical Fisher over N·B (Li et al., 2025, with B = 1). Of IVON (Shen et al.,
    2024), H = ess·h and the prior precision ess·(weight decay): its variational posterior 1/(ess·(h + weight decay)).

    Args:
        optimizer: One that trained the model: `torch.optim.Adam`, `AdamW`, `NAdam`, `RAdam`, `RMSprop`, or `ivon.IVON`.
        model: The trained network; its weights are not changed.
        n_data: N, the number of training data.
        likelihood: As of `Laplace`.
        batch_size: B, the number of data whose mean loss was differentiated in a step; None for 1, with a warning where
            it matters. The loss is that of the
            likelihood, of a regression half the squared error: `nn.MSELoss`, twice that, makes H four times too large.
        n_outputs: C, where the evidence is asked for.
        options: Further arguments of `Laplace(...)`, e.g. `prior_precision`.

    Returns:
        A `DiagLaplace` with an empirical Fisher (`NativeEF`), of which predictions, samples and tuning on validation
        data work. The loss of the training data is not known: its evidence lacks it.

    Raises:
        InvalidArgument: An optimizer without squared gradients, or one that has none of some trainable weight.

    Warns:
        ApproximationWarning: Squared gradients of unknown batches.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidType(f"optimizer is a {type(optimizer).__name__}; the torch.optim.Optimizer of the training is.")
    check_counts(n_data=n_data, batch_size=1 if batch_size is None else batch_size)
    ivon = all("hess" in group and "ess" in group for group in optimizer.param_groups)
    if batch_size is None and not ivon:
        warn(
            "batch_size was not given: squared gradients are taken for those of single data. Of means over B data the "
            "curvature is B times larger; give batch_size=B.",
            ApproximationWarning,
        )
    moments = _of_ivon(optimizer) if ivon else _of_squares(optimizer, n_data * (batch_size or 1))
    la = Laplace(model, likelihood, "all", "diag", **{"backend": NativeEF, **options})
    values: list[Tensor] = []
    for slot in la.problem.slots:
        moment = moments.get(id(la.problem.tensor(slot.name)))
        if moment is None:
            raise InvalidArgument(
                f"optimizer={type(optimizer).__name__} has no squared gradients of {slot.name!r}; give the Adam, "
                "AdamW, RMSprop or IVON that trained this model, after its steps, or freeze what it did not train."
            )
        values.append(slot.take(moment))
    la.start_fit()
    la.H, la.n_data, la.n_outputs = torch.cat(values).to(la.prior_precision), n_data, n_outputs
    if ivon and "prior_precision" not in options:
        priors = {id(t): g["ess"] * g["weight_decay"] for g in optimizer.param_groups for t in g["params"]}
        own = torch.tensor([float(priors[id(la.problem.tensor(slot.name))]) for slot in la.problem.slots])
        la.prior_precision = own[:1] if bool((own == own[0]).all()) else own
    return la


def _of_squares(optimizer: torch.optim.Optimizer, factor: float) -> dict[int, Tensor]:
    """Averages of squared gradients times a factor, by the identity of the weight."""
    moments: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state.get(tensor, {})
            average = state.get("exp_avg_sq", state.get("square_avg"))
            if average is not None:
                decay = group["betas"][1] if "betas" in group else group.get("alpha", group.get("rho"))
                bias = 1.0 if decay is None else 1 - decay ** float(state["step"])
                moments[id(tensor)] = factor * average.detach() / bias
    return moments


def _of_ivon(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """ess·h of every weight, which IVON holds as one vector per group."""
    moments: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        tensors = [tensor for tensor in group["params"] if tensor.requires_grad]
        parts = (group["ess"] * group["hess"]).split([tensor.numel() for tensor in tensors])
        moments |= {id(tensor): part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)}
    return moments
