"""From data to the next posterior: `fit`, and `forget`.

    fit → compute_fit → _begin                  all that can be refused before data are read, and the first batch
                      → infer_from_first_batch  the last layer, and the dimension of the classes
                      → sum_data                one pass over the data, or several: one `Fit`
        → Posterior.with_data

Fits over several processes and of a random subset take the same way, by a `Reading` of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.arguments import check_flag, check_length
from laplace.core.batch import DataWeights, Inputs
from laplace.core.cached import cached_property
from laplace.core.checks import Conditions, all_finite, named, same_count
from laplace.core.content import Content, ContentReader
from laplace.core.inference import kept_for_later
from laplace.core.memory import COTANGENT, ran_out
from laplace.core.overrides import FITTING
from laplace.core.pieces import operations_are_dear
from laplace.core.positions import channel_of
from laplace.core.processes import Processes
from laplace.core.progress import DataBar, known_length
from laplace.core.random_numbers import check_generator, drawn_seed
from laplace.engines.engine import BatchSummary, CurvatureEngine, Listening, detached
from laplace.errors import InvalidArgument, InvalidData, InvalidType, OutOfMemory, UnsupportedError
from laplace.fitting import FITS, checks
from laplace.likelihoods.checks import require_logits, warn_of_sigmoid
from laplace.likelihoods.own_losses import LossCheck
from laplace.network import next_token
from laplace.network.fsdp import require_unsharded
from laplace.network.input_errors import call_with_context, noticing_swap
from laplace.network.model_guard import autograd_mode, hooks_fire, private_copy, reading, same_random_state
from laplace.network.watch import DeterminismCheck, ReferenceOutputs
from laplace.posterior.posterior import Choices, Posterior, match_lengths
from laplace.structures.base import Curvature, DataPass, require_finite
from laplace.structures.fit import Fit
from laplace.weights.problem import Problem

FirstPass = Callable[[CurvatureEngine], DataPass]
"""Makes the first pass over the data of a fit, for the engine that computes their curvature."""


@dataclass(frozen=True, eq=False)
class FitOptions:
    """How data are fitted: the arguments of `la.fit` besides the loader, checked when they are put together."""

    override: bool = True
    progress_bar: bool = False
    decay: float = 1.0
    subset: int | None = None
    generator: torch.Generator | None = None
    check_memory: bool = True
    group: Any = None
    weight_fn: Any = None
    dict_key_weight: Any = None
    first_pass: FirstPass | None = None  # Makes the first pass over the data; None for that of the structure
    # The weight of data that are to be removed from the fit; None where data are added to it
    removed_weight: float | None = None

    def __post_init__(self) -> None:
        check_override(self.override)
        if not isinstance(self.decay, Real) or not 0 < self.decay <= 1:
            raise InvalidArgument(
                f"decay={self.decay}; it must be in (0, 1], where 1 keeps the former data as they are."
            )
        if self.override and self.decay != 1:
            raise InvalidArgument(
                f"decay={self.decay} with override=True, which forgets the former data at once; pass override=False."
            )
        if self.removed_weight is not None and not 0 < self.removed_weight <= 1:
            raise InvalidArgument(
                f"weight={self.removed_weight}; it must be in (0, 1]: 1, or decay**k after k fits with that decay."
            )
        if self.subset is not None:
            check_generator(self.generator)
            if self.generator is None:  # drawn here, since a fit puts the global source back where it was
                object.__setattr__(self, "generator", torch.Generator().manual_seed(drawn_seed()))

    @classmethod
    def of_removal(cls, weight: Any, **options: Any) -> FitOptions:
        """How data are removed that had this weight in the fit."""
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise InvalidType(f"weight must be a number in (0, 1]; {type(weight).__name__} was given.")
        return cls(override=False, removed_weight=float(weight), **options)

    @cached_property
    def processes(self) -> Processes | None:
        """Those that read the other shards of the data; None where all data are read here."""
        return Processes.from_argument(self.group)

    @cached_property
    def reading(self) -> Reading:
        """How the data are read; a group and a subset are refused together."""
        if self.processes is not None:
            return FITS["group"](self.processes)
        return Reading() if self.subset is None else FITS["subset"](self)

    @cached_property
    def weights(self) -> DataWeights | None:
        """How often every datum counts; None for once."""
        return DataWeights.from_arguments(self.weight_fn, self.dict_key_weight)

    def within(self, network: Processes | None) -> FitOptions:
        """The same with the group of a network that is sharded by FSDP2, which must be of the ranks that were given."""
        if network is None or (self.processes is not None and self.processes.group is network.group):
            return self
        return replace(self, group=network.joined(self.processes).group)

    def settings(self, posterior: Posterior) -> dict[str, Any]:
        """What else all processes of a fit must have in common, by name."""
        n_former = 0 if self.override or posterior.data is None else posterior.data.fit.n_data
        weights = {"weights of the data": self.weights and self.weights.name}
        if self.removed_weight is not None:
            return {"weight": self.removed_weight, "data of the former fit": n_former, **weights}
        how = {"override": self.override, "decay": self.decay}
        return {**how, "data of the former fit": n_former, **weights}


def check_override(override: Any) -> None:
    """Checks the second argument of `fit`, in whose place targets are often given."""
    check_flag(
        "override",
        override,
        "fit takes one loader of batches (x, y): la.fit([(X, Y)]) for tensors X and Y, or a DataLoader of "
        "TensorDataset(X, Y); validation data are given to optimize_prior_precision(val_loader=...).",
    )


# The next posterior.


def fit(posterior: Posterior, loader: Iterable[Any], options: FitOptions) -> Posterior:
    """The posterior of data, or of data in addition to those of the former fit; errors and warnings: see `la.fit`."""
    posterior = posterior.without_calibration("fit")
    if not options.override:
        posterior.refuse_moved("fit with override=False", "give override=True")
    options = options.within(posterior.weights.fsdp_processes)
    checks.warn_of_dropped(loader)
    former = None if options.override else posterior.data
    new = compute_fit(posterior, loader, options)
    former_content = None if former is None else former.content
    if former_content is not None and options.decay == 1:  # of which faded data are an average over time
        checks.warn_of_repeated(former_content, new.content)
    with kept_for_later(), torch.no_grad():
        total = new.fit if former is None else former.fit.scaled(options.decay) + new.fit
        after = new.after(total, former_content)
    checks.warn_of_diagonals(new.fit, after.problem)
    _look_for_sigmoid(after, new.reference)
    return after


def forget(posterior: Posterior, loader: Iterable[Any], options: FitOptions) -> Posterior:
    """The posterior without data that were fitted; errors: see `la.forget`."""
    former = posterior.map_fit
    posterior = posterior.without_calibration("forget")
    if posterior.choices.backend_kwargs.get("stochastic"):
        raise UnsupportedError(
            "backend_kwargs has stochastic=True: other targets would be drawn than in the fit, so that the difference "
            "would not be the curvature of the remaining data. Use the exact GGN, or fit the remaining data anew."
        )
    options = options.within(posterior.weights.fsdp_processes)
    removed = compute_fit(posterior, loader, options).fit
    if options.removed_weight is not None:
        removed = removed.scaled(options.removed_weight)
    with autograd_mode(), torch.no_grad():
        signed = posterior.choices.backend_cls.kind == "hessian"
        return posterior.with_fit(former.minus(removed, signed=signed))


@dataclass(frozen=True, eq=False)
class NewFit:
    """Curvature and loss of data at the network's present weights."""

    # The former posterior, with what only data tell: which layer runs last, where the channels are
    posterior: Posterior
    fit: Fit  # Curvature and loss of the data alone
    engine: CurvatureEngine
    reference: ReferenceOutputs | None  # Data of the first batch with the outputs there, or None
    content: Content  # Digest of the data

    def after(self, fit: Fit, former: Content | None = None) -> Posterior:
        """The posterior of a fit that holds these data, and `former` ones, around the network's present weights."""
        content = self.content if former is None else former + self.content
        return self.posterior.with_data(fit, self.engine, self.reference, content)


def compute_fit(posterior: Posterior, loader: Iterable[Any], options: FitOptions) -> NewFit:
    """Curvature and loss of data at the network's present weights."""
    posterior = posterior.with_backend_loss()
    fsdp = posterior.weights.fsdp_processes
    options, model = options.within(fsdp), posterior.model
    looks = fsdp is None and options.removed_weight is None  # whether the network answers twice alike
    determinism = DeterminismCheck(model, posterior.weights.forward_fn) if looks else None
    if options.processes is None:
        checks.warn_of_shards()
    with autograd_mode(), torch.no_grad(), same_random_state(model):
        if posterior.overrides(*FITTING):
            n_data = options.subset or checks.number_of_data(loader, posterior.choices.dict_key_y)
            options = replace(options, first_pass=lambda engine: posterior.users_pass(engine, n_data))
        begin = partial(_begin, posterior, loader, options, determinism)
        begun = options.reading.begin(begin, options.settings(posterior))
        # Lengths could not be checked while the last layer was unknown.
        posterior = begun.posterior.at_hyperparameters(match_lengths(begun.posterior.hypers, begun.posterior.weights))
        engine, choices, content = engine_for(posterior, options), posterior.choices, ContentReader()
        if options.weights is not None:
            engine.require_weighing(options.weights.name)
        fit = options.reading.fit(
            begun.loader, engine, choices, lambda data: sum_data(data, engine, choices, options, determinism, content)
        )
        check_length("sigma_noise", posterior.hypers.sigma_noise, {"one": 1, "outputs": fit.n_outputs})
        fit = fit if options.weights is None else replace(fit, is_weighed=True)
        return NewFit(posterior, fit, engine, None if determinism is None else determinism.reference, content.content)


def engine_for(posterior: Posterior, options: FitOptions) -> CurvatureEngine:
    """An engine for a fit: one that keeps a term per output under a vector noise.

    Where data are added it is that of the former fit, whose random draws go on.
    """
    choices, split, adds = posterior.choices, posterior.hypers.sigma_noise.numel() > 1, not options.override
    former = posterior.cache.engine if adds else None
    if former is not None and former.split_outputs != split:
        former = None
    engine = former or choices.engine(posterior.weights, posterior.problem, split_outputs=split)
    draws = posterior.data.source.draws if adds and posterior.data is not None else None
    source = None if "generator" in choices.backend_kwargs else engine.generator
    if source is not None:
        if draws is not None and source.get_state().shape == draws.shape:
            source.set_state(draws)  # of a copied or loaded posterior, too, whose engine has drawn nothing
        if former is None and options.processes is not None and options.processes.rank:
            source.manual_seed(drawn_seed(source) + options.processes.rank)  # other draws in every process
    return engine


# The first batch: what is refused before it is read, and what it tells.


def _begin(
    posterior: Posterior, loader: Iterable[Any], options: FitOptions, determinism: DeterminismCheck | None
) -> Begun:
    """A reading of the data that has begun; `determinism` looks at the first batch."""
    _refuse_unsupported(posterior, options)
    key = posterior.choices.dict_key_y
    batches.require_loader(loader, "train_loader")
    loader = options.reading.shard(loader, key)
    _require_rereadable(loader, posterior.choices.structure, options)
    if options.weights is not None:
        loader = options.weights.loader(loader, key)
    begun = _begin_reading(loader, key, posterior.hypers.device)
    if begun is not None:
        x, y, loader = begun
        with named("batch 0"), noticing_swap(posterior.model, posterior.call, y):
            posterior = infer_from_first_batch(posterior, x, y, determinism)
    return Begun(posterior, loader, begun and begun[:2])


def _refuse_unsupported(posterior: Posterior, options: FitOptions) -> None:
    """Refuses, before data are read, what cannot be fitted; all processes learn of it."""
    choices, hypers, structure = posterior.choices, posterior.hypers, posterior.choices.structure
    hooked = posterior.overrides(*FITTING)
    loop = "the loop of a user's _curv_closure" if options.subset is None else f"subset={options.subset}"
    if posterior.weights.fsdp_processes is None:
        require_unsharded(posterior.model)  # that were spread only after the object was made
    if options.processes is not None:
        posterior.choices.structure.require_stored("group=, of which each process has a shard,")
        if hooked or options.subset is not None:
            raise UnsupportedError(
                f"group= with {loop}, which uses the data of one process only; leave group at None in a process that "
                "has all the data, or fit without it."
            )
    if options.removed_weight is not None:
        posterior.check_unchanged()
    weights = "class_weight=" if posterior.likelihood.weighs_targets else None
    weights = weights if options.weights is None else options.weights.name
    if weights is not None and not structure.weighs_data:
        raise UnsupportedError(
            f"{weights} with hessian_structure={structure.name!r}, which chooses among data of equal weight; use "
            "'full', 'kron', 'diag' or another structure that sums over all of them."
        )
    if options.weights is not None and (hooked or options.subset is not None):
        loop = "a user's _curv_closure or curvature_of" if options.subset is None else loop
        raise UnsupportedError(f"{weights} with {loop}, which takes data of equal weight; give one of them.")
    # A noise that this kind of curvature cannot take is refused before the data are read, not after.
    posterior.likelihood.curvature_scale(choices.backend_cls.kind, hypers.sigma_noise, hypers.temperature)
    if posterior.weights.problem is not None:
        structure.check(posterior.problem.layout, choices.structure_options)


def _require_rereadable(loader: Iterable[Any], structure: type[Curvature], options: FitOptions) -> None:
    """Refuses an iterator where the data are read several times; before a first batch is taken from it."""
    if structure.n_passes > 1:
        reader = f"hessian_structure={structure.name!r} reads the data {structure.n_passes} times or more"
        batches.require_rereadable(loader, reader)
    if options.subset is not None:
        batches.require_rereadable(loader, f"subset={options.subset} reads the data twice")


def _begin_reading(
    loader: Iterable[Any], dict_key_y: str, device: torch.device
) -> tuple[Inputs, Tensor, Iterable[Any]] | None:
    """Inputs and targets of the first batch, if there is one, and an iterable that still gives every batch."""
    iterator = reading(loader)
    try:
        head = next(iterator)
    except StopIteration:
        return None
    with named("batch 0"):
        x, y = batches.split(head, dict_key_y)
        return batches.to_device(x, device), batches.moved(y, device), _WithFirstBatch(loader, head, iterator)


class _WithFirstBatch:
    """A loader of which one batch has been read: the first reading goes on, later ones start anew.

    The first one must not start anew, for a stream behind a fresh iterator would begin at the second batch, and a
    loader that shuffles would draw another order.
    """

    def __init__(self, loader: Iterable[Any], head: Any, rest: Iterator[Any]) -> None:
        self.loader = loader
        self.head = head
        self.rest: Iterator[Any] | None = rest

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType]  (a TypeError tells a progress bar of none)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that an iterator of which no more than one batch is read takes nothing away.
        if self.rest is not None:
            yield self.head
        rest, self.rest = self.rest, None
        yield from reading(self.loader) if rest is None else rest


def infer_from_first_batch(
    posterior: Posterior, x: Inputs, y: Tensor, determinism: DeterminismCheck | None = None
) -> Posterior:
    """The posterior with what only data tell: which layer runs last, and in which dimension the classes are."""
    posterior = infer_channels(posterior, x, y)
    problem = posterior.weights.discover(x, determinism)
    random = ((slot.name, problem.tensor(slot.name)) for slot in problem.slots)
    dtypes: dict[torch.dtype, str] = {}
    for name, tensor in (next(posterior.model.named_parameters()), *random):
        dtypes.setdefault(torch.promote_types(tensor.dtype, torch.float32), f"{name!r} of {tensor.dtype}")
    if len(dtypes) > 1:
        raise UnsupportedError(
            f"the network has weights of several dtypes: {' and '.join(dtypes.values())}; a posterior has one. Cast "
            "the network, by model.double() or model.float(), and the inputs that it does not cast itself."
        )
    if posterior.likelihood.activation == "sigmoid" and problem.processes is None:
        require_logits(posterior.likelihood, _with_graph(problem, x), problem.dtype)
    return posterior.with_problem(problem)


def infer_channels(posterior: Posterior, x: Inputs, y: Tensor) -> Posterior:
    """The posterior with the dimension of the channels, if it is unknown and the shape of targets tells it.

    That is of labels of positions, and of values `[B]`, whose outputs may be `[B]`, too.
    """
    labels, values = y.ndim > 1 and not y.is_floating_point(), y.ndim == 1 and not posterior.likelihood.class_targets
    if posterior.choices.channel_dim is not None or not (labels or values):
        return posterior
    if labels:
        require_unsharded(posterior.model, "the classes would be found by a pass of one process (give channel_dim=)")
    elif posterior.weights.fsdp_processes is not None:
        return posterior
    with private_copy(posterior.model, posterior.call) as model, torch.no_grad():
        f = _of_one(lambda some: batches.latent(call_with_context(model, posterior.call, some)), detached(x))
    given = next(iter(batches.tensors(x)), f)
    if f.ndim == given.ndim == 1 and (len(f) > 1 or len(y) == 1):  # perhaps all outputs of one datum, of a data set
        return posterior
    channel_dim = channel_of(f, y[: len(f) if f.ndim else 1])
    return posterior if channel_dim is None else posterior.with_channels(channel_dim)


def _look_for_sigmoid(posterior: Posterior, reference: ReferenceOutputs | None) -> None:
    """Warns of a softmax of a sigmoid's outputs; takes a pass only where the first outputs lie in [0, 1]."""
    if reference is None or posterior.likelihood.activation != "softmax":
        return
    if bool((reference.outputs >= 0).all() & (reference.outputs <= 1).all()):
        with autograd_mode(), same_random_state(posterior.model):
            f = _with_graph(posterior.problem, reference.x)
        warn_of_sigmoid(posterior.likelihood, f)


def _with_graph(problem: Problem, x: Inputs) -> Tensor:
    """Outputs of the first datum, with the graph that leads to the random weights."""
    with problem.on_private_copy() as own, hooks_fire(own.module), torch.enable_grad():
        return _of_one(lambda some: own.run(own.stand_ins(), some), detached(x))


def _of_one(outputs: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
    """Outputs of the first datum, or of all data of a batch for a network that takes no single one."""
    try:
        return outputs(batches.select(x, slice(0, 1), batches.size(x, "")))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out(error):
            raise
        return outputs(x)


# How data are read: all of them here, or by one of the ways in `FITS`.


@dataclass(frozen=True)
class Begun:
    """A reading of data that has begun."""

    posterior: Posterior  # The former posterior, with what the first batch tells
    loader: Iterable[Any]  # Gives every batch, also the one that was read
    first: tuple[Inputs, Tensor] | None  # Inputs and targets of the first batch; None if there is none


class Reading:
    """How the data of a fit are read: here, all of them. Other ways are in `FITS`."""

    def shard(self, loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
        """The data that count, of those that a loader gives."""
        del dict_key_y
        return loader

    def begin(self, begin: Callable[[], Begun], settings: Mapping[str, Any]) -> Begun:
        """Begins; `settings` are what all processes of a fit have in common."""
        del settings
        begun = begin()
        if begun.first is None:
            raise InvalidData(checks.NO_DATA)
        return begun

    def fit(
        self, loader: Iterable[Any], engine: CurvatureEngine, choices: Choices, sums: Callable[[Iterable[Any]], Fit]
    ) -> Fit:
        """The fit of a loader's data, by the sums over these or some of them."""
        del engine, choices
        return sums(loader)

    def sum_over(
        self, read: Callable[[], BatchSummary | None], data_pass: DataPass, engine: CurvatureEngine
    ) -> tuple[BatchSummary | None, dict[str, str] | None]:
        """Sums besides curvature, None without data, once `data_pass` has those of the curvature.

        Also the rule that explained every tensor; None where the engine knows it.
        """
        del data_pass, engine
        return read(), None


# Passes over the data.


def sum_data(
    loader: Iterable[Any],
    engine: CurvatureEngine,
    choices: Choices,
    options: FitOptions,
    determinism: DeterminismCheck | None = None,
    content: ContentReader | None = None,
) -> Fit:
    """Reads the data as often as the structure needs, and sums their curvature and loss."""
    structure = choices.structure
    structure.check(engine.problem.layout, choices.structure_options)
    loss = LossCheck.for_likelihood(engine.likelihood, "ef" if engine.options.stochastic else engine.kind)
    check = None
    if options.check_memory:
        check = FITS["memory"](engine.problem, structure, choices.structure_options, known_length(loader))
    make_pass = options.first_pass or (lambda engine: structure.first_pass(engine, choices.structure_options))
    listening = Listening(judge=None if loss is None else loss.see, profile=check)
    with engine.asked(listening):
        fit = _Passes(loader, engine, listening, make_pass(engine), choices, options, determinism, content, check).fit()
    if loss is not None:
        loss.require_curved()
    return fit


_READ_TOGETHER = 8
"""Batches whose conditions are read together where every reading waits for a device."""


@dataclass(eq=False)
class _Passes:
    """As many passes over the data as the structure needs, of which `data_pass` is the present one."""

    loader: Iterable[Any]
    engine: CurvatureEngine
    listening: Listening
    data_pass: DataPass
    choices: Choices
    options: FitOptions
    determinism: DeterminismCheck | None
    content: ContentReader | None
    memory: Any  # Refuses what memory does not hold; None where that is not asked for
    number: int = 1  # of the pass
    first_sums: BatchSummary | None = None  # of the first pass, after it
    draws: Tensor | None = None  # state of the engine's generator before every pass
    all_count: Sequence[bool] = ()  # whether no label is ignored, of the present batch and some beside it

    def fit(self) -> Fit:
        engine = self.engine
        self.draws = None if engine.generator is None else engine.generator.get_state()
        while True:
            if engine.generator is not None and self.draws is not None:
                engine.generator.set_state(self.draws)  # every reading is of the same sampled curvature
            totals, coverage = self.options.reading.sum_over(self._read, self.data_pass, engine)
            totals = self._of_same_data(totals)
            self.first_sums = self.first_sums or totals
            result = self.data_pass.finish()
            if isinstance(result, Curvature):
                coverage = coverage or engine.coverage()  # of which some is known only now, where data were chosen
                if forms := result.forms():
                    names = engine.problem.layout.names
                    coverage = {n: f"{coverage.get(n, '?')} → {form}" for n, form in zip(names, forms, strict=True)}
                counted = self.data_pass.summary_of_fit(self.first_sums)
                used = engine.generator and engine.generator.get_state()
                return Fit(
                    result, counted.loss_terms, counted.count, counted.n_outputs, coverage, used, gaps=counted.gaps
                )
            self.data_pass, self.determinism, self.number = result, None, self.number + 1

    def _of_same_data(self, totals: BatchSummary | None) -> BatchSummary:
        """The sums of a reading, if it was of as many data as the first one."""
        name = self.choices.structure.name
        if totals is None and self.first_sums is None:
            raise InvalidData(checks.NO_DATA)
        if totals is None:
            raise InvalidData(
                f"reading {self.number} of the loader gave no data: behind it there is a stream, which can be read "
                f"only once, but hessian_structure={name!r} reads the data {self.choices.structure.n_passes} times or "
                "more; give a DataLoader of a data set that can be read again, or a list of batches."
            )
        if self.first_sums is not None and not same_count(totals.count, self.first_sums.count):
            raise InvalidData(
                f"reading {self.number} of the loader gave {totals.n_data} data, the first one "
                f"{self.first_sums.n_data}; hessian_structure={name!r} needs the same data every time."
            )
        return totals

    def _read(self) -> BatchSummary | None:
        """Feeds every batch to the pass; returns sums of what they contribute besides curvature, or None."""
        determinism, engine = self.determinism, self.engine
        if self.first_sums is None and self.memory is not None:
            self.memory.before(self.engine, self.loader, self.choices.dict_key_y)
        total: BatchSummary | None = None
        label = "fit" if self.choices.structure.n_passes == 1 else f"fit, reading {self.number}"
        bar = DataBar(label, self.loader, shown=self.options.progress_bar)
        conditions = Conditions()  # read once a batch, or after several: some are those of batches before
        dear = operations_are_dear(engine.problem.device)
        self.listening.outputs = None if determinism is None else determinism.record
        self.listening.keeps = determinism is not None
        for number, batch in enumerate(self.loader):
            later = dear and number % _READ_TOGETHER != _READ_TOGETHER - 1
            with _within_memory(number), conditions.collected(later=later), named(f"batch {number}"):
                data = self._without_ignored(batch, all_count=self._all_count(number))
                if data is None:
                    continue
                if self.content is not None and self.number == 1:
                    self.content.see(*data[:2])
                total = self._extended(total, *data)
                if determinism is not None:
                    conditions.read()
                    determinism.run(*data[:2])
                    determinism = None
            bar.add(len(data[1]))
        conditions.read()
        bar.close()
        self.listening.weights, self.listening.keeps = None, False
        return None if total is None else replace(total, n_data=total.count)

    def _all_count(self, number: int) -> bool:
        """True if it is known that no label of a batch is ignored: of lists it is asked of several batches at once."""
        loader = self.loader.loader if isinstance(self.loader, _WithFirstBatch) else self.loader
        if type(loader) not in (list, tuple):
            return False
        if number % _READ_TOGETHER == 0:
            some = loader[number : number + _READ_TOGETHER]  # pyright: ignore[reportIndexIssue]
            self.all_count = next_token.all_count(some, self.engine.target_rules)
        place = number % _READ_TOGETHER
        return place < len(self.all_count) and self.all_count[place]

    def _without_ignored(self, batch: Any, *, all_count: bool) -> tuple[Inputs, Tensor, Tensor | None] | None:
        """Inputs and targets that are not ignored, with their weights, or None."""
        problem, rules, key = self.engine.problem, self.engine.target_rules, self.choices.dict_key_y
        return next_token.weighted(batch, key, problem.device, rules, problem.module, all_count=all_count)

    def _extended(self, total: BatchSummary | None, x: Inputs, y: Tensor, weights: Tensor | None) -> BatchSummary:
        """The sums with those of one more batch, whose curvature the pass takes in."""
        problem, self.listening.weights = self.engine.problem, weights
        with noticing_swap(problem.module, problem.forward_fn, y):
            new = self.data_pass.add(x, y)
        require_finite(all_finite([new.loss_terms.detach()]))
        new = replace(new, loss_terms=new.loss_terms.detach())
        if total is None:
            return new
        if total.n_outputs != new.n_outputs:
            raise InvalidData(f"the batch has {new.n_outputs} outputs, the former ones {total.n_outputs}.")
        return total.joined(new)


@contextmanager
def _within_memory(number: int) -> Iterator[None]:
    """Names the batch at which memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        said = str(error) if isinstance(error, OutOfMemory) else f"memory ran out. {COTANGENT.remedy} {error}"
        raise OutOfMemory(f"batch {number}: {said}") from error
