"""Whether a network is still the one that was fitted: tensors, attributes, and outputs at some data of the fit."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.inference import kept_for_later
from laplace.core.memory import ran_out
from laplace.core.nested import n_bytes, stored
from laplace.core.pieces import numbers_at_once
from laplace.core.precision_policy import wide_dtype
from laplace.errors import ApproximationWarning, ModelChangedError, ModelChangedWarning, warn
from laplace.network.apart import ATOMS, MOST, is_set
from laplace.network.fsdp import full_tensor, has_sharded_weights, local_part, local_parts, reshard
from laplace.network.model_guard import (
    ThreadDraws,
    autograd_mode,
    generators_of,
    hooks_fire,
    is_alone,
    model_lock,
    own_draws,
    private_copy,
    same_numbers,
    same_random_state,
)
from laplace.network.plain import plain
from laplace.network.tree import HOOKS, attributes_in, modules_of, parameters_of, tensors_of

ROWS, _WHOLE = 2, 64
"""Data that are kept at most: of a network that takes parts of a batch, and of one that takes whole ones alone."""

_INPUT_BYTES = 64 * 2**20
_KEPT_OUTPUTS = 2**20
_ROUNDING, _LARGEST_SHARE = 1000, 0.1
_OTHER_KERNELS = 0.01

_NAMED = 3
"""Changed tensors that an error names."""

_PASSES = 32
"""Passes at most until one differs of a network that draws random numbers: those of two data are often the same."""


@dataclass(frozen=True, eq=False)
class ReferenceOutputs:
    """Inputs of at most two data, and the network's outputs; held in memory alone, never saved."""

    x: Inputs
    outputs: Tensor  # Outputs at them, flat; evenly spaced entries where there are more than a million
    call: ForwardFn
    written: frozenset[str] = frozenset()  # Names of plain attributes that a forward pass writes
    is_alone: bool = False  # True if the outputs at these data were the same beside others in the fit's batch

    @classmethod
    def from_batch(
        cls, x: Inputs, outputs: Tensor, call: ForwardFn, written: Iterable[str] = (), *, is_alone: bool = False
    ) -> ReferenceOutputs:
        """A reference of inputs that are its own, and of outputs `[B, …]`."""
        return cls(x, _spaced(outputs), call, frozenset(written), is_alone)

    def couples(self, model: nn.Module, x: Inputs, n_data: int) -> bool:
        """True if the outputs at data depend on those beside them: those of two are others with one or two more.

        By less than a percent they may be others since more data take other kernels, with faster products (TF32): then
        as many data are compared, the two once more in the place of those beside them.
        """
        count = min(2 * ROWS, n_data)
        try:
            device = next(iter(model.parameters())).device
            rows = batches.to_device(batches.select(x, slice(0, count), n_data), device)
            few = batches.select(rows, slice(0, ROWS), count)
            alone, beside = (outputs_at(model, some, self.call) for some in (few, rows))
            if len(alone) != ROWS or len(beside) <= ROWS or not differ(alone, beside[:ROWS], model):
                return False
            if differ(alone, beside[:ROWS], model, other_kernels=True):
                return True
            again = batches.select(rows, torch.arange(count, device=device) % ROWS, count)
            return differ(outputs_at(model, again, self.call)[:ROWS], beside[:ROWS], model)
        except Exception as error:  # a network that takes whole batches only
            if ran_out(error):
                raise
            return False

    def agrees(self, model: nn.Module, *, changed: bool) -> bool:
        """True if the network has its outputs of then; one that does not run on these data any more has not.

        If no attribute has `changed`, single precision is compared to a percent alone, since users may choose faster
        products between two calls (TF32, bfloat16).
        """
        try:
            for with_gradients in (False, True):  # a network may ask which, and the fit's own pass has them
                outputs = _spaced(outputs_at(model, self.x, self.call, with_gradients=with_gradients))
                if not differ(self.outputs, outputs, model, other_kernels=not changed):
                    return True
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            if ran_out(error):
                raise
        return False

    def moved(self, model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> ReferenceOutputs:
        """The reference of a network that was moved."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        x = batches.transform(self.x, move)
        return replace(self, x=x, outputs=_spaced(outputs_at(model, x, self.call)))


def first_rows(x: Inputs, n_data: int, most: int = ROWS) -> tuple[Inputs, int]:
    """Copies of the first data of a batch, and how many: at most two of them and 64 MiB, but one at least.

    All data, where single ones cannot be taken; objects without tensors are not copied.
    """
    if not batches.can_split(x, n_data):
        return _copied(x), n_data
    bytes_of_one = sum(map(n_bytes, batches.tensors(x))) // max(1, n_data)
    n_rows = min(n_data, most, max(1, _INPUT_BYTES // max(1, bytes_of_one)))
    return _copied(batches.select(x, slice(0, n_rows), n_data)), n_rows


def outputs_at(model: nn.Module, x: Inputs, call: ForwardFn, *, with_gradients: bool = False) -> Tensor:
    """Outputs in evaluation mode, `[B, …]`, by a pass that autograd records as it does those of a fit, or does not."""
    with autograd_mode(), torch.set_grad_enabled(with_gradients), private_copy(model, call) as own:
        return batches.latent(call(own, _copied(x))).detach()


def differ(a: Tensor, b: Tensor, model: nn.Module, *, other_kernels: bool = False) -> bool:
    """True if two outputs of a network differ by more than rounding.

    That is 1,000 times the precision of its numbers, and at most a tenth, relative to the largest output: kernels of
    accelerators may add up in another order every time, and half precision has three digits at most. With
    `other_kernels`, whose products may be of other precision than the numbers, it is a percent in single precision.
    """
    if a.shape != b.shape:
        return True
    distance, largest = _distance(a, b)
    if largest == math.inf:
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return True
        distance, largest = _distance(a[finite], b[finite])
    dtypes = {tensor.dtype for tensor in (a, b, *parameters_of(modules_of(model))) if tensor.is_floating_point()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    share = min(_ROUNDING * eps, _LARGEST_SHARE)
    if other_kernels and eps >= torch.finfo(torch.float32).eps:
        share = max(share, _OTHER_KERNELS)
    return distance > share * largest


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest distance of two entries, and the largest entry of either, infinite unless all are finite."""
    if not a.numel():
        return 0.0, 0.0
    sizes = [(a - b).abs().amax(), a.abs().amax(), b.abs().amax()]
    distance, *largest = torch.stack(sizes).tolist()
    return distance, max(largest) if all(map(math.isfinite, largest)) else math.inf


def _copied(x: Inputs) -> Inputs:
    with kept_for_later():
        return batches.copied(x)


def _same_inputs(a: Inputs, b: Inputs) -> bool:
    """True if inputs are tensors alone, and those of both are equal."""
    tensors = batches.tensors(a)
    if type(a) is not type(b) or batches.signature(a) != batches.signature(b) or not batches.is_dense(a):
        return False
    alone = isinstance(a, Tensor) or (isinstance(a, tuple | Mapping) and len(a) == len(b) == len(tensors))
    return alone and all(map(torch.equal, tensors, batches.tensors(b)))


def _spaced(outputs: Tensor) -> Tensor:
    flat = outputs.detach().flatten()
    return flat[:: max(1, -(-len(flat) // _KEPT_OUTPUTS))].clone()


class DeterminismCheck:
    """Runs the network twice on two data of the first batch, with other random numbers.

    The fit's own pass is one of them, where its engine shows the outputs and two data alone have the same; the other is
    the pass that finds the last layer, where there was one.

    Args:
        model: The network.
        forward_fn: How to call it; None for the default.

    Attributes:
        reference: These data with the outputs, or None: before the first batch, where the outputs are random, or where
            the network does not take a part of a batch.
    """

    def __init__(self, model: nn.Module, forward_fn: ForwardFn | None) -> None:
        self.model = model
        self.call = _Eagerly(forward_fn or batches.call)
        self.reference: ReferenceOutputs | None = None
        self._written: list[str] = []
        self._draws = False
        self._buffers: list[str] = []
        self._depends = False
        self._fitted: Tensor | None = None
        self._early: tuple[Inputs, Tensor] | None = None

    def reuse(self, x: Inputs, n_data: int) -> tuple[Inputs, ForwardFn]:
        """The first data of the first batch, and a call for a pass over them before the fit, which is remembered."""
        rows, _ = first_rows(x, n_data)

        def call(model: nn.Module, x: Inputs) -> object:
            output = self._noting(model, _copied(x))
            self._early = rows, batches.latent(output).detach().clone()
            return output

        return rows, call

    def record(self, outputs: Tensor) -> None:
        """Keeps outputs `[B, …]` of the fit's own pass over the batch, of two data."""
        self._fitted = outputs.detach()[:ROWS].clone()

    def run(self, x: Inputs, y: Tensor) -> None:
        """Looks at a batch that the fit has accepted."""
        seen = self._at(x, y, ROWS)
        if seen is None and ROWS < len(y) <= _WHOLE:  # the network takes whole batches only
            seen = self._at(x, y, _WHOLE)
        if seen is None:
            return
        rows, outputs = seen
        if outputs is None:
            warn(_RANDOM, ApproximationWarning)
        elif rows is not x:  # which its owner may change
            beside = self._fitted is not None and len(y) > len(self._fitted)
            is_alone = beside and self._fitted is not None and self._same(self._fitted, outputs)
            if self._buffers and (self._depends or (beside and not is_alone)):
                warn(_writing(self._buffers), ApproximationWarning)
            self.reference = ReferenceOutputs.from_batch(rows, outputs, self.call, self._written, is_alone=is_alone)

    def _at(self, x: Inputs, y: Tensor, most: int) -> tuple[Inputs, Tensor | None] | None:
        """The first data and the outputs there, or None if they are random.

        None of a network that does not take a part of the batch.
        """
        rows, n_rows = first_rows(x, len(y), most)
        try:
            with model_lock(self.model):
                return rows, self._twice(rows)
        except Exception:  # a network's own assertion, say
            if n_rows == len(y):
                raise
            return None

    def _twice(self, rows: Inputs) -> Tensor | None:
        """Outputs that two passes with other random numbers have in common; None if they have not."""
        early = self._early_at(rows)
        again = outputs_at(self.model, rows, self._noting) if early is None else early
        if not self._draws and self._fitted is not None and self._same(self._fitted, again):
            return again
        once = outputs_at(self.model, rows, self.call)
        if early is not None and differ(once, early, self.model):  # perhaps since autograd recorded that pass
            again = outputs_at(self.model, rows, self._noting)
        devices = {parameter.device for parameter in self.model.parameters() if parameter.is_cuda}
        with same_random_state(self.model):
            for _ in range(_PASSES if self._draws else 0):
                for device in (torch.device("cpu"), *devices):
                    with own_draws():
                        torch.rand(1, device=device)  # so that the next pass draws others
                again = outputs_at(self.model, rows, self._noting)
                if differ(once, again, self.model):
                    break
        return None if differ(once, again, self.model) else once

    def _early_at(self, rows: Inputs) -> Tensor | None:
        """Outputs of the pass before the fit, if that was of these data; the fit may read others of the batch."""
        if self._early is None or not _same_inputs(self._early[0], rows):
            return None
        return self._early[1]

    def _same(self, fitted: Tensor, again: Tensor) -> bool:
        """True if the outputs of data alone are those of the fit, of as many data."""
        return len(fitted) == len(again) and not differ(fitted.flatten(), again.flatten(), self.model)

    def _noting(self, model: nn.Module, x: Inputs) -> object:
        """Calls a copy of the network, and notes what that draws and writes.

        That is whether it draws random numbers, which plain attributes and buffers it writes, and whether the next
        call gives other outputs for it.
        """
        generators, before = generators_of(model), attributes_of(model)
        buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        states = [generator.get_state() for generator in generators]
        output = self.call(model, x)
        self._draws = not all(map(torch.equal, states, [generator.get_state() for generator in generators]))
        if self._draws and not is_alone():  # which may have drawn meanwhile
            with ThreadDraws() as drawing:
                self.call(model, _copied(x))
            self._draws = drawing.drew
        after = attributes_of(model)
        self._written = [] if after == before else changed_names(digests(before), digests(after))
        now = dict(model.named_buffers())
        self._buffers = [name for name, (buffer, copy) in buffers.items()
                         if now.get(name) is not buffer or not same_numbers(buffer, copy)]  # fmt: skip
        if self._buffers and not self._draws:
            first, again = (batches.latent(out).detach() for out in (output, self.call(model, _copied(x))))
            self._depends = differ(first, again, self.model)
        return output


@dataclass(frozen=True)
class _Eagerly:
    """Calls a network as fits and predictions do, compiled parts of it eagerly."""

    forward_fn: ForwardFn

    def __call__(self, model: nn.Module, x: Inputs) -> object:
        with hooks_fire(model):
            return self.forward_fn(model, x)


_RANDOM = (
    "two forward passes of the same data differ, in evaluation mode: the network draws random numbers, of which a fit "
    "and every prediction see one draw, as if it were part of the network. Often it is F.dropout(x, p), which drops "
    "also in evaluation mode: use nn.Dropout, or F.dropout(x, p, training=self.training)."
)


def _writing(names: list[str]) -> str:
    return (
        f"a forward pass in evaluation mode writes the buffers {names}, on which the network's outputs depend. Fits "
        "and predictions start every pass from the buffers at the fit, and leave them so; a call of your own changes "
        "them, and with them the network. Write buffers in training mode only (if self.training: ...)."
    )


# What modules hold besides parameters, buffers and submodules.

_COMPUTE_ALIKE = frozenset(
    {"name_or_path", "gradient_checkpointing", "activation_checkpointing", "_attn_implementation"}
)
"""Where a network of transformers was loaded from, and ways of computing the same outputs."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
_COMPARABLE = ATOMS - {Tensor, nn.Parameter} | {slice, range}
_SHARED = "modules of several names"
_OTHER = object()

_DEPTH = 4
"""Containers inside each other, for `attributes_of`."""

_SETTINGS_DEPTH, _OBJECT = 6, 4
"""Containers inside each other, for settings; objects are not looked into from the second depth on, nor are those that
an object holds: a trainer holds all there is."""

Attributes = dict[str, tuple[tuple[str, Any], ...]]
"""Every module that has an attribute, with its value, by the attribute's name."""


def attributes_of(model: nn.Module) -> Attributes:
    """Numbers, strings, None, and short lists, tuples, dicts and sets of them, on the model and its submodules.

    They are copies, the same in every process; further names of modules that have several are among them.
    """
    named = list(model.named_modules())
    attributes: dict[str, list[tuple[str, Any]]] = {}
    for place, module in named:
        own = vars(module)
        for name in attributes_in(own):
            value = _OTHER if name in _COMPUTE_ALIKE else _plain(own[name], _DEPTH)
            if value is not _OTHER:
                attributes.setdefault(name, []).append((place, value))
    places = {id(module): place for place, module in named}
    names = [
        (f"{place}.{name}" if place else name, places.get(id(child)))
        for place, module in named
        for name, child in module._modules.items()
    ]
    if shared := [(name, first) for name, first in names if first not in (None, name)]:
        attributes[_SHARED] = shared
    return {name: tuple(values) for name, values in attributes.items()}


def _plain(value: Any, depth: int) -> Any:
    """A copy that later writes do not reach, or `_OTHER`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind not in (list, tuple, dict, set) or len(value) > MOST or depth == 0:
        return _OTHER
    if kind is tuple and len(value) > 1 and _PLAIN.issuperset(map(type, value)):
        return (kind.__name__, *value)
    parts = [_plain(part, depth - 1) for part in (value.items() if kind is dict else value)]
    if any(part is _OTHER for part in parts):
        return _OTHER
    if len(parts) == 1 and kind in (list, tuple):  # packages write one adapter as its name, or as a list with it
        return parts[0]
    return (kind.__name__, *(sorted(parts, key=repr) if kind is set else parts))


def digests(attributes: Attributes) -> dict[str, str]:
    """A short hash per name of an attribute, the same in every process."""
    return {
        name: hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest() for name, values in attributes.items()
    }


def changed_names(before: Mapping[str, str], now: Mapping[str, str], *, common: bool = False) -> list[str]:
    """Names of attributes whose digests differ.

    With `common` those are left out that only one side has: other versions of a package give modules other attributes.
    """
    names = before.keys() & now.keys() if common else before.keys() | now.keys()
    return sorted(name for name in names if before.get(name) != now.get(name))


@dataclass(frozen=True, eq=False)
class ModelState:
    """All that decides a model's outputs besides the data, within one process."""

    versions: tuple[tuple[int, int], ...]  # Identity and version of every parameter and buffer
    # Norms of those that are floating-point, per device, for writes that autograd does not count
    norms: tuple[Tensor, ...]
    # Types and names of modules, plain values that their attributes hold, hooks too, identities of other objects, and
    # versions of tensors among them; None of a copy, whose objects are others, and under FSDP2
    settings: tuple[Any, ...] | None

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelState:
        """That of a model now."""
        with model_lock(model):
            modules = modules_of(model)
            known = plain(modules)
            found = _Settings(modules) if known is None else known.found(modules, _Settings)
            whole = tensors_of(modules)
            tensors = local_parts(whole)
            if tensors is not whole:  # FSDP2 keeps states in its modules, which change in every pass
                return cls(_versions(tensors), _norms(tensors), None)
            return cls(_versions(tensors), _norms(tensors), (found.entries, _versions(found.tensors)))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"settings": None}


class _Settings:
    """What modules hold besides their own tensors, in the order in which it is met.

    Args:
        modules: Of a network, each once.

    Attributes:
        entries: Types of modules with names of their submodules, and names, types and values of all else; of what is
            not comparable, or too deep, the identity.
        tensors: Those among it.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.entries: list[Any] = []
        self.tensors: list[Tensor] = []
        self._seen: dict[int, object] = {}
        reshard(modules)
        for module in modules:
            own = module.__dict__
            self.entries.append((type(module), *[(name, id(child)) for name, child in module._modules.items()]))
            for name in (*filter(own.get, HOOKS), *attributes_in(own)):
                self._add(name, own[name], 0)
        self._seen.clear()  # what is kept of a plain network keeps no list of the user's, which may lead to it one day

    def _add(self, name: object, value: Any, depth: int) -> None:
        """Records a value with its parts."""
        kind = type(value)
        if kind in _COMPARABLE:
            self.entries.append((name, kind, value))
            return
        self.entries.append((name, kind, id(value)))
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif depth < _SETTINGS_DEPTH and id(value) not in self._seen:
            self._seen[id(value)] = value
            for key, part in _parts(value):
                self._add(key if type(key) in _COMPARABLE else id(key), part, depth + 1)
            if depth < _OBJECT and not isinstance(value, (nn.Module, type, ModuleType, BuiltinFunctionType)):
                for key, part in getattr(value, "__dict__", {}).items():
                    self._add(key, part, max(depth + 1, _OBJECT))


def _parts(value: Any) -> list[tuple[object, Any]]:
    """Parts of a container or a function, with names."""
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= MOST else []
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value)) if len(value) <= MOST else []
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, FunctionType):
        variables = [cell.cell_contents for cell in value.__closure__ or () if is_set(cell)]
        return [("defaults", value.__defaults__), *enumerate(variables)]
    return []


# Whether the network is the one that was fitted, without a copy of it.

_PERIOD = 4096
"""Tensors are seen as rows of this length; their entries are weighed by column and by row."""

_ROWS = 32
"""Rows that are widened at once, so that no tensor is copied."""

_LEAST_SUMS = 2
"""Sums of a tensor in older states, which have none by row."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Checksums of a model's tensors, and what else decides its outputs.

    Versions and norms of tensors are compared first, at the cost of reading the weights once; only if one of them
    differs are the checksums. The norms notice what autograd does not count: writes through `.data`, unless the same
    numbers only change places in a tensor, or the parameter is frozen (no gradient is asked of it). What is no tensor,
    an adapter that was switched, say, shows in outputs at data of the fit, which are compared once, and again whenever
    plain attributes of modules have changed. Copies and states hold no data: for them the attributes alone are
    compared.

    Attributes:
        places: Device and dtype of every tensor.
        state: All that is compared at every use, when it was last found as it should be; only good within one process.
        sums: Weighted sums of every tensor, float64, `[n, 3]`.
        attributes: Digests of the plain attributes at the fit, by name; without those that a forward pass writes, as a
            counter of calls, where a pass told them.
        reference: Some data of the fit with the outputs there, or None.
        seen: Attributes at which all was well when it was last looked at; None before that.
    """

    places: tuple[tuple[torch.device, torch.dtype], ...]
    state: ModelState
    sums: Tensor
    attributes: Mapping[str, str]
    reference: ReferenceOutputs | None = field(default=None, repr=False)
    seen: Attributes | None = field(default=None, repr=False)

    @classmethod
    def from_model(
        cls, model: nn.Module, reference: ReferenceOutputs | None = None, attributes: Mapping[str, str] | None = None
    ) -> Fingerprint:
        """The fingerprint of a model's present tensors, with digests at the fit if they are known from a state."""
        with model_lock(model):
            known = digests(attributes_of(model)) if attributes is None else dict(attributes)
            if reference is not None:
                known = {name: digest for name, digest in known.items() if name not in reference.written}
            places = _places(local_parts(_resting(model)))
            return cls(places, ModelState.from_model(model), checksums(model), known, reference)

    def check(self, model: nn.Module) -> Fingerprint:
        """This fingerprint, or an equal one with the present state.

        Raises:
            ModelChangedError: The tensors differ, or were moved, or the outputs at data of the fit differ.

        Warns:
            ModelChangedWarning: There are no such data, and attributes differ.
        """
        with model_lock(model):
            now, then = ModelState.from_model(model), self.state
            if now.versions == then.versions and _comparable(now.norms, then.norms):
                checks.require(_equal(now.norms, then.norms), lambda: self._change(model))  # which may be read later
                now = replace(now, norms=then.norms)
            elif (error := self._change(model)) is not None:
                raise error
            if self.seen is not None and now.settings is not None and now.settings == then.settings:
                return self if now.versions == then.versions else replace(self, state=now)
            present = attributes_of(model)
            if self.seen != present:
                self._compare_outputs(model, present)
            return replace(self, state=now, seen=present)

    def moved(self, model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> Fingerprint:
        """The fingerprint of the same model after it was moved."""
        reference = None if self.reference is None else self.reference.moved(model, device, dtype)
        return Fingerprint.from_model(model, reference, self.attributes)

    def __getstate__(self) -> dict[str, Any]:
        """State that is copied and pickled: no data."""
        return vars(self) | {"reference": None}

    def _compare_outputs(self, model: nn.Module, present: Attributes) -> None:
        names = changed_names(self.attributes, digests(present), common=self.reference is None)
        if self.reference is not None:
            names = [name for name in names if name not in self.reference.written]
        if self.reference is not None and not self.reference.agrees(model, changed=bool(names)):
            what = f"the attributes {names} of its modules did" if names else "a setting, a hook or the like did"
            raise ModelChangedError(
                f"the network's outputs at data of the fit are not what they were, though no weight changed; {what} "
                "(an adapter that was switched or disabled, say). Put that back, or call fit again."
            )
        if self.reference is None and names:
            warn(
                f"the attributes {names} of the network's modules differ from those at fit; whether its outputs do "
                "(after an adapter was switched, say) is not known, since the posterior has no data to compare them "
                "at: after loading or copying it has none. Put them back, or call fit again.",
                ModelChangedWarning,
            )

    def _change(self, model: nn.Module) -> ModelChangedError | None:
        """The error of tensors that were moved or have other numbers; None of equal ones."""
        if has_sharded_weights(model):  # sums of all entries are collective, and other processes may see no change
            return ModelChangedError(
                "the network's weights changed after fit, or were spread over processes after it (fully_shard): call "
                "fit again."
            )
        places = _places(local_parts(_resting(model)))
        if len(places) == len(self.places) and places != self.places:
            return ModelChangedError(
                "the network was moved to another device or dtype after fit, and the posterior was not; move both by "
                "la.to(device=..., dtype=...), or call fit again."
            )
        if not same_sums(sums := checksums(model), self.sums):
            return ModelChangedError(
                f"the network's weights or buffers changed after fit{self._named_changes(model, sums)} (a call in "
                "training mode writes the running statistics of BatchNorm), so its predictions do not belong to this "
                "posterior any more; call fit again, or load the weights and buffers at which it was fitted; buffers "
                "that a pass in evaluation mode writes are to be written in training mode only. Samples of a last "
                "layer belong into la.model.last_layer, a copy that la.model(x) runs with, not into the network's own "
                "layer."
            )
        return None

    def _named_changes(self, model: nn.Module, sums: Tensor) -> str:
        """Names of the tensors whose sums are others now, where there are as many as at the fit."""
        if len(sums) != len(self.sums):
            return ""
        tensors = _resting(model)
        named = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        rows = ((named.get(id(tensor)), sums[n : n + 1], self.sums[n : n + 1]) for n, tensor in enumerate(tensors))
        changed = [name for name, now, then in rows if name is not None and not same_sums(now, then)]
        return f", {changed[:_NAMED]}{' and more' if len(changed) > _NAMED else ''}," if changed else ""


class ModelWatch:
    """A fingerprint in use: what was compared once, and found the same, need not be compared as closely again.

    Args:
        fingerprint: Of a network.

    Attributes:
        fingerprint: The same, with what has been seen since.
    """

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self._was_asked = False

    def check(self, model: nn.Module) -> None:
        """Raises `ModelChangedError` if the network's weights, or its outputs at data of the fit, are not as then."""
        self.fingerprint = self.fingerprint.check(model)

    def warn_of_coupling(self, model: nn.Module, x: Inputs) -> None:
        """Asks once, unless the fit has seen it, if predictions depend on the data beside them."""
        reference = self.fingerprint.reference
        if self._was_asked or reference is None or reference.is_alone or not checks.numbers_are_known():
            return
        tensors = batches.tensors(x)
        if not tensors or not tensors[0].ndim or (n_data := batches.size(x, "")) <= ROWS:
            return
        self._was_asked = True
        if reference.couples(model, x, n_data):
            warn(
                "the network's outputs at a datum depend on the data beside it, as where a layer standardises by the "
                "mean and variance of its batch: la(x)[:2] is not la(x[:2]), and fits depend on the batches. In "
                "evaluation mode take running statistics (nn.BatchNorm1d), or a LayerNorm.",
                ApproximationWarning,
            )


def _resting(model: nn.Module) -> list[Tensor]:
    """Parameters, then buffers, as they are between passes."""
    modules = modules_of(model)
    reshard(modules)
    return tensors_of(modules)


def _versions(tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
    try:
        return tuple([(id(t), t._version) for t in tensors])
    except RuntimeError:  # tensors that were made in inference mode have none, and cannot be written to
        return tuple((id(t), 0 if t.is_inference() else t._version) for t in tensors)


def _places(tensors: list[Tensor]) -> tuple[tuple[torch.device, torch.dtype], ...]:
    return tuple((t.device, t.dtype) for t in tensors)


def _norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Norms per device; not of frozen parameters, which are as their versions say: a pass over the network more."""
    read = [t for t in tensors if t.requires_grad or not isinstance(t, nn.Parameter)]
    numbers = [t if t.layout is torch.strided else _values(t) for t in read if t.is_floating_point()]
    devices = list(dict.fromkeys([t.device for t in numbers]))
    groups = [numbers] if len(devices) == 1 else [[t for t in numbers if t.device == device] for device in devices]
    with torch.no_grad():
        return tuple(torch.stack(torch._foreach_norm(group)) for group in groups)


def _comparable(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return [(x.shape, x.dtype, x.device) for x in a] == [(y.shape, y.dtype, y.device) for y in b]


def _equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """True, 0-dim, if comparable norms are equal."""
    if not a:
        return torch.ones((), dtype=torch.bool)
    first, *others = [(x == y).all() for x, y in zip(a, b, strict=True)]
    return torch.stack([first, *(flag.to(first.device) for flag in others)]).all() if others else first


def checksums(model: nn.Module, *, together: bool = True) -> Tensor:
    """Three weighted sums per tensor, `[n, 3]`, float64 on the CPU: of all entries, by column and by row.

    `together` if all processes that the network is sharded over call this: tensors are gathered one at a time for it.
    Else sums of sharded tensors are zero.
    """
    rows: dict[int, Tensor] = {}
    ends: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    with torch.no_grad(), model_lock(model):
        tensors = _resting(model)
        for n, tensor in enumerate(tensors):
            flat = _flat(full_tensor(tensor) if together else _unspread(tensor))
            full = max(0, flat.numel() - 1) // _PERIOD * _PERIOD  # the last row is never empty, unless the tensor is
            if full:
                rows[n] = _row_sums(flat[:full].view(-1, _PERIOD))
            ends.setdefault((flat.device, flat.dtype), {})[n] = flat[full:].clone() if full else flat
        groups = [_sums([rows.get(n) for n in group], list(group.values())) for group in ends.values()]
        if len(groups) == 1:  # of all tensors, in their order
            return groups[0].cpu()
        result = torch.zeros(len(tensors), 3, dtype=wide_dtype(tensors[0].device if tensors else None))
        for group, sums in zip(ends.values(), groups, strict=True):
            result[list(group)] = sums.to(result)
    return result


def _unspread(tensor: Tensor) -> Tensor:
    """A tensor that is no part of one; of others nothing."""
    return tensor if local_part(tensor) is tensor else local_part(tensor)[:0]


def _flat(tensor: Tensor) -> Tensor:
    """The entries `[n]`; of a sparse tensor (a graph's adjacency matrix, say) what it stores, indices and values."""
    if tensor.layout is not torch.strided:
        return torch.cat([_flat(part).to(wide_dtype(part.device)) for part in stored(tensor.detach())])
    flat = tensor.detach().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _values(tensor: Tensor) -> Tensor:
    """Numbers of a sparse tensor, without its indices."""
    return tensor.detach()._values() if tensor.layout is torch.sparse_coo else tensor.detach().values()


def _row_sums(rows: Tensor) -> Tensor:
    """Sums of m rows of at most `_PERIOD` entries, and those with the weights of columns, `[2, m]`."""
    weights, at_once = _column_weights(rows.device)[: rows.shape[1]], _rows_at_once(rows.device)
    # Of all parts: fresh memory takes longer than sums.
    wide = weights.new_empty(min(at_once, len(rows)), rows.shape[1])
    plain: list[Tensor] = []
    weighed: list[Tensor] = []
    for part in rows.split(at_once):
        some = wide[: len(part)].copy_(part)
        plain.append(some.sum(1))
        weighed.append(some.mv(weights))  # half the time of one product with both
    return torch.cat([*plain, *weighed]).view(2, -1)


def _sums(rows: Sequence[Tensor | None], ends: list[Tensor]) -> Tensor:
    """Sums of n tensors that are seen as rows of `_PERIOD` entries, the last of them shorter, `[n, 3]`.

    Of every tensor `rows` are the sums of its full rows, `[2, m]`, if it has any, and `ends` the last row; these are of
    one device and dtype, and are summed together.
    """
    step = _rows_at_once(ends[0].device) if ends else 1
    last = torch.cat(
        [_row_sums(pad_sequence(ends[i : i + step], batch_first=True)) for i in range(0, len(ends), step)], 1
    )
    counts = [0 if full is None else full.shape[1] for full in rows]
    if not any(counts):
        return torch.cat([last, last[:1] * _column_weights(last.device)[0]]).T.contiguous()
    number, of_rows = torch.tensor(counts, device=last.device), _weights(max(counts) + 1, last.device, last.dtype)
    sums = torch.cat([last, last[:1] * of_rows[number]])
    every = torch.cat([full for full in rows if full is not None], 1)
    by_row = every[:1] * torch.cat([of_rows[:count] for count in counts])
    owner = torch.arange(len(rows), device=last.device).repeat_interleave(number)
    return sums.index_add_(1, owner, torch.cat([every, by_row])).T.contiguous()


def _rows_at_once(device: torch.device) -> int:
    """Rows whose copies in float64 stay in the cache of a CPU; elsewhere those of 128 MiB."""
    return min(numbers_at_once(_ROWS * _PERIOD, device), 2**24) // _PERIOD


def _column_weights(device: torch.device) -> Tensor:
    return _kept_weights(device, wide_dtype(device))


@cache
def _kept_weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return _weights(_PERIOD, device, dtype)


def _weights(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights that differ from place to place, `[count]`."""
    return torch.cos(torch.arange(1, count + 1, device=device, dtype=dtype))


def same_sums(a: Tensor, b: Tensor) -> bool:
    """True if two checksums agree up to the order of float64 sums: in those that both have."""
    if a.ndim != 2 or b.ndim != 2 or len(a) != len(b):
        return False
    common = min(a.shape[1], b.shape[1])
    a, b = a[:, :common], b[:, :common]
    return common >= _LEAST_SUMS and bool(torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True))
