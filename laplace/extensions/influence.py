"""Influence of training inputs on the loss at other inputs, and on their own, from one fit.

Without the input i the mode of the posterior moves by about P⁻¹ g_i, one Newton step, so that the loss at a query
input q rises by

    s(q, i) = g_qᵀ P⁻¹ g_i,    g = ∂ℓ/∂θ

(Hampel, 1974; Koh and Liang, 2017; with Kronecker factors and their corrected eigenvalues Grosse et al., 2023). P is
the posterior precision, the sum over all data and not their mean, so that scores are in nats; the prior precision is
the damping. P⁻¹ g_q is solved once for every query, in the form of the structure: in the eigenbases of Kronecker
factors, or for `matrix_free` by conjugate gradients with the exact GGN. A training input meets it as the factors of
its gradient, Σ_t b_t ⊗ a_t for every layer; its gradient is never multiplied out.

Many queries are nearly combinations of few. With V_k the k largest eigenvectors of their correlations, s(q, q') over
the root r_q r_q' of s(q, q) s(q', q'), the scores s/r are V_k V_kᵀ s/r but for a share 1 − Σ_k λ / B of their squares,
were training gradients spread as P is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import eigen
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.precision_policy import widened
from laplace.core.progress import DataBar
from laplace.engines.native.kinds import EFEngine
from laplace.errors import InvalidData, UnsupportedError
from laplace.extensions.asked import Asked, posterior_of
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.checks import for_each
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, reading, same_random_state
from laplace.posterior.posterior import Posterior
from laplace.predictive.predict import Predictor

_AT_ONCE = 64
"""Queries that meet the factors of a batch at once."""


@dataclass(frozen=True, eq=False)
class Influence:
    """How training inputs influence the loss at B query inputs: `laplace.influence(la, train_loader, x, y)`.

    Attributes:
        scores: `[B, N]`, in the order of the loader, 0 for ignored labels: by about how many nats the query's loss
            would be larger without the training input. Positive: it helps; negative: it harms. With `top` the k largest
            in size, `[B, k]`.
        indices: Places of these inputs in the loader, `[B, k]`; None for all of them.
        kept: Share of every query's squared size, g_qᵀ P⁻¹ g_q, that `rank` kept, on the mean; 1 without.
    """

    scores: Tensor
    indices: Tensor | None = None
    kept: float = 1.0


@dataclass(frozen=True, eq=False)
class LabelErrors:
    """Training inputs by how suspicious their targets are: `laplace.label_errors(la, loader)`.

    Attributes:
        indices: Places in the loader, `[N]`, the most suspicious first.
        self_influence: gᵀ P⁻¹ g of every input, `[N]`, in the order of the loader; 0 where a label is ignored.
        loss: Its loss, `[N]`, by which inputs are often ranked instead.
    """

    indices: Tensor
    self_influence: Tensor
    loss: Tensor


@checked
def influence(
    la: Asked,
    loader: Iterable[Any],
    x: Inputs,
    y: Tensor,
    *,
    top: int | None = None,
    rank: int | None = None,
    damping: float | Tensor | None = None,
    progress_bar: bool = False,
) -> Influence:
    """How every training input influences the loss at B other inputs: s = g_qᵀ P⁻¹ g_i, in nats.

    Without the training input i the query's loss would be larger by about s, one Newton step (Koh and Liang, 2017;
    Grosse et al., 2023). `"ekfac"` and `"kron"` take any network, `"full"` is exact for the GGN, and
    `"matrix_free"` solves with the exact GGN by conjugate gradients, whose residual `la.solve_reports` has.

    Args:
        la: A fitted posterior.
        loader: Training data, N of them.
        x: B query inputs.
        y: Their targets.
        top: Return the k scores of largest size only, by which memory does not grow with N.
        rank: Number of combinations of the queries that meet the training data, for many queries: the result's
            `kept` says how much of them that is. None for all.
        damping: Prior precision in P instead of the posterior's, which is often small.
        progress_bar: Show a progress bar.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: `top`, `rank` or `damping` is not positive.
        InvalidData: No data, or data that cannot be used.
        ModelChangedError: The network was trained further after `fit`.
        UnsupportedError: A posterior that is fitted to data with weights.
    """
    check_counts(**{name: value for name, value in (("top", top), ("rank", rank)) if value is not None})
    posterior = posterior_of(la)
    gradients = _Gradients.from_posterior(posterior, "influence")
    at = posterior if damping is None else posterior.assigned(prior_precision=damping)
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        *asked, counts = gradients.counted((x, y))
        if not bool(counts.all()):
            raise InvalidData("labels of y are ignored, of which there is no loss; leave these inputs out.")
        rows = gradients.of_batch(*asked)[0].dense()[:, 0]
        solved, combine, kept = at.precision().solve(rows), None, 1.0
        if rank is not None and rank < len(solved):
            solved, combine, kept = _few(solved, rows, rank)

        def scored(jacobian: Jacobian, _: Tensor) -> Tensor:
            scores = torch.cat([jacobian.apply(some)[..., 0] for some in solved.split(_AT_ONCE)])
            return scores if combine is None else combine @ scores

        parts: list[tuple[Tensor, Tensor]] = []
        start = 0
        for scores in gradients.each(loader, "influence", len(counts), scored, progress_bar=progress_bar):
            places = torch.arange(start, start := start + scores.shape[1], device=scores.device)
            parts.append((scores, places.expand_as(scores)))
            if top is not None:
                parts = [_largest(parts, top)]
        scores, places = (torch.cat(column, 1) for column in zip(*parts, strict=True))
    return Influence(scores, None if top is None else places, kept)


def _few(solved: Tensor, rows: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Combinations `[k, P]` of B solutions P⁻¹ g, what makes these of them again `[B, k]`, and the share that stays."""
    inner = widened(solved) @ widened(rows).T
    size = inner.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(size > 0, 1 / size, 0.0)
    values, vectors = eigen.eigh(inverse.unsqueeze(1) * 0.5 * (inner + inner.T) * inverse)
    chosen = vectors[:, -rank:]
    combined = (inverse.unsqueeze(1) * chosen).to(solved).T @ solved
    kept = values[-rank:].sum() / values.sum() if bool((size > 0).any()) else 1.0  # nothing to lose
    return combined, (size.unsqueeze(1) * chosen).to(solved), float(kept)


def _largest(parts: Sequence[tuple[Tensor, Tensor]], top: int) -> tuple[Tensor, Tensor]:
    """The k scores of largest size with their places, in descending order of size."""
    scores, places = (torch.cat(column, 1) for column in zip(*parts, strict=True))
    order = scores.abs().topk(min(top, scores.shape[1]), 1).indices
    return scores.gather(1, order), places.gather(1, order)


@checked
def label_errors(la: Asked, loader: Iterable[Any], *, progress_bar: bool = False) -> LabelErrors:
    """Ranks training inputs by how suspicious their targets are, by their self-influence gᵀ P⁻¹ g.

    An input whose target contradicts the others has a large gradient in directions that they do not determine.

    Args:
        la: A fitted posterior.
        loader: Training data.
        progress_bar: Show a progress bar.

    Raises:
        NotFittedError: Before `fit`.
        InvalidData: No data, or data that cannot be used.
        ModelChangedError: The network was trained further after `fit`.
        UnsupportedError: As of `influence`.
    """
    posterior = posterior_of(la)
    gradients = _Gradients.from_posterior(posterior, "label_errors")
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        precision = posterior.precision()

        def scored(jacobian: Jacobian, losses: Tensor) -> Tensor:
            return torch.stack([widened(precision.variance(jacobian, "diagonal")[:, 0]), widened(losses)])

        found = gradients.each(loader, "label errors", 2, scored, progress_bar=progress_bar)
        scores, losses = torch.cat(list(found), 1).to(posterior.expansion_point)
    return LabelErrors(scores.argsort(descending=True, stable=True), scores, losses)


@dataclass(frozen=True, eq=False)
class _Gradients:
    """Gradients of the loss of inputs, over σ²T, as Jacobians of one output: the loss.

    Attributes:
        posterior: A fitted posterior.
        engine: Pulls gradients of the loss back.
        scale: 1/(σ²T), of every output where they differ.
    """

    posterior: Posterior
    engine: EFEngine
    scale: Tensor

    @classmethod
    def from_posterior(cls, posterior: Posterior, what: str) -> _Gradients:
        posterior.require_fitted()
        if posterior.choices.loss is not None:
            raise UnsupportedError(f"{what} with a loss that was assigned to the backend, whose gradient is not known.")
        if posterior.map_fit.is_weighed:
            raise UnsupportedError(
                f"{what} of a fit whose data have weights of their own (weight_fn=, dict_key_weight=): fit without "
                "them; class weights, Categorical(class_weight=...), are supported."
            )
        posterior.check_unchanged()
        engine = EFEngine(posterior.problem, posterior.likelihood, replace(posterior.engine.options, stochastic=False))
        hypers = posterior.hypers
        scale = posterior.likelihood.curvature_scale("ggn", hypers.sigma_noise, hypers.temperature)
        return cls(posterior, engine, scale.detach())

    def each(
        self,
        loader: Iterable[Any],
        label: str,
        n_rows: int,
        measure: Callable[[Jacobian, Tensor], Tensor],
        *,
        progress_bar: bool,
    ) -> Iterator[Tensor]:
        """What `measure` makes of gradients and losses, `[R, B]` of every batch; 0 where a label is ignored."""
        batches.require_loader(loader, "loader")
        bar, n_data = DataBar(label, loader, shown=progress_bar), 0
        for number, item in enumerate(reading(loader)):
            with named(f"batch {number}"):
                x, y, counts = self.counted(item)
                values = self.posterior.expansion_point.new_zeros(n_rows, len(counts))
                if len(y):
                    found = measure(*self.of_batch(x, y))
                    values = values.to(found)
                    values[:, counts] = found
            yield values
            n_data += len(y)
            bar.add(len(y))
        bar.close()
        if not n_data:
            raise InvalidData("the loader gave no data, or all are ignored; give the data of the fit.")

    def counted(self, item: Any) -> tuple[Inputs, Tensor, Tensor]:
        """Inputs and targets of a batch without ignored ones, and which of its B inputs these are, `[B]`."""
        problem, rules = self.engine.problem, self.engine.target_rules
        x, y = next_token.split(item, self.posterior.choices.dict_key_y, problem.module, rules)
        x, y = batches.to_device(x, problem.device), y.to(problem.device)
        counts = batches.counting(y, rules.ignore_index)
        if counts is None or bool(counts.all()):
            return x, y, torch.ones(len(y), dtype=torch.bool, device=y.device)
        return batches.select(x, counts, len(y)), y[counts], counts

    def of_batch(self, x: Inputs, y: Tensor) -> tuple[Jacobian, Tensor]:
        """Gradients of B inputs as a Jacobian `[B, 1, P]`, summed over positions, and losses `[B]`."""
        likelihood = self.posterior.likelihood
        batch, targets = self.engine.observe(x, y)
        f = batch.f.to(self.engine.dtype)
        if self.posterior.refined_step is not None:
            f = Predictor(self.posterior).linearised(x).mean().values.to(f)
        cotangents = (self.scale * likelihood.gradient(f, targets.y)).reshape(1, batch.n_data, -1)
        blocks = batch.blocks(cotangents.to(batch.f.dtype), list(range(len(batch.plan))))
        each = for_each(lambda f, y: likelihood.loss_terms(f.unsqueeze(0), y.unsqueeze(0)), f, targets.y)
        losses = (self.scale * each).sum(1).unflatten(0, (batch.n_data, -1)).sum(1)
        return Jacobian(tuple(blocks[i] for i in range(len(batch.plan)))), losses
