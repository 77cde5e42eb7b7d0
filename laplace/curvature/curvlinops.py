"""Curvature by curvlinops: products of linear operators, and Kronecker factors of linear and 2-d convolution layers.

curvlinops (Dangel et al.) has operators for the GGN, the Monte-Carlo and the empirical Fisher, the Hessian and KFAC
(Martens & Grosse, 2015; Eschenhagen et al., 2023). It has no exact diagonal: that is the native engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace.core.random_numbers import drawn_seed
from laplace.curvature.interface import CurvatureInterface, EFInterface, GGNInterface
from laplace.curvature.packages import CopiedBatch, LayerFactors, PackageEngine, layer_obstacle
from laplace.engines.engine import EngineOptions, Groups
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.functions import LayerCall
from laplace.engines.native.kinds import EFEngine, GGNEngine, HessianEngine
from laplace.engines.native.proof import close
from laplace.engines.native.rules import BatchAxis
from laplace.errors import CurvatureError
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import without_fused_layers
from laplace.weights.problem import Problem

INSTALL = (
    "pip install --no-deps 'curvlinops-for-pytorch>=2.0' backpack-for-pytorch unfoldNd einconv and then "
    "pip install einops opt-einsum linear-operator scipy leave an installed PyTorch as it is"
)


def _curvlinops() -> ModuleType:
    import curvlinops

    return curvlinops


class CurvlinopsEngine(PackageEngine):
    """Operators of curvlinops on single batches, and its Kronecker factors."""

    package, install, load = "curvlinops", INSTALL, staticmethod(_curvlinops)
    operator: str  # Name of the operator of products
    fisher_type: str | None = None  # KFAC's name of this kind of curvature, or None where there is no KFAC
    squared: bool = False  # Whether the curvature is quadratic in the loss, and so in the factor of its module

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.scale = self.factor**2 if self.squared else self.factor

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        # The operators of version 2 multiply arrays of float32 only.
        products = {"full": self._full, "blocks": self._blocks, "matmul": self._matmul} if self._of_tensors else {}
        return products if self.fisher_type is None else {**products, "kron": self._kron}

    @property
    def _of_tensors(self) -> bool:
        """True if operators take tensors, as they do from version 3 on."""
        return hasattr(self.api.KFACLinearOperator, "compute_kronecker_factors")

    def obstacle(self, primitive: str, watched: ForwardPass) -> str:
        if primitive != "kron":
            return ""
        return layer_obstacle(watched, lambda call, axis: self._fault(call, axis, watched.n_data))

    def _fault(self, call: LayerCall, axis: BatchAxis, n_data: int) -> str:
        """The reason why factors of a layer are missing or wrong in curvlinops; empty if they are not."""
        layer, x = call.module, call.x
        if type(layer) not in (nn.Linear, nn.Conv2d):
            return f"no Kronecker factors of {type(layer).__name__}"
        if isinstance(layer, nn.Conv2d):
            if layer.groups != 1:
                return "groups of channels, which it averages"
            if layer.padding_mode != "zeros":
                return f"{layer.padding_mode} padding, which it takes for zeros"
            sizes = zip(layer.kernel_size, layer.dilation, strict=True)
            if layer.padding == "same" and any(d * (k - 1) % 2 for k, d in sizes):
                return "unequal padding"
        reduce = self.options.kfac_approx == "reduce"
        if reduce and (axis is not BatchAxis.LEADING or len(x) != n_data):
            return "positions are averaged over another dimension than the data's"
        has_no_batch = x.ndim != 4 if isinstance(layer, nn.Conv2d) else x.ndim < 2
        return "inputs without a batch dimension" if has_no_batch else ""

    # Products.

    def _full(self, batch: CopiedBatch) -> Tensor:
        (block,) = self._blocks(batch, (tuple(range(len(batch.tensors))),))
        return block

    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        self._prove(batch)
        options, sizes, like = self._drawn(), self.problem.layout.sizes, batch.tensors[0]
        units = (torch.eye(sum(sizes[i] for i in group), dtype=like.dtype, device=like.device) for group in groups)
        return [self._products(batch, group, vectors, options) for group, vectors in zip(groups, units, strict=True)]

    def _matmul(self, batch: CopiedBatch, vectors: Tensor) -> Tensor:
        self._prove(batch)
        everything = tuple(range(len(batch.tensors)))
        return self._products(batch, everything, vectors.to(batch.tensors[0]), self._drawn())

    def _prove(self, batch: CopiedBatch) -> None:
        """Checks what operators rely on: that forward-mode derivatives are those of the backward pass.

        The two differ where a backward pass is not the derivative of the forward one: the padding row of an embedding,
        which PyTorch freezes in the backward pass alone, or a user's own gradient. Forward over reverse mode, by which
        the Hessian's products come, is wrong through PyTorch's layer norm.
        """
        generator = torch.Generator().manual_seed(1)
        if self.kind == "hessian":
            vector = torch.randn(1, self.problem.layout.n_params, generator=generator).to(batch.tensors[0])
            actual = self._products(batch, range(len(batch.tensors)), vector, {})
            expected = self.native.matmul(batch.watched.x, batch.y, vector.unsqueeze(0))[1][0].to(actual)
            agree = close(actual, expected, expected.norm())
        else:  # uᵀ(J v) = (Jᵀu)ᵀv for the cotangent u of the batch's probe and random v
            vectors = [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in batch.tensors]
            with _differentiable_forward():
                (forward,) = self._operator("JacobianLinearOperator", batch, batch.tensors) @ vectors
            parts = torch.stack([(g * v).sum() for g, v in zip(batch.gradients, vectors, strict=True)])
            bound = torch.stack([g.norm() * v.norm() for g, v in zip(batch.gradients, vectors, strict=True)]).norm()
            agree = close((forward * batch.probe).sum(), parts.sum(), bound)
        if not agree:
            raise CurvatureError("forward-mode derivatives differ from those of the backward pass")

    def _operator(self, name: str, batch: CopiedBatch, tensors: Sequence[Tensor], **options: Any) -> Any:
        """An operator of curvlinops on one batch; its check of determinism would only compute everything twice."""
        loss = () if name == "JacobianLinearOperator" else (self.loss,)
        return getattr(self.api, name)(
            batch.module, *loss, list(tensors), [(batch.x, batch.y)], check_deterministic=False,
            num_data=len(batch.y), batch_size_fn=lambda _: len(batch.y), **options,
        )  # fmt: skip

    def _products(
        self, batch: CopiedBatch, slots: Sequence[int], vectors: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """Products `[R, p]` of the operator of some tensors with vectors `[R, p]` of their random entries."""
        chosen = [self.problem.slots[i] for i in slots]
        tensors = [batch.tensors[i] for i in slots]
        operator = self._operator(self.operator, batch, tensors, **options)
        step = self.native.per_call(batch.watched.capture, len(vectors))
        rows: list[Tensor] = []
        for part in vectors.split(step):
            pieces = part.split([slot.size for slot in chosen], 1)
            columns = [slot.place(p).T.view(*slot.shape, -1) for slot, p in zip(chosen, pieces, strict=True)]
            with _differentiable_forward():
                products = operator @ columns
            flat = [slot.take_rows(c.movedim(-1, 0)) for slot, c in zip(chosen, products, strict=True)]
            rows.append(torch.cat(flat, 1))
        return self.scale * torch.cat(rows)

    def _drawn(self) -> dict[str, Any]:
        """Options of a sampled operator: a seed of its own for every batch."""
        if self.generator is None:
            return {}
        return {"mc_samples": self.options.num_samples, "seed": drawn_seed(self.generator)}

    # Kronecker factors.

    def _kron(self, batch: CopiedBatch) -> list[LayerFactors]:
        kfac = self._operator(
            "KFACLinearOperator", batch, batch.tensors, fisher_type=self.fisher_type,
            kfac_approx=self.options.kfac_approx, num_per_example_loss_terms=1, separate_weight_and_bias=True,
            **self._drawn(),
        )  # fmt: skip
        # Once: a second call would add to the first.
        (kfac.compute_kronecker_factors if self._of_tensors else kfac._compute_kfac)()
        names = {module: name for name, module in batch.module.named_modules()}
        return [self._layer_factors(batch, i, kfac, names) for i in range(len(batch.tensors))]

    def _layer_factors(self, batch: CopiedBatch, slot: int, kfac: Any, names: Mapping[nn.Module, str]) -> LayerFactors:
        call = batch.call(slot)
        name = names[batch.copies[call.module]]
        shape = batch.input_shape(slot)
        shared = call.shape[2:].numel() if isinstance(call.module, nn.Conv2d) else shape[1:-1].numel()
        if self.options.kfac_approx == "reduce":
            shared = 1
        positions = shape[0] * shared
        output = self.scale * kfac._gradient_covariances[name]
        if batch.watched.plan[slot].uses[0].attribute == "bias":
            return LayerFactors(output, None, positions)
        # curvlinops divides the sum over the positions of a batch by its num_data and by the shared dimensions.
        return LayerFactors(output, kfac._input_covariances[name] * (len(batch.y) * shared), positions)


@contextmanager
def _differentiable_forward() -> Iterator[None]:
    """Attention without the fused kernels, which have no forward-mode derivative."""
    with without_fused_layers(), sdpa_kernel(SDPBackend.MATH):
        yield


class CurvlinopsGGNEngine(CurvlinopsEngine):
    """GGN, exact or sampled."""

    name = "CurvlinopsGGN"
    native_type = GGNEngine

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        drawn = ("FisherMCLinearOperator", "mc")
        self.operator, self.fisher_type = drawn if options.stochastic else ("GGNLinearOperator", "type-2")


class CurvlinopsEFEngine(CurvlinopsEngine):
    """Empirical Fisher."""

    name = "CurvlinopsEF"
    native_type = EFEngine
    operator = "EFLinearOperator"
    fisher_type = "empirical"
    squared = True


class CurvlinopsHessianEngine(CurvlinopsEngine):
    """Exact Hessian."""

    name = "CurvlinopsHessian"
    native_type = HessianEngine
    needs_plan = False
    operator = "HessianLinearOperator"


class CurvlinopsInterface(CurvatureInterface):
    """Base of the backends by curvlinops.

    The arguments are those of `CurvatureInterface`, and:

    Args:
        memory_budget: Bytes of activations of vectorised passes that are held at once.

    Warns:
        InstallationWarning: The package cannot be imported, so that the native engine computes, with the same results.
    """

    engine_options = ("memory_budget",)


class CurvlinopsGGN(CurvlinopsInterface, GGNInterface):
    """GGN by curvlinops, exact or sampled: structures `full` and `kron`, blocks and products; the rest is native.

    The arguments are those of `NativeGGN`, without `max_passes`, and:

    Args:
        mc_samples: Another name of `num_samples`, which it replaces.
    """

    engine_type = CurvlinopsGGNEngine
    engine_options = ("stochastic", "num_samples", "generator", "kfac_approx", "memory_budget")
    synonyms: Mapping[str, str] = {"mc_samples": "num_samples"}


class CurvlinopsEF(CurvlinopsInterface, EFInterface):
    """Empirical Fisher by curvlinops: structures `full` and `kron`, blocks and products; the rest is native.

    The arguments are those of `CurvlinopsInterface`, with `kfac_approx` of `NativeGGN`.
    """

    engine_type = CurvlinopsEFEngine
    engine_options = ("kfac_approx", "memory_budget")


class CurvlinopsHessian(CurvlinopsInterface):
    """Exact Hessian by curvlinops, which may be indefinite: structure `full`, blocks and products; the rest is native.

    The arguments are those of `CurvlinopsInterface`.
    """

    kind = "hessian"
    engine_type = CurvlinopsHessianEngine
