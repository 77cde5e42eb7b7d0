"""Data that a posterior has not seen, out of those it was fitted to: for those who have no validation data.

Over the weights of a head a posterior is fitted anew K times, its mean trained anew too, each time without one of K
parts of the data (`refits_of_head`). The features stay: where they have not seen the labels, as those of a frozen
backbone, what is scored is honest; elsewhere it is a forecast, whose differences have the right sign. Over other
weights nothing is trained anew: of a part of the data the curvature knows nothing (`held_out_part`), but the network
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core import eigen
from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.checks import named, same_count
from laplace.core.overrides import POSTERIOR, PREDICTIONS, is_ours
from laplace.core.positions import rows_that_count, target_rows
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import check_generator
from laplace.curvature.interface import CurvatureInterface, NativeEF, NativeGGN, NativeHessian
from laplace.engines.engine import CurvatureEngine, HeadBatch
from laplace.enums import LinkApprox
from laplace.errors import CalibrationWarning, CurvatureError, InvalidArgument, InvalidData, UnsupportedError, warn
from laplace.fitting.fit import FitOptions, fit
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.targets import mean_of, variance_of
from laplace.network import next_token
from laplace.network.fsdp import require_unsharded
from laplace.network.model_guard import autograd_mode, reading, same_random_state
from laplace.posterior.posterior import Choices, Posterior
from laplace.refinement.linear_model import minimise
from laplace.tuning.candidates import Predictive
from laplace.weights.last_layer import LastLayer

# ----------------------------------------------------------------------------------------------------------------------
# The head of a network trained anew on some of its data, with features that stay: a convex problem of few numbers
# ----------------------------------------------------------------------------------------------------------------------
#
# With features φ (a 1 for the bias among them) and r, a bias that is not random, the data without those of a fold lead
# to
#
#     W = argmin_W  Σ_b ℓ(y_b, W φ_b + r) + ½ λ ‖W‖².
#
# There is one minimum. The search begins at the head as the user trained it, W*, and ends at the minimum, so that of
# the fold's data nothing is left in W but what the features and λ know of them.
#
# λ is what makes W* as nearly as possible stationary for all data: it minimises ‖g + λ W*‖², with g = Σ_b ∂ℓ_b/∂W at
# W*. A training that converged under weight decay has g = −λ W*, and its weight decay is found. Of one that was stopped
# early g is what still drives the weights apart, and a penalty takes the place of stopping (Bishop, 2006, section
# 5.5.2): loss and ‖W‖ at the minimum for all data are about those of W*.


_FLOOR = 1e-6
"""The smallest λ, as a share of the features' mean square sum: it makes the minimum unique where nothing else does."""

_NEGLIGIBLE = 1e-12
"""Share of the largest eigenvalue of a Gram below which a direction is rounding."""

_SURE = 1e-3
"""Weight of data that the network is sure of, as a share of the mean weight: their directions count as well."""


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A head on the features of data; numbers are float64. With positions, R are rows, data × positions."""

    likelihood: Likelihood
    features: Tensor  # φ, `[R, D]`
    offset: Tensor  # r, `[C]`
    y: Tensor  # checked targets of the rows
    weight: Tensor  # W*, `[C, D]`

    @classmethod
    def of_network(cls, posterior: Posterior, features: Tensor, f: Tensor, y: Tensor) -> LinearHead:
        """The head as the user trained it, on features with a 1 for a random bias, where the network has outputs f."""
        features, has_bias, n_outputs = widened(features), _has_random_bias(posterior), f.shape[1]
        sizes = [n_outputs * (features.shape[1] - has_bias), n_outputs * has_bias]
        parts = widened(posterior.expansion_point).split(sizes)
        weight = torch.cat([part.view(n_outputs, -1) for part in parts], 1)
        offset = (widened(f) - features @ weight.T).mean(0)  # of a bias that is not random, the same for all
        return cls(posterior.likelihood, features, offset * (not has_bias), y, weight)

    @cached_property
    def ridge(self) -> Tensor:
        """λ, of W* in the directions that the features have."""
        gradient = self.likelihood.gradient(self.features @ self.weight.T + self.offset, self.y).T @ self.features
        weight = self.weight @ self._basis[0]
        square = weight.square().sum()
        floor = _FLOOR * self.features.square().sum() / self.features.shape[1]
        driven = -(gradient * self.weight).sum() / square
        return torch.where(driven > floor, driven, floor)  # also of weights that are zero, of which nothing is known

    def refit(self, rows: Tensor, *, tolerance: float = 1e-6, max_steps: int = 100, residual: float = 1e-2) -> Tensor:
        """W of some rows, `[C, D]`; options are those of `minimise`."""
        data = LinearHead(self.likelihood, self.features[rows], self.offset, self.y[rows], self.weight)
        # With fewer rows than features nothing but W* says anything of the other directions, in which W is zero.
        basis, sums = data._basis if len(rows) < self.features.shape[1] else self._basis
        sums = sums * (len(rows) / len(self.features)) if basis is self._basis[0] else sums
        of_outputs, turn = data._outputs
        diagonal = of_outputs.unsqueeze(1) * sums + self.ridge

        def precondition(vector: Tensor) -> Tensor:
            return (turn @ ((turn.T @ vector.view_as(diagonal)) / diagonal)).flatten()

        function = _Penalised(self.likelihood, data.features @ basis, data.offset, data.y, self.ridge)
        start = (self.weight @ basis).flatten()
        end = minimise(function, start, precondition, tolerance=tolerance, max_steps=max_steps, residual=residual)
        return end.at.view_as(diagonal) @ basis.T

    # The preconditioner, Σ_b Λ_b / Σ_b tr Λ_b ⊗ Σ_b tr Λ_b φ_b φ_bᵀ at W*.

    @cached_property
    def _basis(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors of Σ_b tr(Λ_b) φ_b φ_bᵀ, `[D, r]`, and its eigenvalues, with r the number of rows at most."""
        scaled = self._weights.sqrt().unsqueeze(1) * self.features
        if len(scaled) >= scaled.shape[1]:
            values, vectors = eigen.eigh(scaled.T @ scaled)
            return vectors, values.clamp(min=0)
        values, vectors = eigen.eigh(scaled @ scaled.T)
        has_data = values > _NEGLIGIBLE * values[-1]
        return scaled.T @ (vectors[:, has_data] / values[has_data].sqrt()), values[has_data]

    @cached_property
    def _weights(self) -> Tensor:
        """The trace of Λ of every row, `[R]`, and a little for those that have none."""
        hessian = self.likelihood.hessian(self.features @ self.weight.T + self.offset, self.y)
        traces = hessian.diagonal().sum(1).clamp(min=0)
        return traces + (_SURE * traces.mean()).clamp(min=torch.finfo(traces.dtype).tiny ** 0.5)

    @cached_property
    def _outputs(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of Σ_b Λ_b / Σ_b tr Λ_b, `[C]`, and eigenvectors, `[C, C]`."""
        total = self.likelihood.hessian(self.features @ self.weight.T + self.offset, self.y).total()
        values, vectors = eigen.eigh(total / total.trace().clamp(min=torch.finfo(total.dtype).tiny))
        return values.clamp(min=0), vectors


@dataclass(frozen=True, eq=False)
class _Penalised:
    """The penalised loss of `Head`, of weights `[C·r]`, with the penalty λ."""

    likelihood: Likelihood
    features: Tensor
    offset: Tensor
    y: Tensor
    ridge: Tensor

    def value(self, at: Tensor) -> Tensor:
        return self.likelihood.loss(self._outputs(at), self.y) + 0.5 * self.ridge * (at @ at)

    def gradient(self, at: Tensor) -> Tensor:
        return self._pulled(self.likelihood.gradient(self._outputs(at), self.y)) + self.ridge * at

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        hessian = self.likelihood.hessian(self._outputs(at), self.y)
        return lambda vector: self._pulled(hessian.times(self._pushed(vector))) + self.ridge * vector

    def _outputs(self, at: Tensor) -> Tensor:
        return self._pushed(at) + self.offset

    def _pushed(self, at: Tensor) -> Tensor:
        return (at.view(-1, self.features.shape[1]) @ self.features.T).T

    def _pulled(self, cotangents: Tensor) -> Tensor:
        return (cotangents.T @ self.features).flatten()


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A posterior, and data that it has not seen, batches `(x, y)` as its engine takes them."""

    posterior: Posterior
    loader: list[tuple[Inputs, Tensor]]


def refits_of_head(
    posterior: Posterior,
    train_loader: Iterable[Any],
    *,
    folds: int = 5,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Iterator[HeldOut]:
    """Posteriors over a head that was trained and fitted without one of K parts of the data, with that part.

    The network runs once over the data, in this call; the refits follow as they are asked for. Classes have equal
    shares of the parts; an input that is the only one of its class is in none. Parts are drawn from the generator, or
    from one with the seed of `torch.manual_seed`, which leaves the global random state alone.

    Raises:
        InvalidArgument: Fewer than two parts, or more than data.
        InvalidData: Other data than those of the fit, or a batch that cannot be used.
        UnsupportedError: Other weights than a head's, or a posterior that a fit alone does not lead to.
    """
    check_counts(2, folds=folds)
    check_generator(generator)
    return HeadData.read(posterior, train_loader, progress_bar=progress_bar).refits(folds, generator)


def held_out_part(
    posterior: Posterior,
    train_loader: Iterable[Any],
    *,
    share: float = 0.2,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> HeldOut:
    """The posterior at the same network, fitted without a random share of the data, with that share.

    The loader is read once, and its data are kept in memory, on their device. Classes have the same share of both
    parts. The curvature is that of the data that remain, and is not scaled up to that of all.

    Raises:
        InvalidArgument: A share that leaves no data on one side.
        InvalidData: Another number of data than in the fit, or a batch that cannot be used.
        UnsupportedError: A posterior that a fit alone does not lead to.
    """
    if not 0 < share < 1:
        raise InvalidArgument(f"share={share}; a number above 0 and below 1 is accepted.")
    check_generator(generator)
    _require_of_fit(posterior)
    data = _in_memory(posterior, train_loader)
    targets = [y for _, y in data]
    n_data = sum(len(y) for y in targets)
    n_out = round(share * n_data)
    if not 0 < n_out < n_data:
        raise InvalidArgument(
            f"share={share} of {n_data} data holds out {n_out}; give more data, or a share that leaves some on both "
            "sides."
        )
    ranks = ranks_of_data(torch.cat(targets) if all(y.ndim == 1 for y in targets) else None, n_data, generator)
    is_out = (ranks + 1) * n_out // n_data > ranks * n_out // n_data  # n_out ranks, evenly spread
    out: list[tuple[Inputs, Tensor]] = []
    rest: list[tuple[Inputs, Tensor]] = []
    for (x, y), marks in zip(data, is_out.split([len(y) for y in targets]), strict=True):
        for part, chosen in ((out, marks), (rest, ~marks)):
            index = chosen.nonzero().flatten().to(y.device)
            if len(index):
                part.append((batches.select(x, index, len(y)), y[index]))
    start = replace(posterior, choices=_for_part(posterior.choices, n_data - n_out))
    fitted = fit(start, rest, FitOptions(progress_bar=progress_bar))
    n_rest, seen = fitted.map_fit.n_data, posterior.map_fit.n_data
    if same_count(n_rest, n_data - n_out) and not same_count(n_data, seen):  # labels without weights or positions
        raise InvalidData(f"train_loader gave {n_data} data, the fit has seen {seen:g}; give the data of the fit.")
    return HeldOut(fitted, out)


# ----------------------------------------------------------------------------------------------------------------------
# The data as a head sees them
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadFeatures:
    """Features of a head with what it makes of them; of outputs with positions, R are rows, data × positions."""

    features: Tensor  # φ, `[R, D]`, with a 1 for the bias
    f: Tensor  # the network's outputs, `[R, C]`
    y: Tensor  # checked targets of the rows; those with ignored labels are left out
    inputs: Tensor  # number of the input that a row is of, `[R]`

    @classmethod
    def of_batch(cls, engine: CurvatureEngine, x: Inputs, y: Tensor, start: int) -> HeadFeatures:
        """The rows of a batch whose first input has the number `start`."""
        parts = engine.head_jacobian(x)
        if parts is None:
            raise UnsupportedError(
                "the random weights are not those of one linear layer whose outputs are the network's, so that nothing "
                f"can be refitted on features; {_INSTEAD}."
            )
        jacobian, f = parts[0]
        y = engine.checked(f, target_rows(y, f, jacobian.positions, engine.problem.channel_dim))
        inputs = start + torch.arange(len(f), device=f.device) // math.prod(jacobian.positions)
        rows = rows_that_count(y, jacobian.positions, engine.likelihood.ignore_index)
        columns = jacobian.head_features().to(f), f, y, inputs
        return cls(*(columns if rows is None else (column[rows] for column in columns)))

    @classmethod
    def concatenated(cls, parts: list[HeadFeatures]) -> HeadFeatures:
        columns = [[part.features, part.f, part.y, part.inputs] for part in parts]
        return cls(*(torch.cat(column) for column in zip(*columns, strict=True)))


@dataclass(frozen=True, eq=False)
class HeadData:
    """A posterior over a head with the data of its fit, and the head refitted to parts of them."""

    posterior: Posterior
    rows: HeadFeatures

    @classmethod
    def read(cls, posterior: Posterior, train_loader: Iterable[Any], *, progress_bar: bool = False) -> HeadData:
        """The data of a loader, by one pass of the network."""
        _require_of_fit(posterior)
        if posterior.overrides(*POSTERIOR, *PREDICTIONS) or not is_ours(posterior.choices.backend_cls):
            raise UnsupportedError(f"refits of a head under methods, or a backend, of your own; {_INSTEAD}.")
        shapes = [len(slot.shape) for slot in posterior.problem.slots]
        if shapes[0] < 2 or shapes[1:] not in ([], [1]):
            names = list(posterior.problem.layout.names)
            raise UnsupportedError(
                f"refits of a head take the weight of a linear layer, alone or before its bias, not {names}; "
                f"{_INSTEAD}."
            )
        batches.require_loader(train_loader, "train_loader")
        choices, problem = posterior.choices, posterior.problem
        engine = _native_backend(choices).engine(posterior.weights, problem, split_outputs=False)
        parts: list[HeadFeatures] = []
        n_data = 0
        with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
            for name, x, y in next_token.read(
                train_loader, choices.dict_key_y, problem.device, engine.target_rules, problem.module,
                label="features of the head", progress_bar=progress_bar,
            ):  # fmt: skip
                with named(name):
                    parts.append(HeadFeatures.of_batch(engine, x, y, n_data))
                n_data += len(y)
        if not parts:
            raise InvalidData("train_loader gave no data, or all are ignored; give the data of the fit.")
        rows, seen = HeadFeatures.concatenated(parts), posterior.map_fit.n_data
        count = float(posterior.likelihood.count(rows.f, rows.y))
        if not same_count(count, seen):
            raise InvalidData(f"train_loader gave {count:g} data, the fit has seen {seen:g}; give the data of the fit.")
        return cls(posterior, rows)

    def refits(self, folds: int, generator: torch.Generator | None) -> Iterator[HeldOut]:
        """Posteriors over refits without one of K parts, with that part."""
        fold = self._folds(folds, generator)
        return (self._without(fold == k) for k in range(folds))

    def _folds(self, folds: int, generator: torch.Generator | None) -> Tensor:
        """Number of the part that a row is in, `[R]`; −1 of a class that has no other input."""
        inputs, rows = self.rows.inputs.unique(return_inverse=True)
        if folds > len(inputs):
            raise InvalidArgument(
                f"folds={folds} parts of {len(inputs)} data; give at most as many parts as data, or {_INSTEAD[5:]}."
            )
        y = self.rows.y
        labels = y if y.ndim == 1 and len(y) == len(inputs) else None
        fold = ranks_of_data(labels, len(inputs), generator).to(inputs.device) % folds
        if labels is not None:
            _, which, counts = labels.unique(return_inverse=True, return_counts=True)
            fold = fold.where(counts[which] > 1, -1)
        return fold[rows]

    def _without(self, is_out: Tensor) -> HeldOut:
        """The posterior of the other rows, at the head refitted to them, with those that are held out, `[R]`."""
        rest, out = (part.nonzero().flatten() for part in (~is_out, is_out))
        layer = self._layer(self.head.refit(rest).to(self.rows.f))
        choices = _for_part(_native_backend(self.posterior.choices), len(rest))
        choices = replace(choices, forward_fn=None, channel_dim=-1, loss=None)
        start = Posterior(choices, LastLayer(layer, name=""), self.posterior.hypers.detached())
        return HeldOut(fit(start, self._batches(rest), FitOptions()), self._batches(out))

    def _layer(self, weight: Tensor) -> nn.Linear:
        """The head as a network of its own; a bias that is not random stays what it was."""
        width = weight.shape[1] - self._has_bias
        bias = weight[:, width] if self._has_bias else self.head.offset.to(weight)
        layer = nn.Linear(width, len(weight), device="meta")  # where no random numbers are drawn
        layer.weight = nn.Parameter(weight[:, :width].contiguous())
        layer.bias = nn.Parameter(bias.clone(), requires_grad=self._has_bias)
        return layer

    def _batches(self, rows: Tensor) -> list[tuple[Inputs, Tensor]]:
        """Features and targets of some rows."""
        data = self.rows
        width = data.features.shape[1] - self._has_bias
        return [(data.features[part, :width], data.y[part]) for part in rows.split(_ROWS_OF_BATCH)]

    @cached_property
    def head(self) -> LinearHead:
        """The head on these data, as the user trained it."""
        return LinearHead.of_network(self.posterior, self.rows.features, self.rows.f, self.rows.y)

    @property
    def _has_bias(self) -> bool:
        return _has_random_bias(self.posterior)


_ROWS_OF_BATCH = 2048
"""Rows in a batch of a refit."""

_NATIVE: dict[str, type[CurvatureInterface]] = {"ggn": NativeGGN, "ef": NativeEF, "hessian": NativeHessian}
"""The library's own backend of a kind of curvature: of a head all of a kind compute the same."""


def _native_backend(choices: Choices) -> Choices:
    """The same choices with the library's own backend, which knows heads."""
    backend = _NATIVE[choices.backend_cls.kind]
    given = {**choices.backend_kwargs, **choices.asdl_fisher_kwargs}
    options = {name: value for name, value in given.items() if name in backend.engine_options}
    return replace(choices, backend_cls=backend, backend_kwargs=options, asdl_fisher_kwargs={})


_INSTEAD = "give val_loader=, validation data"


def _has_random_bias(posterior: Posterior) -> bool:
    """True if a bias is random, which is then the second tensor, after the weight."""
    return len(posterior.problem.slots) > 1


def _require_of_fit(posterior: Posterior) -> None:
    """Refuses posteriors that another fit would not lead to."""
    data = posterior.require_fitted()
    posterior.check_unchanged()
    require_unsharded(posterior.model, "held-out data take fits of one process")
    refused = {
        "refine(...)": data.refinement is not None,
        "assigned parts (H, mean, posterior_scale)": (
            posterior.root is not None or data.assigned_mean is not None or data.source is not data.fit
        ),
        "weights of data (weight_fn=, dict_key_weight=)": data.fit.is_weighed,
    }
    cause = next((what for what, is_so in refused.items() if is_so), None)
    if cause is not None:
        raise UnsupportedError(f"held-out training data after {cause}, which fits of parts would lack; {_INSTEAD}.")


def _for_part(choices: Choices, n_data: int) -> Choices:
    """The same choices for a fit of a part of the data, which draws from a copy of the user's generator."""
    from laplace.gp.nystrom import NystromOptions
    from laplace.gp.subset import SubsetOptions

    options, generator = choices.structure_options, choices.backend_kwargs.get("generator")
    if isinstance(options, SubsetOptions | NystromOptions):
        options = options.at_most(n_data)
    given = choices.backend_kwargs
    if isinstance(generator, torch.Generator):
        draws = torch.Generator(generator.device)
        draws.set_state(generator.get_state())
        given = {**given, "generator": draws}
    return replace(choices, structure_options=options, backend_kwargs=given)


def _in_memory(posterior: Posterior, train_loader: Iterable[Any]) -> list[tuple[Inputs, Tensor]]:
    """Inputs and targets of all batches, without ignored data."""
    batches.require_loader(train_loader, "train_loader")
    likelihood, data = posterior.likelihood, []
    with same_random_state(posterior.model):
        for number, batch in enumerate(reading(train_loader)):
            with named(f"batch {number}"):
                x, y = next_token.split(batch, posterior.choices.dict_key_y, posterior.model, likelihood)
                counted = batches.without_ignored(x, y, likelihood.ignore_index)
            if counted is not None:
                data.append(counted)
    if not data:
        raise InvalidData("train_loader gave no data, or all are ignored; give the data of the fit.")
    return data


def ranks_of_data(labels: Tensor | None, n_data: int, generator: torch.Generator | None) -> Tensor:
    """Ranks `[N]` of the data in a random order in which those of a class are side by side; classes are `[N]`."""
    generator = torch.Generator().manual_seed(torch.initial_seed()) if generator is None else generator
    order = torch.randperm(n_data, generator=generator, device=generator.device).cpu()
    if labels is not None:
        order = order[labels.cpu()[order].argsort(stable=True)]
    return torch.empty_like(order).scatter_(0, order, torch.arange(n_data))


# ----------------------------------------------------------------------------------------------------------------------
# Forecast of whether a posterior predicts worse than the network, from features of the head that the fit kept
# ----------------------------------------------------------------------------------------------------------------------
#
# A part of the data is held out, the head is trained anew without it, and on it the posterior, with the covariance it
# has, is compared with the network. That takes no pass of the network and no fit. Where features have seen the labels,
# as in a network that was trained as a whole, they make both look better than they are on new data: small differences
# say nothing then, and no warning is no proof. What it may take is fixed by these numbers, and no clock is read.

_ROWS = 128  # that are looked at, at most; every third of them is held out
_LEAST = 30  # rows below which nothing is said
_STEPS = 2  # Newton steps of the refit
_RESIDUAL = 0.2  # of each step, relative to the gradient

# What is worth a warning: a difference between the losses that exceeds both.
_STANDARD_ERRORS = 2.0
_NATS = 0.08  # a probability of what was observed that is 8 % smaller


def warn_if_worse(tuned: tuple[Posterior, ...]) -> None:
    """Warns of a tuned posterior over a head that is forecast to predict worse than the network; not of a mixture."""
    losses = held_out_losses(tuned[0]) if len(tuned) == 1 else None
    if losses is None:
        return
    warn_of_losses(
        *losses,
        "tuning: the posterior that the evidence chose is forecast to predict worse than the network alone: on "
        f"{len(losses[0])} of the training data, without which the head was trained anew,",
    )


def warn_of_losses(ours: Tensor, network: Tensor, where: str) -> None:
    """Warns if a posterior's losses on data, `[n]`, are clearly larger than the network's; `where` begins the text."""
    difference = ours - network
    mean, deviation = torch.stack([difference.mean(), difference.std()]).tolist()
    error = deviation / math.sqrt(max(1, len(difference)))
    if len(difference) >= _LEAST and mean > max(_STANDARD_ERRORS * error, _NATS):
        warn(
            f"{where} its negative log likelihood is {float(ours.mean()):.2f}, that of the network "
            f"{float(network.mean()):.2f} (difference {mean:.2f}, standard error {error:.2g}). Call "
            "la.calibrate(val_loader), or without validation data la.calibrate(train_loader=train_loader), before you "
            "use its probabilities or intervals.",
            CalibrationWarning,
        )


def held_out_losses(posterior: Posterior, link: str = LinkApprox.PROBIT) -> tuple[Tensor, Tensor] | None:
    """Negative log likelihoods of some held-out data, `[n]`, under the posterior, by a link, and by the network alone.

    None where the fit did not keep all of its data, or where it alone does not lead to the posterior. The global random
    state is not used.
    """
    seen = _kept_by_fit(posterior, link)
    if not seen:
        return None
    with autograd_mode(), torch.no_grad(), suppress(CurvatureError):  # of a posterior that does not exist
        return _losses(posterior, seen, link)
    return None


def _kept_by_fit(posterior: Posterior, link: str) -> list[HeadBatch]:
    """The data of the fit as it kept them; none where they are not all, or do not say how the posterior predicts."""
    data, engine, likelihood = posterior.data, posterior.cache.engine, posterior.likelihood
    if data is None or engine is None or posterior.overrides(*POSTERIOR, *PREDICTIONS):
        return []
    replaced = data.refinement is not None or data.assigned_mean is not None or data.source is not data.fit
    if replaced or posterior.root is not None or data.fit.is_weighed:
        return []
    if not likelihood.has_noise and link not in likelihood.links:
        return []
    seen = list(engine.seen.batches())
    n_data = sum(len(batch.f) for batch in seen)
    return seen if n_data >= _LEAST and n_data == data.fit.n_data else []


def _losses(posterior: Posterior, seen: list[HeadBatch], link: str) -> tuple[Tensor, Tensor] | None:
    likelihood, slots = posterior.likelihood, posterior.problem.slots
    f, y = (torch.cat(column) for column in zip(*((batch.f, batch.y) for batch in seen), strict=True))
    (n_data, n_outputs), width, has_bias = f.shape, seen[0].features.shape[1], len(slots) > 1
    if [slot.size for slot in slots] != [n_outputs * width, n_outputs][: len(slots)]:
        return None  # a part of a head
    ranks = ranks_of_data(y if y.ndim == 1 else None, n_data, torch.Generator().manual_seed(0)).to(f.device)
    n_rows = min(n_data, _ROWS)
    rows = ranks.argsort()[torch.arange(n_rows, device=f.device) * n_data // n_rows]  # classes in their shares
    f, y = f[rows], y[rows]
    features = torch.cat([batch.features for batch in seen])[rows].to(f)
    ones = features.new_ones(n_rows, 1)
    every = torch.arange(n_rows)  # on the host, who knows which
    out, rest = every[::3].to(f.device), every[every % 3 > 0].to(f.device)

    head = LinearHead.of_network(posterior, torch.cat([features, ones], 1) if has_bias else features, f, y)
    moved = head.refit(rest, max_steps=_STEPS, residual=_RESIDUAL)
    f, y = (head.features[out] @ moved.T + head.offset).to(f), y[out]

    blocks = [HeadBlock(features[out], n_outputs), HeadBlock(ones[out], n_outputs, is_bias=True)][: len(slots)]
    summaries = Predictive(link_approx=link).summaries(likelihood, for_scores=True)
    variance = summaries.contraction(posterior.precision())(Jacobian(tuple(blocks))).to(f)
    ours, network = summaries.of_gaussian(f, variance), likelihood.inverse_link(f)
    losses = [
        widened(likelihood.predictive_nll(mean_of(one), variance_of(one), y, posterior.hypers.sigma_noise))
        for one in (ours, network)
    ]
    return losses[0], losses[1]
