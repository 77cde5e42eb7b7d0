"""Copies of the network for packages that write to what they are given, proved to compute the same.

A package may leave hooks, attributes and gradients on modules, so it never sees the user's. A copy is made for every
batch, is thrown away after it, and must give the outputs and derivatives of the network: a copy of a module that reads
its weights through a closure, say, would have none of its derivatives.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.batch import Inputs
from laplace.core.memory import ran_out
from laplace.engines.engine import detached
from laplace.engines.native.autograd import BackwardPasses
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.functions import LayerCall
from laplace.engines.native.proof import close
from laplace.errors import CurvatureError
from laplace.weights.problem import Caller, Problem, reduce_features


@dataclass(frozen=True, eq=False)
class CopiedBatch:
    """A batch with a copy of the network, or of its head, which a package may write to.

    Attributes:
        module: Gives `[B, C]` for `x`. The copy itself if it is called with one tensor and returns one.
        x: Inputs of the network, or features of the head.
        y: Checked targets.
        tensors: The copy's random parameters, whole, one per slot; nothing else in the copy requires gradients.
        copies: The copy of every module of the network that was copied.
        of_head: True if only the head was copied, so that `x` are its inputs.
        watched: The captured pass of the network itself.
        probe: The random cotangent u `[B, C]` of the proof.
        gradients: Jᵀu by tensor, whole, of the copy and of the network.
    """

    module: nn.Module
    x: Inputs
    y: Tensor
    tensors: tuple[nn.Parameter, ...]
    copies: Mapping[nn.Module, nn.Module]
    of_head: bool
    watched: ForwardPass
    probe: Tensor
    gradients: tuple[Tensor, ...]

    @property
    def problem(self) -> Problem:
        """The network and its random parameters."""
        return self.watched.problem

    def input_shape(self, slot: int) -> torch.Size:
        """Shape of the inputs of the copied layer that holds a tensor with one use."""
        return self.x.shape if self.of_head else self.call(slot).x.shape

    def call(self, slot: int) -> LayerCall:
        """The captured use of a tensor with one use."""
        return self.watched.capture.calls[self.watched.plan[slot].uses[0].call]

    def layer(self, slot: int) -> tuple[nn.Module, str]:
        """The copied layer that holds a tensor with one use, and the attribute under which it does."""
        return self.copies[self.call(slot).module], self.watched.plan[slot].uses[0].attribute

    def treat_only(self, slots: Collection[int]) -> None:
        """Makes the other tensors constants: what a package need not differentiate does not stop it."""
        for i, tensor in enumerate(self.tensors):
            tensor.requires_grad_(i in slots)


def copied_batch(watched: ForwardPass, y: Tensor) -> CopiedBatch:
    """A proven copy for a batch: of the head where the outputs are the head's, else of the network.

    Args:
        watched: The captured pass of the network.
        y: Checked targets.

    Raises:
        CurvatureError: No copy gives the outputs and derivatives of the network; the message is the reason.
    """
    problem, f = watched.problem, watched.capture.f
    probe = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)
    stand_ins = [watched.capture.stand_ins[slot.name] for slot in problem.slots]
    with watched.capture.backward(1, len(stand_ins)):
        gradients = _gradients(f, stand_ins, probe)
    features = _features(watched)
    sources: list[tuple[nn.Module, Inputs]] = []
    if features is not None and problem.head is not None:
        sources.append((problem.module.get_submodule(problem.head), features))
    if problem.reduction is None:
        sources.append((problem.module, detached(watched.x)))
    for source, x in sources:
        module, tensors, copies = _copied(problem, source, x)
        batch = CopiedBatch(module, x, y, tensors, copies, x is features, watched, probe, gradients)
        if _is_faithful(batch):
            return batch
    raise CurvatureError("a copy of the network does not have its outputs and derivatives")


def _features(watched: ForwardPass) -> Tensor | None:
    """Inputs of the head, if it has one use and its outputs are the network's."""
    problem, capture = watched.problem, watched.capture
    if problem.head is None:
        return None
    head = problem.module.get_submodule(problem.head)
    calls = [call for call in capture.calls if call.by is head]
    if len(calls) != 1 or 0 not in capture.heads:
        return None
    x = calls[0].x.detach()
    return reduce_features(x, problem.reduction)


def _copied(
    problem: Problem, source: nn.Module, x: Inputs
) -> tuple[nn.Module, tuple[nn.Parameter, ...], dict[nn.Module, nn.Module]]:
    """A copy of a module as something to call on x, its random parameters, and the copies of its modules."""
    originals = [problem.tensor(slot.name) for slot in problem.slots]
    random = {id(tensor) for tensor in originals}
    parameters = {id(p): nn.Parameter(p.detach().clone(), requires_grad=id(p) in random) for p in source.parameters()}
    memo: dict[int, Any] = {**parameters, **{id(buffer): buffer.detach().clone() for buffer in source.buffers()}}
    try:
        copied = copy.deepcopy(source, memo)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if ran_out(error):
            raise
        raise CurvatureError(f"the network cannot be copied: {error}") from error
    copies: dict[nn.Module, nn.Module] = {m: memo[id(m)] for m in source.modules() if id(m) in memo}
    tensors = tuple(parameters[id(tensor)] for tensor in originals)
    if problem.head is not None and source is problem.module:
        tensors = _untied(copied.get_submodule(problem.head), tensors)
    for module in copied.modules():
        module.training = False
        if not module._backward_hooks:
            module._is_full_backward_hook = None  # hooks of another kind, long gone, would forbid a package's
    plain = isinstance(x, Tensor) and (source is not problem.module or problem.forward_fn is None)
    if plain and isinstance(_called(copied, x), Tensor):
        return copied, tensors, copies
    return Caller(copied, problem.forward_fn), tensors, copies


def _called(module: nn.Module, x: Tensor) -> object:
    with torch.no_grad():
        return module(x)


def _untied(head: nn.Module, tensors: tuple[nn.Parameter, ...]) -> tuple[nn.Parameter, ...]:
    """Gives a head tensors of its own where they are tied to others of the network, which stay fixed."""
    own: dict[int, nn.Parameter] = {}
    for name, tensor in list(head.named_parameters()):
        own[id(tensor)] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        head.register_parameter(name, own[id(tensor)])
        tensor.requires_grad_(False)
    return tuple(own[id(tensor)] for tensor in tensors)


def _is_faithful(batch: CopiedBatch) -> bool:
    """True if the copy has the outputs of the network and, for the cotangent of the probe, its gradients."""
    f = batch.watched.f
    outputs = batch.module(batch.x)
    if outputs.shape != f.shape or not close(outputs.detach(), f, f.norm()):
        return False
    gradients = _gradients(outputs, batch.tensors, batch.probe)
    bound = torch.stack([gradient.norm() for gradient in batch.gradients]).norm()
    return all(close(actual, expected, bound) for actual, expected in zip(gradients, batch.gradients, strict=True))


def _gradients(f: Tensor, tensors: Sequence[Tensor], u: Tensor) -> tuple[Tensor, ...]:
    """Jᵀu by tensor, zero where f does not depend on one."""
    if not f.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in tensors)
    gradients = BackwardPasses([f], tensors).gradients(u)
    return tuple(torch.zeros_like(t) if g is None else g.to_dense() for t, g in zip(tensors, gradients, strict=True))
