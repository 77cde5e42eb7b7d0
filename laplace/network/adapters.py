"""Adapters of the package PEFT in a network: small trained tensors beside frozen layers."""

from __future__ import annotations

import sys
from typing import Any

from laplace.network.model_guard import modules_of


def has_adapters(model: Any) -> bool:
    """True if the network is a model of PEFT, or one of its layers is: nothing is imported to find out."""
    if "peft" not in sys.modules:  # which made the adapters, if there are any
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, PeftModel | BaseTunerLayer) for module in modules_of(model))


def are_idle(model: Any) -> bool:
    """True if no adapter of a model that has some takes part: all are merged into their layers, or switched off."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in modules_of(model) if isinstance(module, BaseTunerLayer)]
    return bool(layers) and all(layer.merged or layer.disable_adapters for layer in layers)
