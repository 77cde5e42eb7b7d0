"""Curvature by ASDL (Osawa et al., 2023), which reads the inputs and output gradients of linear and 2-d convolutions.

ASDL (on the package index as asdfghjkl; the package called asdl there is another one) takes every row of a layer's
inputs for a sample of its own, a layer's calls for one, and convolutions for ungrouped ones of input padded by zeros;
some diagonals of convolutions it approximates. Where that would be wrong the native engine computes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.random_numbers import drawn_seed
from laplace.curvature.interface import SAMPLED_BY_PACKAGE, CurvatureInterface, EFInterface, GGNInterface
from laplace.curvature.packages import CopiedBatch, LayerFactors, PackageEngine, imported, obstacle_by_row
from laplace.engines.engine import EngineOptions
from laplace.engines.native.autograd import differentiable
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.functions import LayerCall
from laplace.engines.native.kinds import EFEngine, GGNEngine, HessianEngine
from laplace.errors import CurvatureError
from laplace.likelihoods.base import Likelihood
from laplace.weights.problem import Problem


def asdl_fault(call: LayerCall, primitive: str) -> str:
    """Reason why ASDL does not compute a quantity of a layer correctly; empty if it does."""
    layer = call.module
    if type(layer) is nn.Linear:
        apart = call.x.ndim == 2 or (primitive == "kron" and call.x.ndim > 2)
        return "" if apart else "positions that share a weight, which it takes for data"
    if type(layer) is not nn.Conv2d:
        return f"no curvature of {type(layer).__name__}"
    if layer.groups != 1 or layer.dilation != (1, 1):
        return "a grouped or dilated convolution"
    if layer.padding_mode != "zeros":
        return f"{layer.padding_mode} padding, which it takes for zeros"
    if layer.padding == "same":
        return "padding='same', which it does not know"
    shared, outputs, inputs = call.shape[2:].numel(), layer.out_channels, layer.weight[0].numel()
    if primitive == "diag" and shared > 1 and shared * (outputs + inputs) < outputs * inputs:
        return "a wide convolution, whose diagonal it approximates"
    return "" if call.x.ndim == 4 else "inputs without a batch dimension"


INSTALL = "pip install --no-deps asdfghjkl, which brings the module asdl, leaves an installed PyTorch as it is"


def _asdl() -> ModuleType:
    import asdl.fisher
    import asdl.gradient
    import asdl.hessian

    return asdl


class AsdlEngine(PackageEngine):
    """Fisher matrices of ASDL, exact, sampled or empirical."""

    package, install, load = "asdl", INSTALL, staticmethod(_asdl)
    fisher_type: str  # ASDL's name of this kind of curvature

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {"full": self._full, "diag": self._diag, "kron": self._kron, "jacobian": self._jacobian}

    def obstacle(self, primitive: str, watched: ForwardPass) -> str:
        return obstacle_by_row(watched, lambda call: asdl_fault(call, primitive))

    def _full(self, batch: CopiedBatch) -> Tensor:
        columns = self._columns(batch)
        (total,) = self._mean(batch, "full", lambda: [batch.module.fisher.data])  # pyright: ignore
        return self._scale() * total[columns][:, columns]

    def _diag(self, batch: CopiedBatch) -> list[Tensor]:
        slots = self.problem.slots
        places: list[tuple[Any, str]] = [batch.layer(i) for i in range(len(slots))]
        diagonals = self._mean(batch, "diag", lambda: [getattr(m.fisher.diag, name) for m, name in places])
        return [self._scale() * slot.take(values) for slot, values in zip(slots, diagonals, strict=True)]

    def _kron(self, batch: CopiedBatch) -> list[LayerFactors]:
        places: list[tuple[Any, str]] = [batch.layer(i) for i in range(len(self.problem.slots))]
        sides = self._mean(batch, "kron", lambda: [f for m, _ in places for f in (m.fisher.kron.A, m.fisher.kron.B)])
        factors: list[LayerFactors] = []
        for i, ((layer, name), a, b) in enumerate(zip(places, sides[::2], sides[1::2], strict=True)):
            shape = batch.input_shape(i)
            convolution = isinstance(layer, nn.Conv2d)
            shared = batch.call(i).shape[2:].numel() if convolution else shape[1:-1].numel()
            # ASDL's input side is a sum over the data, of means over the positions of a convolution's output.
            total = None if name == "bias" else a * (shared if convolution else 1)
            factors.append(LayerFactors(self._scale() * b, total, shape[0] * shared))
        return factors

    def _jacobian(self, batch: CopiedBatch) -> Tensor:
        """Jacobians `[B, C, P]`: one forward and one backward pass per output."""
        columns, n_data, outputs = self._columns(batch), *batch.watched.f.shape

        def of_output(c: int) -> Tensor:
            def backward() -> None:
                batch.module(batch.x)[:, c].sum().backward()

            return self.api.gradient.batch_gradient(batch.module, backward, batch_size=n_data)[:, columns]

        return torch.stack([of_output(c) for c in range(outputs)], 1)

    def _mean(self, batch: CopiedBatch, shape: str, read: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Values that `read` gives after a pass of ASDL, as a mean over the draws.

        Targets are drawn one per pass: of several ASDL divides the gradients by their number, and so the Fisher by
        its square.
        """
        if self.generator is not None:
            torch.manual_seed(drawn_seed(self.generator))
        total: list[Tensor] = []
        for _ in range(self.options.num_samples):
            # One forward and backward pass, which leave their result in the attribute `fisher` of private modules.
            config = self.api.fisher.FisherConfig(
                fisher_type=self.fisher_type, fisher_shapes=[shape], loss_type=self._loss_type(), data_size=1
            )
            maker = self.api.fisher.get_fisher_maker(batch.module, config)
            outputs = maker.setup_model_call(batch.module, batch.x)
            if self.fisher_type == "fisher_emp":
                maker.setup_loss_call(self.loss, outputs, batch.y)
            maker.forward_and_backward()
            new = [values.detach() for values in read()]
            total = [former + values for former, values in zip(total, new, strict=True)] if total else new
        return [values / self.options.num_samples for values in total]

    def _loss_type(self) -> str | None:
        if self.fisher_type == "fisher_emp":
            return None
        loss = self.loss
        if type(loss) is nn.MSELoss:
            return "mse"
        if type(loss) is nn.CrossEntropyLoss and loss.weight is None and loss.label_smoothing == 0:
            return "cross_entropy"
        raise CurvatureError(f"no Fisher of {type(loss).__name__}")

    def _scale(self) -> float:
        """Factor that makes ASDL's Fisher that of the unit negative log likelihood; its own squared error is halved."""
        if self.fisher_type == "fisher_emp":
            return self.factor**2
        return 2 * self.factor if type(self.loss) is nn.MSELoss else self.factor

    def _columns(self, batch: CopiedBatch) -> Tensor:
        """Indices of the random entries, in the order of the slots, among the columns of ASDL, module by module."""
        place = {batch.layer(i): i for i in range(len(batch.tensors))}
        order = [place[m, a] for m in batch.module.modules() for a in ("weight", "bias") if (m, a) in place]
        starts: dict[int, int] = {}
        total = 0
        for i in order:
            starts[i] = total
            total += self.problem.slots[i].shape.numel()
        indices = torch.arange(total, device=self.problem.device)
        slots = enumerate(self.problem.slots)
        return torch.cat([slot.take(indices[starts[i] : starts[i] + slot.shape.numel()]) for i, slot in slots])


class AsdlGGNEngine(AsdlEngine):
    """GGN, exact or sampled."""

    name = "AsdlGGN"
    native_type = GGNEngine

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.fisher_type = "fisher_mc" if options.stochastic else "fisher_exact"


class AsdlEFEngine(AsdlEngine):
    """Empirical Fisher."""

    name = "AsdlEF"
    native_type = EFEngine
    fisher_type = "fisher_emp"


class AsdlHessianEngine(PackageEngine):
    """The exact Hessian by differentiating twice, one row after the other."""

    package, install, load = "asdl", INSTALL, staticmethod(_asdl)
    name = "AsdlHessian"
    native_type = HessianEngine
    needs_plan = False

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {"full": self._full}

    def obstacle(self, primitive: str, watched: ForwardPass) -> str:
        return ""

    def _full(self, batch: CopiedBatch) -> Tensor:
        maker = self.api.hessian.HessianMaker(batch.module, self.api.hessian.HessianConfig(hessian_shapes=["full"]))
        maker.setup_loss_call(self.loss, maker.setup_model_call(batch.module, batch.x), batch.y)
        with differentiable(batch.module, twice=True):
            maker.forward_and_backward()
        places, start = {}, 0
        for tensor in batch.module.parameters():
            if tensor.requires_grad:
                places[id(tensor)] = torch.arange(start, start + tensor.numel(), device=tensor.device)
                start += tensor.numel()
        pairs = zip(self.problem.slots, batch.tensors, strict=True)
        columns = torch.cat([slot.take(places[id(tensor)]) for slot, tensor in pairs])
        return self.factor * batch.module.hessian.data[columns][:, columns]  # pyright: ignore


def batch_gradient(
    model: nn.Module, closure: Callable[[], Any], return_outputs: bool = False, batch_size: int | None = None
) -> Any:
    """ASDL's own function of this name: gradients `[B, P]` per sample of what `closure` differentiates.

    Args:
        model: The network, whose modules get hooks for the length of the call.
        closure: Runs the network and the backward pass; returns the outputs.
        return_outputs: Return the outputs as well.
        batch_size: B, where layers see more rows than data.

    Raises:
        MissingDependency: ASDL is not installed.
    """
    package: Any = imported(_asdl, "asdl", INSTALL)
    return package.gradient.batch_gradient(model, closure, return_outputs, batch_size)


class AsdlInterface(CurvatureInterface):
    """Base of the backends by ASDL.

    The arguments are those of `CurvatureInterface`, and:

    Args:
        memory_budget: Bytes of Jacobians, or of activations of vectorised passes, that are held at once.

    Warns:
        InstallationWarning: The package cannot be imported, so that the native engine computes, with the same results.
    """

    engine_options = ("memory_budget",)


class AsdlGGN(AsdlInterface, GGNInterface):
    """GGN by ASDL, exact or sampled: structures `full`, `diag` and `kron`, and Jacobians; the rest is native.

    The arguments are those of `NativeGGN`, without `kfac_approx` and `max_passes`.
    """

    engine_type = AsdlGGNEngine
    engine_options = SAMPLED_BY_PACKAGE


class AsdlEF(AsdlInterface, EFInterface):
    """Empirical Fisher by ASDL: structures `full`, `diag` and `kron`, and Jacobians; the rest is native.

    The arguments are those of `AsdlInterface`.
    """

    engine_type = AsdlEFEngine


class AsdlHessian(AsdlInterface):
    """Exact Hessian by ASDL, which may be indefinite: structure `full`; the rest is native.

    The arguments are those of `AsdlInterface`.
    """

    kind = "hessian"
    engine_type = AsdlHessianEngine
