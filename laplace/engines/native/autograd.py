"""Backward passes for K cotangents at once, and replacements of functions without true derivatives.

On a CPU a loop over K is faster for convolutions than the vectorised pass, whose batching folds K into the batch of a
slower kernel; elsewhere, and on networks of matrix products, the vectorised pass wins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._vmap_internals import _vmap
from torch.autograd.graph import GradientEdge
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from laplace.core.memory import ran_out
from laplace.core.pieces import operations_are_dear
from laplace.engines.native.steps import has_few_scores
from laplace.errors import UnsupportedError
from laplace.network.model_guard import computable_again, switched_off
from laplace.network.tree import modules_of

# PyTorch's note that vmap runs an operation in a loop of its own is no news to who calls the library. It is turned off
# where it arises: filters of warnings are the process's, and a thread that puts them back undoes what others set.
torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # pyright: ignore[reportAttributeAccessIssue]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RECURRENT = (nn.RNNBase,)


def prefers_loop(module: nn.Module, device: torch.device, *, twice: bool = False, stepwise: bool = False) -> bool:
    """True if the network holds layers whose vectorised backward pass is slow on a device, or missing."""
    convolves_faster = not twice and not operations_are_dear(device)
    slow = (_CONVOLUTIONS if convolves_faster else ()) + (() if stepwise else _RECURRENT)
    return any(isinstance(child, slow) for child in modules_of(module))


def pull(
    f: Tensor,
    edges: Sequence[GradientEdge | Tensor],
    cotangents: Tensor,
    *,
    loop: bool,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Gradients `[K, *shape]` of Σ_bc u_kbc f_bc with respect to every edge, for every k; None where there are none.

    With `loop` one pass for each of the cotangents u `[K, B, C]`, else a vectorised one.
    """
    if not edges:
        return []
    return BackwardPasses([f], edges, create_graph=create_graph).each(cotangents, loop=loop)


class BackwardPasses:
    """Backward passes from some outputs to edges (nodes or tensors), for any cotangents.

    They start at a number whose gradients with respect to the outputs are the cotangents. Given these,
    `torch.autograd.grad` would compare their shapes by SymPy, whose import takes a third of a second.
    """

    def __init__(
        self, outputs: Sequence[Tensor], edges: Sequence[GradientEdge | Tensor], *, create_graph: bool = False
    ) -> None:
        # What to differentiate with respect to
        self.edges: Any = edges  # edges and tensors may be mixed, which the signature of torch does not say
        self.create_graph = create_graph  # True if the gradients can be differentiated again
        self._dtypes = [output.dtype for output in outputs]
        self._cotangents: list[Tensor] = []
        with torch.inference_mode(False), torch.enable_grad():
            self._start: Tensor = _Start.apply(self._cotangents, *outputs)  # pyright: ignore[reportAssignmentType]

    def each(self, *cotangents: Tensor, loop: bool) -> list[Tensor | None]:
        """Gradients `[K, *shape of the edge]` of K cotangents `[K, *shape of the output]`, in a loop or at once."""
        if not loop and len(cotangents[0]) > 1:
            try:
                return self.vectorised(*cotangents)
            except RuntimeError as error:  # an operation on the way has no batching rule
                if ran_out(error):
                    raise
        return [stack(gradients) for gradients in zip(*map(self.gradients, *cotangents), strict=True)]

    def gradients(self, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for one cotangent of every output, in the dtype of the outputs."""
        self._cotangents[:] = [u.to(dtype) for u, dtype in zip(cotangents, self._dtypes, strict=True)]
        with computable_again(), _through_recurrence():
            return torch.autograd.grad(
                self._start, self.edges, retain_graph=True, create_graph=self.create_graph, allow_unused=True
            )

    def vectorised(self, *cotangents: Tensor) -> list[Tensor | None]:
        """Gradients for K cotangents `[K, *shape of the output]` at once."""
        if not operations_are_dear(cotangents[0].device):
            # As `is_grads_batched=True` runs it; `torch.func.vmap` of PyTorch 2.4 imports the compiler.
            return list(_vmap(self.gradients, 0, 0, allow_none_pass_through=True)(*cotangents))
        reached: list[bool] = []

        def gradients(*one: Tensor) -> list[Tensor]:
            """Those that there are: of convolutions and batch norms this vmap alone takes one operation for all."""
            every = self.gradients(*one)
            reached[:] = [gradient is not None for gradient in every]
            return [gradient for gradient in every if gradient is not None]

        found = iter(vmap(gradients)(*cotangents))
        return [next(found) if there else None for there in reached]


class _Start(torch.autograd.Function):
    """Zero, with given cotangents for its gradients with respect to the outputs."""

    @staticmethod
    def forward(ctx: Any, cotangents: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.cotangents = cotangents
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        del gradients
        return None, *ctx.cotangents


def stack(gradients: tuple[Tensor | None, ...]) -> Tensor | None:
    """Stacks gradients of one tensor, one per pass: zeros where it was not reached, None if it never was."""
    nonzero = [g for g in gradients if g is not None]
    if not nonzero:
        return None
    if len(nonzero) == 1:
        return nonzero[0].unsqueeze(0)
    return torch.stack([torch.zeros_like(nonzero[0]) if g is None else g for g in gradients])


@contextmanager
def differentiable(module: nn.Module, *, twice: bool, of_head: bool = False) -> Iterator[None]:
    """Context in which gradients are dense and true derivatives, and differentiable again with `twice`.

    Attention takes the kernel that has second derivatives; over short texts so it does where operations are dear, since
    PyTorch runs the backward pass of its others in a loop over the cotangents. A table's `sparse=True` and
    `scale_grad_by_freq=True` say how it is to be trained; its derivative knows neither. Of an `EmbeddingBag` PyTorch
    has no second derivatives, and of its fused weight norm wrong ones. `twice` also serves gradients that are
    vectorised over data. Recurrent layers run without cuDNN, unless the graph is that `of_head`, which begins behind
    them.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    short_by_products = operations_are_dear(device) and not (of_head or twice)
    tables = [table for table in modules_of(module) if isinstance(table, (nn.Embedding, nn.EmbeddingBag))]
    rewritten = twice or short_by_products or any(table.sparse or table.scale_grad_by_freq for table in tables)
    with (
        without_cudnn(module) if twice or not of_head else nullcontext(),
        sdpa_kernel(SDPBackend.MATH) if twice else nullcontext(),
        _Rewritten(twice=twice, short_by_products=short_by_products) if rewritten else nullcontext(),
    ):
        yield


_CUDNN: dict[object, bool] = {}
"""Calls that have turned cuDNN off, with what its switch was set to before."""


def without_cudnn(module: nn.Module) -> AbstractContextManager[None]:
    """A block in which cuDNN is off, which has no backward pass of recurrent layers in evaluation mode.

    It stays on for networks with convolutions, which need it more, unless they hold a recurrent layer: what they call
    as a function is refused where it is differentiated.
    """
    modules = modules_of(module)
    if any(isinstance(m, _CONVOLUTIONS) for m in modules) and not any(isinstance(m, _RECURRENT) for m in modules):
        return nullcontext()
    # `torch.backends.cudnn.flags` would set other switches as well.
    return switched_off(_CUDNN, torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled)


_WITHOUT_BACKWARD = "cudnn RNN backward can only be called in training mode"
"""What PyTorch says of a recurrent function that cuDNN ran."""


@contextmanager
def _through_recurrence() -> Iterator[None]:
    """A block of backward passes, with a remedy for recurrent functions that cuDNN ran."""
    try:
        yield
    except RuntimeError as error:
        if _WITHOUT_BACKWARD not in str(error):
            raise
        raise UnsupportedError(
            "a recurrent function (torch.lstm, gru, rnn_tanh, rnn_relu) that the network calls was run by cuDNN, which "
            "has no backward pass of it in evaluation mode, in which networks are differentiated here. Call it inside "
            "`with torch.backends.cudnn.flags(enabled=False):`, or use nn.LSTM, nn.GRU or nn.RNN, for which that is "
            "done."
        ) from error


class _Rewritten(TorchFunctionMode):
    """Replaces some functions of PyTorch by others with the same values."""

    def __init__(self, *, twice: bool, short_by_products: bool) -> None:
        super().__init__()
        self.twice = twice
        self.short_by_products = short_by_products

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TABLES:
            given = _TABLES[func].bind(*args, **kwargs)
            given.arguments |= {"scale_grad_by_freq": False, "sparse": False}
            if func is F.embedding_bag and self.twice:
                given.apply_defaults()
                return _embedding_bag(**given.arguments)
            return func(*given.args, **given.kwargs)
        if func is torch._weight_norm and self.twice:
            return _weight_norm(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self.short_by_products and _is_short(*args, **kwargs):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_short(query: Tensor, key: Tensor, *_: Any, **__: Any) -> bool:
    return has_few_scores(key)


_TABLES = {table: inspect.signature(table) for table in (F.embedding, F.embedding_bag)}


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [d for d in range(v.ndim) if d != dim] if dim != -1 else None
    return g * v / torch.linalg.vector_norm(v, dim=others, keepdim=True)


def _embedding_bag(
    input: Tensor,  # noqa: A002 - the names of PyTorch's function
    weight: Tensor,
    offsets: Tensor | None,
    max_norm: float | None,
    norm_type: float,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
    **_: object,
) -> Tensor:
    """`F.embedding_bag` by operations that have second derivatives."""
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = input != (padding_idx if padding_idx >= 0 else padding_idx + len(weight))
    if offsets is not None:  # then input is one list
        places, inside = _bags(offsets[:-1] if include_last_offset else offsets, len(input))
        input, counted = input[places], counted[places] & inside  # noqa: A001
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights[places]
    rows = F.embedding(input, weight, None, max_norm, norm_type)
    if mode == "max":
        masked = rows.masked_fill(~counted[..., None], -torch.inf)
        return torch.where(counted.any(1, keepdim=True), masked.max(1).values, 0)
    factors = counted.to(rows.dtype) if per_sample_weights is None else counted * per_sample_weights
    total = torch.einsum("bl,bld->bd", factors, rows)
    return total if mode == "sum" else total / counted.sum(1, keepdim=True).clamp(min=1)


def _bags(offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pads the bags of an embedding bag to equal length: indices into the list and a mask, `[B, L]` each."""
    ends = torch.cat([offsets[1:], offsets.new_tensor([length])])
    longest = max(1, int((ends - offsets).max()))
    places = offsets[:, None] + torch.arange(longest, device=offsets.device)
    return places.clamp(max=max(0, length - 1)), places < ends[:, None]
