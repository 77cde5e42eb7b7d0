"""Layer rules for modules of the user's own: speed and Kronecker factors, never other numbers."""

from __future__ import annotations

from torch import nn

from laplace.engines.native.rules import LayerRule, evenly, files, rule_of
from laplace.errors import InvalidArgument

__all__ = ["LayerRule", "evenly", "files", "like"]


def like(known: type[nn.Module], *own: type[nn.Module]) -> None:
    """Treats modules of the classes `own`, and of classes that derive from them, by the rule of `known`.

    Subclasses of a known class, and weights that are used by PyTorch's functions, need no such line. A module that does
    not work as `known` does is found out, and explained in another way.

    Args:
        known: A class that has a rule: `nn.Linear`, `nn.Conv2d`, `nn.Embedding`, `nn.LayerNorm`, ….
        own: Classes whose weights have the names and shapes of the known one's.

    Raises:
        InvalidArgument: The known class has no rule.
    """
    rule = rule_of(known)
    if rule is None:
        raise InvalidArgument(
            f"known={known.__name__}: there is no rule for it; name a class that has one, such as nn.Linear, "
            "nn.Conv2d, nn.Embedding or nn.LayerNorm, or write a rule (laplace.curvature.rules.LayerRule)."
        )
    files(rule, *own)
