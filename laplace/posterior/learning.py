"""From one posterior and data to the next: fitting, forgetting, and what a fit would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core import batch as batches
from laplace.core.arguments import check_length
from laplace.core.batch import DataWeights, ForwardFn, Inputs
from laplace.core.checks import named
from laplace.core.inference import kept_for_later
from laplace.core.memory import ran_out
from laplace.core.overrides import FITTING
from laplace.core.positions import channel_of, channels_last
from laplace.core.processes import Processes
from laplace.core.progress import known_length
from laplace.core.random_numbers import drawn_seed
from laplace.engines.engine import CurvatureEngine, detached
from laplace.errors import InvalidData, UnsupportedError
from laplace.fitting import FirstPass, Fit, ReadOptions, Resumable, planning, subsampling
from laplace.fitting.content import Content, ContentReader
from laplace.fitting.planning import FitPlan
from laplace.fitting.subsampling import Subset
from laplace.likelihoods.checks import require_logits, warn_of_sigmoid
from laplace.network.misfits import called, noticing_swap
from laplace.network.model_guard import autograd_mode, hooks_fire, preserve_model, same_random_state
from laplace.network.spread import require_whole
from laplace.network.watch import FirstBatch, Witness
from laplace.posterior import sharding
from laplace.posterior.agreement import Account, Started, started_together
from laplace.posterior.manual_fit import with_backend_loss
from laplace.posterior.posterior import Posterior, match_lengths
from laplace.posterior.user_hooks import HookedPass, number_of_data
from laplace.structures import fields
from laplace.weights.problem import Problem

# Last layer and dimension of the classes, as the first outputs of a network tell them.


def discovered(posterior: Posterior, x: Inputs, y: Tensor, first: FirstBatch | None = None) -> Posterior:
    """The posterior with what only data tell: which layer runs last, and in which dimension the classes are.

    Args:
        posterior: Fitted or not.
        x: Inputs of the first batch.
        y: Its targets.
        first: What looks at the first batch of a fit; None without one.

    Raises:
        InvalidData: Labels that fit two readings of the outputs, or a network that ends in a sigmoid under a
            likelihood that takes one of the outputs.
        UnsupportedError: Random weights of several dtypes.
    """
    posterior = with_channels_of(posterior, x, y)
    problem = posterior.weights.discover(x, first)
    _require_one_dtype(posterior, problem)
    if posterior.likelihood.activation == "sigmoid" and problem.processes is None:
        require_logits(posterior.likelihood, _with_graph(problem, x), problem.dtype)
    return posterior.with_problem(problem)


def look_for_sigmoid(posterior: Posterior, witness: Witness | None) -> None:
    """Warns of a softmax of a sigmoid's outputs; only where those of the first data lie in (0, 1) is there a pass.

    Args:
        posterior: Fitted.
        witness: Data of the first batch with the outputs there, or None.
    """
    if witness is None or posterior.likelihood.activation != "softmax":
        return
    if bool((witness.outputs >= 0).all() & (witness.outputs <= 1).all()):
        with autograd_mode(), same_random_state(posterior.model):
            f = _with_graph(posterior.problem, witness.x)
        warn_of_sigmoid(posterior.likelihood, f)


def _with_graph(problem: Problem, x: Inputs) -> Tensor:
    """Outputs of the first datum, with the graph that leads to the random weights."""
    with preserve_model(problem.module), hooks_fire(problem.module), torch.enable_grad():
        return _of_one(lambda some: problem.run(problem.stand_ins(), some), detached(x))


def _require_one_dtype(posterior: Posterior, problem: Problem) -> None:
    """Refuses random weights of float32, or less, and of float64: a curvature has one dtype, as its prior has.

    Raises:
        UnsupportedError: There are both, or the random weights have another dtype than the first of the network.
    """
    random = ((slot.name, problem.tensor(slot.name)) for slot in problem.slots)
    first: dict[torch.dtype, str] = {}
    for name, tensor in (next(posterior.model.named_parameters()), *random):
        first.setdefault(torch.promote_types(tensor.dtype, torch.float32), f"{name!r} of {tensor.dtype}")
    if len(first) > 1:
        raise UnsupportedError(
            f"the network has weights of several dtypes: {' and '.join(first.values())}; a posterior has one. Cast the "
            "network, by model.double() or model.float(), and the inputs that it does not cast itself."
        )


def with_channels_of(posterior: Posterior, x: Inputs, y: Tensor) -> Posterior:
    """The posterior with the dimension of the channels, if it is unknown and labels of positions tell it.

    Args:
        posterior: Fitted or not.
        x: Inputs of a batch.
        y: Its targets.

    Raises:
        InvalidData: Labels that fit two readings of the outputs.
    """
    if posterior.choices.channel_dim is not None or y.ndim < 2 or y.is_floating_point():
        return posterior
    require_whole(posterior.model, "the classes would be found by a pass of one process (give channel_dim=)")
    call = call_of(posterior)
    with preserve_model(posterior.model), torch.no_grad():
        f = _of_one(lambda some: batches.latent(called(posterior.model, call, some)), detached(x))
    channel_dim = channel_of(f, y[: len(f)])
    return posterior if channel_dim is None else with_channels(posterior, channel_dim)


def informed(posterior: Posterior, channel_dim: int | None, layer: str | None) -> Posterior:
    """The posterior with what first outputs tell, as they were seen elsewhere.

    Args:
        posterior: Fitted or not.
        channel_dim: Dimension of the channels, if it is known.
        layer: Name of the last layer, where one is random.
    """
    if posterior.choices.channel_dim is None and channel_dim is not None:
        posterior = with_channels(posterior, channel_dim)
    problem = posterior.weights.problem if layer is None else posterior.weights.named(layer)
    return posterior if problem is None else posterior.with_problem(problem)


def with_channels(posterior: Posterior, channel_dim: int) -> Posterior:
    """The posterior of a network whose outputs have their channels in this dimension."""
    choices = posterior.choices
    call = batches.caller(posterior.model, choices.forward_fn, choices.dict_key_y)
    weights = posterior.weights.called_by(channels_last(call, channel_dim))
    return replace(posterior.with_choices(channel_dim=channel_dim), weights=weights)


def call_of(posterior: Posterior) -> ForwardFn:
    """The call of a posterior's network on inputs; its outputs are as it returns them."""
    choices = posterior.choices
    return batches.caller(posterior.model, choices.forward_fn, choices.dict_key_y) or batches.call


def _of_one(outputs: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
    """Outputs of the first datum, or of all data of a batch for a network that takes no single one."""
    rows = batches.tensors(x)
    n_data = rows[0].shape[0] if rows and rows[0].ndim else 1
    try:
        return outputs(batches.select(x, slice(0, 1), n_data))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out(error):
            raise
        return outputs(x)


# The start of a fit that goes on where another process was interrupted: it must be the same fit.


def started_again(
    resume: Resumable,
    loader: Iterable[Any],
    device: torch.device,
    start: Callable[[], Started],
    settings: Mapping[str, Any],
) -> Started:
    """Begins the reading of the data that a fit was interrupted in, or the first one where there is no file.

    Args:
        resume: The file.
        loader: What `fit` was given, which has the generators of its order.
        device: Where the sums are to be.
        start: Begins the reading.
        settings: What else both fits must have in common, by name.

    Raises:
        InvalidArgument: The order of the loader's data is another one every time.
        StateError: The file is no checkpoint, or of another fit.
    """
    resume.begin(loader, device)
    started = start()
    account = Account.of(started.posterior, {**settings, **_sizes(loader)})
    if resume.former is not None:
        _require_same(resume, account, fields.from_state(Account, resume.former))
    resume.account = fields.state_of(account)
    return replace(started, reading=resume.reading)


def _require_same(resume: Resumable, account: Account, former: Account) -> None:
    difference, _ = account.difference(former, "the fit in the file")
    if difference:
        raise resume.refusal(difference)
    if (account.random, account.layer) != (former.random, former.layer):
        raise resume.refusal("makes other parameters random than the fit in the file")
    if account.channel_dim != former.channel_dim:
        raise resume.refusal("reads the outputs' channels in another dimension than the fit in the file")


def _sizes(loader: Iterable[Any]) -> dict[str, Any]:
    """Numbers of batches and data, where they are known."""
    data = getattr(loader, "dataset", None)
    number = len(data) if isinstance(data, Sized) else None
    return {"number of batches": known_length(loader), "size of the data set": number}


@dataclass(frozen=True, eq=False)
class Measured:
    """Curvature and loss of data at the network's present weights.

    Attributes:
        posterior: The former posterior, with what only data tell: which layer runs last, where the channels are.
        fit: Curvature and loss of the data alone.
        engine: What computed them.
        witness: Data of the first batch with the outputs there, or None.
        content: Digest of the data.
    """

    posterior: Posterior
    fit: Fit
    engine: CurvatureEngine
    witness: Witness | None
    content: Content

    def after(self, fit: Fit, former: Content | None = None) -> Posterior:
        """The posterior of a fit that holds these data, around the network's present weights.

        Args:
            fit: Curvature and loss.
            former: Digest of other data that it holds.
        """
        content = self.content if former is None else former + self.content
        return self.posterior.with_data(fit, self.engine, self.witness, content)


def measured(
    posterior: Posterior,
    train_loader: Iterable[Any],
    *,
    progress_bar: bool = False,
    check_memory: bool = True,
    go_on: bool = True,
    subset: Subset | None = None,
    look: bool = True,
    first_pass: FirstPass | None = None,
    processes: Processes | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    require: Callable[[], None] | None = None,
    resume: Resumable | None = None,
    weights: DataWeights | None = None,
) -> Measured:
    """Curvature and loss of data at the network's present weights.

    Args:
        posterior: The former posterior.
        train_loader: Batches.
        progress_bar: Show a progress bar.
        check_memory: Whether to ask first if memory holds the fit.
        go_on: Whether to use the former fit's engine, whose random draws go on.
        subset: Of how many data the curvature is; None for all.
        look: Whether to ask of the first batch if the network answers twice alike.
        first_pass: Makes the first pass over the data; None for that of the structure.
        processes: Those that read the other shards of the data; None where all data are read here.
        settings: What else all processes must have in common, by name.
        require: Raises what is to be refused before data are read, in all processes where one does.
        resume: The file from which the fit goes on, and to which it is written; None without one.
        weights: How often every datum counts; None for once.

    Raises:
        OutOfMemory: Memory does not hold the fit.
        StateError: The file is of another fit.
        InvalidData: A batch cannot be used.
        InvalidArgument: A hyper-parameter's length does not fit the random parameters or the outputs, or the
            structure reads the data several times and the loader can be read only once.
        ProcessError: Another process failed, or its network, data or settings do not fit to this one's.
        UnsupportedError: Several processes, of a subset of the data, with a user's own hooks or products.
    """
    posterior = with_backend_loss(posterior)
    choices, model = posterior.choices, posterior.model
    spread = posterior.weights.spread_over
    if spread is not None:
        processes, look = spread.joined(processes), False
    first = FirstBatch(model, posterior.weights.forward_fn) if look else None
    content = ContentReader()
    reading = ReadOptions(choices.dict_key_y, progress_bar, first, check_memory, first_pass, processes, resume, content)
    hooked = posterior.overrides(*FITTING)
    if processes is None:
        fitting.warn_of_shards()
    with autograd_mode(), torch.no_grad(), same_random_state(model):
        if hooked:
            n_data = number_of_data(train_loader, choices.dict_key_y) if subset is None else subset.size
            reading = replace(reading, first_pass=lambda engine: HookedPass(posterior, engine, n_data))
        shard, settings = processes is not None, {**settings, "weights of the data": weights and weights.name}
        start = partial(_started, posterior, train_loader, subset, weights, first, shard=shard, require=require)
        if resume is not None:
            start = partial(started_again, resume, train_loader, posterior.hypers.device, start, settings)
        started = start() if processes is None else started_together(processes, start, settings, informed)
        if started.first is None and processes is None:
            raise InvalidData(fitting.NO_DATA)
        posterior, train_loader = started.posterior, started.loader
        # Their lengths could not be checked while the last layer was unknown.
        posterior = posterior.at(match_lengths(posterior.hypers, posterior.weights))
        engine = _fitting_engine(posterior, go_on=go_on, rank=0 if processes is None else processes.rank)
        if weights is not None:
            engine.require_weighing(weights.name)
        what = (train_loader, engine, choices.structure, choices.structure_options)
        fit = fitting.accumulate(*what, reading) if subset is None else subsampling.accumulate(*what, subset, reading)
        check_length("sigma_noise", posterior.hypers.sigma_noise, {"one": 1, "outputs": fit.n_outputs})
        fit = fit if weights is None else replace(fit, is_weighed=True)
        return Measured(posterior, fit, engine, None if first is None else first.witness, content.content)


def _started(
    posterior: Posterior,
    train_loader: Iterable[Any],
    subset: Subset | None,
    weights: DataWeights | None,
    first: FirstBatch | None,
    *,
    shard: bool,
    require: Callable[[], None] | None,
) -> Started:
    """A reading of the data that has begun, with what the first batch tells; all that can be refused before it is.

    Args:
        posterior: The former posterior.
        train_loader: Batches.
        subset: Of how many data the curvature is; None for all.
        weights: How often every datum counts; None for once.
        first: What looks at the first batch, or None.
        shard: Whether other processes read other data.
        require: Raises what else is to be refused.
    """
    choices, hypers = posterior.choices, posterior.hypers
    if posterior.weights.spread_over is None:
        require_whole(posterior.model)  # that were spread only after the object was made
    if shard:  # here, where all processes learn of it
        require_held(posterior, "group=, of which each process has a shard,")
        if posterior.overrides(*FITTING) or subset is not None:
            raise _of_one_process(subset)
    if require is not None:
        require()
    batches.require_loader(train_loader, "train_loader")
    _require_weighing(posterior, subset, weights)
    # A noise that this kind of curvature cannot take is refused before the data are read, not after.
    posterior.likelihood.curvature_scale(choices.backend_cls.kind, hypers.sigma_noise, hypers.temperature)
    if shard:
        train_loader = fitting.without_padding(train_loader, choices.dict_key_y)
    fitting.require_rereadable(train_loader, choices.structure)
    if posterior.weights.problem is not None:
        choices.structure.check(posterior.problem.layout, choices.structure_options)
    if subset is not None:
        batches.require_rereadable(train_loader, f"subset={subset.size} reads the data twice")
    if weights is not None:
        train_loader = weights.loader(train_loader, choices.dict_key_y)
    begun = fitting.begin_reading(train_loader, choices.dict_key_y, posterior.hypers.device)
    if begun is None:
        return Started(posterior, train_loader, None)
    x, y, train_loader = begun
    with named("batch 0"), noticing_swap(posterior.model, call_of(posterior), y):
        return Started(discovered(posterior, x, y, first), train_loader, (x, y))


def _require_weighing(posterior: Posterior, subset: Subset | None, weights: DataWeights | None) -> None:
    """Refuses weights of data, or of their classes, where what is summed does not know them.

    Raises:
        UnsupportedError: It does not.
    """
    structure = posterior.choices.structure
    if weights is None and not posterior.likelihood.weighs_targets:
        return
    what = "class_weight=" if weights is None else weights.name
    if not structure.weighs_data:
        raise UnsupportedError(
            f"{what} with hessian_structure={structure.name!r}, which chooses among data of equal weight; use 'full', "
            "'kron', 'diag' or another structure that sums over all of them."
        )
    if weights is not None and (subset is not None or posterior.overrides(*FITTING)):
        other = "a user's _curv_closure or curvature_of" if subset is None else f"subset={subset.size}"
        raise UnsupportedError(f"{what} with {other}, which takes data of equal weight; give one of them.")


def require_held(posterior: Posterior, what: str) -> None:
    """Refuses a structure whose curvature is not held, but asked of the network at the fit.

    Args:
        posterior: Of the structure.
        what: What takes curvature that is held, for the message.

    Raises:
        UnsupportedError: It is.
    """
    if posterior.choices.structure.asks_network:
        raise UnsupportedError(
            f"{what} with hessian_structure={posterior.choices.structure.name!r}, which asks the network, with the "
            "weights of the fit, for products over all data; use 'kron', 'diag' or 'full', whose curvature is stored."
        )


def _of_one_process(subset: Subset | None) -> UnsupportedError:
    what = "the loop of a user's _curv_closure" if subset is None else f"subset={subset.size}"
    return UnsupportedError(
        f"group= with {what}, which uses the data of one process only; leave group at None in a process that has all "
        "the data, or fit without it."
    )


def _fitting_engine(posterior: Posterior, *, go_on: bool, rank: int = 0) -> CurvatureEngine:
    """An engine for a fit: one that keeps a term per output under a vector noise.

    Args:
        posterior: The former posterior, whose random weights are known.
        go_on: Whether data are added, with the former fit's engine, whose random draws go on.
        rank: Number of this process, by which its draws differ from those of others.
    """
    choices, split = posterior.choices, posterior.hypers.sigma_noise.numel() > 1
    former = posterior.cache.engine if go_on else None
    if former is not None and former.split_outputs != split:
        former = None
    engine = former or choices.engine(posterior.weights, posterior.problem, split_outputs=split)
    draws = posterior.data.source.draws if go_on and posterior.data is not None else None
    source = None if "generator" in choices.backend_kwargs else engine.generator
    if source is not None:
        if draws is not None and source.get_state().shape == draws.shape:
            source.set_state(draws)  # of a copied or loaded posterior, too, whose engine has drawn nothing
        if rank and former is None:
            source.manual_seed(drawn_seed(source) + rank)
    return engine


def fitted_to(
    posterior: Posterior,
    train_loader: Iterable[Any],
    *,
    override: bool = True,
    progress_bar: bool = False,
    decay: float = 1.0,
    subset: int | None = None,
    generator: torch.Generator | None = None,
    check_memory: bool = True,
    first_pass: FirstPass | None = None,
    group: Any = None,
    resume: Any = None,
    save_every: Any = None,
    sharded: bool = False,
    weight_fn: Any = None,
    dict_key_weight: Any = None,
) -> Posterior:
    """The posterior of data, or of data in addition to those of the former fit.

    The arguments are those of `la.fit`, and what makes the first pass over the data; None for that of the structure.

    Raises:
        OutOfMemory: Memory does not hold the fit.
        InvalidData: A batch cannot be used.
        InvalidArgument: A decay, a subset or a hyper-parameter's length that is not accepted.
        InvalidType: What is given for the loader cannot be iterated over, or targets are given beside it.
        StateError: The file of `resume` is of another fit.
        ProcessError: Another process failed, or its network, data or settings do not fit to this one's.
        UnsupportedError: The structure is no sum over data, and the former fit cannot fade, or be resumed, or no sum
            over tensors, and cannot be sharded.
    """
    fitting.check_override(override)
    fitting.check_decay(decay, override=override)
    posterior = posterior.before_new_data("fit")
    fitting.warn_of_dropped(train_loader)
    processes = Processes.of(group)
    sharding.check_group(processes, sharded=sharded, former=None if override else posterior)
    resumable = Resumable.of(resume, save_every, processes)
    if resumable is not None and subset is not None:
        raise UnsupportedError(f"resume= with subset={subset}, a choice that another process would draw anew.")
    former = 0 if override or posterior.data is None else posterior.data.fit.n_data
    settings = {"override": override, "decay": decay, "data of the former fit": former, "sharded": sharded}
    part = None if subset is None else Subset.drawn(subset, generator)
    new = measured(
        posterior, train_loader, progress_bar=progress_bar, check_memory=check_memory, go_on=not override, subset=part,
        first_pass=first_pass, processes=processes, settings=settings, resume=resumable,
        weights=DataWeights.of(weight_fn, dict_key_weight),
        require=partial(sharding.check, posterior, override=override, sharded=sharded),
    )  # fmt: skip
    former_data = None if override or posterior.data is None else posterior.data.content
    if former_data is not None and decay == 1:  # of which faded data are an average over time
        fitting.warn_of_repeated(former_data, new.content)
    with kept_for_later(), torch.no_grad():
        fit = new.fit
        if not override and posterior.data is not None:
            fit = sharding.total(posterior.map_fit.scaled(decay), fit)
        if sharded and processes is not None:
            fit = sharding.spread(fit, processes, new.posterior.problem.layout)
        after = new.after(fit, former_data)
    fitting.warn_of_diagonals(new.fit, after.problem)
    look_for_sigmoid(after, new.witness)
    if resumable is not None:
        resumable.end()
    return after


def without(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    progress_bar: bool = False,
    weight: float = 1.0,
    group: Any = None,
    weight_fn: Any = None,
    dict_key_weight: Any = None,
) -> Posterior:
    """The posterior without data that were fitted; the arguments are those of `la.forget`.

    Raises:
        NotFittedError: Before a fit.
        ModelChangedError: The weights are not those of the fit any more.
        InvalidData: More data than the fit has seen, or data that cannot be used.
        CurvatureError: The curvature would be indefinite: these data were not fitted.
        UnsupportedError: The structure is no sum over data, or its curvature is a random sample.
    """
    former = posterior.map_fit
    fitting.check_weight(weight)
    posterior = posterior.before_new_data("forget")
    if posterior.choices.backend_kwargs.get("stochastic"):
        raise UnsupportedError(
            "backend_kwargs has stochastic=True: other targets would be drawn than in the fit, so that the difference "
            "would not be the curvature of the remaining data. Use the exact GGN, or fit the remaining data anew."
        )
    processes, settings = Processes.of(group), {"weight": weight, "data of the former fit": former.n_data}
    sharding.check_group(processes, sharded=False, former=posterior)
    removed = measured(
        posterior, loader, progress_bar=progress_bar, look=False, processes=processes, settings=settings,
        require=posterior.check_unchanged, weights=DataWeights.of(weight_fn, dict_key_weight),
    ).fit  # fmt: skip
    with autograd_mode(), torch.no_grad():
        signed = posterior.choices.backend_cls.kind == "hessian"
        return posterior.with_fit(sharding.difference(former, removed.scaled(weight), signed=signed))


def planned(posterior: Posterior, train_loader: Iterable[Any]) -> tuple[Posterior, FitPlan]:
    """The posterior with what the first batch tells of the network, and what a fit would take.

    Raises:
        InvalidArgument: A loader that can be read only once: a fit would miss that batch.
        InvalidData: No data, or all are ignored.
        UnsupportedError: A user's own backend or structure, which does not say what it takes.
    """
    choices, model = posterior.choices, posterior.model
    require_whole(model, "timing takes passes that other processes do not make")
    with autograd_mode(), torch.no_grad(), same_random_state(model):
        n_batches = planning.length(train_loader)
        x, y = planning.first_counted(
            train_loader, choices.dict_key_y, posterior.hypers.device, posterior.likelihood, model
        )
        posterior = discovered(posterior, x, y)
        profile = _fitting_engine(posterior, go_on=False).profile(x, y)
    plan = planning.make_plan(profile, posterior.problem, choices.structure, choices.structure_options, n_batches)
    return posterior, plan
