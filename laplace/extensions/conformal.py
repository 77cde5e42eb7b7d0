"""Intervals that cover: conformal prediction from the posterior of one fit, without refits.

With r_i = y_i − f_i and k = J P⁻¹ Jᵀ/σ², a linear Gaussian model at its mode has, without input i and with a further
input x whose target is f_x + u,

    without i:          r_i / (1 − k_ii)  at i,    f_x − k_xi r_i / (1 − k_ii)  at x,
    with (x, f_x + u):  r_i − k_ix u / (1 + k_xx)  at i,    u / (1 + k_xx)  at x,

exactly, whatever the prior. Jackknife+ (Barber et al., 2021) takes the first line, full conformal prediction the
second: its set is where the residual at x is not among the largest. Around a trained network both are those of the
linearised one (Immer et al., 2021): then they are approximate. CV+ leaves out folds, S: (I − k_SS)⁻¹ r_S in place of
a quotient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from laplace.core import eigen
from laplace.core.arguments import checked
from laplace.core.batch import Inputs, require_loader, to_device
from laplace.core.positions import NO_CHANNELS, target_rows
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import check_generator
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData, UnsupportedError, warn
from laplace.extensions.asked import posterior_of
from laplace.gp.subset import SubsetCurvature
from laplace.likelihoods.checks import check_outputs, refuse_gaps
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, reading, same_random_state
from laplace.posterior.posterior import Posterior
from laplace.refinement.leave_one_out import COMPRESSED
from laplace.refinement.linear_model import RefineOptions
from laplace.refinement.weight_space import LinearData, WeightRefiner
from laplace.structures.precision import Precision

if TYPE_CHECKING:
    from laplace.parametric import ParametricLaplace

ConformalMethod = Literal["jackknife+", "full", "cv+"]

_MOST_CLIPPED = 0.01
"""Share of inputs that may stay in the fit, as Kronecker factors do not hold all that they added."""

_FAR = 0.5
"""Posterior standard deviations from the mode at which a warning is due."""


@dataclass(frozen=True, eq=False)
class Conformal:
    """Intervals for new targets with a coverage that is counted on data, not modelled: `laplace.conformal(la, ...)`.

    Attributes:
        method: `"jackknife+"`, `"full"`, `"cv+"` or `"split"`.
        n_data: N, the number of data whose residuals are counted.
        exact: Whether residuals are those of refits: of a linear model, or of a head on features that the targets of
            the fit did not train, and always for `"split"`. Else they are those of the linearised network.
    """

    method: str
    n_data: int
    exact: bool
    _bounds: _Jackknife | _Folds | _Full | _Split

    def interval(self, x: Inputs, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends for the targets of inputs, `[B, C]` each, one interval for every output.

        An end is infinite where so few data cannot promise the level.

        Args:
            x: Inputs.
            level: Share of targets that the intervals are to hold, in (0, 1).

        Raises:
            InvalidArgument: Another level.
            ModelChangedError: The network changed since the fit.
        """
        if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < 1:
            raise InvalidArgument(f"level={level!r}; the share of targets to hold, in (0, 1), is accepted.")
        return self._bounds.interval(x, 1 - float(level))

    def guarantee(self, level: float = 0.9) -> str:
        """What holds at a level, if the data and the new input are exchangeable, in words."""
        if not self.exact:
            return (
                "approximate: residuals without an input are those of the linearised network; no coverage is promised"
            )
        promised = level if self.method in {"full", "split"} else max(0.0, 2 * level - 1)
        return f"coverage of at least {100 * promised:.3g} %, if the data and the new input are exchangeable"

    def __repr__(self) -> str:
        """Method, number of data and whether it is exact."""
        return f"Conformal({self.method!r}, n_data={self.n_data:,}, {'exact' if self.exact else 'approximate'})"


@checked
def conformal(
    la: ParametricLaplace,
    train_loader: Iterable[Any] | None = None,
    *,
    val_loader: Iterable[Any] | None = None,
    method: ConformalMethod = "jackknife+",
    folds: int = 10,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Conformal:
    """Intervals for regression targets whose coverage is counted on data, not modelled: `.interval(x, level)`.

    From the training data and this one fit: `"jackknife+"` and `"cv+"` (Barber et al., 2021) promise a coverage of
    at least 2·level − 1 and have about the level in practice, `"full"` promises the level. For a linear model, or a
    head on features that the targets did not train, their residuals are those of refits, exactly; for trained
    networks they are approximate, and nothing is promised. With validation data, split conformal prediction (Lei
    et al., 2018) promises the level, whatever the network. The noise σ need not be right.

    Args:
        la: A fitted posterior.
        train_loader: All data of the fit.
        val_loader: Data that neither the network nor the fit has seen, in place of them.
        method: Of the training data: `"jackknife+"`, `"full"` or `"cv+"` (linear models and heads alone).
        folds: Number of folds of `"cv+"`.
        generator: Random generator of the folds; None for seed 0.
        progress_bar: Show a progress bar.

    Returns:
        A `Conformal`, with `.interval(x, level)` → lower and upper ends `[B, C]`, and `.guarantee(level)` in words.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: Both loaders, or none; an unknown method, or folds that are none.
        InvalidData: The training data are not those of the fit, or there are no validation data.
        UnsupportedError: Another likelihood than that of regression (for sets of classes see the package MAPIE), or
            a structure that does not hold all that an input adds, without validation data.

    Warns:
        ApproximationWarning: The network is not linear in its weights, or far from the mode of the prior.
    """
    posterior = posterior_of(la)
    if train_loader is None and val_loader is not None:
        check_method(method)
        return split_conformal(la, val_loader)
    if train_loader is None or val_loader is not None:
        raise InvalidArgument("give either train_loader, the data of the fit, or val_loader=, data it has not seen.")
    return _conformal(posterior, train_loader, method, folds, generator, progress_bar=progress_bar)


def _conformal(
    posterior: Posterior, loader: Iterable[Any], method: str, folds: int, generator: torch.Generator | None,
    *, progress_bar: bool = False,
) -> Conformal:  # fmt: skip
    """Intervals from the data of a fit; arguments and errors are those of `laplace.conformal`."""
    structure = posterior.choices.structure
    check_generator(generator)
    _check_likelihood(posterior)
    check_method(method)
    if issubclass(structure, (*COMPRESSED, SubsetCurvature)):
        raise UnsupportedError(
            f"conformal(train_loader) with hessian_structure={structure.name!r}, which does not hold all that an input "
            "adds; use 'full' over all weights or a last layer, or give val_loader= in place of train_loader."
        )
    exact = _is_linear_in_its_weights(posterior) and structure.is_exact
    if method == "cv+" and not exact:
        raise UnsupportedError(
            "method='cv+' refits without every fold: it takes hessian_structure='full' over the weights of a linear "
            "model, or of a last layer whose other weights are frozen (requires_grad=False). Use 'jackknife+'."
        )
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        posterior.check_unchanged()
        refiner = WeightRefiner(posterior, loader, RefineOptions(progress_bar=progress_bar))
        refiner.require_same_loss()
        covariance = refiner.covariance()
        gradient = refiner.model.gradient(refiner.start)
        newton = covariance.solve(gradient)
        distance = math.sqrt(max(0.0, float(gradient @ newton)))
        start = refiner.start - newton if exact else refiner.start  # of a linear model one step finds the mode
        known = _LinearisedData(posterior, refiner.data, covariance.precision, start, refiner.scale)
        if method == "cv+":
            bounds: _Jackknife | _Folds | _Full = _Folds.fitted(known, folds, generator)
        elif method == "full":
            bounds = _Full(known, known.residuals())
        else:
            blocks = [widened(block) for block in covariance.of_outputs(diagonal=False)]
            bounds = _Jackknife.fitted(known, torch.cat(blocks))
    if not exact and distance > _FAR:
        warn(
            f"the posterior's mean is {distance:.2g} standard deviations from the mode of its prior, which conformal "
            "intervals start from. Call la.refine(train_loader) first, which finds it.",
            ApproximationWarning,
        )
    if not exact:
        warn(
            "conformal intervals of a trained network are approximate: the targets have trained its features, and "
            "residuals without an input are those of the linearised network. With val_loader= coverage is guaranteed.",
            ApproximationWarning,
        )
    return Conformal(method, known.n_data, exact, bounds)


def split_conformal(la: ParametricLaplace, loader: Iterable[Any]) -> Conformal:
    """Intervals from held-out data, in units of the predictive standard deviation (Lei et al., 2018)."""
    posterior = posterior_of(la)
    _check_likelihood(posterior)
    require_loader(loader, "val_loader")
    held = copy.copy(la)  # which keeps its posterior, whatever is assigned later
    scores: list[Tensor] = []
    for batch in reading(loader):
        x, y = next_token.split(batch, posterior.choices.dict_key_y, posterior.model, posterior.engine.target_rules)
        mean, deviation = _moments(held, x)
        y = target_rows(y, mean, (), posterior.channel_dim)
        if y.shape != mean.shape:
            raise InvalidData(f"targets have shape {list(y.shape)}, the outputs {list(mean.shape)}; give one for each.")
        if not bool(y.isfinite().all()):
            raise InvalidData("targets of val_loader hold NaN or infinite values.")
        scores.append((widened(y.to(mean.device)) - mean).abs() / deviation)
    if not scores:
        raise InvalidData("val_loader gave no data.")
    whole = torch.cat(scores)
    return Conformal("split", len(whole), True, _Split(held, whole))


def check_method(method: str) -> None:
    """Raises `InvalidArgument` at an unknown method."""
    if method not in get_args(ConformalMethod):
        raise InvalidArgument(f"method={method!r}; accepted are 'jackknife+', 'full' and 'cv+'.")


def _check_likelihood(posterior: Posterior) -> None:
    posterior.require_fitted()
    likelihood = posterior.likelihood
    if not likelihood.has_noise or not likelihood.latent_prediction:
        raise UnsupportedError(
            f"conformal with likelihood={likelihood.name!r}: intervals are for 'regression'. Prediction sets of "
            "classes are in the package MAPIE, which takes the probabilities of la(x)."
        )


def _moments(la: ParametricLaplace, x: Inputs) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of targets, `[B, C]` each."""
    with torch.no_grad():
        mean, variance = la(x, diagonal_output=True, observation_noise=True)
    if la.channel_dim == NO_CHANNELS:
        mean, variance = mean.unsqueeze(-1), variance.unsqueeze(-1)
    if mean.ndim != 2:
        raise UnsupportedError("conformal intervals take outputs [B, C], without positions.")
    return widened(mean), widened(variance).sqrt()


def _is_linear_in_its_weights(posterior: Posterior) -> bool:
    """Whether the weights with a distribution are one linear layer, and all others are frozen."""
    problem = posterior.problem
    owners = {slot.name.rpartition(".")[0] for slot in problem.slots}
    layer = problem.module.get_submodule(next(iter(owners))) if len(owners) == 1 else None
    names = {slot.name for slot in problem.slots}
    if any(p.requires_grad for name, p in problem.module.named_parameters() if name not in names):
        return False
    whole = all(slot.entries is None for slot in problem.slots)
    return (
        whole
        and isinstance(layer, nn.Linear)
        and (problem.head is not None or len(list(problem.module.modules())) == 1)
    )


@dataclass(frozen=True, eq=False)
class _LinearisedData:
    """The data of a fit as the linearised network sees them around parameters.

    Attributes:
        posterior: Fitted.
        data: All of its data.
        precision: P.
        start: Parameters − θ*, `[P]`.
        scale: 1/(σ²T), 0-dim or `[C]`.
    """

    posterior: Posterior
    data: LinearData
    precision: Precision
    start: Tensor
    scale: Tensor

    @property
    def n_data(self) -> int:
        return sum(len(batch.f) for batch in self.data.batches)

    def residuals(self) -> Tensor:
        """Residuals y − f, `[N, C]`."""
        for batch in self.data.batches:
            refuse_gaps(batch.y, "conformal")
        pushed = self.data.push(self.start)
        return torch.cat([batch.y - batch.f - step for batch, step in zip(self.data.batches, pushed, strict=True)])

    def linearised(self, x: Inputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Outputs `[b, C]`, Jacobian `[b, C, P]` and J P⁻¹, of consecutive inputs: as many as memory takes."""
        posterior = self.posterior
        posterior.check_unchanged()
        x = to_device(x, posterior.problem.device)
        with autograd_mode(), torch.no_grad(), closing(self.data.engine.jacobian(x)) as pieces:
            for jacobian, f in pieces:
                check_outputs(f)
                done = 0
                for piece in jacobian.pieces():
                    rows = widened(piece)
                    own = widened(f[done : done + len(rows)]) + rows @ self.start
                    done += len(rows)
                    flat = piece.flatten(0, 1).to(posterior.expansion_point)
                    yield own, rows, widened(self.precision.solve(flat)).view_as(rows)

    def cross(self, solved: Tensor) -> Tensor:
        """J_i P⁻¹ J_xᵀ for all data, `[b, C, N, C]`, from J_x P⁻¹ `[b, C, P]`: outputs of x first."""
        flat = solved.flatten(0, 1)
        pushed = torch.cat([batch.linear.push(flat) for batch in self.data.batches], 1)
        return pushed.unflatten(0, solved.shape[:2])


@dataclass(frozen=True, eq=False)
class _Jackknife:
    """Jackknife+: predictions without each input, and the residuals there.

    Attributes:
        known: The data.
        weights: S (I − Sᵀ Σ S)⁻¹ Sᵀ r, `[N, C]`, by which outputs elsewhere move, S Sᵀ = 1/(σ²T).
        residuals: |y_i − f₋ᵢ(x_i)|, `[N, C]`.
    """

    known: _LinearisedData
    weights: Tensor
    residuals: Tensor

    @classmethod
    def fitted(cls, known: _LinearisedData, covariance: Tensor) -> _Jackknife:
        residuals = known.residuals()
        root = known.scale.expand(residuals.shape[1]).sqrt()
        values, vectors = eigen.eigh(root.unsqueeze(1) * covariance * root)
        rest = 1 - values
        stuck = rest.amin(1) < 1e-9
        if int(stuck.sum()) > _MOST_CLIPPED * len(stuck):
            raise UnsupportedError(
                f"{int(stuck.sum())} of {len(stuck)} inputs cannot be removed from hessian_structure="
                f"{known.posterior.choices.structure.name!r}, which knows less of them than they add. Use 'full', or "
                "val_loader= in place of train_loader."
            )
        inverse = torch.where(stuck.unsqueeze(1), 1.0, 1 / rest)
        inner = (vectors * inverse.unsqueeze(1)) @ vectors.mT
        weights = root * (inner @ (root * residuals).unsqueeze(2)).squeeze(2)
        without = residuals + (covariance @ weights.unsqueeze(2)).squeeze(2)
        return cls(known, torch.where(stuck.unsqueeze(1), 0.0, weights), without.where(~stuck.unsqueeze(1), residuals))

    def interval(self, x: Inputs, alpha: float) -> tuple[Tensor, Tensor]:
        ends = []
        for f, _, solved in self.known.linearised(x):
            moved = f.unsqueeze(1) - torch.einsum("bknc,nc->bnk", self.known.cross(solved), self.weights)
            ends.append(_between(moved, self.residuals.abs(), alpha))
        lower, upper = zip(*ends, strict=True)
        return torch.cat(lower), torch.cat(upper)


@dataclass(frozen=True, eq=False)
class _Folds:
    """CV+: predictions without each of K folds, and the residuals there.

    Attributes:
        known: The data, around the mode of all.
        steps: θ₋S − θ of every fold, `[K, P]`.
        fold: Number of the fold of every input, `[N]`.
        residuals: |y_i − f₋S(x_i)|, `[N, C]`.
    """

    known: _LinearisedData
    steps: Tensor
    fold: Tensor
    residuals: Tensor

    @classmethod
    def fitted(cls, known: _LinearisedData, folds: int, generator: torch.Generator | None) -> _Folds:
        residuals, n = known.residuals(), known.n_data
        if not 2 <= folds <= n:
            raise InvalidArgument(f"folds={folds}; from 2 to the number of data, {n}, are accepted.")
        source = generator or torch.Generator().manual_seed(0)
        fold = torch.empty(n, dtype=torch.long)
        fold[torch.randperm(n, generator=source, device=source.device).cpu()] = torch.arange(n) % folds
        fold, root = fold.to(residuals.device), known.scale.expand(residuals.shape[1]).sqrt()
        rows = torch.cat([_dense(batch.linear, known.start) for batch in known.data.batches])  # [N, C, P]
        steps, without = [], residuals.clone()
        for number in range(folds):
            chosen = fold == number
            scaled = (root.unsqueeze(1) * rows[chosen]).flatten(0, 1)
            solved = widened(known.precision.solve(scaled.to(known.posterior.expansion_point)))
            inner = torch.eye(len(scaled), dtype=scaled.dtype, device=scaled.device) - scaled @ solved.T
            right = (root * residuals[chosen]).flatten()
            step = -torch.linalg.solve(inner, right) @ solved
            steps.append(step)
            without[chosen] = residuals[chosen] - rows[chosen] @ step
        return cls(known, torch.stack(steps), fold, without.abs())

    def interval(self, x: Inputs, alpha: float) -> tuple[Tensor, Tensor]:
        ends = []
        for f, rows, _ in self.known.linearised(x):
            moved = f.unsqueeze(1) + torch.einsum("bkp,sp->bsk", rows, self.steps)
            ends.append(_between(moved[:, self.fold], self.residuals, alpha))
        lower, upper = zip(*ends, strict=True)
        return torch.cat(lower), torch.cat(upper)


@dataclass(frozen=True, eq=False)
class _Split:
    """Split conformal prediction: quantiles of residuals on data that the fit has not seen.

    Attributes:
        la: The posterior as it was.
        scores: |y − f| over the predictive standard deviation, `[N, C]`.
    """

    la: ParametricLaplace
    scores: Tensor

    def interval(self, x: Inputs, alpha: float) -> tuple[Tensor, Tensor]:
        mean, deviation = _moments(self.la, x)
        rank = math.ceil((1 - alpha) * (len(self.scores) + 1) - 1e-9)
        if rank > len(self.scores):
            return torch.full_like(mean, -math.inf), torch.full_like(mean, math.inf)
        width = deviation * self.scores.kthvalue(rank, 0).values
        return mean - width, mean + width


def _dense(linear: Any, like: Tensor) -> Tensor:
    """The Jacobian of a head's batch, `[B, C, P]`."""
    identity = torch.eye(len(like), dtype=like.dtype, device=like.device)
    return linear.push(identity).permute(1, 2, 0)


def _between(moved: Tensor, residuals: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Ends of jackknife+ and CV+, `[b, C]`, of predictions `[b, N, C]` with residuals `[N, C]`."""
    n = moved.shape[1]
    low, high = math.floor(alpha * (n + 1) + 1e-9), math.ceil((1 - alpha) * (n + 1) - 1e-9)
    infinite = torch.full_like(moved[:, 0], math.inf)
    lower = (moved - residuals).kthvalue(low, 1).values if low >= 1 else -infinite
    upper = (moved + residuals).kthvalue(high, 1).values if high <= n else infinite
    return lower, upper


@dataclass(frozen=True, eq=False)
class _Full:
    """Full conformal prediction: of every possible target whether its residual is among the largest of all.

    Attributes:
        known: The data.
        residuals: y − f, `[N, C]`.
    """

    known: _LinearisedData
    residuals: Tensor

    def interval(self, x: Inputs, alpha: float) -> tuple[Tensor, Tensor]:
        lower, upper = [], []
        scale = self.known.scale.expand(self.residuals.shape[1])
        for f, rows, solved in self.known.linearised(x):
            own = 1 + scale * (rows * solved).sum(2)  # 1 + k_xx, `[b, C]`
            cross = self.known.cross(solved).diagonal(dim1=1, dim2=3) * scale  # k_ix of one output, `[b, N, C]`
            slopes, residuals = (cross / own.unsqueeze(1)).mT, self.residuals.T.expand(len(f), -1, -1)
            upper.append(f + _rightmost(residuals, slopes, 1 / own, alpha))
            lower.append(f - _rightmost(-residuals, slopes, 1 / own, alpha))
        return torch.cat(lower), torch.cat(upper)


def _rightmost(residuals: Tensor, slopes: Tensor, own: Tensor, alpha: float) -> Tensor:
    """Largest u at which more than α (N + 1) of the N + 1 residuals are at least that of the new input, `[...]`.

    |r_i − c_i u| ≥ d |u| holds, with the roots r_i/(c_i ± d), of which one is r_i/(2 c_i) where d = |c_i|:

        d > |c_i|                between the roots
        d < |c_i|                outside of them
        d = |c_i|, r_i c_i > 0   to the left of the one root
        d = |c_i|, r_i c_i < 0   to its right
        d = |c_i|, r_i = 0       everywhere

    From the right, these sets open and close at their ends; the new input counts everywhere.

    Args:
        residuals: r, `[..., N]`.
        slopes: c, `[..., N]`.
        own: d, `[...]`, positive.
        alpha: 1 − level.
    """
    own = own.unsqueeze(-1)
    roots = torch.stack([residuals / (slopes + own), residuals / (slopes - own)])
    first, second = roots.amin(0), roots.amax(0)
    between, single = own > slopes.abs(), (own == slopes.abs()) & (residuals != 0)
    everywhere = (own == slopes.abs()) & (residuals == 0)
    outside = ~(between | single | everywhere)
    left = single & ((residuals > 0) == (slopes > 0))
    right = single & ~left
    begins = outside | right | everywhere  # holds at +∞
    root, never = residuals / (2 * slopes), torch.full_like(first, -math.inf)
    opens, closes = never.clone(), never
    for case, at_opening, at_closing in (
        (between, second, first),
        (outside, first, second),
        (left, root, never),
        (right, never, root),
    ):
        opens, closes = at_opening.where(case, opens), at_closing.where(case, closes)
    n = residuals.shape[-1]
    needed = math.floor(alpha * (n + 1) + 1e-9)  # of the others, besides the new input itself
    events = torch.cat([opens, closes], -1)
    order = (-events).argsort(dim=-1, stable=True)
    change = torch.cat([torch.ones_like(opens), -torch.ones_like(closes)], -1).gather(-1, order)
    at_infinity = begins.sum(-1, keepdim=True)
    reached = (at_infinity + change.cumsum(-1)) >= needed
    place = reached.long().argmax(-1, keepdim=True)
    found = events.gather(-1, order).gather(-1, place).squeeze(-1)
    return torch.where(at_infinity.squeeze(-1) >= needed, math.inf, found)
