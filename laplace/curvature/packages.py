"""Base of engines by other packages; what a package cannot compute, the native engine does.

A table of every package says, before anything is computed, for which tensors of a batch it has a quantity and for which
it has none, or a wrong one; those are *routed*: the native engine computes them, and `coverage()` says so with the
reason. Nothing is refused that a route gives.

A package may leave hooks, attributes and gradients on modules, so it never sees the user's. A copy is made for every
batch, is thrown away after it, and must give the outputs and derivatives of the network: a copy of a module that reads
its weights through a closure, say, would have none of its derivatives.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
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
from laplace.engines.kron_parts import Factor, KronBlock
from laplace.engines.native.autograd import BackwardPasses, without_cudnn
from laplace.engines.native.forward import ForwardPass, record
from laplace.engines.native.functions import FunctionCall, LayerCall
from laplace.engines.native.kinds import HessianEngine, OuterEngine
from laplace.engines.native.proof import close, first_of_use
from laplace.engines.native.rules import BatchAxis
from laplace.engines.sinks import BlockSink, DiagSink, KronSink, ProductSink, Sink
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

    def treat_only(self, slots: Collection[int]) -> None:
        """Freezes the other tensors, so that layers that a package cannot differentiate do not stop it."""
        for i, tensor in enumerate(self.tensors):
            tensor.requires_grad_(i in slots)


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


Reasons = dict[int, str]
"""Reasons why tensors, by index, are left to the native engine."""

_WHOLE = ("full", "blocks", "matmul", "jacobian")
"""Quantities of all tensors together: if one tensor is left to the native engine, all are."""

_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""Errors that packages raise for a network that they cannot differentiate."""


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """Kronecker factors of the layer of a tensor, summed over a batch."""

    output: Tensor  # Σ g gᵀ over data and positions, `[O, O]`
    inputs: Tensor | None  # Σ a aᵀ over data and positions, `[I, I]`, or None for a bias
    positions: int  # Number of terms of the sum on the input side


class PackageEngine(CurvatureEngine):
    """Computes by a package what it computes correctly, and the rest by the native engine of the same kind."""

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
        self._reasons: Reasons = {}

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

        `full`: `[P, P]`; `diag`: `[p]` for every tensor asked for, by index; `kron`: `LayerFactors` likewise;
        `blocks(batch, groups)`: `[p, p]` each; `matmul(batch, vectors)`: `[R, P]`; `jacobian`: `[B, C, P]`.
        `diag` and `kron` get the indices of the tensors asked for as their second argument. All are of the unit
        negative log likelihood.
        """

    @abstractmethod
    def obstacles(self, primitive: str, watched: ForwardPass) -> Reasons:
        """Reasons why tensors of a captured batch are left to the native engine."""

    def accumulate(self, x: Inputs, y: Tensor, sink: Sink) -> BatchSummary:
        if len(sink.parts) > 1:
            summary, *_ = [self.accumulate(x, y, part) for part in sink.parts]
            return summary
        if isinstance(sink, DiagSink) and sink.bases is not None:
            return self.native.accumulate(x, y, sink)
        if sink.quantity not in self.computes():
            self._note(self._everything(f"it has no {sink.quantity}"))
            return self.native.accumulate(x, y, sink)
        watched, targets = self._watch(x, y)
        refuse_gaps(targets.y, f"backend={self.name}")
        arguments = (sink.vectors[0],) if isinstance(sink, ProductSink) else ()
        arguments = (sink.groups,) if sink.quantity == "blocks" else arguments
        values, reasons = self._computed(sink.quantity, watched, targets.y, *arguments)
        self._note(reasons)
        if values is None:
            return self.native.accumulate(x, y, sink)
        if isinstance(sink, ProductSink):
            sink.put(values.unsqueeze(0).to(sink.vectors))
        elif isinstance(sink, BlockSink):
            blocks = [values] if sink.quantity == "full" else values
            sink.put([block.to(self.dtype).unsqueeze(0) for block in blocks])
        elif isinstance(self.native, OuterEngine):
            self.native.add(watched, targets, sink, only=[i for i, reason in reasons.items() if reason])
            origins = first_of_use(watched.plan)
            for i, own in values.items():
                if isinstance(sink, KronSink):
                    self._put_factors(sink, i, origins[i], own)
                elif isinstance(sink, DiagSink):
                    sink.put_tensor(i, own.to(self.dtype))
        return self.native.summary(watched.f, targets)

    def _put_factors(self, sink: KronSink, slot: int, origin: int, layer: LayerFactors) -> None:
        """Factors of a tensor, restricted to the random entries, under the keys of the native engine."""
        picked, output, inputs = self.problem.slots[slot].selection, layer.output, layer.inputs
        if picked is not None:
            output = _square(output, picked.rows)
            inputs = None if inputs is None else _square(inputs, picked.cols)
        out = f"out:{origin}" if picked is None else f"own:{slot}"
        count = torch.tensor(float(layer.positions), dtype=self.dtype, device=output.device)
        factors: dict[str, Factor] = {out: output.to(self.dtype)[None, None], f"positions:{slot}": count}
        if inputs is not None:
            factors[f"in:{slot}"] = inputs.to(self.dtype).unsqueeze(0)
        sink.put_block(slot, KronBlock(
            "kron", self.problem.slots[slot].size, out, None if inputs is None else f"in:{slot}", f"positions:{slot}",
            index=None if picked is None else picked.index,
        ), factors)  # fmt: skip

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
        known, names = self.native.coverage(), [slot.name for slot in self.problem.slots]
        return {
            names[i]: f"{known.get(names[i], 'native')}, not {self.package} ({reason})" if reason else self.package
            for i, reason in self._reasons.items()
        }

    # The package's part of a batch.

    def _computed(self, primitive: str, watched: ForwardPass, y: Tensor | None, *arguments: Any) -> tuple[Any, Reasons]:
        """Values of the package, or None, and for every tensor the reason why it is left out (empty if it is not)."""
        common = self._common_obstacle(watched, y)
        reasons = self.obstacles(primitive, watched) if common is None else self._everything(common)
        if reasons and primitive in _WHOLE:
            reasons = self._everything(next(iter(reasons.values()))) | reasons
        own = [i for i in range(len(self.problem.slots)) if i not in reasons]
        if not own:
            return None, reasons
        ignore(*_OF_PACKAGES)
        try:
            with (
                watched.problem.apart(),
                without_cudnn(self.problem.module),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                classes = None if y is None else classes_of(y, self.likelihood)  # packages read no soft labels
                batch = copied_batch(watched, watched.f if y is None else y if classes is None else classes)
                values = self.computes()[primitive](batch, *(arguments if primitive in _WHOLE else (own,)))
        except _FAILURES as error:
            if ran_out(error):
                raise
            return None, self._everything(_first_line(error))
        return values, dict(sorted((reasons | dict.fromkeys(own, "")).items()))

    def _everything(self, reason: str) -> Reasons:
        return dict.fromkeys(range(len(self.problem.slots)), reason)

    def _watch(self, x: Inputs, y: Tensor) -> tuple[ForwardPass, Observed]:
        """A captured pass of the network itself, with checked targets."""
        if self.needs_plan:
            return self.native.observe(x, y)
        x = detached(x)
        with torch.inference_mode(False), self.problem.apart() as problem:
            capture = record(problem, x, loop=False)
        watched = ForwardPass(problem, x, capture, (), self.native.memory_budget)
        return watched, self.native.targets(watched.f, y, watched.positions)

    def _common_obstacle(self, watched: ForwardPass, y: Tensor | None) -> str | None:
        """The reason why no package can compute this batch, or None."""
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
        return "half precision" if tensors[0].dtype.itemsize < torch.float32.itemsize else None

    def _note(self, reasons: Reasons) -> None:
        """Remembers for `coverage` what was left to the native engine in any batch."""
        self._reasons = {i: self._reasons.get(i) or reason for i, reason in sorted(reasons.items())}


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


def without_one_use(watched: ForwardPass) -> Reasons:
    """Tensors that are not explained by one use of one layer."""
    reasons: Reasons = {}
    for i, rule in enumerate(watched.plan):
        if rule.description == "unused":
            reasons[i] = "the batch does not use it"
        elif len(rule.uses) > 1:
            reasons[i] = "several uses"
        elif not rule.uses or isinstance(watched.capture.calls[rule.uses[0].call].by, FunctionCall):
            reasons[i] = "no layer rule"
    return reasons


def obstacles_of(watched: ForwardPass, fault: Callable[[LayerCall], str]) -> Reasons:
    """Reasons to leave tensors out: not one use of one layer, samples in another dimension, or a fault of the layer."""
    reasons = without_one_use(watched)
    for i, rule in enumerate(watched.plan):
        if i in reasons:
            continue
        call = watched.capture.calls[rule.uses[0].call]
        if rule.uses[0].axis is not BatchAxis.LEADING or len(call.x) != watched.n_data:
            reasons[i] = "the data are not in the first dimension of a layer's inputs"
        elif reason := fault(call):
            reasons[i] = reason
    return reasons


def _square(matrix: Tensor, index: Tensor | None) -> Tensor:
    return matrix if index is None else matrix[index.to(matrix.device)][:, index.to(matrix.device)]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    words = text[0] if text else type(error).__name__
    return words if isinstance(error, CurvatureError) else f"{type(error).__name__}: {words[:80]}"
