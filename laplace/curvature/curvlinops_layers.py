"""Layers for which the Kronecker factors of curvlinops are those of KFAC."""

from __future__ import annotations

from torch import Tensor, nn

from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.rules import BatchAxis


def fault(watched: ForwardPass, slot: int, *, reduce: bool) -> str | None:
    """The reason why factors of a tensor with one use are missing or wrong in curvlinops, or None.

    Args:
        watched: The captured pass of the network.
        slot: Index of the tensor.
        reduce: Average over positions (KFAC-reduce), which curvlinops does over all but the first dimension.
    """
    use = watched.plan[slot].uses[0]
    call = watched.capture.calls[use.call]
    layer, x = call.module, call.x
    if type(layer) not in (nn.Linear, nn.Conv2d):
        return f"no Kronecker factors of {type(layer).__name__}"
    reason = _of_convolution(layer) if isinstance(layer, nn.Conv2d) else None
    if reason is not None:
        return reason
    if reduce and (use.axis is not BatchAxis.LEADING or len(x) != watched.n_data):
        return "positions are averaged over another dimension than the data's"
    return _of_input(layer, x)


def _of_convolution(layer: nn.Conv2d) -> str | None:
    if layer.groups != 1:
        return "groups of channels, which it averages"
    if layer.padding_mode != "zeros":
        return f"{layer.padding_mode} padding, which it takes for zeros"
    sizes = zip(layer.kernel_size, layer.dilation, strict=True)
    unequal = layer.padding == "same" and any(d * (k - 1) % 2 for k, d in sizes)
    return "unequal padding" if unequal else None


def _of_input(layer: nn.Module, x: Tensor) -> str | None:
    missing = x.ndim != 4 if isinstance(layer, nn.Conv2d) else x.ndim < 2
    return "inputs without a batch dimension" if missing else None
