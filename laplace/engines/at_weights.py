"""Outputs of a network at many weights, none of which is ever written into it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.memory import Unit, in_slices
from laplace.core.positions import unrolled
from laplace.core.precision_policy import at_least_single, widened
from laplace.engines.engine import CurvatureEngine, detached
from laplace.engines.native.autograd import without_cudnn
from laplace.weights.problem import Problem

# Outputs of the network at sampled weights: a pass for each sample, or one for many of them by `torch.func.vmap`.
#
# Every operation has a fixed cost, of calling it, beside that of its numbers. A vectorised pass pays it once for many
# samples, but its tensors are larger than a processor's caches, and a convolution that has another kernel for every
# sample is slower. So a network is vectorised whose operations write few numbers, and what decides is counted: one pass
# of one sample is watched, once per shape of the inputs. Then both ways are run on the first samples and must agree: a
# network that vmap cannot run, or runs as another function (it draws random numbers, counts its calls), takes a pass
# for each sample. Weights are drawn before, so that the samples are the same either way.


CHUNK_BYTES = 2**23
"""Bytes of weights and outputs of all operations that a vectorised pass has at once, in the order of a cache's."""

NUMBERS_PER_OPERATION = 2**13
"""Numbers that an operation writes per sample, on average, beyond which its fixed cost does not show."""

LEAST_SAMPLES = 8
"""Samples below which a vectorised pass, whose own fixed cost is that of some plain ones, does not pay."""

_COMPARED = 2
"""Samples on which both ways must agree."""

_SAMPLE = Unit("sample of the weights", "samples of the weights", "Predict fewer data at once.")


def outputs_at(problem: Problem, x: Inputs, thetas: Tensor, memory_budget: int) -> Tensor:
    """Outputs `[S, B, C]`, or `[S, B, *positions, C]`, of the network on x at weights `[S, P]`; left as it was."""
    with without_cudnn(problem.module) if _is_differentiated(thetas, x) else nullcontext():
        return _outputs_at(problem, x, thetas, memory_budget)


def _is_differentiated(thetas: Tensor, x: Inputs) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (thetas, *batches.tensors(x)))


def _outputs_at(problem: Problem, x: Inputs, thetas: Tensor, memory_budget: int) -> Tensor:
    if len(thetas) >= LEAST_SAMPLES and not _is_watched(problem.module):
        key = (batches.signature(x), thetas.dtype, memory_budget)
        if key not in problem.samples_at_once:
            problem.samples_at_once[key] = _samples_at_once(problem, x, thetas, min(memory_budget, CHUNK_BYTES))
        at_once = problem.samples_at_once[key]
        outputs = _tried(problem, x, thetas, at_once) if at_once > 1 else None
        if outputs is not None:
            return outputs
        problem.samples_at_once[key] = 1
    return one_by_one(problem, x, thetas)


def one_by_one(problem: Problem, x: Inputs, thetas: Tensor) -> Tensor:
    """Outputs by a pass for each sample."""
    at_once = max(1, CHUNK_BYTES // _weight_bytes(problem, thetas))  # where a few entries are random, tensors are made
    outputs: list[Tensor] = []
    with problem.on_private_copy() as problem:
        fixed = problem.detached()
        for part in thetas.split(at_once):
            stacked = problem.stacked(part)
            with problem.holding(fixed) as put:
                for weights in zip(*(tensor.unbind() for tensor in stacked.values()), strict=True):
                    put(dict(zip(stacked, weights, strict=True)))
                    outputs.append(problem.outputs(x))
    return torch.stack(outputs)


def vectorised(problem: Problem, x: Inputs, thetas: Tensor, at_once: int) -> Tensor:
    """Outputs by passes of several samples; raises whatever vmap or the network raises where it cannot be run so."""
    with problem.on_private_copy() as problem, _attention_by_rule():
        fixed = problem.detached()

        def run(part: slice) -> Tensor:
            stacked = problem.stacked(thetas[part])
            with problem.holding(fixed) as put:

                def one(weights: dict[str, Tensor]) -> Tensor:
                    put(weights)
                    return problem.outputs(x)

                return vmap(one, randomness="error")(stacked)

        parts = [outputs for _, outputs in in_slices(len(thetas), at_once, run, _SAMPLE)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attention_by_rule() -> AbstractContextManager[object]:
    """Attention takes the kernel that vmap has a rule for."""
    return sdpa_kernel(SDPBackend.MATH)


def _compiled_code_run_eagerly() -> AbstractContextManager[object]:
    """Runs functions that a network has compiled, and `torch.cond`, eagerly: watched, they would fail ever after."""
    set_stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    return nullcontext() if set_stance is None else set_stance("force_eager")


def _weight_bytes(problem: Problem, thetas: Tensor) -> int:
    """Bytes of the tensors of one sample."""
    return sum(slot.shape.numel() for slot in problem.slots) * thetas.element_size()


def _tried(problem: Problem, x: Inputs, thetas: Tensor, at_once: int) -> Tensor | None:
    """Outputs by vectorised passes; None where the network cannot be run so."""
    try:
        return vectorised(problem, x, thetas, at_once)
    except Exception:  # of anything: a pass for each sample raises it again, if it is the network's own fault
        return None


def _samples_at_once(problem: Problem, x: Inputs, thetas: Tensor, budget: int) -> int:
    """Samples that one pass should take; 1 for a pass for each."""
    counter = _Counter()
    try:
        with problem.on_private_copy() as own, own.holding(own.substituted(thetas[0])), _attention_by_rule():
            own.outputs(x)  # what a first pass compiles must not be compiled while it is watched
            with _compiled_code_run_eagerly(), counter:
                own.outputs(x)
    except Exception:  # of operations that cannot be watched, say; a fault of the network is raised again later
        return 1
    # A kernel may want the weights in another order, in a copy.
    at_once = budget // (2 * _weight_bytes(problem, thetas) + counter.bytes)
    small = counter.numbers <= NUMBERS_PER_OPERATION * counter.operations
    if at_once < LEAST_SAMPLES or not small or counter.without_rule:
        return 1
    together = _tried(problem, x, thetas[:_COMPARED], _COMPARED)
    agree = together is not None and _agree(one_by_one(problem, x, thetas[:_COMPARED]), together)
    return at_once if agree else 1


def _is_watched(model: nn.Module) -> bool:
    """True if passes are seen by others, or run by compiled code: those are to be of one sample each."""
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "_orig_mod" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
        for module in model.modules()
    )


def _agree(plain: Tensor, together: Tensor) -> bool:
    """True if two ways to compute the same numbers differ by no more than rounding may."""
    if plain.shape != together.shape or plain.dtype != together.dtype:
        return False
    a, b = widened(plain.detach()), widened(together.detach())
    tolerance = torch.finfo(plain.dtype).eps ** 0.5 if plain.is_floating_point() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(a.nan_to_num(0, 0, 0).norm()), equal_nan=True)


class _Counter(TorchDispatchMode):
    """Counts what operations write, views and what is written in place apart.

    Attributes:
        operations: How many there were.
        numbers: Numbers that they wrote.
        bytes: Bytes of these.
        without_rule: How many vmap would run sample by sample, which saves nothing.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.numbers = self.bytes = self.without_rule = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, or the first operation that is counted imports PyTorch's compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):  # `torch.cond` and the like, which run functions
            self.without_rule += 1
            return result
        ruled = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "FuncTorchBatched")
        self.without_rule += not ruled and any(isinstance(arg, Tensor) for arg in args)
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        written = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]
        self.operations += 1
        self.numbers += sum(t.numel() for t in written)
        self.bytes += sum(t.numel() * t.element_size() for t in written)
        return result


def outputs_of_weights(
    engine: CurvatureEngine, mean: Tensor, x: Inputs, model_kwargs: dict[str, Any], *, create_graph: bool = False
) -> Callable[[Tensor], Tensor]:
    """Maps weights `[S, P]` to the network's outputs on x, `[S, B, C]`, or `[S, B, *positions, C]`.

    A head on frozen features is linear in its weights, so that one pass of the trunk serves all samples.
    """
    problem = engine.problem
    x = batches.to_device(x, problem.device)
    if problem.head is not None and not model_kwargs:
        parts = engine.head_jacobian(x, create_graph=create_graph)
        if parts is not None:
            positions = parts[0][0].positions

            def exact(thetas: Tensor) -> Tensor:
                """f + J (θ_s − θ*)."""
                rows = [f.to(at_least_single(f)) + jacobian.apply(thetas - mean) for jacobian, f in parts]
                return unrolled(torch.cat(rows, 1), positions, 1)

            return exact
    problem = with_arguments(problem, model_kwargs)
    x = x if create_graph else detached(x)

    def run(thetas: Tensor) -> Tensor:
        samples = outputs_at(problem, x, thetas, engine.options.budget(problem.device))
        return samples.to(at_least_single(samples))

    return run


def with_arguments(problem: Problem, model_kwargs: dict[str, Any]) -> Problem:
    """The problem whose network is called with further arguments."""
    if not model_kwargs:
        return problem
    call = problem.forward_fn or batches.call

    def forward(model: torch.nn.Module, x: Inputs) -> Any:
        return call(_Partial(model, model_kwargs), x)

    return replace(problem, forward_fn=forward)


class _Partial(torch.nn.Module):
    """A model with some arguments of its forward filled in."""

    def __init__(self, model: torch.nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs, **self.arguments)
