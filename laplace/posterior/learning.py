"""From one posterior and data to the next: fitting, forgetting, what a fit would take, and what first outputs tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core import batch as batches
from laplace.core import hyperparameters as hyper
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.checks import named
from laplace.core.memory import ran_out
from laplace.core.overrides import FITTING
from laplace.core.positions import channel_of, channels_last
from laplace.engines.engine import CurvatureEngine, detached
from laplace.errors import UnsupportedError
from laplace.fitting import FirstPass, Fit, ReadOptions, planning, subsampling
from laplace.fitting.planning import FitPlan
from laplace.fitting.subsampling import Subset
from laplace.likelihoods.logits import require_logits
from laplace.network.misfits import called
from laplace.network.model_guard import autograd_mode, hooks_fire, preserve_model, same_random_state
from laplace.network.witness import FirstBatch, Witness
from laplace.posterior.assembled import with_backend_loss
from laplace.posterior.assigned import restricted
from laplace.posterior.hooked import HookedPass, number_of_data
from laplace.posterior.posterior import Posterior
from laplace.structures.algebra import bars


@dataclass(frozen=True, eq=False)
class Measured:
    """Curvature and loss of data at the network's present weights.

    Attributes:
        posterior: The former posterior, with what only data tell: which layer runs last, where the channels are.
        fit: Curvature and loss of the data alone.
        engine: What computed them.
        witness: Data of the first batch with the outputs there, or None.
    """

    posterior: Posterior
    fit: Fit
    engine: CurvatureEngine
    witness: Witness | None

    def after(self, fit: Fit) -> Posterior:
        """The posterior of a fit that holds these data, around the network's present weights."""
        return self.posterior.with_data(fit, self.engine, self.witness)


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
) -> Measured:
    """Curvature and loss of data at the network's present weights.

    Args:
        posterior: The former posterior.
        train_loader: Batches.
        progress_bar: Show one.
        check_memory: Whether to ask first if memory holds the fit.
        go_on: Whether to use the former fit's engine, whose random draws go on.
        subset: Of how many data the curvature is; None for all.
        look: Whether to ask of the first batch if the network answers twice alike.
        first_pass: Makes the first pass over the data; None for that of the structure.

    Raises:
        OutOfMemory: Memory does not hold the fit.
        InvalidData: A batch cannot be used.
        InvalidArgument: A hyper-parameter's length does not fit the random parameters or the outputs, or the
            structure reads the data several times and the loader can be read only once.
    """
    posterior = with_backend_loss(posterior)
    choices, model = posterior.choices, posterior.model
    first = FirstBatch(model, posterior.weights.forward_fn) if look else None
    reading = ReadOptions(choices.dict_key_y, progress_bar, first, check_memory, first_pass)
    fitting.require_rereadable(train_loader, choices.structure)
    if posterior.weights.problem is not None:
        choices.structure.check(posterior.problem.layout, choices.structure_options)
    if subset is not None:
        batches.require_rereadable(train_loader, f"subset={subset.size} reads the data twice")
    hooked, n_data = posterior.overrides(*FITTING), 0
    if hooked:
        n_data = number_of_data(train_loader, choices.dict_key_y) if subset is None else subset.size
    fitting.warn_of_shards()
    with autograd_mode(), torch.no_grad(), same_random_state(model), bars(progress_bar):
        x, y, train_loader = fitting.begin_reading(train_loader, choices.dict_key_y, posterior.hypers.device)
        with named("batch 0"):
            posterior = discovered(posterior, x, y)
        # Their lengths could not be checked while the last layer was unknown.
        posterior = posterior.at(restricted(posterior.hypers, posterior.weights))
        engine = _fitting_engine(posterior, go_on=go_on)
        # A noise that this kind of curvature cannot take is refused before the data are read, not after.
        kind, hypers = choices.backend_cls.kind, posterior.hypers
        posterior.likelihood.curvature_scale(kind, hypers.sigma_noise, hypers.temperature)
        if hooked:
            reading = replace(reading, first_pass=lambda engine: HookedPass(posterior, engine, n_data))
        what = (train_loader, engine, choices.structure, choices.structure_options)
        if subset is None:
            fit = fitting.accumulate(*what, reading)
        else:
            fit = subsampling.accumulate(*what, subset, reading)
        hyper.check_length("sigma_noise", hypers.sigma_noise, {"one": 1, "outputs": fit.n_outputs})
        return Measured(posterior, fit, engine, None if first is None else first.witness)


def _fitting_engine(posterior: Posterior, *, go_on: bool) -> CurvatureEngine:
    """An engine for a fit: one that keeps a term per output under a vector noise.

    Args:
        posterior: The former posterior, whose random weights are known.
        go_on: Whether data are added, with the former fit's engine, whose random draws go on.
    """
    choices, split = posterior.choices, posterior.hypers.sigma_noise.numel() > 1
    former = posterior.derived.engine
    if go_on and former is not None and former.split_outputs == split:
        return former
    engine = choices.engine(posterior.weights, posterior.problem, split_outputs=split)
    draws = posterior.data.fit.draws if go_on and posterior.data is not None else None
    own = "generator" not in choices.backend_kwargs
    if draws is not None and own and engine.generator and engine.generator.get_state().shape == draws.shape:
        engine.generator.set_state(draws)  # of a copied or loaded posterior, whose engine was left behind
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
) -> Posterior:
    """The posterior of data, or of data in addition to those of the former fit.

    The arguments are those of `la.fit`, and what makes the first pass over the data; None for that of the structure.

    Raises:
        OutOfMemory: Memory does not hold the fit.
        InvalidData: A batch cannot be used.
        InvalidArgument: A decay, a subset or a hyper-parameter's length that is not accepted.
        InvalidType: What is given for the loader cannot be iterated over, or targets are given beside it.
        UnsupportedError: The structure is no sum over data, and the former fit cannot fade.
    """
    fitting.check_override(override)
    fitting.check_decay(decay, override=override)
    batches.require_loader(train_loader, "train_loader")
    part = None if subset is None else Subset.drawn(subset, generator)
    new = measured(
        posterior, train_loader, progress_bar=progress_bar, check_memory=check_memory, go_on=not override, subset=part,
        first_pass=first_pass,
    )  # fmt: skip
    with torch.inference_mode(False), torch.no_grad(), bars(progress_bar):
        fit = new.fit if override or posterior.data is None else posterior.data.fit.scaled(decay) + new.fit
        if progress_bar:
            fit.curvature.decompose(**posterior.choices.precision_options)
        after = new.after(fit)
    fitting.warn_of_diagonals(new.fit, after.problem)
    return after


def without(
    posterior: Posterior, loader: Iterable[Any], *, progress_bar: bool = False, weight: float = 1.0
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
    if posterior.choices.backend_kwargs.get("stochastic"):
        raise UnsupportedError(
            "backend_kwargs has stochastic=True: other targets would be drawn than those of the fit, and the "
            "difference would be no curvature of the data that are left. Use the exact GGN, or fit them anew."
        )
    posterior.check_unchanged()
    removed = measured(posterior, loader, progress_bar=progress_bar, look=False).fit
    with autograd_mode(), torch.no_grad():
        signed = posterior.choices.backend_cls.kind == "hessian"
        return posterior.with_fit(former.minus(removed.scaled(weight), signed=signed))


def planned(posterior: Posterior, train_loader: Iterable[Any]) -> tuple[Posterior, FitPlan]:
    """The posterior with what the first batch tells of the network, and what a fit would take.

    Raises:
        InvalidArgument: A loader that can be read only once: a fit would miss that batch.
        InvalidData: No data that count.
        UnsupportedError: A user's own backend or structure, which does not say what it takes.
    """
    choices, model = posterior.choices, posterior.model
    with autograd_mode(), torch.no_grad(), same_random_state(model):
        n_batches = planning.length(train_loader)
        x, y = planning.first_counted(
            train_loader, choices.dict_key_y, posterior.hypers.device, posterior.likelihood, model
        )
        posterior = discovered(posterior, x, y)
        profile = _fitting_engine(posterior, go_on=False).profile(x, y)
    plan = planning.make_plan(profile, posterior.problem, choices.structure, choices.structure_options, n_batches)
    return posterior, plan


def discovered(posterior: Posterior, x: Inputs, y: Tensor) -> Posterior:
    """The posterior with what only data tell: which layer runs last, and in which dimension the classes are.

    Args:
        posterior: Fitted or not.
        x: Inputs of the first batch.
        y: Its targets.

    Raises:
        InvalidData: Labels that fit two readings of the outputs, or a network that ends in a sigmoid under a
            likelihood that takes one of the outputs.
    """
    posterior = with_channels_of(posterior, x, y)
    problem = posterior.weights.discover(x)
    if posterior.likelihood.activation == "sigmoid":
        with preserve_model(problem.module), hooks_fire(problem.module), torch.enable_grad():
            f = _of_one(lambda some: problem.run(problem.stand_ins(), some), detached(x))
        require_logits(posterior.likelihood, f, problem.dtype)
    return posterior.with_problem(problem)


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
    call = call_of(posterior)
    with preserve_model(posterior.model), torch.no_grad():
        f = _of_one(lambda some: batches.latent(called(posterior.model, call, some)), detached(x))
    channel_dim = channel_of(f, y[: len(f)])
    return posterior if channel_dim is None else with_channels(posterior, channel_dim)


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
