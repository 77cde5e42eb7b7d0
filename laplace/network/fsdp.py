"""Networks whose weights are spread over processes: which of them can be used, and their weights as a whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from laplace.core.processes import Processes
from laplace.errors import UnsupportedError
from laplace.network.tree import modules_of, tensors_of

_SPREAD = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed.tensor",
           "torch.distributed._tensor")  # fmt: skip
"""Where modules and tensors come from of which every process holds a part; nothing is imported to tell them."""


def _is_part(part: object) -> bool:
    return _is_of_parts(type(part))


@lru_cache(1024)
def _is_of_parts(kind: type) -> bool:
    return any(base.__module__.startswith(_SPREAD) for base in kind.__mro__)


def _spread_part(model: nn.Module) -> str | None:
    """Name of the first module, parameter or buffer that is spread; None of a whole network."""
    modules = modules_of(model)
    if not any(map(_is_of_parts, {type(part) for part in (*modules, *tensors_of(modules))})):  # which asks for no names
        return None
    parts = [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]
    return next((name or type(part).__name__ for name, part in parts if _is_part(part)), None)


def has_sharded_weights(model: nn.Module) -> bool:
    """True if some weights of a network are spread over processes."""
    return _spread_part(model) is not None


def require_unsharded(model: nn.Module, what: str = "") -> nn.Module:
    """The network, unless its weights are spread over processes (FSDP, FSDP2, tensor parallelism)."""
    name = _spread_part(model)
    if name is not None:
        raise _refusal(name, what)
    return model


def _refusal(name: str, what: str) -> UnsupportedError:
    needs = what or "this needs all of them in one process"
    return UnsupportedError(
        f"the model's {name!r} is spread over processes, by FSDP or as a DTensor: every process holds a part of the "
        f"weights, and {needs}. Under FSDP2 (fully_shard) hessian_structure='kron', 'ekfac' and 'diag' work, of all "
        "weights or of a last layer that is named, with linearised predictions. For all else give a copy that holds "
        "the weights whole: state = "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)), loaded into the same network without FSDP."
    )


def fsdp_processes(model: nn.Module) -> Processes | None:
    """The processes that an FSDP2 network is spread over, which take every pass together; None of a whole network."""
    name = _spread_part(model)
    if name is None:
        return None
    reshard(model.modules())
    meshes = {parameter.device_mesh for parameter in model.parameters() if _is_part(parameter)}  # pyright: ignore[reportAttributeAccessIssue]
    sharded = [module for module in model.modules() if _is_sharded(module)]
    covered = {id(parameter) for module in sharded for parameter in module.parameters()}
    if len(meshes) != 1 or any(_is_part(p) and id(p) not in covered for p in model.parameters()):
        raise _refusal(name, "it is not fully_shard over one mesh that spread them")
    (mesh,) = meshes
    if mesh.ndim != 1:
        raise _refusal(name, f"over a mesh of {mesh.ndim} dimensions they are spread in a way that is not known here")
    return Processes(mesh.get_group())


def _is_sharded(module: object) -> bool:
    """True of a module that `fully_shard` was applied to."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def reshard(modules: Iterable[nn.Module]) -> None:
    """Frees the weights that FSDP2 left gathered after a pass, so that every process holds its own part alone."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for module in modules:
        if _is_sharded(module):
            resting: Any = module
            resting.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this process may hold a part: a collective call then."""
    spread: Any = tensor
    return spread.full_tensor() if _is_part(tensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it but for one that is spread."""
    spread: Any = tensor
    return spread._local_tensor if _is_part(tensor) else tensor


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """The same of many tensors."""
    if not any(map(_is_of_parts, set(map(type, tensors)))):
        return tensors
    return [local_part(tensor) for tensor in tensors]
