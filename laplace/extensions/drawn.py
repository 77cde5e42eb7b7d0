"""Functions drawn from a posterior, as modules: the network at sampled weights, linearised or as it is.

    f_s(x) = f(x, θ*) + J(x) (θ_s − θ*),    θ_s ~ N(θ̂, P⁻¹)

θ_s is drawn once, so that one function is the same at all inputs and in all calls: over draws, cov(f_s(x), f_s(x')) =
J(x) P⁻¹ J(x')ᵀ, the joint covariance of the linearised network (Immer et al., 2021; as functions: Magnani et al.,
2025). J(x) v is the derivative of f in a direction, by forward-mode differentiation beside the forward pass:
its cost is independent of the number of outputs, and no Jacobian is held. Of a last layer only the head has one.

Under a calibrated width that follows the input the first term is f(x, θ*) / T(x) (`posterior/tilt.py`), for
the same Gaussian of logits as that of predictions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs
from laplace.core.memory import ran_out
from laplace.core.positions import as_returned, in_users_layout, rows_of, unrolled
from laplace.core.random_numbers import check_generator
from laplace.engines.layer_inputs import in_rows, inputs_of
from laplace.engines.native.steps import CELLS, run_recurrent, weights_of
from laplace.errors import InvalidArgument, UnsupportedError, ignore
from laplace.extensions.asked import Asked, posterior_of
from laplace.likelihoods.base import Likelihood
from laplace.mixture.mixture import MixtureLaplace, drawn_components
from laplace.network.fsdp import require_unsharded
from laplace.network.model_guard import model_lock, own_precision
from laplace.posterior.posterior import Posterior
from laplace.posterior.tilt import Tilt
from laplace.predictive.sampled import refuse_refined
from laplace.weights.problem import Caller

ignore(("`torch.jit.script` is deprecated", DeprecationWarning, r"torch\.jit\."))
import torch._decomp.decompositions_for_jvp  # noqa: E402  (which forward mode loads, and which uses what is deprecated)

_AT_ONCE = 64
"""Functions whose derivatives one pass computes, where many are asked for together."""


class DrawnFunction(nn.Module):
    """A function drawn from a posterior: `laplace.draw(la, n)` gives n of them.

    It takes the inputs that `la(x)` takes and returns what the network returns, `[B, C]` or outputs at positions. It
    holds a copy of the network as it was at the fit, which all functions of one call share, and weights of its own; so
    it needs neither the posterior nor the network any more. It can be differentiated with respect to x, pickled,
    passed to `torch.compile(fullgraph=True)` (under a calibrated width: the result of `export`) and, for batches of one
    size, to `torch.export.export`; `export` makes a module for batches of any size. It is always in evaluation mode.

    Args:
        network: How the copied network is called.
        steps: θ_s − θ* of every tensor with random entries, by its name in the network.
        linearised: Whether the network is linearised at θ*.
        tied: Whether a tensor that has several names changes under all of them.
        width: What a calibrated width makes of the network's logits; None without one.
    """

    def __init__(
        self,
        network: Caller,
        steps: Mapping[str, Tensor],
        *,
        linearised: bool,
        tied: bool,
        width: TemperedLogits | None = None,
    ) -> None:
        super().__init__()
        self.network, self.width = network, width
        self.linearised, self.tied = linearised, tied
        self._names = tuple(f"module.{name}" for name in steps)
        for i, step in enumerate(steps.values()):
            self.register_buffer(f"step_{i}", step)
        self._by_products = any(isinstance(module, _WITHOUT_DIRECTION) for module in network.modules())
        self.eval()

    def train(self, mode: bool = True) -> DrawnFunction:
        """Changes nothing: a function has no dropout."""
        return super().train(False)

    def forward(self, x: Inputs) -> Tensor:
        """Values of the function at x, `[B, C]`, or as the network's outputs are laid out.

        Raises:
            UnsupportedError: An operation of the network has no derivative in a direction.
        """
        return self._at(x, {name: getattr(self, f"step_{i}") for i, name in enumerate(self._names)})

    def _at(self, x: Inputs, steps: dict[str, Tensor]) -> Tensor:
        weights: dict[str, Tensor] = {name: self.network.get_parameter(name) for name in self._names}

        def run(tensors: dict[str, Tensor]) -> Tensor:
            return functional_call(self.network, tensors, (x,), tie_weights=self.tied)

        def read(tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            names = () if self.width is None else self.width.tilt.layers
            return inputs_of(self.network.module, names, partial(run, tensors)) if names else (run(tensors), {})

        if not self.linearised:
            at_sample = run({name: weights[name] + steps[name] for name in weights})
            if self.width is None:
                return at_sample
            f, inputs = read(weights)
            return self.width(f, inputs) + (at_sample - f)
        try:
            with sdpa_kernel(SDPBackend.MATH), _ByProducts() if self._by_products else nullcontext():
                found: Any = jvp(read, (weights,), (steps,), has_aux=True)
            f, moved, inputs = found
        except RuntimeError as error:  # of PyTorch's operations without one, or of a user's autograd.Function
            if ran_out(error):
                raise
            run(weights)  # raises what is wrong with the inputs
            reason = str(error).split(". ")[0].splitlines()[0]
            raise UnsupportedError(
                f"the network cannot be differentiated in a direction of its weights ({reason}): take "
                "linearised=False, or subset_of_weights='last_layer'; an autograd.Function of your own needs "
                "setup_context and jvp."
            ) from error
        return (f if self.width is None else self.width(f, inputs)) + moved

    @staticmethod
    def stacked(functions: Sequence[DrawnFunction], x: Inputs) -> Tensor:
        """Values of several functions at x, `[S, B, C]`.

        Of functions of one call of `laplace.draw` the network runs once for many, if vmap can: each costs two to three
        forward passes then, whatever the size of the batch. One by one it is three, and more of a small network.

        Args:
            functions: At least one, of `laplace.draw`.
            x: Inputs, as of each of them.

        Raises:
            InvalidArgument: No function, or something else among them.
            UnsupportedError: An operation of the network has no derivative in a direction.
        """
        given = functions if isinstance(functions, Sequence) else ()
        if not given or not all(isinstance(function, DrawnFunction) for function in given):
            kinds = [type(function).__name__ for function in given] or type(functions).__name__
            raise InvalidArgument(f"functions are {kinds}; give those of laplace.draw(la, n), one at least.")
        first = functions[0]
        if len(functions) > 1 and all(function.network is first.network for function in functions):
            steps = {
                name: torch.stack([getattr(function, f"step_{i}") for function in functions])
                for i, name in enumerate(first._names)
            }
            with suppress(RuntimeError):  # of what vmap has no rule for; a fault of the network is raised again
                return vmap(first._at, in_dims=(None, 0), chunk_size=_AT_ONCE)(x, steps)
        return torch.stack([function(x) for function in functions])

    def export(self, example_x: Inputs) -> nn.Module:
        """The function as a plain PyTorch module for batches of any size, that needs this library no longer.

        It is like the result of `laplace.export`: traced at `example_x`, checked against the function there, and
        accepted by `torch.export.export` with a dynamic batch dimension, `torch.onnx.export` and
        `torch.compile(fullgraph=True)`.

        Args:
            example_x: Inputs of at least one datum.

        Raises:
            InvalidData: No data, or a key that cannot be the name of an argument.
            UnsupportedError: The function cannot be traced, or its graph depends on the batch.
        """
        from laplace.extensions.export import exported

        return exported(self, example_x, None, {})


class TemperedLogits(nn.Module):
    """The network's logits at the temperature T(x) of a calibrated width, f(x, θ*) / T(x).

    Args:
        tilt: The width.
        likelihood: Of the logits.
        channel_dim: Where the network's outputs have their classes.
    """

    def __init__(self, tilt: Tilt, likelihood: Likelihood, channel_dim: int) -> None:
        super().__init__()
        self.tilt, self.likelihood, self.channel_dim = tilt, likelihood, channel_dim
        for i, each in enumerate(tilt.leverages):
            self.register_buffer(f"root_{i}", each.root)

    def forward(self, f: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Of logits as the network returns them, and inputs of its layers."""
        rows = rows_of(f, self.channel_dim)
        n_rows = len(rows.values)
        roots = (getattr(self, f"root_{i}") for i in range(len(self.tilt.leverages)))
        leverages = tuple(replace(each, root=root) for each, root in zip(self.tilt.leverages, roots, strict=True))
        r = replace(self.tilt, leverages=leverages).distance(in_rows(inputs, n_rows), n_rows)
        values = self.tilt.mean(self.likelihood, rows.values, r)
        return in_users_layout(unrolled(values, rows.positions), self.channel_dim)


_WITHOUT_DIRECTION = nn.RNNBase | nn.MultiheadAttention | ParametrizationList


class _ByProducts(TorchFunctionMode):
    """Runs layers by operations that have a derivative in a direction: recurrent ones step by step.

    PyTorch takes its fused encoder layers only where no mode is active.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in CELLS and weights_of(args):
            return run_recurrent(name, args, F.linear)
        if name == "_weight_norm":
            v, g, dim = args
            return v * (g / torch.norm_except_dim(v, 2, dim))
        return func(*args, **(kwargs or {}))


@checked
def draw(
    la: Asked | MixtureLaplace, n: int, *, generator: torch.Generator | None = None, linearised: bool = True
) -> tuple[DrawnFunction, ...]:
    """Functions drawn from the posterior, f_s(x) = f(x, θ*) + J(x) (θ_s − θ*), as n modules with `f_s(x)` `[B, C]`.

    Each is one function for ever: the same at all inputs and in all calls, smooth in x, and without noise. A call
    costs about three forward passes, whatever the number of outputs; of a last layer one and two products. Of a
    calibrated posterior they have the covariance that was chosen, and under a width that follows the input the mean of
    predictions: logits f(x, θ*) / T(x). In a regression that width is a part of the noise, independent between
    inputs, which no function has: `la.functional_samples` have it.

    Args:
        la: A fitted posterior; or a mixture, of which a component is drawn for every function, by its weight.
        n: Number of functions.
        generator: Random generator; the weights θ_s are those of `la.sample(n, generator)`.
        linearised: False for the network at sampled weights, f(x, θ_s), as of `pred_type="nn"`.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: n is not a positive integer.
        ModelChangedError: The network was trained further after `fit`.
        UnsupportedError: A posterior over functions (`"gp"`), which has no weights; a network that is spread
            over processes; a refined one without `linearised`; a network that cannot be copied.
    """
    check_counts(n=n)
    check_generator(generator)
    if not isinstance(la, MixtureLaplace):
        return _draw(posterior_of(la), n, generator, linearised=linearised)
    chosen = drawn_components(la.weights, n, generator).tolist()
    functions = {
        k: iter(_draw(posterior_of(la.components[k]), chosen.count(k), generator, linearised=linearised))
        for k in sorted(set(chosen))
    }
    return tuple(next(functions[k]) for k in chosen)


def _draw(
    posterior: Posterior, n: int, generator: torch.Generator | None, *, linearised: bool
) -> tuple[DrawnFunction, ...]:
    """Functions of a posterior.

    Raises:
        NotFittedError: Before a fit.
        ModelChangedError: The network is no longer that of the fit.
        UnsupportedError: A posterior without weights, or with shares of them; a refined one that is not linearised; a
            network that cannot be copied.
    """
    posterior = posterior.predictive()
    posterior.require_fitted()
    problem = posterior.problem
    require_unsharded(problem.module, "a function that is drawn holds a copy of the network")
    if not linearised:
        refuse_refined(posterior.refined_step, problem)
    posterior.check_unchanged()
    with torch.no_grad(), own_precision():
        # An assigned mean is that of samples of the weights alone, as in predictions.
        centre = posterior.mean if linearised else posterior.expansion_point
        steps = posterior.sampler()(n, generator).detach() - centre
        if linearised and posterior.refined_step is not None:
            steps += posterior.refined_step
        network = Caller(_copied(problem.module), as_returned(problem.forward_fn)).requires_grad_(False)
        rows = dict(zip(problem.slots, steps.split(problem.layout.sizes, 1), strict=True))
        tensors = {
            slot.name: slot.place(part).view(n, *slot.shape).to(problem.tensor(slot.name))
            for slot, part in rows.items()
        }
        applied, logits = posterior.applied, posterior.likelihood
        width = None
        if applied is not None and applied.tilt is not None and not logits.has_noise:
            width = TemperedLogits(applied.tilt.moved(problem.device, None), logits, problem.channel_dim)
    for name, module in problem.module.named_modules():
        key = f"{name}.weight".lstrip(".")
        if linearised and isinstance(module, nn.Embedding) and module.padding_idx is not None and key in tensors:
            tensors[key][:, module.padding_idx] = 0  # whose row autograd gives no gradient, and predictions no variance
    return tuple(
        DrawnFunction(
            network,
            {name: parts[s].clone() for name, parts in tensors.items()},
            linearised=linearised,
            tied=problem.head is None,
            width=width,
        )
        for s in range(n)
    )


def _copied(module: nn.Module) -> nn.Module:
    with model_lock(module):
        try:
            return copy.deepcopy(module)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedError(
                f"the network cannot be copied, so that functions could be drawn that hold it: {error} Modules of "
                "torch.nn.utils.parametrizations can be, those of the older torch.nn.utils.weight_norm cannot."
            ) from error
