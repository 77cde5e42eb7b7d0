"""Base of engines by other packages; a batch that a package cannot compute, the native engine does.

Before anything is computed a table of every package says of a batch if there is a tensor for which the package has no
such quantity, or a wrong one. Then the batch is *routed*: the native engine computes all of it, and `coverage()` says
so with the reason. Nothing is refused that a route gives.

A package may leave hooks, attributes and gradients on modules, so it never sees the user's. A copy is made for every
batch, is thrown away after it, and must give the outputs and derivatives of the network: a copy of a module that reads
its weights through a closure, say, would have none of its derivatives.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import numbers_are_known
from laplace.core.memory import DATUM, in_slices, ran_out
from laplace.core.positions import OutputChoice
from laplace.engines.engine import BatchSummary, CurvatureEngine, EngineOptions, detached
from laplace.engines.kron_parts import KronBlock, KronParts
from laplace.engines.native.autograd import BackwardPasses, without_cudnn
from laplace.engines.native.forward import ForwardPass, record
from laplace.engines.native.functions import FunctionCall, LayerCall
from laplace.engines.native.kinds import HessianEngine, OuterEngine
from laplace.engines.native.proof import close, first_of_use
from laplace.engines.native.rules import BatchAxis
from laplace.engines.sinks import BatchForm, BlockSink, DiagSink, ProductSink, Sink
from laplace.errors import CurvatureError, InstallationWarning, MissingDependency, ignore, warn
from laplace.jacobian.jacobian import Jacobian, chosen
from laplace.likelihoods.base import Likelihood, Observed
from laplace.likelihoods.categorical import classes_of
from laplace.likelihoods.checks import refuse_gaps
from laplace.weights.problem import Caller, Problem, reduce_features


@dataclass(frozen=True, eq=False)
class CopiedBatch:
    """A batch with a copy of the network, or of its head, which a package may write to."""

    module: nn.Module  # Gives `[B, C]` for `x`. The copy itself if it is called with one tensor and returns one.
    x: Inputs  # Inputs of the network, or features of the head
    y: Tensor  # Checked targets
    # The copy's random parameters, whole, one per slot; nothing else in the copy requires gradients
    tensors: tuple[nn.Parameter, ...]
    copies: Mapping[nn.Module, nn.Module]  # The copy of every module of the network that was copied
    of_head: bool  # True if only the head was copied, so that `x` are its inputs
    watched: ForwardPass  # The captured pass of the network itself
    probe: Tensor  # The random cotangent u `[B, C]` of the proof
    gradients: tuple[Tensor, ...]  # Jᵀu by tensor, whole, of the copy and of the network

    def input_shape(self, slot: int) -> torch.Size:
        """Shape of the inputs of the copied layer of a tensor with one use."""
        return self.x.shape if self.of_head else self.call(slot).x.shape

    def call(self, slot: int) -> LayerCall:
        """The captured use of a tensor with one use."""
        return self.watched.capture.calls[self.watched.plan[slot].uses[0].call]

    def layer(self, slot: int) -> tuple[nn.Module, str]:
        """The copied layer of a tensor with one use, and the tensor's attribute there."""
        return self.copies[self.call(slot).module], self.watched.plan[slot].uses[0].attribute


def copied_batch(watched: ForwardPass, y: Tensor) -> CopiedBatch:
    """A proven copy for a batch: of the head where the outputs are the head's, else of the network."""
    problem, f = watched.problem, watched.capture.f
    probe = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)
    stand_ins = [watched.capture.stand_ins[slot.name] for slot in problem.slots]
    with watched.capture.backward(1, len(stand_ins)):
        gradients = _gradients(f, stand_ins, probe)
    sources: list[tuple[nn.Module, Inputs]] = []
    if problem.head is not None:
        head = problem.module.get_submodule(problem.head)
        calls = [call for call in watched.capture.calls if call.by is head]
        if len(calls) == 1 and 0 in watched.capture.heads:
            sources.append((head, reduce_features(calls[0].x.detach(), problem.reduction)))
    if problem.reduction is None:
        sources.append((problem.module, detached(watched.x)))
    for source, x in sources:
        module, tensors, copies = _copied(problem, source, x)
        of_head = source is not problem.module
        batch = CopiedBatch(module, x, y, tensors, copies, of_head, watched, probe, gradients)
        if _is_faithful(batch):
            return batch
    raise CurvatureError("a copy of the network does not have its outputs and derivatives")


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
    if isinstance(x, Tensor) and (source is not problem.module or problem.forward_fn is None):
        with torch.no_grad():
            if isinstance(copied(x), Tensor):
                return copied, tensors, copies
    return Caller(copied, problem.forward_fn), tensors, copies


def _untied(head: nn.Module, tensors: tuple[nn.Parameter, ...]) -> tuple[nn.Parameter, ...]:
    """Separates the tensors of a head from those of the network that they are tied to."""
    own: dict[int, nn.Parameter] = {}
    for name, tensor in list(head.named_parameters()):
        own[id(tensor)] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        head.register_parameter(name, own[id(tensor)])
        tensor.requires_grad_(False)
    return tuple(own[id(tensor)] for tensor in tensors)


def _is_faithful(batch: CopiedBatch) -> bool:
    """True if the copy has the outputs of the network and, for a random cotangent, its gradients."""
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


_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""Errors that packages raise for a network that they cannot differentiate."""


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """Kronecker factors of the layer of a tensor, summed over a batch."""

    output: Tensor  # Σ g gᵀ over data and positions, `[O, O]`
    inputs: Tensor | None  # Σ a aᵀ over data and positions, `[I, I]`, or None for a bias
    positions: int  # Number of terms of the sum on the input side


class PackageEngine(CurvatureEngine):
    """Computes by a package the batches of which it is right, and others by the native engine of the same kind."""

    package: str  # Its name
    install: str  # The command that brings it
    load: Callable[[], ModuleType]  # Imports it with the modules that are needed
    native_type: type[OuterEngine] | type[HessianEngine]  # Class of the native engine of the same kind
    needs_plan: bool = True  # Whether the outputs must split over the data, as all but the Hessian's must

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.api: Any = imported(self.load, self.package, self.install)
        self.native = self.native_type(problem, likelihood, options)
        self.kind = self.native.kind
        self.generator = self.native.generator if options.stochastic else None
        self.loss, self.factor = likelihood.torch_loss()
        self._reason: str | None = None  # why a batch was native, empty if none was; None before the first

    @classmethod
    def make(cls, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> CurvatureEngine:
        """The package's engine; where it cannot be imported the native one of the same kind, with one warning."""
        try:
            return cls(problem, likelihood, options)
        except MissingDependency as missing:
            if cls.package not in _MISSED:
                message = f"backend={cls.name} is computed by the native engine, with the same results: {missing}."
                warn(message, InstallationWarning)
                _MISSED.add(cls.package)
            return cls.native_type(problem, likelihood, options)

    # The package's own table.

    @abstractmethod
    def computes(self) -> Mapping[str, Callable[..., Any]]:
        """Functions of a `CopiedBatch` by primitive.

        `full`: `[P, P]`; `diag`: `[p]` of every tensor; `kron`: `LayerFactors` likewise; `blocks(batch, groups)`:
        `[p, p]` each; `matmul(batch, vectors)`: `[R, P]`; `jacobian`: `[B, C, P]`. All are of the unit negative log
        likelihood.
        """

    @abstractmethod
    def obstacle(self, primitive: str, watched: ForwardPass) -> str:
        """The reason why a captured batch is left to the native engine; empty if it is not."""

    def accumulate(self, x: Inputs, y: Tensor, sink: Sink) -> BatchSummary:
        if len(sink.parts) > 1:
            summary, *_ = [self.accumulate(x, y, part) for part in sink.parts]
            return summary
        if isinstance(sink, DiagSink) and sink.bases is not None:
            return self.native.accumulate(x, y, sink)
        if sink.quantity not in self.computes():
            self._note(f"it has no {sink.quantity}")
            return self.native.accumulate(x, y, sink)
        watched, targets = self._watch(x, y)
        refuse_gaps(targets.y, f"backend={self.name}")
        arguments = (sink.vectors[0],) if isinstance(sink, ProductSink) else ()
        arguments = (sink.groups,) if sink.quantity == "blocks" else arguments
        values, reason = self._computed(sink.quantity, watched, targets.y, *arguments)
        self._note(reason)
        if reason:
            return self.native.accumulate(x, y, sink)
        if isinstance(sink, ProductSink):
            sink.put(values.unsqueeze(0).to(sink.vectors))
        elif isinstance(sink, BlockSink):
            blocks = [values] if sink.quantity == "full" else values
            sink.put([block.to(self.dtype).unsqueeze(0) for block in blocks])
        elif isinstance(sink, DiagSink):
            sink.begin(BatchForm(self.problem, 1, self.dtype, self.dtype))  # which chooses the dtype of the sum
            sink.put(torch.cat(values).to(self.dtype).unsqueeze(0))
        else:
            sink.put(self._kron_parts(values, first_of_use(watched.plan)))
        return self.native.summary(watched.f, targets)

    def _kron_parts(self, layers: Sequence[LayerFactors], origins: Sequence[int]) -> KronParts:
        """Factors of all tensors, restricted to the random entries, under the keys of the native engine."""
        factors: dict[str, Tensor] = {}
        blocks: list[KronBlock] = []
        for i, (slot, layer) in enumerate(zip(self.problem.slots, layers, strict=True)):
            picked, output, inputs = slot.selection, layer.output, layer.inputs
            if picked is not None:
                output = _square(output, picked.rows)
                inputs = None if inputs is None else _square(inputs, picked.cols)
            left = f"out:{origins[i]}" if picked is None else f"own:{i}"
            right, positions = None if inputs is None else f"in:{i}", f"positions:{i}"
            factors[left] = output.to(self.dtype)[None, None]
            factors[positions] = torch.tensor(float(layer.positions), dtype=self.dtype, device=output.device)
            if inputs is not None:
                factors[f"in:{i}"] = inputs.to(self.dtype).unsqueeze(0)
            index = None if picked is None else picked.index
            blocks.append(KronBlock("kron", slot.size, left, right, positions, index=index))
        return KronParts(factors, tuple(blocks))

    def jacobian(
        self, x: Inputs, *, create_graph: bool = False, choice: OutputChoice | None = None
    ) -> Generator[tuple[Jacobian, Tensor]]:
        # A trace takes the native operations: a package's are proven by random numbers, which a graph would draw again.
        if create_graph or not numbers_are_known() or "jacobian" not in self.computes():
            yield from self.native.jacobian(x, create_graph=create_graph, choice=choice)
        else:
            yield from chosen(self._jacobians(x), choice)

    def _jacobians(self, x: Inputs) -> Generator[tuple[Jacobian, Tensor]]:
        watched = self.native.forward(x)
        if watched.positions:
            yield from self.native.jacobian(x)
            return
        n_data, outputs = watched.f.shape
        step = max(1, self.native.memory_budget // (outputs * self.problem.layout.n_params * self.dtype.itemsize))

        def jacobian_of(part: slice) -> tuple[Inputs, Tensor, Tensor | None]:
            whole = part == slice(0, n_data)
            some = x if whole else batches.select(x, part, n_data)
            seen = watched if whole else self.native.forward(some)
            return some, seen.f, self._computed("jacobian", seen, None)[0]

        for _, (some, f, values) in in_slices(n_data, step, jacobian_of, DATUM):
            if values is None:
                yield from self.native.jacobian(some)
            else:
                yield Jacobian.from_dense(values.to(self.dtype), self.problem.layout.sizes), f

    def coverage(self) -> dict[str, str]:
        names, known = [slot.name for slot in self.problem.slots], self.native.coverage()
        if not self._reason:
            return {} if self._reason is None else dict.fromkeys(names, self.package)
        return {name: f"{known.get(name, 'native')}, not {self.package} ({self._reason})" for name in names}

    def _note(self, reason: str) -> None:
        """Remembers for `coverage` why a batch was native, the first time."""
        self._reason = self._reason or reason

    def _computed(self, primitive: str, watched: ForwardPass, y: Tensor | None, *arguments: Any) -> tuple[Any, str]:
        """Values of the package, or None, and the reason why the batch is native, empty if it is not."""
        if reason := self._common_obstacle(watched, y) or self.obstacle(primitive, watched):
            return None, reason
        ignore(*_OF_PACKAGES)
        try:
            with (
                watched.problem.on_private_copy(),
                without_cudnn(self.problem.module),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                classes = None if y is None else classes_of(y, self.likelihood)  # packages read no soft labels
                batch = copied_batch(watched, watched.f if y is None else y if classes is None else classes)
                return self.computes()[primitive](batch, *arguments), ""
        except _FAILURES as error:
            if ran_out(error):
                raise
            return None, _first_line(error)

    def _watch(self, x: Inputs, y: Tensor) -> tuple[ForwardPass, Observed]:
        """A captured pass of the network itself, with checked targets."""
        if self.needs_plan:
            return self.native.observe(x, y)
        x = detached(x)
        with torch.inference_mode(False), self.problem.on_private_copy() as problem:
            capture = record(problem, x, loop=False)
        watched = ForwardPass(problem, x, capture, (), self.native.memory_budget)
        return watched, self.native.targets(watched.f, y, watched.positions)

    def _common_obstacle(self, watched: ForwardPass, y: Tensor | None) -> str:
        """The reason why no package can compute this batch; empty if there is none."""
        if watched.positions:
            return "outputs with positions"
        ignored = self.likelihood.ignore_index
        tensors = [self.problem.tensor(slot.name) for slot in self.problem.slots]
        if y is not None and self.split_outputs and watched.f.shape[1] > 1:
            return "one noise per output"
        if y is not None and ignored is not None and y.ndim == 1 and bool((y == ignored).any()):
            return "ignored labels"
        if y is not None and self.kind != "ggn" and classes_of(y, self.likelihood) is not None:
            return "soft labels"
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            return "tensors of several dtypes or devices"
        return "half precision" if tensors[0].dtype.itemsize < torch.float32.itemsize else ""


_OF_PACKAGES = (
    ("`torch.jit.script` is deprecated", DeprecationWarning, r"torch\.jit\."),
    ("Full backward hook is firing", UserWarning, r"laplace\.curvature\."),
    ("Using a non-full backward hook", FutureWarning, r"torch\.nn\.modules\."),
)
"""Warnings of PyTorch of what packages call, which are no news to the user."""


_MISSED: set[str] = set()
"""Packages of which was warned that they are missing."""


def imported(load: Callable[[], ModuleType], name: str, install: str) -> ModuleType:
    """An optional package; `install` is the command that brings it and leaves PyTorch alone.

    Raises:
        MissingDependency: The package is missing, or its import fails, as that of a torchvision beside another PyTorch.
    """
    ignore(*_OF_PACKAGES)
    try:
        return load()
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise MissingDependency(f"this backend needs {name}, which cannot be imported ({error}); {install}") from error


def layer_obstacle(watched: ForwardPass, fault: Callable[[LayerCall, BatchAxis], str]) -> str:
    """The first tensor that is not explained by one use of one layer without a fault; empty if there is none."""
    for slot, rule in zip(watched.problem.slots, watched.plan, strict=True):
        call = watched.capture.calls[rule.uses[0].call] if len(rule.uses) == 1 else None
        if rule.description == "unused":
            reason = "the batch does not use it"
        elif call is None:
            reason = "several uses" if rule.uses else "no layer rule"
        else:
            reason = "no layer rule" if isinstance(call.by, FunctionCall) else fault(call, rule.uses[0].axis)
        if reason:
            return f"{slot.name}: {reason}"
    return ""


def obstacle_by_row(watched: ForwardPass, fault: Callable[[LayerCall], str]) -> str:
    """The same of a package that takes the first dimension of a layer's inputs for the data."""

    def of_rows(call: LayerCall, axis: BatchAxis) -> str:
        if axis is not BatchAxis.LEADING or len(call.x) != watched.n_data:
            return "the data are not in the first dimension of a layer's inputs"
        return fault(call)

    return layer_obstacle(watched, of_rows)


def _square(matrix: Tensor, index: Tensor | None) -> Tensor:
    return matrix if index is None else matrix[index.to(matrix.device)][:, index.to(matrix.device)]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    words = text[0] if text else type(error).__name__
    return words if isinstance(error, CurvatureError) else f"{type(error).__name__}: {words[:80]}"
