"""The engine of a user's backend: the methods that its class defines, and the library's for the rest."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.overrides import is_ours
from laplace.core.positions import OutputChoice
from laplace.engines.engine import BatchSummary, CurvatureEngine, detached, require_no_positions
from laplace.engines.kron_parts import KronParts, n_entries
from laplace.engines.native.autograd import without_cudnn
from laplace.engines.sinks import BatchForm, KronSink, Sink
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.jacobian.blocks import Block, DenseBlock
from laplace.jacobian.jacobian import Jacobian, chosen
from laplace.network.model_guard import gradients_set_aside, hooks_put_back, users_own

if TYPE_CHECKING:
    from laplace.curvature.interface import CurvatureInterface

METHODS = frozenset(("full", "diag", "kron", "jacobians", "last_layer_jacobians", "gradients"))
"""Public methods that a class of the user's may define."""

DERIVATIVES = frozenset(("jacobians", "last_layer_jacobians", "gradients"))
"""Methods that the library's curvature calls back into when a user's method calls it by `super()`."""


def with_users_methods(
    backend: CurvatureInterface, builtin: CurvatureEngine, names: frozenset[str], options: dict[str, Any]
) -> CurvatureEngine:
    """The library's engine with those of some methods that the backend's class defines itself; `options` are theirs."""
    methods = frozenset(name for name in names if not is_ours(getattr(type(backend), name)))
    return UserBackendEngine(backend, builtin, methods, options) if methods else builtin


class UserBackendEngine(CurvatureEngine):
    """Primitives from a user's `full`, `diag`, `kron`, `jacobians` and `gradients`.

    Curvature that the class does not give itself follows from its Jacobians (GGN) or gradients (empirical Fisher) if it
    defines them, then from its full matrix, and is the library's if it defines nothing that bears on it.
    """

    def __init__(
        self, backend: CurvatureInterface, builtin: CurvatureEngine, methods: frozenset[str], options: dict[str, Any]
    ) -> None:
        self.kind, self.name = backend.kind, type(backend).__name__
        super().__init__(builtin.problem, builtin.likelihood, builtin.options)
        if builtin.split_outputs:
            raise UnsupportedError(
                f"sigma_noise holds one noise per output, for which {type(backend).__name__} keeps no terms; give "
                "one noise, or use backend=NativeGGN."
            )
        self.backend = backend  # The user's backend
        self.builtin = builtin  # The library's engine of the same kind
        self.methods = methods  # Names of the methods that are the user's
        self.call_options = options
        self.generator = builtin.generator

    def accumulate(self, x: Inputs, y: Tensor, sink: Sink) -> BatchSummary:
        if len(sink.parts) > 1:
            summary, *_ = [self.accumulate(x, y, part) for part in sink.parts]
            return summary
        if sink.quantity in self.methods:
            summary, values = self._by_method(sink.quantity, x, y)
            sink.put([values] if sink.quantity == "full" else values)
            return summary
        if isinstance(sink, KronSink):
            return self.builtin.accumulate(x, y, sink)
        if self._gives_columns:
            summary, blocks = self._weighted(x, y)
            sink.begin(BatchForm(self.problem, 1, self.dtype, self.dtype))
            sink.add(blocks, 0)
            return summary
        if "full" in self.methods:
            summary, matrix = self._by_method("full", x, y)
            sink.put_matrix(matrix, self.problem.layout, type(self.backend).__name__)
            return summary
        return self.builtin.accumulate(x, y, sink)

    def jacobian(
        self, x: Inputs, *, create_graph: bool = False, choice: OutputChoice | None = None
    ) -> Generator[tuple[Jacobian, Tensor]]:
        name = self._jacobians
        if name is None:
            yield from self.builtin.jacobian(x, create_graph=create_graph, choice=choice)
        else:
            yield from chosen(self._by_user(name, x, create_graph=create_graph), choice)

    def _by_user(self, name: str, x: Inputs, *, create_graph: bool) -> Generator[tuple[Jacobian, Tensor]]:
        with users_call(self.problem.module):
            method = getattr(self.backend, name)
            J, f = method(x, enable_backprop=True) if create_graph else method(x)
        J, f = (J, f) if create_graph else (J.detach(), f.detach())
        require_no_positions(f.shape[1:-1], f"backend={self.name}")
        yield Jacobian.from_dense(self._shaped(name, J, 3), self.problem.layout.sizes), f

    def coverage(self) -> dict[str, str]:
        known = self.builtin.coverage()
        name = type(self.backend).__qualname__
        return {slot.name: known.get(slot.name, f"by {name}") for slot in self.problem.slots}

    # The user's methods.

    @property
    def _jacobians(self) -> str | None:
        names = ("last_layer_jacobians", "jacobians") if self.backend.last_layer else ("jacobians",)
        return next((name for name in names if name in self.methods), None)

    @property
    def _gives_columns(self) -> bool:
        """True if the user's methods give the columns of the curvature's outer products."""
        if self.kind == "ef":
            return "gradients" in self.methods or self._jacobians is not None
        return self.kind == "ggn" and self._jacobians is not None

    def _weighted(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Mapping[int, Block]]:
        """Columns whose outer products add up to the curvature, as one block per tensor."""
        if "gradients" in self.methods and self.kind == "ef":
            factor = self.likelihood.torch_loss()[1]
            with users_call(self.problem.module):
                gradients, loss = self.backend.gradients(x, y)
            columns = factor * self._shaped("gradients", gradients.detach(), 2).unsqueeze(0)
            summary = summarised(self, x, y, factor * loss, f"backend={self.name}")
        else:
            ((jacobian, f),) = self.jacobian(x)
            f = f.to(self.dtype)
            y = self.checked(f, y)
            ef = self.kind == "ef"
            u = self.likelihood.gradient(f, y).unsqueeze(0) if ef else self.likelihood.hessian(f, y).root()
            columns = torch.einsum("kbc,bcp->kbp", u, jacobian.dense().to(u))
            summary = BatchSummary(
                self.likelihood.loss_terms(f, y).sum().reshape(1), self.likelihood.count(f, y), f.shape[1]
            )
        parts = columns.to(self.dtype).split(list(self.problem.layout.sizes), 2)
        return summary, {i: DenseBlock(part) for i, part in enumerate(parts)}

    def _by_method(self, method: str, x: Inputs, y: Tensor) -> tuple[BatchSummary, Any]:
        """The summary of a batch, with what the user's `full`, `diag` or `kron` returns, as sinks take it."""
        n_data = batches.size(x, self.backend.dict_key_x) if method == "kron" else 0
        options = ({} if method == "full" else self.call_options) | ({"N": n_data} if method == "kron" else {})
        with users_call(self.problem.module):
            loss, values = getattr(self.backend, method)(x, y, **options)
        summary = summarised(self, x, y, loss, f"backend={self.name}")
        if method == "kron":
            return summary, self._parts(values.kfacs, n_data)
        values = self._shaped(method, values, 2 if method == "full" else 1).unsqueeze(0)
        return summary, values.clone() if method == "diag" else values  # to which batches are added

    def _shaped(self, method: str, values: Tensor, ndim: int) -> Tensor:
        n_params = self.problem.layout.n_params
        square = method != "full" or values.shape[0] == n_params
        if values.ndim != ndim or values.shape[-1] != n_params or not square:
            raise InvalidArgument(
                f"{type(self.backend).__name__}.{method} returned a tensor of shape {tuple(values.shape)}; it must "
                f"have {ndim} dimensions, the last one P = {n_params}, the number of random parameters."
            )
        return values.to(self.dtype) if method in ("full", "diag") else values

    def _parts(self, kfacs: Sequence[Sequence[Tensor]], n_data: int) -> KronParts:
        """Sums over the data from a user's factors, whose input sides are means."""
        for slot, kfac in zip(self.problem.slots, kfacs, strict=True):
            if n_entries(kfac) != slot.size:
                raise InvalidArgument(
                    f"{type(self.backend).__name__}.kron returned factors of {n_entries(kfac)} entries for "
                    f"{slot.name!r}, of which {slot.size} are random."
                )
        return KronParts.from_factors([[side.to(self.dtype) for side in kfac] for kfac in kfacs], n_data)


def summarised(engine: CurvatureEngine, x: Inputs, y: Tensor, loss: Tensor, name: str) -> BatchSummary:
    """A user's loss, with the number of samples and outputs from one forward pass."""
    problem = engine.problem
    dtype = torch.promote_types(problem.dtype, torch.float32)
    with torch.no_grad(), problem.on_private_copy() as own:
        f = own.run(own.detached(), detached(x)).to(dtype)
    require_no_positions(f.shape[1:-1], name)
    y = engine.checked(f, y)
    terms = torch.as_tensor(loss, dtype=dtype, device=f.device).detach().reshape(1)
    return BatchSummary(terms, engine.likelihood.count(f, y), f.shape[1])


@contextmanager
def users_call(module: torch.nn.Module) -> Iterator[None]:
    """Context of a call of a user's method: evaluation mode, gradients enabled, the model restored afterwards."""
    with users_own(module), hooks_put_back(module), gradients_set_aside(module):  # noqa: SIM117
        with torch.inference_mode(False), without_cudnn(module), torch.enable_grad():
            yield
