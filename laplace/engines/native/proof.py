"""The numbers that a rule must reproduce, and how closely."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import where_not_finite
from laplace.engines.native.autograd import differentiable, pull
from laplace.engines.native.capture import Capture
from laplace.errors import InvalidData
from laplace.weights.problem import Problem

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Relative error that rounding may leave in a product of a derivative with random vectors."""

_SCALINGS = (0.61, 0.83, 1.37)
"""Factors of a cotangent under which every product in a backward pass is rounded in another way."""

_MOVES = 6
"""Forward passes at weights and inputs that differ in their last digits, so that every product is another one."""

_LOST = 0.25
"""Share of a derivative that moves with them where rounding is all that it is."""

_NOISE = 8.0
"""Number of times the rounding that was seen an error may be."""

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Probe:
    """The random numbers of one probe with what autograd says of them.

    Attributes:
        r: Weights of the data, `[B]`.
        unweighted: u, a multiple of v for every datum, `[1, B, M]`.
        truths: autograd.grad(f, tensor, r u) per slot, or None where f does not depend on the tensor.
        gradients: Output gradients of every captured use for the unweighted cotangents.
        coarsest: The least exact dtype among them and the outputs: that of the weights, or a lower one where the
            network enters `torch.autocast` by itself.
        again: The truths of another multiple of r u.
        moved: Those of r u at weights and inputs with other last digits, by a seed; None where that is not known.
    """

    r: Tensor
    unweighted: Tensor
    truths: Gradients
    gradients: tuple[Tensor, ...]
    coarsest: torch.dtype
    again: Callable[[float], Gradients]
    moved: Callable[[int], Gradients] | None

    @cached_property
    def noise(self) -> tuple[Tensor, ...]:
        """Norm of the rounding errors in every truth: what c⁻¹ autograd.grad(f, tensor, c r u) changes with c.

        Where a derivative is zero for a reason, as that of a softmax in the bias of its keys or of a norm over two
        channels in what it normalises, nothing but rounding is left of it, which no bound of the sum shows.
        """
        return self._largest_change((self.again(factor), factor) for factor in _SCALINGS)

    @cached_property
    def lost(self) -> tuple[Tensor, ...]:
        """Norm of every truth that is rounding of the forward pass and nothing else; 0 of all others.

        A norm over one number gives 0, but for rounding that follows the last digits of what it is given. The
        derivative in its weight is that rounding; it is another one in every pass over other data.
        """
        if self.moved is None:
            return (torch.zeros(()),) * len(self.truths)
        changes = self._largest_change((self.moved(seed), 1.0) for seed in range(_MOVES))
        return tuple(
            change if truth is not None and change >= _LOST * truth.to_dense().to(change).norm() else 0 * change
            for truth, change in zip(self.truths, changes, strict=True)
        )

    def _largest_change(self, others: Iterable[tuple[Gradients, float]]) -> tuple[Tensor, ...]:
        """Norm of the largest difference of every truth from others, which are multiples of it by some factor."""
        largest = [torch.zeros(())] * len(self.truths)
        for gradients, factor in others:
            for i, (truth, scaled) in enumerate(zip(self.truths, gradients, strict=True)):
                if truth is not None and scaled is not None:
                    dtype = torch.promote_types(truth.dtype, torch.float32)
                    difference = scaled.to_dense().to(dtype) / factor - truth.to_dense().to(dtype)
                    largest[i] = torch.maximum(largest[i].to(difference), difference.norm())
        return tuple(largest)

    def agree(self, slot: int, actual: Tensor, expected: Tensor, bound: Tensor, scale: float = 1.0) -> bool:
        """True if two vectors agree to the accuracy of the model's dtype, or to what rounding leaves in the truth.

        Args:
            slot: Which tensor they belong to.
            actual: From factors.
            expected: From autograd, in the model's dtype.
            bound: Norm of what was added up: the scale of rounding errors where the sum cancels.
            scale: Size of the cotangents as a multiple of those of the truths.
        """
        if close(actual, expected, bound, self.coarsest):
            return True
        error = (actual - expected.to(actual)).norm()
        if error <= _NOISE * scale * self.noise[slot].to(error):
            return True
        return bool(error <= _NOISE * scale * self.lost[slot].to(error))


def close(actual: Tensor, expected: Tensor, bound: Tensor, coarsest: torch.dtype | None = None) -> bool:
    """True if two vectors agree to the accuracy of the model's dtype.

    Args:
        actual: From factors.
        expected: From autograd, in the model's dtype.
        bound: Norm of what was added up: the scale of rounding errors where the sum cancels.
        coarsest: A dtype in which a part of both may have been computed.
    """
    tolerance = max(TOLERANCE[expected.dtype], TOLERANCE.get(coarsest or expected.dtype, 0.0))
    error = (actual - expected.to(actual)).norm()
    return bool(error <= tolerance * (expected.norm().to(error) + 1e-2 * bound.to(error)))


def probe(problem: Problem, capture: Capture, x: Inputs, n_data: int) -> Probe:
    """The probe of a captured batch x of B data.

    Raises:
        InvalidData: Outputs or derivatives are not finite.
    """
    f, generator = capture.f, torch.Generator().manual_seed(0)
    r = torch.randn(n_data, generator=generator).to(f) if n_data > 1 else torch.ones(1).to(f)
    v = torch.randn(f.shape[1], generator=generator).to(f)
    # A bias has the same Jacobian at every datum: cotangents that differ in size tell its rows apart all the same.
    unweighted = (1 + torch.rand(n_data, 1, generator=generator).to(f)) * v
    weighted, names = r[:, None] * unweighted, [slot.name for slot in problem.slots]
    stand_ins = [capture.stand_ins[name] for name in names]

    def again(factor: float) -> Gradients:
        with capture.backward(1, len(stand_ins)):
            gradients = pull(f, stand_ins, factor * weighted.unsqueeze(0), loop=True)
        return tuple(None if gradient is None else gradient[0] for gradient in gradients)

    def moved(seed: int) -> Gradients:
        digits = torch.Generator().manual_seed(seed)
        tensors = {name: _moved(tensor, digits) for name, tensor in problem.detached().items()}
        wanted = [tensors[name].requires_grad_() for name in names]
        with torch.enable_grad(), differentiable(problem.module, twice=False), problem.holding(tensors):
            outputs = problem.outputs(batches.transform(x, lambda leaf: _moved(leaf, digits))).flatten(1)
            gradients = pull(outputs, wanted, weighted.unsqueeze(0), loop=True)
        return tuple(None if gradient is None else gradient[0] for gradient in gradients)

    truths = again(1.0)
    known = [f, *(truth.to_dense() for truth in truths if truth is not None)]
    if not all(bool(tensor.isfinite().all()) for tensor in known):
        raise InvalidData(
            f"the network's outputs or their derivatives are NaN or infinite{where_not_finite(f)}; look at the inputs "
            "and at the network's weights."
        )
    cotangents = unweighted.unsqueeze(0)
    pulled = capture.gradients(cotangents, range(len(capture.calls)))
    gradients = tuple(pulled[n].detach() for n in range(len(capture.calls)))
    coarsest = max({tensor.dtype for tensor in (f, *gradients)}, key=lambda dtype: TOLERANCE.get(dtype, 0.0))
    made = Probe(r, cotangents, truths, gradients, coarsest, again, moved if capture.processes is None else None)
    # Whether it is needed is for rounding to say, which processes that make all passes together may not wait for.
    if capture.processes is not None:
        _ = made.noise
    return made


def _moved(tensor: Tensor, digits: torch.Generator) -> Tensor:
    """A tensor whose numbers differ by some units of rounding; others than floating point ones as they are."""
    if not tensor.is_floating_point():
        return tensor
    steps = torch.randint(-3, 4, tensor.shape, generator=digits, dtype=torch.int8).to(tensor)
    return torch.addcmul(tensor.detach(), tensor.detach(), steps, value=torch.finfo(tensor.dtype).eps)
