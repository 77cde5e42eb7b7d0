"""Multi-input multi-output networks as mixtures: one network, M inputs and M heads (Havasi et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.arguments import CheckedConstructor, check_counts, checked
from laplace.core.layout import flatten
from laplace.core.random_numbers import check_generator, uniform
from laplace.enums import HessianStructure, LikelihoodName, StructureName, SubsetOfWeights, WeightsName
from laplace.errors import InvalidArgument, InvalidData
from laplace.grid import from_names
from laplace.likelihoods import Likelihood, get_likelihood
from laplace.mixture.mixture import MixtureLaplace
from laplace.network.fsdp import require_unsharded
from laplace.network.model_guard import model_lock, require_module, unwrap
from laplace.structures.base import Curvature
from laplace.weights.base import trainable
from laplace.weights.discovery import find_last_layer, require_linear
from laplace.weights.last_layer import network_of


@dataclass(frozen=True)
class HeadCall:
    """Calls a network of M heads for the outputs of one: a `forward_fn`.

    Head m predicts the target of input m: of one input x, which the network sees M times, or of M inputs.

    Attributes:
        head: Which one, from 0.
        n_heads: M.
    """

    head: int
    n_heads: int
    saved_as: ClassVar[str] = "head"

    def __call__(self, model: nn.Module, x: Any) -> Tensor:
        """Outputs of the head, `[B, C]`, at one input `[B, D, …]` or at M of them."""
        return mimo_outputs(model, x, self.n_heads)[:, self.head]


def mimo_outputs(model: nn.Module, x: Any, n_heads: int) -> Tensor:
    """Outputs of every head of a network with M inputs and M heads, `[B, M, C]`.

    Args:
        model: Takes M inputs concatenated along dimension 1; returns `[B, M·C]`, head after head, or `[B, M, C]`.
        x: For prediction: one input `[B, D, …]`, repeated M times. For training: a tuple of M inputs, one per head.
        n_heads: M.

    Raises:
        InvalidArgument: `n_heads` is not a positive integer.
        InvalidData: The number of inputs is not M, their shapes differ, or the shape of the outputs does not belong to
            M heads.
    """
    check_counts(n_heads=n_heads)
    inputs = (x,) * n_heads if isinstance(x, Tensor) else x
    if not isinstance(inputs, tuple) or len(inputs) != n_heads:
        raise InvalidData(f"give one tensor, or a tuple of {n_heads}, one for each head of the network.")
    shapes = {tuple(part.shape): None for part in inputs}
    if len(shapes) > 1:
        raise InvalidData(f"the inputs of the {n_heads} heads have the shapes {list(shapes)}; give one shape.")
    outputs = model(torch.cat(inputs, 1))
    if outputs.ndim == 2 and outputs.shape[1] % n_heads == 0:
        outputs = outputs.unflatten(1, (n_heads, -1))
    if outputs.ndim != 3 or outputs.shape[1] != n_heads:
        raise InvalidData(
            f"the network's outputs have shape {tuple(outputs.shape)}; those of {n_heads} heads are [B, M·C], "
            "head after head, or [B, M, C]."
        )
    return outputs


def last_layer_of(model: nn.Module, n_heads: int, last_layer_name: str | None, example: Tensor | None) -> str:
    """Name of the layer with the heads: as given, or found by a pass of an example."""
    require_unsharded(model)
    inner = unwrap(require_module(model))
    if last_layer_name is not None:
        return require_linear(inner, last_layer_name)
    if example is None:
        raise InvalidArgument(
            "which layer holds the heads? Pass last_layer_name=, or example= with some inputs [B, …] for a forward "
            "pass that shows it."
        )
    return find_last_layer(inner, example[:1], HeadCall(0, n_heads))


def head_indices(model: nn.Module, last_layer_name: str, call: HeadCall) -> Tensor:
    """Indices of the weights of one head among the flattened trainable parameters of a network, `[p]`."""
    inner = unwrap(model)
    layer = inner.get_submodule(require_linear(inner, last_layer_name))
    with model_lock(inner):
        own = {id(tensor) for tensor in layer.parameters()}
        every = {name: (tensor.shape, id(tensor) in own) for name, tensor in trainable(inner).items()}
        n_outputs = max((len(tensor) for tensor in layer.parameters()), default=0)
    if n_outputs % call.n_heads:
        raise InvalidArgument(
            f"layer {last_layer_name!r} has {n_outputs} outputs, which are not those of n_heads={call.n_heads} heads."
        )
    if not any(mine for _, mine in every.values()):
        raise InvalidArgument(
            f"layer {last_layer_name!r} is frozen, so none of its weights can be random; set requires_grad=True."
        )
    size = n_outputs // call.n_heads
    rows = slice(call.head * size, (call.head + 1) * size)
    marks = {name: torch.zeros(shape, dtype=torch.bool) for name, (shape, _) in every.items()}
    for name, (_, mine) in every.items():
        if mine:
            marks[name][rows] = True
    return flatten(marks).nonzero().flatten()


@checked
def from_mimo(
    model: nn.Module,
    n_heads: int,
    likelihood: Likelihood | LikelihoodName = "classification",
    subset_of_weights: WeightsName = SubsetOfWeights.LAST_LAYER,
    hessian_structure: StructureName | type[Curvature] = HessianStructure.FULL,
    *,
    last_layer_name: str | None = None,
    example: Tensor | None = None,
    weights: Literal["uniform", "evidence"] | Tensor | Sequence[float] = "uniform",
    **options: Any,
) -> MixtureLaplace:
    """A multi-input multi-output network (MIMO; Havasi et al., 2021) with M heads, as a mixture of M.

    Component m is the network x ↦ f_m(x, …, x), with head m's rows of the last layer (or all weights) random.
    Loaders give one x per target, `[B, D, …]`, which is repeated M times, as in prediction. To fit a head at the
    inputs it was trained with, fit its component with batches `(x_1, …, x_M, y_m)`.

    Args:
        model: Takes M inputs concatenated along dimension 1; returns `[B, M·C]`, head after head, or `[B, M, C]`.
        n_heads: M.
        likelihood: As in `Laplace`.
        subset_of_weights: `"last_layer"` or `"all"`.
        hessian_structure: As in `Laplace`; by default a full matrix per head, as in the paper.
        last_layer_name: Name of the layer with the heads, an `nn.Linear`. If you do not give it, give
        example: inputs `[B, D, …]`, from which the layer is determined.
        weights: Mixture weights π, as in `MixtureLaplace`.
        **options: Further arguments of `Laplace`, except `forward_fn`.

    Raises:
        InvalidArgument: No such layer, a number of outputs that M does not divide, or another subset of weights.
    """
    check_counts(n_heads=n_heads)
    model = network_of(model)
    calls = [HeadCall(head, n_heads) for head in range(n_heads)]
    subset = str(subset_of_weights)
    if subset not in (SubsetOfWeights.LAST_LAYER, SubsetOfWeights.ALL):
        raise InvalidArgument(f"subset_of_weights={subset!r}; accepted for heads are 'last_layer' and 'all'.")
    each: list[dict[str, Any]] = [options | {"forward_fn": call} for call in calls]
    if subset == SubsetOfWeights.LAST_LAYER:
        subset, name = SubsetOfWeights.SUBNETWORK, last_layer_of(model, n_heads, last_layer_name, example)
        for own, call in zip(each, calls, strict=True):
            own["subnetwork_indices"] = head_indices(model, name, call)
    parts = [from_names(model, likelihood, subset, hessian_structure, **own) for own in each]
    return MixtureLaplace(parts, weights=weights)


# Training of multi-input multi-output networks (Havasi et al., 2021): their batches and their loss.


class MimoBatches(CheckedConstructor):
    """Training batches of a network with M inputs and M heads (MIMO), made from those of a loader.

    Every batch `(x, y)` of B data becomes one of n = R·B rows, `((x_1, …, x_M), targets)`, with inputs `[n, D, …]` for
    each head and targets `[n, M, …]`. Each head gets the data of the batch, R times, in a random order of its own, so
    that the heads become independent. With probability ρ a row has the same datum for all heads, as in prediction.

    Each iteration draws new random numbers. To fit head m at the inputs of its training, iterate once,
    `rows = list(MimoBatches(loader, M))`, and fit `mimo.components[m]` to `[(x, y[:, m]) for x, y in rows]`.

    Args:
        loader: Batches `(x, y)` with x `[B, D, …]` and targets in any form that the likelihood accepts.
        n_heads: M.
        input_repetition: ρ, in [0, 1].
        batch_repetition: R, how often a batch is repeated, in different combinations.
        generator: Random generator; None for PyTorch's global one.

    Raises:
        InvalidArgument: A number is out of range, or the loader can be read only once.
        InvalidType: `loader` or `generator` has another type.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        n_heads: int,
        input_repetition: float = 0.0,
        batch_repetition: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        check_counts(n_heads=n_heads, batch_repetition=batch_repetition)
        if not isinstance(input_repetition, Real) or not 0 <= input_repetition <= 1:
            raise InvalidArgument(f"input_repetition={input_repetition!r}; a probability, from 0 to 1, is accepted.")
        check_generator(generator)
        batches.require_loader(loader, "loader")
        batches.require_rereadable(loader, "training reads it once per epoch")
        self.loader, self.n_heads, self.generator = loader, n_heads, generator
        self.input_repetition, self.batch_repetition = float(input_repetition), batch_repetition

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Inputs of every head, M times `[n, D, …]`, and targets `[n, M, …]`, of every batch.

        Raises:
            InvalidData: Inputs that are no tensor `[B, D, …]`, or as many targets.
        """
        for batch in self.loader:
            x, y = batches.split(batch, batches.LABELS)
            _check_pair(x, y)
            rows = self._rows(x)
            yield tuple(x[row] for row in rows), torch.stack([y[row] for row in rows.to(y.device)], 1)

    def _rows(self, x: Tensor) -> Tensor:
        """Index of the datum that every head sees in every row, `[M, n]`."""
        data = torch.arange(len(x), device=x.device).repeat(self.batch_repetition)
        numbers = uniform((self.n_heads + 1, len(data)), x, self.generator)
        repeated = numbers[0] < self.input_repetition
        # Rows that do not repeat their input are first; a head has them in an order of its own, the others as they are.
        places = repeated.int().argsort(stable=True)
        order = numbers[1:].masked_fill(repeated, 1.0).argsort(dim=1, stable=True)
        return torch.empty_like(order).scatter_(1, places.expand_as(order), data[order])


def _check_pair(x: Any, y: Tensor) -> None:
    """Requires one tensor of inputs, and a target for each of them."""
    if not isinstance(x, Tensor) or x.ndim < 2:
        given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InvalidData(
            f"the inputs of a batch are {given}; those of heads are one tensor [B, D, …], of which the network takes M "
            "concatenated along dimension 1: for x of shape [B] give x.unsqueeze(1)."
        )
    if len(x) != len(y):
        raise InvalidData(f"a batch has {len(x)} inputs and {len(y)} targets; give a target for every datum.")


@checked
def mimo_loss(f: Tensor, y: Tensor, likelihood: Likelihood | LikelihoodName = "classification") -> Tensor:
    """Loss of a network with M heads, the sum over heads of their mean losses, 0-dim.

        L(θ) = Σ_m (1/n_m) Σ_b ℓ(f_m(x_b1, …, x_bM), y_bm)

    with the loss ℓ (cross-entropy, or half the squared error summed over outputs) and the number n_m of rows of head m
    whose label is not ignored (with class weights: the sum of their weights). It is the loss of Havasi et al. (2021)
    without the weight decay.

    Args:
        f: Outputs of every head, `[n, M, C]`, from `mimo_outputs`.
        y: Targets of every head, `[n, M, …]`, from `MimoBatches`.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.

    Raises:
        InvalidData: Shapes of other heads, outputs that are not finite, or targets that do not fit them.
    """
    known = get_likelihood(likelihood)
    if f.ndim != 3 or y.shape[:2] != f.shape[:2]:
        raise InvalidData(
            f"the outputs have shape {list(f.shape)}, the targets {list(y.shape)}; those of M heads are [n, M, C] and "
            "[n, M, …]: see mimo_outputs and MimoBatches."
        )
    wide = f.to(torch.promote_types(f.dtype, torch.float32))
    with checks.together():
        means = [_mean_loss(known, *head) for head in zip(wide.unbind(1), y.to(f.device).unbind(1), strict=True)]
    return torch.stack(means).sum()


def _mean_loss(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Mean unit loss of the rows of one head that count, 0-dim; zero where none does."""
    y = likelihood.check_targets(f, y)
    count = torch.as_tensor(likelihood.count(f, y), device=f.device, dtype=f.dtype)
    return likelihood.loss(f, y) / torch.where(count > 0, count, 1)
