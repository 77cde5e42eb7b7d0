"""The weights that training moves: those that are random, and the rest, which has a prior of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from laplace.core.processes import Processes
from laplace.errors import InvalidArgument, InvalidData
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.parametric import ParametricLaplace
from laplace.posterior.learning import discovered, informed
from laplace.posterior.posterior import match_lengths
from laplace.weights.base import trainable
from laplace.weights.problem import ParameterSlice, Problem


def random_weights(la: ParametricLaplace) -> Tensor:
    """Random entries of the model's present weights, `[P]`, with their graph."""
    tensors = [slot.take(tensor) for slot, tensor in zip(la.problem.slots, la.params, strict=True)]
    return torch.cat(tensors).to(la.prior_mean.dtype)


@dataclass(frozen=True)
class RestOfWeights:
    """Trainable weights that are not random, the trunk below a last layer for one, under N(0, 1/ε).

    Attributes:
        problem: The network, and its random entries.
        slots: Tensors with entries of the rest, and which these are.
        precision: ε, 0-dim.
    """

    problem: Problem
    slots: tuple[ParameterSlice, ...]
    precision: Tensor

    @classmethod
    def of(cls, la: ParametricLaplace, precision: float) -> RestOfWeights:
        """The rest of the weights of a posterior's network.

        Args:
            la: Its random weights are known.
            precision: ε.

        Raises:
            InvalidArgument: The random weights are frozen, or the precision is negative or infinite.
        """
        if not isinstance(precision, Real) or not 0 <= precision < math.inf:
            raise InvalidArgument(f"prior_prec_rest={precision!r}; it must be a number from 0, and finite.")
        if not all(tensor.requires_grad for tensor in la.params):
            raise InvalidArgument(
                "the random weights are frozen, and the evidence is that of weights that training moves; set "
                "requires_grad=True, or use Laplace(...) after training."
            )
        # By identity: a weight that is tied to another one's has a second name.
        random = {id(tensor): slot for tensor, slot in zip(la.params, la.problem.slots, strict=True)}
        slots = [
            _others(name, tensor.shape, random.get(id(tensor))) for name, tensor in trainable(la.weights.model).items()
        ]
        return cls(la.problem, tuple(slot for slot in slots if slot is not None), la.prior_mean.new_tensor(precision))

    def quad(self) -> Tensor:
        """ε ‖θ‖² at the present weights, 0-dim, with their graph."""
        total = torch.zeros_like(self.precision)
        for slot in self.slots:
            total = total + slot.take(self.problem.tensor(slot.name)).to(total.dtype).square().sum()
        return self.precision * total


def _others(name: str, shape: torch.Size, random: ParameterSlice | None) -> ParameterSlice | None:
    """Entries of a tensor that are not random; None without any."""
    if random is None:
        return ParameterSlice(name, shape)
    if random.entries is None:
        return None
    others = torch.ones(shape.numel(), dtype=torch.bool)
    others[random.entries.cpu()] = False
    return ParameterSlice(name, shape, others.nonzero().squeeze(1))


def find_random_weights(la: ParametricLaplace, train_loader: Iterable[Any], processes: Processes | None) -> None:
    """Finds the last layer by a pass of the first data, where it is random and was not named.

    Args:
        la: The posterior, which knows its random weights afterwards.
        train_loader: Batches.
        processes: Those that train together; None where this one does alone.

    Raises:
        InvalidArgument: A prior whose length does not fit its weights.
        InvalidData: No data, or all are ignored.
        ProcessError: Another process failed.
    """
    if la.weights.problem is not None:
        return

    def find() -> tuple[int | None, str | None] | None:
        with autograd_mode(), torch.no_grad(), same_random_state(la.weights.model):
            first = _first(la, train_loader)
            if first is None:
                return None
            posterior = discovered(la.snapshot(), *first)
            return posterior.choices.channel_dim, posterior.problem.head

    # A process may have no data.
    outcomes = [find()] if processes is None else processes.agreed(find)
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        raise InvalidData("train_loader gave no data, or all are ignored; training needs at least one datum.")
    posterior = informed(la.snapshot(), *known[0])
    la.set_posterior(posterior.at(match_lengths(posterior.hypers, posterior.weights)))


def _first(la: ParametricLaplace, train_loader: Iterable[Any]) -> tuple[Any, Tensor] | None:
    """The data of the first batch that has any, without ignored ones; None without one."""
    rules, model = la.likelihood_object, la.weights.model
    read = (next_token.counted(batch, la.dict_key_y, la.prior_mean.device, rules, model) for batch in train_loader)
    return next((data for data in read if data is not None), None)
