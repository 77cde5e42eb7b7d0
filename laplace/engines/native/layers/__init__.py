"""Layer rules, one small file per family; importing this package files them all."""

from laplace.engines.native.layers import convolution, embedding, linear, scale_shift
from laplace.engines.native.layers.base import RULES, BatchAxis, LayerRule, RoutedRows, class_with_rule, rule_for

__all__ = [
    "RULES",
    "BatchAxis",
    "LayerRule",
    "RoutedRows",
    "class_with_rule",
    "convolution",
    "embedding",
    "linear",
    "rule_for",
    "scale_shift",
]
