"""A prediction as a plain module of PyTorch, traced from the prediction itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from laplace.core import batch as batches
from laplace.core.arguments import checked
from laplace.core.batch import Inputs
from laplace.core.memory import ran_out
from laplace.core.random_numbers import replayed, standard_normal
from laplace.errors import InvalidData, InvalidInputs, LaplaceError, UnsupportedError
from laplace.extensions.asked import posterior_of
from laplace.extensions.graphs import AnySize, traced
from laplace.mixture.mixture import MixtureLaplace
from laplace.parametric import ParametricLaplace

Predict = Callable[..., Any]
"""A prediction at inputs, by keywords with a generator or without: a tensor, or mean and variance."""

_SIZES = (3, 5)
"""Data of the two traces: more than one, for one is a case of its own, and few."""

_BEYOND = 8
"""Data on which the module is compared besides the example: more than were traced, and no odd number."""

_COMPARED = 3
"""Data that are predicted one by one to be compared."""

_DIGITS = 2 / 3
"""Share of the digits of a dtype in which module and prediction must agree."""


@dataclass(frozen=True, eq=False)
class Example:
    """Inputs as users give them, and what the tensors among them are called."""

    x: Inputs
    names: tuple[str, ...]  # of the module's arguments, one per tensor, as of `_argument_names`
    n_data: int  # B

    @classmethod
    def from_inputs(cls, x: Inputs) -> Example:
        """Inputs with at least one datum."""
        n_data = batches.size(x, "")
        if n_data == 0:
            raise InvalidData("example_x holds no data; give a batch of at least one datum.")
        return cls(x, _argument_names(x), n_data)

    @property
    def batched(self) -> int:
        """The first tensor that has the data in its first dimension."""
        shapes = [tensor.shape for tensor in batches.tensors(self.x)]
        return next(i for i, shape in enumerate(shapes) if len(shape) and shape[0] == self.n_data)

    def rows(self, index: slice | Tensor) -> Inputs:
        """Some of the data."""
        return batches.select(self.x, index, self.n_data)

    def of_size(self, size: int) -> Inputs:
        """The data, as often as it takes."""
        return self.rows(torch.arange(size, device=batches.tensors(self.x)[0].device) % self.n_data)


def exported(
    predict: Predict, example_x: Inputs, generator: torch.Generator | None, options: Mapping[str, Any]
) -> nn.Module:
    """The module of a prediction, for batches of any size.

    Args:
        predict: The prediction.
        example_x: Inputs of at least one datum.
        generator: Source of the numbers that are stored; None for the global one.
        options: Of the prediction.
    """
    if options.get("group_size") not in (None, 1):
        raise UnsupportedError(
            "group_size= of an export: a module takes batches of any size, not only whole groups. Export "
            "joint=True without it, and give the module one group at a time."
        )
    example = Example.from_inputs(example_x)
    draws = replayed(generator, batches.tensors(example_x)[0].device)
    source = draws()
    any_size = AnySize(_SIZES, lambda shape, like: standard_normal(shape, like, source))
    small, large = (_graph(predict, example.of_size(size), options) for size in _SIZES)
    with torch.no_grad():
        module = any_size.module((small, large), example.names, example.batched)
    if any_size.has_noise and options.get("joint"):
        raise UnsupportedError(
            "joint=True with sampling: the module stores the random numbers of one datum, for all data. Leave it out."
        )
    for x in _compared(example, apart=any_size.has_noise):
        numbers = {"generator": draws()} if any_size.has_noise else {}
        with torch.no_grad():
            actual = module(*batches.tensors(x))
        _require_equal(actual, predict(x, **options, **numbers))
    return module


def _graph(predict: Predict, x: Inputs, options: Mapping[str, Any]) -> fx.GraphModule:
    """The operations of a prediction, which is made once before, so that all that is kept is there."""

    def function(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return predict(batches.transform(x, lambda _: next(given)), **options)

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        predict(x, **options)
        try:
            return traced(function, batches.tensors(x))
        except (RuntimeError, TypeError, ValueError) as raised:
            # The inputs fit the network: it has just been run on them.
            error = raised.__cause__ if isinstance(raised, InvalidInputs) and raised.__cause__ else raised
            if isinstance(error, LaplaceError) or ran_out(error):
                raise
            raise UnsupportedError(f"{_NO_GRAPH} PyTorch says: {str(error).strip().splitlines()[0]}") from error


_NO_GRAPH = (
    "the prediction is no fixed graph of operations: the network, or what is asked of the posterior, decides by the "
    "numbers in the inputs what to do. A network that branches on its inputs is to be written with torch.where; one "
    "that packs sequences, whose lengths pack_padded_sequence reads as numbers, runs on padded ones and takes the "
    "state at the last position of each by torch.gather; one "
    "whose inputs say which positions count (by an index) takes subset_of_weights='last_layer'; in place of "
    "a structure that solves by steps until exact ('matrix_free' of many weights) fit 'kron', 'diag' or 'lowrank'."
)


def _compared(example: Example, *, apart: bool) -> list[Inputs]:
    """Inputs at which module and prediction are compared: one datum, all data, and more than were traced.

    Args:
        example: The data.
        apart: Some data one by one instead, of which each is predicted with the numbers that the module stores.
    """
    single = [example.rows(slice(i, i + 1)) for i in range(min(example.n_data, _COMPARED) if apart else 1)]
    return single if apart else [*single, example.of_size(_BEYOND), example.rows(slice(0, example.n_data))]


def _require_equal(actual: Any, expected: Any) -> None:
    """Requires that tensors, or pairs of them, differ by no more than their rounding."""
    pairs = zip(*(value if isinstance(value, tuple) else (value,) for value in (actual, expected)), strict=True)
    for a, b in pairs:
        scale = b.detach().abs().amax().clamp(min=torch.finfo(b.dtype).tiny)
        difference = float((a - b.detach()).abs().amax() / scale)
        if not difference <= torch.finfo(b.dtype).eps ** _DIGITS:
            raise UnsupportedError(
                f"the module that was traced differs from the prediction, by {difference:.1e} of its largest entry: "
                "the network does not compute the same twice (random numbers, a counter), or what it does depends on "
                "the size of the batch."
            )


def _argument_names(x: Inputs) -> tuple[str, ...]:
    """Names of the tensors among the inputs, as arguments: the keys of a mapping, `x`, or `x0`, `x1`, … of a tuple."""
    if batches.keys(x) is None:
        return ("x",) if isinstance(x, Tensor) else tuple(f"x{i}" for i in range(len(batches.tensors(x))))
    given: Any = x
    names = tuple(key for key, value in given.items() if isinstance(value, Tensor))
    for key in names:
        if not isinstance(key, str) or not key.isidentifier():
            raise InvalidData(f"the inputs have the key {key!r}, which is no name of an argument; rename it.")
    return names


@checked
def export(
    la: ParametricLaplace | MixtureLaplace,
    example_x: Inputs,
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> nn.Module:
    """The prediction `la(x, **options)` as a plain PyTorch module that needs this library no longer.

    The module holds buffers only, takes batches of any size, returns what `la(x)` returns, and can be
    differentiated with respect to x. It can be passed to `torch.export.export` with a dynamic batch dimension, to
    `torch.onnx.export` and to `torch.compile(fullgraph=True)`. It is traced at `example_x`, and checked against the
    prediction there. Random numbers are drawn now and stored: every datum uses the same ones.

    Args:
        la: A fitted posterior or mixture.
        example_x: Inputs of at least one datum: a tensor, tuple or mapping. The module is called with the tensors
            in it: `module(x)`, `module(x0, x1)`, or by the keys of the mapping, `module(**x)`.
        generator: Random generator of the stored numbers.
        **options: Options of `la(x, ...)`: `link_approx`, `diagonal_output`, `observation_noise`, …

    Raises:
        NotFittedError: Before `fit`.
        InvalidData: No data, or a key that cannot be the name of an argument.
        UnsupportedError: The prediction cannot be traced, or its graph depends on the batch; or the
            module's result differs from the prediction.
    """
    for part in la.components if isinstance(la, MixtureLaplace) else (la,):
        posterior_of(part)
    return exported(la, example_x, generator, options)
