"""The numbers that a rule must reproduce, and how closely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.engines.native.autograd import pull
from laplace.engines.native.capture import Capture
from laplace.errors import InvalidData
from laplace.weights.problem import Problem

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Relative error that rounding may leave in a product of a derivative with random vectors."""

_SCALINGS = (0.61, 0.83, 1.37)
"""Factors of a cotangent under which every product in a backward pass is rounded in another way."""

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
    """

    r: Tensor
    unweighted: Tensor
    truths: Gradients
    gradients: tuple[Tensor, ...]
    coarsest: torch.dtype
    again: Callable[[float], Gradients]

    @cached_property
    def noise(self) -> tuple[Tensor, ...]:
        """Norm of the rounding errors in every truth: what c⁻¹ autograd.grad(f, tensor, c r u) changes with c.

        Where a derivative is zero for a reason, as that of a softmax in the bias of its keys or of a norm over two
        channels in what it normalises, nothing but rounding is left of it, which no bound of the sum shows.
        """
        largest = [torch.zeros(())] * len(self.truths)
        for factor in _SCALINGS:
            for i, (truth, scaled) in enumerate(zip(self.truths, self.again(factor), strict=True)):
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
        return bool(error <= _NOISE * scale * self.noise[slot].to(error))


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


def probe(problem: Problem, capture: Capture, n_data: int) -> Probe:
    """The probe of a captured batch of B data.

    Raises:
        InvalidData: Outputs or derivatives are not finite.
    """
    f, generator = capture.f, torch.Generator().manual_seed(0)
    r = torch.randn(n_data, generator=generator).to(f) if n_data > 1 else torch.ones(1).to(f)
    v = torch.randn(f.shape[1], generator=generator).to(f)
    # A bias has the same Jacobian at every datum: cotangents that differ in size tell its rows apart all the same.
    unweighted = (1 + torch.rand(n_data, 1, generator=generator).to(f)) * v
    stand_ins = [capture.stand_ins[slot.name] for slot in problem.slots]

    def again(factor: float) -> Gradients:
        cotangents = factor * r[:, None] * unweighted
        with capture.backward(1, len(stand_ins)):
            gradients = pull(f, stand_ins, cotangents.unsqueeze(0), loop=True)
        return tuple(None if gradient is None else gradient[0] for gradient in gradients)

    truths = again(1.0)
    known = [f, *(truth.to_dense() for truth in truths if truth is not None)]
    if not all(bool(tensor.isfinite().all()) for tensor in known):
        raise InvalidData(
            "the network's outputs or their derivatives are NaN or infinite; look at the inputs and at the network's "
            "weights."
        )
    cotangents = unweighted.unsqueeze(0)
    pulled = capture.gradients(cotangents, range(len(capture.calls)))
    gradients = tuple(pulled[n].detach() for n in range(len(capture.calls)))
    coarsest = max({tensor.dtype for tensor in (f, *gradients)}, key=lambda dtype: TOLERANCE.get(dtype, 0.0))
    made = Probe(r, cotangents, truths, gradients, coarsest, again)
    # Whether it is needed is for rounding to say, which processes that make all passes together may not wait for.
    if capture.processes is not None:
        _ = made.noise
    return made
