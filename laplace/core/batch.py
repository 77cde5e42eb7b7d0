"""The only code that knows what a batch looks like: pairs, longer tuples, mappings and graphs, with or without weights.

Inputs `x` are a tensor, a tuple of tensors (batches with more than two parts: all but the last), a mapping (dict,
`BatchEncoding`), a dataclass, or graphs of PyTorch Geometric, one (`Data`) or many in one object (`Batch`). Tensors may
be sparse. With a `forward_fn` any other object is an input, too: the targets say how many data it holds. Everything
else in the library passes inputs along untouched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from numbers import Number, Real
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.checks import is_true, require
from laplace.core.memory import ran_out
from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument, InvalidData, InvalidType, MissingKey

Inputs = Any
"""A tensor, a tuple of tensors, a mapping of tensors, a dataclass, graphs, or what a `forward_fn` takes."""

ForwardFn = Callable[[nn.Module, Inputs], Any]

LABELS = "labels"
"""Default key of the targets, by which Hugging Face's models take theirs."""


def split(batch: Any, dict_key_y: str) -> tuple[Inputs, Tensor]:
    """Splits a batch of a loader into inputs and targets."""
    batch = without_names(without_weights(batch))
    if isinstance(batch, Mapping):
        if dict_key_y not in batch.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
            raise MissingKey(
                f"the batch is a mapping with keys {sorted(map(str, batch.keys()))}, without "
                f"dict_key_y={dict_key_y!r}; pass the key of the targets as dict_key_y."
            )
        return batch, _targets(batch[dict_key_y])
    if isinstance(batch, Sequence) and len(batch) >= 2:
        *inputs, y = batch
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), _targets(y)
    y = getattr(batch, dict_key_y, getattr(batch, "y", None))
    if are_graphs(batch) or (isinstance(y, Tensor) and not isinstance(batch, Tensor)):
        return batch, _targets(y)
    raise InvalidData(
        f"a batch of type {type(batch).__name__} cannot be split; the loader must give pairs (x, y), tuples "
        "(x1, x2, …, y) or mappings; for one batch of your own give [(x, y)]."
    )


def are_graphs(x: Any) -> bool:
    """True of many graphs in one object, as PyTorch Geometric's loader gives them: its data are the graphs."""
    if isinstance(x, Tensor | Mapping | tuple | list):
        return False
    return isinstance(getattr(x, "num_graphs", None), int) and callable(getattr(x, "to_data_list", None))


def is_graph(x: Any) -> bool:
    """True of one graph as PyTorch Geometric's data sets give it, a `Data` or `HeteroData`: one datum."""
    return not are_graphs(x) and _has_stores(x)


def _has_stores(x: Any) -> bool:
    return not isinstance(x, Tensor | Mapping | tuple | list) and isinstance(getattr(x, "stores", None), list)


def is_dense(x: Inputs) -> bool:
    """True of inputs whose data are rows of dense tensors alone, so that they can be mapped over and joined."""
    given = tensors(x)
    if not given or _has_stores(x) or are_graphs(x) or any(map(_is_rows, _parts(x))):
        return False
    return all(tensor.layout is torch.strided for tensor in given)


def without_names(batch: Any) -> Any:
    """A tuple less the strings at its end: webdataset gives (x, y, keys), with the key of every sample."""
    while isinstance(batch, tuple | list) and len(batch) > 2 and _are_names(batch[-1]):
        batch = batch[:-1]
    return batch


def _are_names(part: Any) -> bool:
    return isinstance(part, tuple | list) and len(part) > 0 and all(isinstance(name, str) for name in part)


def is_ignored(y: Tensor, ignore_index: int) -> Tensor:
    """True for integer labels that are the ignored one, whatever their dtype: as a uint8, −100 would be 156."""
    return y.long() == ignore_index


def counting(y: Tensor, ignore_index: int | None) -> Tensor | None:
    """True for data whose label is not the ignored one, of several labels any of them, `[B]`; None if none can be."""
    if ignore_index is None or y.is_floating_point() or y.ndim == 0:
        return None
    counts = y.long() != ignore_index
    return counts.flatten(1).any(1) if y.ndim > 1 else counts


def without_ignored(x: Inputs, y: Tensor, ignore_index: int | None) -> tuple[Inputs, Tensor] | None:
    """The data whose labels are not the ignored one: those count nowhere. None if there are none.

    Of data with a label per position those stay of which some position counts.
    """
    keep = counting(y, ignore_index)
    if keep is None or is_true(keep.all()):
        return x, y
    return (select(x, keep, len(y)), y[keep]) if keep.any() else None


@dataclass(frozen=True, eq=False)
class WeightedBatch:
    """A batch of weighted data."""

    batch: Any  # what the loader gave, without the weights
    weigh: Callable[[], Tensor]  # gives the weights, `[B]` or of the shape of the targets, checked


def without_weights(batch: Any) -> Any:
    """A batch as the loader gave it."""
    return batch.batch if isinstance(batch, WeightedBatch) else batch


def without_key(x: Mapping[Any, Any], key: str | None) -> Mapping[Any, Any]:
    """A mapping without one of its entries, of the same type where that can be."""
    rest = {name: value for name, value in x.items() if name != key}
    return rest if isinstance(x, dict) else _rebuild(x, rest)


def inputs(batch: Any) -> Inputs:
    """Inputs of a batch with or without targets: a tensor, a mapping, `(x,)`, or all but the last part of a tuple."""
    batch = without_names(batch)
    if isinstance(batch, Tensor | Mapping) or are_graphs(batch) or _are_names(batch):
        return batch
    if not isinstance(batch, Sequence | Number | None):
        return batch
    if isinstance(batch, Sequence) and batch and not isinstance(batch, str):
        parts = tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
        return parts[0] if len(parts) == 1 else parts
    raise InvalidData(
        f"a batch of type {type(batch).__name__} holds no inputs; the loader must give tensors, mappings or tuples "
        "(x, …, y)."
    )


def _targets(y: Any) -> Tensor:
    if not isinstance(y, Tensor):
        raise InvalidData(f"the targets are of type {type(y).__name__}; give a tensor, see torch.as_tensor.")
    if y.ndim == 0:
        raise InvalidData(
            "the targets are one number without a batch dimension: the loader gives single samples; wrap the data set "
            "in torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    return y


def tensors(x: Inputs) -> list[Tensor]:
    """All tensors among the inputs."""
    return [x] if isinstance(x, Tensor) else [value for value in _parts(x) if isinstance(value, Tensor)]


def _parts(x: Inputs) -> list[Any]:
    """The parts of inputs of several; none of a tensor and of objects that are not looked into."""
    if isinstance(x, Mapping):
        return list(x.values())
    if _has_stores(x):
        return [value for store in x.stores for value in store.values()]
    if are_graphs(x):
        return list(x.to_dict().values())
    if is_dataclass(x):
        return [getattr(x, field.name) for field in fields(x)]
    return list(x) if isinstance(x, tuple | list) else []


def keys(x: Inputs) -> list[str] | None:
    """Names of the inputs of a mapping; None of others."""
    return sorted(map(str, x.keys())) if isinstance(x, Mapping) else None


def entries(x: Inputs) -> dict[str, Any]:
    """Inputs of a mapping by name, in its order; none of others."""
    return {str(key): value for key, value in x.items()} if isinstance(x, Mapping) else {}


def transform(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Applies a function to every tensor among the inputs, keeping the container's type where it can be kept."""
    return _mapped(x, lambda part: function(part) if isinstance(part, Tensor) else part)


def copied(x: Inputs) -> Inputs:
    """Inputs with memory of their own, detached; objects that hold no tensors are returned as they are."""

    def copy_of(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.detach().clone()
        return copy.copy(part) if _is_rows(part) else part

    return copy_of(x) if _is_rows(x) else _mapped(x, copy_of)


def _mapped(x: Inputs, function: Callable[[Any], Any]) -> Inputs:
    """Applies a function to every part of the inputs; objects that hold no tensors are returned as they are."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        new = {key: function(value) for key, value in x.items()}
        return new if isinstance(x, dict) else _rebuild(x, new)
    if are_graphs(x) or _has_stores(x):
        return copy.copy(x).apply(function)
    if is_dataclass(x) and not isinstance(x, type):
        new = copy.copy(x)
        for field in fields(x):  # of a frozen one, too, and without its own checks of what it is given
            object.__setattr__(new, field.name, function(getattr(x, field.name)))
        return new
    return tuple(map(function, x)) if isinstance(x, tuple | list) and not _is_rows(x) else x


def _is_rows(part: Any) -> bool:
    """True of an array, and of a sequence of strings, numbers or sequences of numbers: a row for every datum."""
    if isinstance(part, tuple | list):
        return len(part) > 0 and _holds_plain_values(part)
    return isinstance(part, Sized) and hasattr(part, "__array__") and not isinstance(part, Tensor)


def _holds_plain_values(x: Any) -> bool:
    """True for a string, a number, and sequences of them."""
    while isinstance(x, list | tuple) and x:
        if any(isinstance(part, Tensor) for part in x):
            return False
        x = x[0]
    return isinstance(x, str | Real)


def _rebuild(original: Mapping[Any, Any], new: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type (models read attributes off a `BatchEncoding`), else a plain dict."""
    try:
        return type(original)(new)  # pyright: ignore[reportCallIssue]
    except TypeError:
        return new


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; nobody waits for the copy of pinned memory, which a loader fills for that purpose."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu" and tensor.device.type == "cpu" and tensor.is_pinned())


def to_device(x: Inputs, device: torch.device) -> Inputs:
    """Inputs with every tensor on `device`; objects that hold none are asked by their own `to`, if they have one."""

    def on_device(part: Any) -> Any:
        if isinstance(part, Tensor):
            if part.is_meta:
                raise InvalidData(
                    "the inputs are on the meta device, which holds no numbers; give tensors that hold some."
                )
            return moved(part, device)
        if tensors(part) and not isinstance(part, tuple | list):
            return _mapped(part, on_device)
        own = None if isinstance(part, nn.Module) else getattr(part, "to", None)
        if not callable(own):
            return part
        there = own(device)
        return part if there is None else there  # of one that moves itself

    return _mapped(x, on_device) if isinstance(x, tuple | list) or tensors(x) else on_device(x)


def size(x: Inputs, dict_key_x: str) -> int:
    """Number of samples, the leading dimension (of `x[dict_key_x]`, or of the first tensor).

    Of objects without tensors it is their length, or 1 if they have none: what is known without targets.
    """
    if isinstance(x, Mapping) and isinstance(x.get(dict_key_x, None), Tensor):
        return int(x[dict_key_x].shape[0])
    if not isinstance(x, Mapping) and are_graphs(x):
        return int(x.num_graphs)
    if is_graph(x):
        return 1
    first = next(iter(tensors(x)), None)
    if first is None and not (isinstance(x, tuple | list | Mapping) and not len(x)):
        return next((len(part) for part in (x, *_parts(x)) if _is_rows(part)), 1)
    if first is None or first.ndim == 0:
        raise InvalidData("the inputs hold no tensor with a leading batch dimension.")
    return int(first.shape[0])


def can_split(x: Inputs, n: int) -> bool:
    """True if data can be selected of n: not of objects that hold no tensors and no rows, nor of a single graph."""
    if n == 1:
        return True
    return not is_graph(x) and (bool(tensors(x)) or any(_is_rows(p) and len(p) == n for p in (x, *_parts(x))))


def select(x: Inputs, index: slice | Tensor, n: int) -> Inputs:
    """Rows `index` of every tensor whose leading dimension is the batch size `n`; of n graphs these graphs.

    So it is with arrays, and with lists of strings.

    Raises:
        InvalidData: The data of an object are asked for one by one, that does not give them.
    """
    if are_graphs(x):
        if x.num_graphs != n:
            return x
        from torch_geometric.data import Batch

        graphs = x.to_data_list()
        return Batch.from_data_list([graphs[i] for i in _indices(index, n)])
    if not can_split(x, n) or is_graph(x) or (n == 1 and not tensors(x) and not _is_rows(x)):
        if _indices(index, n) == list(range(n)):
            return x
        raise InvalidData(
            f"the inputs are of type {type(x).__name__}, of which single data cannot be taken; give a tensor, a tuple, "
            "a mapping or a dataclass of tensors, a list of strings or an array, with the data in their first "
            "dimension; or one datum at a time."
        )

    def rows(part: Any) -> Any:
        if isinstance(part, Tensor):
            return _rows_of(part, index) if part.ndim and part.shape[0] == n else part
        if not _is_rows(part) or len(part) != n:
            return part
        at = _indices(index, n)
        return type(part)(part[i] for i in at) if isinstance(part, list | tuple) else part[at]

    return rows(x) if _is_rows(x) else _mapped(x, rows)


def _indices(index: slice | Tensor, n: int) -> list[int]:
    """Numbers of the rows that are selected of n."""
    return torch.arange(n)[index if isinstance(index, slice) else index.cpu()].tolist()


def _rows_of(tensor: Tensor, index: slice | Tensor) -> Tensor:
    """Rows of a tensor, in its own layout."""
    if tensor.layout is torch.strided:
        return tensor[index]
    rows = tensor.to_sparse_coo().index_select(0, torch.arange(len(tensor), device=tensor.device)[index])
    return rows.coalesce() if tensor.layout is torch.sparse_coo else rows.to_sparse(layout=tensor.layout)


def dense(tensor: Tensor) -> Tensor:
    """A tensor, or a sparse one with its zeros: what formulas of layers multiply out."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def first(batch: Any, dict_key_y: str, number: int) -> Any:
    """The first data of a batch with targets, so many of them."""
    x, y = split(batch, dict_key_y)
    part = select(x, slice(0, number), len(y))
    if x is batch:
        return part
    return (*(part if isinstance(part, tuple) else (part,)), y[:number])


def signature(x: Inputs) -> tuple[Any, ...]:
    """Shapes and dtypes of the inputs: what a proven capture plan may depend on."""
    if isinstance(x, Mapping):
        return tuple((str(k), tuple(v.shape), v.dtype) for k, v in x.items() if isinstance(v, Tensor))
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(x))


def call(model: nn.Module, x: Inputs) -> Any:
    """Calls a model on inputs: `CallByName()`, the default."""
    return CallByName()(model, x)


@dataclass(frozen=True)
class CallByName:
    """The way of calling a model on whatever inputs are.

    A tuple is spread, unless the model's `forward` has one argument alone. A mapping is spread by name into a model
    whose `forward` names its keys (a Hugging Face model), less the keys that it does not know (with `**kwargs` it knows
    all) and less the targets; it goes whole to a model whose `forward` needs one argument of another name (a user's
    wrapper), and to one that cannot do with the value of its only argument (`def forward(self, x): ... x["x"]`).
    """

    dict_key_y: str = LABELS  # key of the targets, which only a `forward` that cannot do without gets

    def __call__(self, model: nn.Module, x: Inputs) -> Any:
        if isinstance(x, Tensor) or are_graphs(x):
            return model(x)
        if _holds_plain_values(x) or hasattr(x, "__array__") or (isinstance(x, tuple) and any(map(_is_rows, x))):
            raise InvalidData(
                f"the inputs are of type {type(x).__name__}; give a tensor (see torch.as_tensor), a tuple or a mapping"
                ", or say by forward_fn=lambda model, x: ... how the network takes them."
            )
        if not isinstance(x, Mapping | tuple | list):
            return model(x)
        if not isinstance(x, Mapping):
            return _together(model, x) if len(x) > 1 and _takes_one(model) else model(*x)
        named = self.keywords(model, x)
        if named is None:
            return model(x)
        try:
            return model(**named)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, Warning) as error:
            # Warning: a tensor that is indexed by a name warns before it raises.
            if ran_out(error) or len(named) > 1 or set(_parameters(model)) - {self.dict_key_y} != set(named):
                raise
            return _whole(model, x, error)

    def keywords(self, model: nn.Module, x: Mapping[str, Any]) -> dict[str, Any] | None:
        """Arguments that a model gets of a mapping by name; None where it gets the mapping whole."""
        parameters = _parameters(model)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        needed = [name for name, p in names.items() if p.default is p.empty]
        withheld = ({self.dict_key_y} | ({LABELS, "label"} - names.keys())) - set(needed)
        keys = [key for key in x.keys() if key not in withheld]  # noqa: SIM118  (a TensorDict iterates over its rows)
        if len(needed) == 1 and needed[0] not in keys:
            return None
        if not names.keys() & set(keys) and (names or not takes_all):
            return None
        passed = {key: x[key] for key in keys if takes_all or key in names}
        return passed | self._decoder_inputs(model, names, x, passed)

    def _decoder_inputs(
        self, model: nn.Module, names: Mapping[str, Any], x: Mapping[str, Any], passed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Inputs of a decoder that the model would make of its labels, which it does not get."""
        given = self.dict_key_y in x.keys() and self.dict_key_y not in passed  # noqa: SIM118
        if not given or _DECODER[0] not in names or passed.keys() & set(_DECODER):
            return {}
        makers: Iterator[Any] = (getattr(part, _MAKER, None) for part in model.modules())
        make = next((maker for maker in makers if callable(maker)), None)
        return {} if make is None else {_DECODER[0]: make(labels=x[self.dict_key_y])}


_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_MAKER = "prepare_decoder_input_ids_from_labels"


def caller(model: nn.Module, forward_fn: ForwardFn | None, dict_key_y: str) -> ForwardFn | None:
    """The way of calling a model on mappings whose targets are under a key; None for the default.

    Where the key makes no difference to the model's `forward` it is the default, which packages know better.
    """
    if forward_fn is not None or dict_key_y == LABELS:
        return forward_fn
    concerned = any(takes(model, name) for name in (dict_key_y, LABELS, "label"))
    return CallByName(dict_key_y) if concerned else None


def takes(model: nn.Module, name: str) -> bool:
    """True if a model's `forward` has an argument of this name, or passes all on."""
    parameters = _parameters(model)
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _together(model: nn.Module, x: Inputs) -> Any:
    """Output of a model of one argument called with all parts; the error of a call with each if neither way works."""
    try:
        return model(x)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if ran_out(error):
            raise
    return model(*x)


def _takes_one(model: nn.Module) -> bool:
    """True if a model's `forward` has one argument alone, which is then a sequence where inputs are one."""
    kinds = [p.kind for p in _parameters(model).values()]
    return kinds in ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD])


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of a model's `forward`; of one that passes `*args, **kwargs` on to its only child, the child's.

    So do `DistributedDataParallel` and models of PEFT.
    """
    while True:
        parameters = inspect.signature(model.forward).parameters
        children, kinds = list(model.children()), [p.kind for p in parameters.values()]
        if len(children) != 1 or kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
            return parameters
        model = children[0]


def _whole(model: nn.Module, x: Inputs, error: Exception) -> Any:
    """Output of a model called with the whole mapping, after an error by name; that error if neither way works."""
    try:
        return model(x)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as second:
        if ran_out(second):
            raise
        raise error from None


def latent(output: Any) -> Tensor:
    """The network's output tensor, out of whatever a model returns (`.logits` of a `ModelOutput`)."""
    if isinstance(output, Tensor):
        return output
    logits = part(output, "logits")
    if isinstance(logits, Tensor):
        return logits
    remedy = "Pass forward_fn=lambda model, x: ... to say which tensor is meant."
    if isinstance(output, tuple | list) and len(output) > 1 and all(isinstance(head, Tensor) for head in output):
        remedy = (
            "Pass forward_fn=lambda model, x: model(x)[0] for one of its heads; several regressions go together by "
            "forward_fn=lambda model, x: torch.cat(model(x), -1), with targets torch.cat([y1, y2], -1)."
        )
    raise InvalidData(
        f"the model returned {type(output).__name__}; it must return a tensor [B, C] or an object with `.logits`. "
        f"{remedy}"
    )


def part(output: Any, name: str) -> Any:
    """The part of an output under a name, in a mapping or an object; None where there is no such part."""
    return output.get(name, None) if isinstance(output, Mapping) else getattr(output, name, None)


def plain(x: Inputs) -> Any:
    """Inputs as a state may hold them: a tensor, a dict, or a list for a tuple."""
    if isinstance(x, Mapping):
        return dict(x.items())
    return list(x) if isinstance(x, tuple | list) else x


def from_plain(state: Any) -> Inputs:
    """The inputs of a state."""
    return tuple(state) if isinstance(state, list) else state


def is_loader(x: Any) -> bool:
    """True of an iterable of batches: any but a tensor, tuple or mapping, which are inputs, and arrays and numbers."""
    if isinstance(x, Tensor | tuple | str | bytes) or not isinstance(x, Iterable) or keys(x) is not None:
        return False
    if are_graphs(x) or callable(getattr(x, "to", None)):
        return False  # what is moved to a device is an input
    return getattr(x, "__array__", None) is None and not (isinstance(x, list) and x and isinstance(x[0], Real | str))


_AT_ONCE = 500
"""Inputs of a tensor that are predicted at once."""


def in_parts(x: Any, name: str, at_once: int = _AT_ONCE) -> Iterator[Inputs]:
    """The inputs of a loader, or of a tensor, tuple or mapping, a few hundred at a time."""
    if x is None or isinstance(x, Number):
        raise InvalidType(f"{name}={x!r}; give a tensor, tuple or mapping of inputs, or a loader of batches.")
    for part in (inputs(batch) for batch in x) if is_loader(x) else (x,):
        count = size(part, "")
        step = at_once if can_split(part, count) else max(1, count)
        for start in range(0, count, step):
            yield part if count <= step else select(part, slice(start, start + step), count)


def require_loader(loader: Any, name: str) -> None:
    """Refuses what cannot be iterated over, and single tensors, whose first dimension would count as batches."""
    indexed = getattr(type(loader), "__getitem__", None)  # what `iter` takes as well
    if isinstance(loader, Tensor | Mapping | str) or not (isinstance(loader, Iterable) or indexed):
        raise InvalidType(
            f"{name} is of type {type(loader).__name__}; give a DataLoader, or any iterable of batches: [(x, y)] for a "
            "single one."
        )


def require_rereadable(loader: Iterable[Any], reader: str) -> None:
    """Refuses an iterator where data are read more than once, before a first batch is taken from it."""
    if isinstance(loader, Iterator):
        raise InvalidArgument(
            f"{reader}, but the loader, a {type(loader).__name__}, can be read only once; give a DataLoader or a list "
            "of batches."
        )


# Weights of inputs: how often each of them counts, as users say it beside a loader.


WeightFn = Callable[[Inputs, Tensor], Any]
"""`weight_fn(x, y)` gives weights `[B]`, or of the shape of y, of inputs and targets as a loader gives them."""


@dataclass(frozen=True)
class DataWeights:
    """Weights of the data of a loader, by a function of each batch or by a key of its mapping."""

    name: str  # how the user said it, for messages
    function: WeightFn | None  # `weight_fn(x, y)`, or None
    key: str | None  # key of the weights, or None

    @classmethod
    def from_arguments(cls, weight_fn: Any, dict_key_weight: Any) -> DataWeights | None:
        """The weights that the arguments of `fit` ask for; None if all weights are 1."""
        if weight_fn is None and dict_key_weight is None:
            return None
        if weight_fn is not None and dict_key_weight is not None:
            raise InvalidArgument(f"weight_fn= and dict_key_weight={dict_key_weight!r} are given; give one of them.")
        if weight_fn is None:
            if not isinstance(dict_key_weight, str):
                raise InvalidType(
                    f"dict_key_weight={dict_key_weight!r}; the key of the weights, a string, is accepted."
                )
            return cls(f"dict_key_weight={dict_key_weight!r}", None, dict_key_weight)
        if not callable(weight_fn):
            raise InvalidType(
                f"weight_fn is a {type(weight_fn).__name__}; a function is accepted: weight_fn=lambda x, y: ..., which "
                "returns a number for every datum, [B]."
            )
        return cls("weight_fn=", weight_fn, None)

    def loader(self, loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
        """A loader whose batches know their weights."""
        return _WeightedLoader(self, loader, dict_key_y)

    def weighted(self, batch: Any, dict_key_y: str) -> WeightedBatch:
        """A batch that knows its weights, which are computed when they are asked for; those of a key are taken out."""
        mapped = self.key is not None and keys(batch) is not None
        rest = without_key(batch, self.key) if mapped else batch
        return WeightedBatch(rest, lambda: self._checked(batch, dict_key_y))

    def _checked(self, batch: Any, dict_key_y: str) -> Tensor:
        """Weights of a batch, `[B]` or of the shape of its targets, float64."""
        x, y = split(batch, dict_key_y)
        given = self.function(x, y) if self.function is not None else self._under_key(batch)
        if not isinstance(given, Tensor):
            raise InvalidData(f"the weights of {self.name} are of type {type(given).__name__}; give a tensor [B].")
        if given.shape not in (y.shape[:1], y.shape) or given.is_complex():
            also = f", or for every target, {list(y.shape)}," if y.ndim > 1 else ","
            raise InvalidData(
                f"the weights of {self.name} have shape {list(given.shape)} and dtype {given.dtype}; a real number for "
                f"every datum, {list(y.shape[:1])}{also} is accepted."
            )
        weights = widened(given.detach())
        require(
            (weights >= 0) & torch.isfinite(weights),
            lambda: InvalidData(
                f"the weights of {self.name} reach from {weights.min().item():.3g} to {weights.max().item():.3g}; they "
                "must be finite and at least 0."
            ),
        )
        return weights

    def _under_key(self, batch: Any) -> Any:
        """Weights under the key of a mapping."""
        names = keys(batch)
        if names is not None and self.key in names:
            return batch[self.key]
        form = "is no mapping" if names is None else f"has the keys {names}"
        raise MissingKey(f"{self.name}, but the batch {form}; give weight_fn=lambda x, y: ... instead.")


@dataclass(frozen=True, eq=False)
class _WeightedLoader:
    """The batches of a loader with their weights."""

    weights: DataWeights  # of the data
    batches: Iterable[Any]
    dict_key_y: str  # key of the targets, for mappings

    def __len__(self) -> int:
        return len(self.batches)  # pyright: ignore[reportArgumentType]  (a TypeError tells a progress bar of none)

    def __iter__(self) -> Iterator[WeightedBatch]:
        return (self.weights.weighted(batch, self.dict_key_y) for batch in self.batches)
