"""Tables of what BackPACK and ASDL differentiate correctly: modules, their configurations, and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from laplace.curvature.module_chain import ModuleChain
from laplace.curvature.packages import Reasons, reuse
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.functions import LayerCall
from laplace.engines.native.rules import BatchAxis
from laplace.errors import CurvatureError

SupportTable = Mapping[type[nn.Module], Callable[[Any], str]]
"""Reason, by exact class, why a module is not differentiated correctly; empty if it is."""


def _none(module: nn.Module) -> str:
    return ""


def _padded(module: Any) -> str:
    if isinstance(module.padding, str):
        return f"padding={module.padding!r}, which it does not know"
    return "" if module.padding_mode == "zeros" else f"{module.padding_mode} padding, which it takes for zeros"


def _enlarged(module: Any) -> str:
    return "output padding" if any(module.output_padding) else ""


def _in_place(module: Any) -> str:
    return "an activation in place" if module.inplace else ""


def _normalised(module: Any) -> str:
    return "" if module.affine and module.track_running_stats else "a norm without scale or running statistics"


def _max_pooled(module: Any) -> str:
    return "indices of a pooling" if module.return_indices else ""


def _mean_pooled(module: Any) -> str:
    plain = module.count_include_pad and not module.ceil_mode and getattr(module, "divisor_override", None) is None
    return "" if plain else "an average of another number of entries"


def _cropped(module: Any) -> str:
    return "negative padding" if min(module.padding) < 0 else ""


def _flat(module: Any) -> str:
    return "" if module.start_dim >= 1 else "the data's dimension is flattened"


_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)

LAYERS: SupportTable = {
    nn.Linear: _none,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _padded),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _enlarged),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _normalised),
}
"""Layers with parameters, by exact class."""

FACTORED: SupportTable = {
    nn.Linear: _none,
    nn.Conv2d: _padded,
    nn.ReLU: _in_place,
    **dict.fromkeys((nn.Sigmoid, nn.Tanh, nn.Identity), _none),
    nn.Dropout: _in_place,
    nn.Flatten: _flat,
    nn.MaxPool2d: _max_pooled,
    nn.AvgPool2d: _mean_pooled,
    nn.ZeroPad2d: _cropped,
}
"""Modules of chains through which Kronecker factors are propagated."""

CHAIN: SupportTable = {
    **LAYERS,
    **FACTORED,
    nn.LogSigmoid: _none,
    **dict.fromkeys((nn.LeakyReLU, nn.ELU, nn.SELU), _in_place),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool3d), _max_pooled),
    **dict.fromkeys(_AVERAGES, _mean_pooled),
}
"""Modules of chains through which roots of the GGN are propagated."""


def fault_of(module: nn.Module, table: SupportTable) -> str:
    """Reason why a module is not in a table; empty if it is."""
    if type(module) not in table:
        return f"no derivative of {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook on a layer"
    return table[type(module)](module)


def obstacles_of(watched: ForwardPass, fault: Callable[[LayerCall], str]) -> Reasons:
    """Reasons why tensors are not a package's: not one use of one layer, data in another dimension, or a fault."""
    reasons = reuse(watched)
    for i, rule in enumerate(watched.plan):
        if i in reasons:
            continue
        use = rule.uses[0]
        call = watched.capture.calls[use.call]
        if use.axis is not BatchAxis.LEADING or len(call.x) != watched.n_data:
            reasons[i] = "the data are not in the first dimension of a layer's inputs"
        elif reason := fault(call):
            reasons[i] = reason
    return reasons


def backpack_fault(call: LayerCall, *, factored: bool) -> str:
    """Reason why BackPACK does not differentiate a layer correctly; empty if it does."""
    layer = call.module
    if factored and type(layer) is not nn.Linear:
        return f"no Kronecker factors of {type(layer).__name__} by the convention of KFAC-expand"
    if factored and call.x.ndim != 2:
        return "no Kronecker factors for positions that share a weight"
    return fault_of(layer, LAYERS)


def faultless(chain: ModuleChain, table: SupportTable) -> ModuleChain:
    """A chain of which the table knows every module.

    Raises:
        CurvatureError: It does not know one, or BackPACK averages in another dtype than the default one.
    """
    for module in chain.modules:
        fault = fault_of(module, table)
        if fault:
            raise CurvatureError(fault)
        # Its derivative of a mean is that of a convolution, which is made in the default dtype.
        if isinstance(module, _AVERAGES) and chain.x.dtype is not torch.get_default_dtype():
            raise CurvatureError(f"averages in {chain.x.dtype}, which is not the default dtype")
    return chain


def hessian_known(loss: nn.Module, outputs: int) -> nn.Module:
    """The loss as BackPACK takes it for its Hessian.

    Raises:
        CurvatureError: It has no Hessian of this loss.
    """
    if type(loss) is nn.MSELoss:
        return nn.MSELoss(reduction="sum")
    if type(loss) is nn.CrossEntropyLoss and loss.weight is None and loss.label_smoothing == 0:
        return nn.CrossEntropyLoss(reduction="sum")  # BackPACK insists on −100 for ignored labels; none are left here
    if type(loss) is nn.BCEWithLogitsLoss and loss.weight is None and loss.pos_weight is None and outputs == 1:
        return nn.BCEWithLogitsLoss(reduction="sum")
    raise CurvatureError(f"no Hessian of {type(loss).__name__} of {outputs} outputs")


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
