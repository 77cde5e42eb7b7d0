"""Curvature by BackPACK (Dangel, Kunstner & Hennig, 2020), which extends the backward pass of modules it knows.

First-order quantities (gradients and Jacobians per datum) exist for known layers wherever they stand in a network;
second-order ones only where the network is, from the first layer with random parameters on, a chain of known modules.
Padding other than zeros, which BackPACK takes for zeros, and convolutions' Kronecker factors, which follow another
convention than KFAC-expand, are the native engine's.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.gram import gram
from laplace.core.random_numbers import drawn_seed
from laplace.curvature.interface import CurvatureInterface, EFInterface
from laplace.curvature.model_copy import CopiedBatch
from laplace.curvature.module_chain import chain_from
from laplace.curvature.package_backends import PackageGGN, PackageInterface
from laplace.curvature.packages import LayerFactors, PackageEngine, Reasons, missing
from laplace.curvature.support_tables import (
    CHAIN,
    FACTORED,
    SupportTable,
    backpack_fault,
    faultless,
    hessian_known,
    obstacles_of,
)
from laplace.engines.engine import EngineOptions, Groups
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.kinds import EFEngine, GGNEngine
from laplace.likelihoods.base import Likelihood
from laplace.weights.problem import Problem

INSTALL = (
    "pip install --no-deps backpack-for-pytorch unfoldNd and then pip install einops leave an installed PyTorch as it "
    "is (its own requirements would bring torchvision and another PyTorch)"
)

_ONE_AT_A_TIME = threading.RLock()
"""BackPACK keeps its active extensions and hooks in global variables."""


def _package() -> ModuleType:
    try:
        import backpack
        import backpack.context
        import backpack.extensions
    except ImportError as error:
        raise missing("backpack", INSTALL, error) from error
    return backpack


class BackPackEngine(PackageEngine):
    """Base of both kinds of curvature: layers, and gradients per datum.

    The arguments are those of `PackageEngine`.
    """

    package = "backpack"

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.backpack = _package()

    @abstractmethod
    def computes(self) -> Mapping[str, Callable[..., Any]]: ...

    def obstacles(self, primitive: str, watched: ForwardPass) -> Reasons:
        return obstacles_of(watched, lambda use: backpack_fault(use, factored=primitive == "kron"))

    @abstractmethod
    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        """Blocks of the unit curvature of groups of tensors."""

    def _full(self, batch: CopiedBatch) -> Tensor:
        return self._blocks(batch, (tuple(range(len(batch.tensors))),))[0]

    def _jacobian(self, batch: CopiedBatch) -> Tensor:
        """Jacobians `[B, C, P]`: one backward pass per output."""
        with self._extended(_layers(batch)):
            f = batch.module(batch.x)
            rows: list[Tensor] = []
            for column in f.T:
                with self.backpack.backpack(self.backpack.extensions.BatchGrad(), retain_graph=True):
                    column.sum().backward(retain_graph=True)
                rows.append(torch.cat(self._per_datum(batch, "grad_batch"), 1))
        return torch.stack(rows, 1)

    def _per_datum(self, batch: CopiedBatch, field: str) -> list[Tensor]:
        """Random entries `[B, p]` of what BackPACK left per datum on every tensor."""
        whole = [getattr(tensor, field).detach() for tensor in batch.tensors]
        return [slot.take_rows(values) for slot, values in zip(self.problem.slots, whole, strict=True)]

    @contextmanager
    def _extended(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """BackPACK's hooks on private modules; its global list of hooks is afterwards what it was before."""
        with _ONE_AT_A_TIME:
            handles = self.backpack.context.CTX.hook_handles
            before = len(handles)
            try:
                for module in modules:
                    self.backpack.extend(module)
                yield
            finally:
                ours = handles[before:]
                del handles[before:]
                for handle in ours:
                    handle.remove()


class BackPackGGNEngine(BackPackEngine):
    """GGN by a propagated root of the output Hessian, exact or sampled; the arguments are those of the base."""

    name = "BackPackGGN"
    native_type = GGNEngine

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "full": self._full, "blocks": self._blocks, "diag": self._diag, "kron": self._kron,
            "jacobian": self._jacobian,
        }  # fmt: skip

    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        """Grams of the propagated root V, `[K, B, p]` of every tensor."""
        roots = self._propagated(batch, range(len(batch.tensors)), "SqrtGGN", CHAIN)
        flat = [slot.take_rows(root.flatten(0, 1)) for slot, root in zip(self.problem.slots, roots, strict=True)]
        return [self.factor * gram(torch.cat([flat[i] for i in group], 1)) for group in groups]

    def _diag(self, batch: CopiedBatch, chosen: Sequence[int]) -> dict[int, Tensor]:
        diagonals = self._propagated(batch, chosen, "DiagGGN", CHAIN)
        return {i: self.factor * self.problem.slots[i].take(v) for i, v in zip(chosen, diagonals, strict=True)}

    def _kron(self, batch: CopiedBatch, chosen: Sequence[int]) -> dict[int, LayerFactors]:
        sides = self._propagated(batch, chosen, "KFAC" if self.options.stochastic else "KFLR", FACTORED)
        factors: dict[int, LayerFactors] = {}
        for i, (output, *inputs) in zip(chosen, sides, strict=True):
            n_data = len(batch.y)  # BackPACK's input side is a mean over the data
            factors[i] = LayerFactors(self.factor * output, n_data * inputs[0] if inputs else None, n_data)
        return factors

    def _propagated(self, batch: CopiedBatch, chosen: Sequence[int], quantity: str, table: SupportTable) -> list[Any]:
        """Values of a second-order extension for some tensors, in one backward pass.

        Raises:
            CurvatureError: The network is not a chain of modules that the extension knows.
        """
        loss = hessian_known(self.loss, batch.watched.f.shape[1])
        batch.treat_only(chosen)
        chain = faultless(chain_from(batch.module, batch.x, [batch.tensors[i] for i in chosen]), table)
        extension = self._extension(quantity)
        with self._extended([*chain.modules, loss]), self.backpack.backpack(extension):
            loss(nn.Sequential(*chain.modules)(chain.x), batch.y).backward()
        return [getattr(batch.tensors[i], extension.savefield) for i in chosen]

    def _extension(self, quantity: str) -> Any:
        """An extension, its draws (from the global state, which is put back) begun at a seed of their own."""
        extensions = self.backpack.extensions
        if self.generator is not None:
            torch.manual_seed(drawn_seed(self.generator))
        if not self.options.stochastic:
            return getattr(extensions, quantity if quantity == "KFLR" else f"{quantity}Exact")()
        return getattr(extensions, quantity if quantity == "KFAC" else f"{quantity}MC")(
            mc_samples=self.options.num_samples
        )


class BackPackEFEngine(BackPackEngine):
    """Empirical Fisher by gradients per datum, or by the sums of their squares; the arguments are those of the base."""

    name = "BackPackEF"
    native_type = EFEngine

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {"full": self._full, "blocks": self._blocks, "diag": self._diag, "jacobian": self._jacobian}

    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        self._backward(batch, self.backpack.extensions.BatchGrad())
        gradients = self._per_datum(batch, "grad_batch")
        # The factor of the loss is a factor of every gradient, so that the Fisher has its square.
        return [self.factor**2 * gram(torch.cat([gradients[i] for i in group], 1)) for group in groups]

    def _diag(self, batch: CopiedBatch, chosen: Sequence[int]) -> dict[int, Tensor]:
        batch.treat_only(chosen)
        self._backward(batch, self.backpack.extensions.SumGradSquared())
        sums = [batch.tensors[i].sum_grad_squared for i in chosen]  # pyright: ignore[reportAttributeAccessIssue]
        return {i: self.factor**2 * self.problem.slots[i].take(v) for i, v in zip(chosen, sums, strict=True)}

    def _backward(self, batch: CopiedBatch, extension: Any) -> None:
        with self._extended(_layers(batch)), self.backpack.backpack(extension):
            self.loss(batch.module(batch.x), batch.y).backward()


def _layers(batch: CopiedBatch) -> list[nn.Module]:
    """Modules of the copy that hold random parameters."""
    parameters = {id(tensor) for tensor in batch.tensors if tensor.requires_grad}
    return [m for m in batch.module.modules() if any(id(t) in parameters for t in m._parameters.values())]


def _cleanup(module: nn.Module) -> None:
    """Takes BackPACK's hooks and attributes off a module and its submodules, those of other modules left alone.

    `backpack.context.CTX.remove_hooks()` takes the hooks off every module there is, and leaves the mark by which
    `extend` knows an extended module, so that it could not be extended again.
    """
    backpack = _package()
    names = (backpack.hook_store_io, backpack.hook_run_extensions)
    for part in module.modules():
        for hooks in (part._forward_hooks, part._backward_hooks):
            for key in [key for key, hook in hooks.items() if hook in names]:
                del hooks[key]
        if not part._backward_hooks:
            part._is_full_backward_hook = None
        backpack.memory_cleanup(part)
        part.__dict__.pop("_backpack_extend", None)


class BackPackInterface(CurvatureInterface):
    """Base of the backends by BackPACK.

    Args:
        model: The network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        last_layer: Differentiate with respect to the last layer only.
        subnetwork_indices: Differentiate with respect to these weights only: indices of flattened parameters, `[p]`.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
    """


class BackPackGGN(BackPackInterface, PackageGGN):
    """GGN by BackPACK, exact or sampled: `full`, `diag` and `kron`, blocks and Jacobians; the rest is native.

    The arguments are those of `PackageGGN`.
    """

    engine_type = BackPackGGNEngine


class BackPackEF(BackPackInterface, PackageInterface, EFInterface):
    """Empirical Fisher by BackPACK: structures `full` and `diag`, blocks and Jacobians; the rest is native.

    The arguments are those of `PackageInterface`.
    """

    engine_type = BackPackEFEngine
