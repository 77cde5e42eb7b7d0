"""The width that follows the input, chosen on held-out data: the widest that is not shown to be worse.

Beside the choice of a scale (`calibrate`), which is right for ordinary inputs and much too narrow for strange ones: see
`posterior/tilt.py`. What is chosen is c alone, among `WIDTHS`; the layers' leverages take no labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import as_count, named
from laplace.core.gaussian import GaussianOutputs
from laplace.core.gram import group_gram
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.kron_parts import Factor
from laplace.engines.layer_inputs import first_dense, in_rows, layer_inputs, read_layers
from laplace.errors import InvalidData
from laplace.network import next_token
from laplace.posterior.posterior import Posterior
from laplace.posterior.tilt import Leverage, Tilt, applies_to
from laplace.predictive.prediction import mixed
from laplace.tuning.candidates import Summaries
from laplace.tuning.losses import find_score

WIDTHS = (100.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
"""Values of c that are tried, the widest first; 0 is the network, and beyond r_far the posterior."""

FAR = 2.0
"""r_far in units of (1 + 4/√n) times the largest r of n held-out data."""


def leverages_of(
    posterior: Posterior, train_loader: Iterable[Any] | None, *, anew: bool = False
) -> tuple[tuple[Leverage, ...], str]:
    """Leverages in the layers with random weights, by the second moments of the training inputs; or why there are none.

    Moments are those of the fit, which has them as Kronecker factors, or keeps features of a last layer; else sums
    of one forward pass over the training data. Where these are given, the layer that a network of classes begins with
    counts beside a last layer, if it is dense: what is strange about an input is seen there, and may be lost on the
    way. The noise of a regression is none the better for it.
    With `anew` they are sums in any case, in units of the inputs.
    """
    if not applies_to(posterior.likelihood):
        return (), f"the outputs of likelihood={posterior.likelihood.name!r} have no size that is a confidence"
    layers = read_layers(posterior.problem)
    if not layers or posterior.problem.processes is not None:
        return (), "no dense or convolutional layer has random weights whose inputs could be read"
    moments = {} if anew else _of_fit(posterior, layers)
    if train_loader is not None:
        has_first = posterior.problem.head is not None and not posterior.likelihood.has_noise
        first = first_dense(posterior.problem) if has_first else []
        missing = first if moments else [*first, *layers]
        moments = (_summed(posterior, missing, train_loader) if missing else {}) | moments
    if not moments:
        return (), "the fit has no second moments of the layers' inputs; give train_loader=, the data of the fit"
    dtype = posterior.hypers.dtype
    found = [Leverage.from_moments(name, factor) for name, factor in moments.items()]
    return tuple(each.moved(None, dtype) for each in found if each is not None), ""


def _of_fit(posterior: Posterior, layers: Mapping[str, int]) -> dict[str, Factor]:
    """Moments that the fit has: of all layers, or none."""
    curvature, reduced = posterior.map_fit.curvature, posterior.choices.backend_kwargs.get("kfac_approx") == "reduce"
    sides = {name: None if reduced else curvature.input_moments(place) for name, place in layers.items()}
    known: dict[str, Factor] = {name: side for name, side in sides.items() if side is not None}
    if len(known) == len(layers):
        return known
    engine = posterior.cache.engine
    seen = [] if engine is None or posterior.problem.head is None else list(engine.seen.batches())
    n_seen = sum(len(batch.features) for batch in seen)
    if len(layers) != 1 or n_seen != as_count(posterior.map_fit.n_data):
        return {}
    width = seen[0].features.shape[1]
    rows = torch.cat([batch.features for batch in seen]).view(-1, 1, width)
    return {next(iter(layers)): group_gram(widened(rows))}


def _summed(posterior: Posterior, names: list[str], train_loader: Iterable[Any]) -> dict[str, Factor]:
    """Moments by one forward pass over the training data."""
    sums: dict[str, Tensor] = {}
    for inputs, _ in _inputs_of_fit(posterior, names, train_loader):
        for name, each in inputs.items():
            sums[name] = sums.get(name, 0) + group_gram(widened(each.flatten(0, 1)))
    for name, total in sums.items():
        if not bool(total.isfinite().all()):
            raise InvalidData(
                f"train_loader: the inputs of layer {name!r} are NaN or infinite; give the data of the fit."
            )
    return dict(sums)


def _inputs_of_fit(
    posterior: Posterior, names: Sequence[str], train_loader: Iterable[Any]
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Inputs of layers at every batch of the training data, and the number of rows of the outputs."""
    batches.require_loader(train_loader, "train_loader")
    is_empty, key, device = True, posterior.choices.dict_key_y, posterior.problem.device
    for name, x, _ in next_token.read(
        train_loader, key, device, posterior.likelihood, posterior.model,
        name="train_loader: batch {}", label="inputs of layers",
    ):  # fmt: skip
        with named(name):
            rows, inputs = layer_inputs(posterior.problem, x, names)
        is_empty = False
        yield inputs, len(rows.values)
    if is_empty:
        raise InvalidData("train_loader gave no data, or all are ignored; give the data of the fit.")


_FEW = 2
"""Data for every input of a layer below which leverages without the datum itself are not those of new data."""


def left_out(posterior: Posterior, leverages: tuple[Leverage, ...], data: list[Any]) -> Tensor:
    """Leverages of the inputs of a fit, each against all others, `[N, L]`, float64.

    With ℓ = aᵀ (A + ρI)⁻¹ a the one without a's own row is aᵀ (A + ρI − a aᵀ)⁻¹ a = ℓ / (1 − ℓ) (Sherman and Morrison,
    1950). NaN of layers with several positions of a datum, each with a row. And of layers with fewer than twice as many
    data as inputs: data that were centred, or standardised, by the mean of all of them are nearly spanned by the
    others, as no new datum is.
    """
    parts: list[Tensor] = []
    for inputs, n_rows in _inputs_of_fit(posterior, [each.layer for each in leverages], data):
        single = {name: each for name, each in inputs.items() if each.shape[:2] == (n_rows, 1)}
        parts.append(in_layers(leverages, single, n_rows))
    values = widened(torch.cat(parts))
    few = torch.tensor([_FEW * each.root.shape[-1] > len(values) for each in leverages], device=values.device)
    return (values / (1 - values).clamp(min=torch.finfo(values.dtype).eps)).masked_fill(few, torch.nan)


@dataclass
class HeldOutRows:
    """What held-out data say of the widths of one network: outputs, targets and leverages of all rows that count."""

    summaries: Summaries
    layers: tuple[Leverage, ...]  # by which the leverages are
    outputs: list[Tensor] = field(default_factory=list)  # f, `[R, C]`
    targets: list[Tensor] = field(default_factory=list)
    leverages: list[Tensor] = field(default_factory=list)  # of every layer, of all rows of a batch, `[R, L]`
    index: list[Tensor] = field(default_factory=list)  # which of them count
    inputs: list[Tensor] = field(default_factory=list)  # number of the input of every row, `[R]`
    n_inputs: int = 0

    def add(self, f: Tensor, leverages: Tensor, index: Tensor, y: Tensor, inputs: Tensor, n_data: int) -> None:
        """Takes in a batch of n data: of its rows those with an index count, with targets y, of these inputs."""
        self.outputs.append(f[index])
        self.targets.append(y)
        self.leverages.append(leverages)
        self.index.append(index)
        self.inputs.append(self.n_inputs + inputs)
        self.n_inputs += n_data

    def keep(self, known: Tensor) -> None:
        """Drops layers, by marks `[L]` of those that stay."""
        if not bool(known.all()):
            self.layers = tuple(one for one, stays in zip(self.layers, known.tolist(), strict=True) if stays)
            self.leverages = [part[:, known] for part in self.leverages]

    @property
    def n_bytes(self) -> int:
        """Bytes of the outputs."""
        return sum(f.nbytes for f in self.outputs)


_SAME = 0.05
"""Relative difference of leverages that is rounding, of a network in half precision."""

MOST_BYTES = 2**28
"""Bytes of held-out outputs up to which a width is chosen: they are kept until it is."""


def in_layers(leverages: tuple[Leverage, ...], inputs: dict[str, Tensor], n_rows: int) -> Tensor:
    """Leverages of every row, `[R, L]`; NaN of a layer that the network did not call."""
    inputs = in_rows(inputs, n_rows)
    n_data = next(len(each) for each in inputs.values()) if inputs else n_rows
    columns = [
        each.mean_over_positions(inputs[each.layer])
        if each.layer in inputs
        else each.root.new_full((n_data,), torch.nan)
        for each in leverages
    ]
    return torch.stack(columns, 1).repeat_interleave(n_rows // n_data, 0)


def are_in_order(posterior: Posterior, leverages: tuple[Leverage, ...], read: Tensor, first: Inputs) -> Tensor:
    """Whether the leverages of a batch, `[R, L]`, begin with those of its first datum alone, `[L]`.

    Not so where a network has its positions before its data, which shapes do not tell: r would be of other data.
    """
    rows, inputs = layer_inputs(posterior.problem, first, tuple(each.layer for each in leverages))
    alone = in_layers(leverages, inputs, len(rows.values))
    return torch.isclose(read[: len(alone)], alone, rtol=_SAME, atol=0.0, equal_nan=True).all(0)


class _Units(NamedTuple):
    """Leverages in units in which r is their mean, and r of the held-out data."""

    leverages: tuple[Leverage, ...]
    far: float
    r: Tensor  # of all rows that count
    of_batches: list[Tensor]  # of the rows of every batch, `[R]`


def _in_units(rows: HeldOutRows) -> _Units | str:
    """Of one network; where r does not exist it says why."""
    values = widened(torch.cat([part[index] for part, index in zip(rows.leverages, rows.index, strict=True)]))
    medians = values.nanmedian(0).values
    usable = medians.isfinite() & (medians > 0)
    if not bool(usable.any()):
        return "the layers' inputs are constant, or not finite, on the held-out data"
    values, medians = values[:, usable], medians[usable]
    r = (values / medians).nanmean(1)
    if not bool(r.isfinite().all()):
        return "inputs of layers are NaN or infinite on the held-out data"
    middle = r.median()
    r = r / middle
    kept = [each for each, use in zip(rows.layers, usable.tolist(), strict=True) if use]
    unit = [float(1 / (median * middle)) for median in medians]
    units = tuple(each.scaled(factor) for each, factor in zip(kept, unit, strict=True))
    r = r.to(rows.outputs[0])
    far = FAR * (1 + 4 / math.sqrt(rows.n_inputs)) * float(r.max())
    return _Units(units, far, r, [(part[:, usable] * values.new_tensor(unit)).nanmean(1) for part in rows.leverages])


def choose(
    members: Sequence[HeldOutRows], weights: Tensor, sigma: Tensor, n_errors: float
) -> tuple[tuple[Tilt, ...], list[list[Tensor]]] | str:
    """The widest c whose mean difference from the network, and so many standard errors, is at most 0.

    Of a mixture with weights `[K]` it is one c, of its predictions; every network has its own r. The layers are those
    of the posteriors that are to predict, or of ones like them.

    Returns:
        The width of every network, and of its batches r of all rows, `[R]`; where r does not exist why.
    """
    measured: list[_Units] = []
    for rows in members:
        found = _in_units(rows)
        if isinstance(found, str):
            return found
        measured.append(found)
    inputs, n_data = torch.cat(members[0].inputs), members[0].n_inputs
    counts = torch.bincount(inputs, minlength=n_data)
    per_input = (counts > 0).sum().item()

    tilts = [tuple(Tilt(width, one.far, one.leverages, 0.0, 0.0) for one in measured) for width in (*WIDTHS, 0.0)]
    scores = _nll(members, [one.r for one in measured], ((), *tilts), weights, sigma)
    network = next(scores)
    for each, values in zip(tilts, scores, strict=True):
        gaps = torch.zeros(n_data, dtype=wide_dtype(), device=values.device).index_add_(0, inputs, values - network)
        mean = float(gaps.sum() / counts.sum())
        rest = gaps - mean * counts
        error = float(rest.square().sum().mul(per_input / max(1, per_input - 1)).sqrt() / counts.sum())
        if mean + n_errors * error <= 0 or not each[0].width:
            nll = float(values.mean())
            chosen = tuple(replace(tilt, nll=nll, standard_error=error) for tilt in each)
            return chosen, [one.of_batches for one in measured]
    raise AssertionError


_AT_ONCE = 2**20
"""Logits that are scored by one operation."""


def _nll(
    members: Sequence[HeldOutRows],
    distances: Sequence[Tensor],
    tilts: Sequence[tuple[Tilt, ...]],
    weights: Tensor,
    sigma: Tensor,
) -> Iterator[Tensor]:
    """−log p(y | x) of every row by the networks, at every width, or where there is none without it; float64."""
    likelihood, y = members[0].summaries.likelihood, torch.cat(members[0].targets)
    score = find_score("nll", likelihood)
    networks = [
        GaussianOutputs(f, _no_variance(rows.summaries, f)) for rows in members for f in [torch.cat(rows.outputs)]
    ]

    def latents(k: int, tilt: tuple[Tilt, ...]) -> GaussianOutputs:
        return tilt[k].gaussian(likelihood, sigma, distances[k], networks[k]) if tilt else networks[k]

    def losses(rows: Sequence[GaussianOutputs], y: Tensor, sigma: Tensor) -> Tensor:
        each = [one.summaries.of_gaussian(f.mean, f.covariance) for one, f in zip(members, rows, strict=True)]
        return widened(score(likelihood, mixed(each, weights), y, sigma))

    every = range(len(members))
    if not likelihood.has_noise and networks[0].covariance.numel() * len(tilts) <= _AT_ONCE:  # then all share σ
        joined = [_concatenated([latents(k, tilt) for tilt in tilts]) for k in every]
        yield from losses(joined, y.repeat(len(tilts), *(1,) * (y.ndim - 1)), sigma).view(len(tilts), -1)
        return
    for tilt in tilts:
        noise = tilt[0].noise(likelihood, sigma) if tilt else sigma
        yield losses([latents(k, tilt) for k in every], y, noise)


def _no_variance(summaries: Summaries, f: Tensor) -> Tensor:
    return torch.zeros_like(f) if summaries.diagonal else f.new_zeros(*f.shape, f.shape[1])


def _concatenated(each: Sequence[GaussianOutputs]) -> GaussianOutputs:
    return GaussianOutputs(torch.cat([one.mean for one in each]), torch.cat([one.covariance for one in each]))
