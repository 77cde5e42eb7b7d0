"""Accumulates batches into one frozen `Fit`: all of the data's part of a posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace.core.memory import ran_out
from laplace.core.precision_policy import wide_dtype
from laplace.core.progress import known_length
from laplace.engines.engine import BatchSummary, CurvatureEngine, as_count, same_count
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, UnsupportedError
from laplace.fitting import planning
from laplace.fitting import processes as shards
from laplace.fitting.planning import MemoryCheck
from laplace.fitting.reading import Reading, ReadOptions
from laplace.fitting.resuming import Resumable
from laplace.likelihoods.base import Likelihood
from laplace.structures.base import Curvature, DataPass, narrowed

# A user's own loss, as a fit meets it: one that has no curvature, or that couples data, would leave the prior.


_LIBRARY = __name__.split(".")[0]

_ALONE = 8
"""Data whose losses are also computed one by one."""

_SCALES = (0.1, 1.0, 10.0)
"""Distances, in units of the outputs, at which a loss is tried that had no curvature at the data."""

_TOGETHER = (
    "Data that are to depend on each other, as those of a risk set, are one datum with as many outputs: inputs "
    "[1, N, ...], outputs [1, N]."
)


class OwnLoss:
    """A loss as the batches of a fit show it.

    Args:
        likelihood: The loss.
        curvature: What the curvature is made of: second derivatives (`"ggn"`), gradients (`"ef"`) or either.
    """

    def __init__(self, likelihood: Likelihood, curvature: str) -> None:
        self.likelihood = likelihood
        self.curvature = curvature
        self._last: tuple[Tensor, Tensor] | None = None
        self._curved = False

    @classmethod
    def of(cls, engine: CurvatureEngine) -> OwnLoss | None:
        """That of an engine; None of the library's own."""
        likelihood = engine.likelihood
        if type(likelihood).__module__.split(".")[0] == _LIBRARY:
            return None
        return cls(likelihood, "ef" if engine.options.stochastic else engine.kind)

    def see(self, f: Tensor, y: Tensor) -> None:
        """Looks at outputs `[B, C]` with their checked targets, until there was some curvature.

        Raises:
            UnsupportedError: The loss couples data.
        """
        if self._last is None:
            self._require_sum(f[:_ALONE], y[:_ALONE])
        if not self._curved:
            self._last, self._curved = (f, y), self._is_curved(f, y)

    def require_curved(self) -> None:
        """Refuses a loss without curvature, at the data and wherever else it was tried.

        Raises:
            CurvatureError: It has none.
        """
        if self._curved or self._last is None:
            return
        f, y = self._last
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(f.shape, generator=generator, dtype=wide_dtype()).to(f)
        centres = [f, y.to(f)] if y.is_floating_point() and y.shape == f.shape else [f]
        for centre in centres:
            for scale in _SCALES:
                if self._is_curved(centre + scale * (1 + centre.abs()) * noise, y):
                    return
        derivative = "gradient" if self.curvature == "ef" else "second derivative"
        raise CurvatureError(
            f"the loss of likelihood={self.likelihood.name!r} has a {derivative} of exactly zero, at all data of the "
            "fit and at other outputs: the posterior would be the prior. A quantile or absolute loss has no curvature: "
            "take a smooth one, ((f - y)**2 + 0.01).sqrt() for |f - y|, or backend=NativeEF, a sum of outer products "
            f"of gradients. A loss that couples data, as Cox's, says nothing of one datum alone. {_TOGETHER}"
        )

    def _is_curved(self, f: Tensor, y: Tensor) -> bool:
        if self.curvature != "ef":
            hessian = self.likelihood.hessian(f, y)
            if bool((hessian.diag if hessian.dense is None else hessian.dense).ne(0).any()):
                return True
        return self.curvature != "ggn" and bool(self.likelihood.gradient(f, y).ne(0).any())

    def _require_sum(self, f: Tensor, y: Tensor) -> None:
        """Refuses a loss that is no sum over data, as far as few data tell."""
        try:
            alone = torch.stack([self.likelihood.loss_terms(f[b : b + 1], y[b : b + 1]) for b in range(len(f))])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # a loss that wants several data
            if ran_out(error):
                raise
            return
        together = self.likelihood.loss_terms(f, y)
        allowed = torch.finfo(f.dtype).eps ** 0.5 * (1 + alone.abs().sum(0))
        if bool(((together - alone.sum(0)).abs() > allowed).any()):
            raise UnsupportedError(
                f"the loss of likelihood={self.likelihood.name!r} is no sum over data: {len(f)} data have a loss of "
                f"{together.sum().item():.6g} together, and of {alone.sum().item():.6g} one by one. loss_terms is a "
                f"sum, not a mean, over the batch. {_TOGETHER}"
            )


_NOTHING = 1e-9
"""Share of the data below which a count, a sum of weights that faded, is zero."""

NO_DATA = "the loader gave no data, or all are ignored; a Laplace approximation needs at least one datum."


@dataclass(frozen=True, eq=False)
class Fit:
    """Curvature and loss of the data: additive over batches, shards and later data.

    Attributes:
        curvature: Unit curvature.
        loss_terms: Summed unit negative log likelihood, `[1]`, or `[C]` with one noise per output.
        n_data: Number of data without ignored ones, or the sum of their weights; a `decay` multiplies it.
        n_outputs: C.
        coverage: Which layer rule or fallback explained every random parameter.
        draws: State of the engine's random numbers after the fit, which a fit of further data goes on from.
        is_weighed: Whether some of the data had weights of their own, which no other reading of the data knows.
    """

    curvature: Curvature
    loss_terms: Tensor
    n_data: float
    n_outputs: int
    coverage: dict[str, str] = field(default_factory=dict)
    draws: Tensor | None = None
    is_weighed: bool = False

    @property
    def H(self) -> Any:
        """The unit curvature as users see it, in the dtype of the posterior."""
        H, dtype = self.curvature.public(), self.loss_terms.dtype
        if not self.curvature.is_wide:
            return H
        return H.to(dtype) if isinstance(H, Tensor) else tuple(block.to(dtype) for block in H)

    @property
    def complete(self) -> Fit:
        """The fit itself, of which nothing is still to be made."""
        return self

    def __add__(self, other: Fit) -> Fit:
        self._check_matches(other)
        return replace(
            self,
            curvature=self.curvature + other.curvature,
            loss_terms=torch.add(*_alike(self.loss_terms, other.loss_terms)),
            n_data=as_count(self.n_data + other.n_data),
            draws=other.draws,
            is_weighed=self.is_weighed or other.is_weighed,
        )

    def scaled(self, factor: float) -> Fit:
        """The fit of data with the weight `factor` each.

        Raises:
            UnsupportedError: The structure is no sum over data.
        """
        if factor == 1:
            return self
        return replace(
            self,
            curvature=self.curvature.scaled(factor),
            loss_terms=factor * self.loss_terms,
            n_data=as_count(factor * self.n_data),
        )

    def minus(self, removed: Fit, *, signed: bool = False) -> Fit:
        """The fit of the data without some of them.

        Args:
            removed: What these say.
            signed: Whether the curvature may be indefinite.

        Raises:
            InvalidData: More data than were seen, or of other outputs.
            CurvatureError: The curvature would be indefinite.
            UnsupportedError: The structure is no sum over data.
        """
        self._check_matches(removed)
        left = self.n_data - removed.n_data
        if left < -_NOTHING * self.n_data:
            raise InvalidData(
                f"{removed.n_data:g} data are to be removed, but the fit has seen {self.n_data:g}; remove only data "
                "that were fitted, once, and with their present weight."
            )
        dtype = self.loss_terms.dtype  # in which terms differ that were computed in other batches
        curvature = narrowed(self.curvature, dtype).minus(narrowed(removed.curvature, dtype), signed=signed)
        if left <= _NOTHING * self.n_data:  # the prior, and no rounding errors of two equal sums
            return replace(self, curvature=curvature.scaled(0), loss_terms=0 * self.loss_terms, n_data=0)
        loss_terms = torch.sub(*_alike(self.loss_terms, removed.loss_terms))
        return replace(self, curvature=curvature, loss_terms=loss_terms, n_data=as_count(left))

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Fit:
        """The same elsewhere."""
        curvature, losses = self.curvature.moved(device, dtype), self.loss_terms.to(device=device, dtype=dtype)
        return replace(self, curvature=curvature, loss_terms=losses)

    def _check_matches(self, other: Fit) -> None:
        if self.n_outputs != other.n_outputs:
            raise InvalidData(f"the data have {other.n_outputs} outputs, those of the former fit {self.n_outputs}.")
        if self.curvature.n_terms != other.curvature.n_terms:
            raise InvalidArgument(
                f"the former fit kept {self.curvature.n_terms} curvature terms, the new one {other.curvature.n_terms}: "
                "sigma_noise changed between one noise and one per output. Set it back to what it was, or fit all data "
                "with override=True."
            )


def _alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Loss terms of two fits, summed over the outputs where one of them, an assigned one, is for all of them."""
    if first.shape == second.shape:
        return first, second
    return first.sum().reshape(1), second.sum().reshape(1)


def accumulate(
    loader: Iterable[Any],
    engine: CurvatureEngine,
    structure: type[Curvature],
    options: Any,
    reading: ReadOptions,
) -> Fit:
    """Reads the data as often as the structure needs, and sums their curvature and loss.

    Args:
        loader: Batches.
        engine: Computes the numbers of a batch.
        structure: The shape of the curvature.
        options: Its options.
        reading: How they are read.

    Raises:
        OutOfMemory: Memory does not hold the fit.
        InvalidData: No data, a batch that cannot be used, or other data (or none) in a later reading; nothing has been
            changed then.
        ProcessError: Another process failed, or its data do not fit to this one's.
    """
    structure.check(engine.problem.layout, options)
    own_loss = OwnLoss.of(engine)
    engine.judge = None if own_loss is None else own_loss.see
    try:
        check = None
        if reading.check_memory:
            check = MemoryCheck(engine.problem, structure, options, known_length(loader))
            engine.on_profile = check
        first = structure.first_pass(engine, options) if reading.first_pass is None else reading.first_pass(engine)
        if reading.processes is not None:
            _require_sums(first)
        fit = _fitted(loader, engine, structure, first, reading, check)
    finally:
        engine.on_profile = engine.on_outputs = engine.judge = None
    if own_loss is not None:
        own_loss.require_curved()
    return fit


def _require_sums(data_pass: DataPass) -> None:
    """Refuses a pass that does not add up over shards, before they are read.

    Raises:
        UnsupportedError: It does not.
    """
    with suppress(InvalidData):  # there are no sums yet
        data_pass.form()


def _fitted(
    loader: Iterable[Any],
    engine: CurvatureEngine,
    structure: type[Curvature],
    data_pass: DataPass,
    options: ReadOptions,
    check: MemoryCheck | None,
) -> Fit:
    """The fit after as many passes over the data as the structure needs, of which `data_pass` is the first."""
    first, number, resume = None, 1, options.resume
    draws = None if engine.generator is None else engine.generator.get_state()
    if resume is not None:
        data_pass, first, number, draws = _gone_on(resume, data_pass, draws)
    while True:
        if engine.generator is not None and draws is not None:
            engine.generator.set_state(draws)  # every reading is of the same sampled curvature
        label = "fit" if structure.n_passes == 1 else f"fit, reading {number}"
        reading = Reading(loader, engine, data_pass, options, label, number, first, draws)
        read = reading.run
        if first is None and check is not None:
            read = partial(_checked, check, engine, loader, options.dict_key_y, read)
        if options.processes is None:
            totals, coverage = read(), None
        else:
            totals, coverage = shards.sum_over(options.processes, read, data_pass, engine, reading.coverage)
        if totals is None:
            raise InvalidData(NO_DATA if first is None else _read_up(structure, number))
        if first is not None and not same_count(totals.count, first.count):
            raise InvalidData(
                f"reading {number} of the loader gave {totals.n_data} data, the first one {first.n_data}; "
                f"hessian_structure={structure.name!r} needs the same data every time."
            )
        first, number = first or totals, number + 1
        result = data_pass.finish()
        if isinstance(result, Curvature):
            summary, used = data_pass.counted(first), None if engine.generator is None else engine.generator.get_state()
            coverage = coverage or reading.coverage()  # of which some is known only now, where data were chosen
            report = _report(coverage, engine.problem.layout.names, result)
            return Fit(result, summary.loss_terms, summary.count, summary.n_outputs, report, used)
        data_pass, options = result, replace(options, first_batch=None)
        if resume is not None:
            resume.next_reading()


def _gone_on(
    resume: Resumable, data_pass: DataPass, draws: Tensor | None
) -> tuple[DataPass, BatchSummary | None, int, Tensor | None]:
    """The pass that a fit goes on with, the sums of its first reading, the number of its reading, and its draws.

    Raises:
        UnsupportedError: The pass cannot be saved.
    """
    data_pass.state()  # refuses before data are read
    at = resume.at
    if at is None:
        return data_pass, None, 1, draws
    return data_pass.resumed(resume.taken()), at.first, at.reading, draws if at.draws is None else at.draws[0].cpu()


def _checked(
    check: MemoryCheck,
    engine: CurvatureEngine,
    loader: Iterable[Any],
    dict_key_y: str,
    read: Callable[[], BatchSummary | None],
) -> BatchSummary | None:
    """A reading before which memory is asked."""
    _check_before(check, engine, loader, dict_key_y)
    return read()


def _check_before(check: MemoryCheck, engine: CurvatureEngine, loader: Iterable[Any], dict_key_y: str) -> None:
    """Refuses a fit that is too large whatever its data; only then a batch is read, which says what is not."""
    least = engine.profile_by_shapes()
    lacking = None if least is None else check.lacking(least)
    if lacking is None:
        return
    x, _ = planning.first_counted(loader, dict_key_y, engine.problem.device, engine.likelihood, engine.problem.module)
    profile = engine.profile_by_shapes(x)
    if profile is not None:
        raise check.refusal(profile, lacking)


def _read_up(structure: type[Curvature], number: int) -> str:
    """Message for a loader that is no iterator, and yet can be read only once."""
    return (
        f"reading {number} of the loader gave no data: behind it there is a stream, which can be read only once, but "
        f"hessian_structure={structure.name!r} reads the data {structure.n_passes} times or more; give a DataLoader "
        "of a data set that can be read again, or a list of batches."
    )


def _report(rules: dict[str, str], names: Sequence[str], curvature: Curvature) -> dict[str, str]:
    """Rule that explains every tensor, and the form of its curvature."""
    forms = curvature.forms()
    if not forms:
        return rules
    return {name: f"{rules.get(name, '?')} → {form}" for name, form in zip(names, forms, strict=True)}
