"""Subnetwork masks by what a parameter is called, where it lives, or whatever a function says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import InvalidArgument, InvalidType
from laplace.weights.masks import SubnetMask, WholeTensorSubnetMask


class RegexSubnetMask(WholeTensorSubnetMask):
    r"""Selects the trainable parameter tensors whose name in `model.named_parameters()` matches a regular expression.

    `re.search` is used: anchor the pattern by `^` and `$` to match whole names. For a tied tensor all names are tried.

    Args:
        model: The network; it is only read.
        pattern: A regular expression, or a compiled one; e.g. `r"\.bias$"` or `r"^layers\.[01]\."`.

    Raises:
        InvalidArgument: No regular expression, or one that matches the name of no trainable parameter.
    """

    def __init__(self, model: nn.Module, pattern: str | re.Pattern[str]) -> None:
        super().__init__(model)
        try:
            self.pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InvalidArgument(f"pattern={pattern!r} is not a regular expression: {error}.") from error
        if not self._matching():
            names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
            raise InvalidArgument(
                f"pattern={self.pattern.pattern!r} matches none of the trainable parameters {names}; it is searched "
                "for anywhere in the name."
            )

    def _matching(self) -> list[nn.Parameter]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [p for name, p in named if p.requires_grad and self.pattern.search(name)]

    def _chosen(self, train_loader: Iterable[Any] | None) -> Sequence[nn.Parameter]:
        return self._matching()


class ModuleTypeSubnetMask(WholeTensorSubnetMask):
    """Selects the trainable parameters of all modules of given types, including those of their submodules.

    Args:
        model: The network; it is only read.
        module_types: One type, or several; e.g. `nn.LayerNorm`.

    Raises:
        InvalidType: Something else than types of modules.
        InvalidArgument: No module of these types has a trainable parameter.
    """

    def __init__(self, model: nn.Module, module_types: type[nn.Module] | Sequence[type[nn.Module]]) -> None:
        super().__init__(model)
        listed = (module_types,) if isinstance(module_types, type) else tuple(module_types)
        if not all(isinstance(one, type) and issubclass(one, nn.Module) for one in listed):
            raise InvalidType(f"module_types={module_types!r}; accepted are classes of modules, such as nn.LayerNorm.")
        self.module_types = listed
        if not any(p.requires_grad for p in self._matching()):
            known = sorted({type(m).__qualname__ for m in model.modules() if any(True for _ in m.parameters())})
            raise InvalidArgument(
                f"module_types={[one.__qualname__ for one in listed]}: no module of these types has a trainable "
                f"parameter; modules with parameters are of the types {known}."
            )

    def _matching(self) -> list[nn.Parameter]:
        modules = [module for module in self.model.modules() if isinstance(module, self.module_types)]
        return [parameter for module in modules for parameter in module.parameters()]

    def _chosen(self, train_loader: Iterable[Any] | None) -> Sequence[nn.Parameter]:
        return self._matching()


class CallableSubnetMask(SubnetMask):
    """Selects what a function of name and value says: whole tensors, or entries of them.

    Args:
        model: The network; it is only read.
        choose: Called as `choose(name, value)` for every trainable parameter, its first name in
            `model.named_parameters()` and a detached copy of its value; returns a bool for the whole tensor, or a
            mask of the value's shape, of booleans or integers 0 and 1.

    Raises:
        InvalidType: `choose` cannot be called.
        InvalidArgument: On `select`, it returned something else, or chose nothing.
    """

    def __init__(self, model: nn.Module, choose: Callable[[str, Tensor], bool | Tensor]) -> None:
        super().__init__(model)
        if not callable(choose):
            raise InvalidType(f"choose={choose!r} cannot be called; give a function choose(name, value).")
        self.choose = choose

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        mask = torch.cat([self._of(name, p.detach().clone()) for name, p in named])
        if not mask.any():
            raise InvalidArgument(f"choose={self.choose!r} chose none of {[name for name, _ in named]}.")
        return mask

    def _of(self, name: str, value: Tensor) -> Tensor:
        """Mask of one tensor by the function, `[p]`."""
        answer = self.choose(name, value)
        if isinstance(answer, bool):
            return torch.full((value.numel(),), answer, device=value.device)
        if isinstance(answer, Tensor) and answer.shape == value.shape and not answer.is_floating_point():
            return answer.reshape(-1).to(value.device)
        said = f"a tensor {list(answer.shape)} of {answer.dtype}" if isinstance(answer, Tensor) else repr(answer)
        raise InvalidArgument(
            f"choose({name!r}, value) returned {said}; accepted are True, False, or a mask {list(value.shape)} of "
            "booleans or integers 0 and 1."
        )
