"""Subnetwork masks: which entries of the trainable parameters are random, chosen by name.

Indices refer to the flattened vector of *trainable* parameters, in `model.parameters()` order: a frozen parameter
has no place in it and is never selected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from laplace.core import batch as batches
from laplace.core.arguments import CheckedConstructor
from laplace.core.batch import Inputs
from laplace.errors import InvalidArgument, InvalidData, NotFittedError
from laplace.network.model_guard import unwrap
from laplace.weights.discovery import find_last_layer, require_linear
from laplace.weights.feature_extractor import network_of


class SubnetMask(CheckedConstructor, ABC):
    """Base of all subnetwork masks, which choose single weights or whole tensors of a network.

    Call `select`, and pass its result to `Laplace(..., subset_of_weights="subnetwork", subnetwork_indices=...)`.

    Args:
        model: The network; it is not changed.

    Raises:
        InvalidArgument: Every parameter is frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = network_of(model)
        trainable = [p.detach() for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise InvalidArgument(
                f"{type(model).__name__} has no trainable parameter to choose from; set requires_grad=True for some."
            )
        self.parameter_vector: Tensor = parameters_to_vector(trainable)
        self._n_params = self.parameter_vector.numel()
        self._n_kept: int | None = None
        self._indices: Tensor | None = None

    @property
    def indices(self) -> Tensor:
        """Indices of the selected weights among the flattened trainable parameters, sorted, `[p]`, int64.

        Raises:
            NotFittedError: `select` was not called.
        """
        if self._indices is None:
            raise NotFittedError(f"{type(self).__name__} has selected nothing yet; call select(train_loader) first.")
        return self._indices

    @property
    def n_params_subnet(self) -> int | None:
        """Number of selected weights, p; None while it is not known."""
        return self._n_kept

    def select(self, train_loader: Iterable[Any] | None = None) -> Tensor:
        """Chooses the subnetwork.

        Args:
            train_loader: Training data, for masks that need them.

        Returns:
            Indices of the selected weights among the flattened trainable parameters, sorted, `[p]`, int64.

        Raises:
            InvalidArgument: `select` was called before, or the mask needs data and got none.
        """
        if self._indices is not None:
            raise InvalidArgument(
                f"{type(self).__name__} has selected its subnetwork already; read `indices`, or make a new mask."
            )
        self._indices = self.convert_subnet_mask_to_indices(self.get_subnet_mask(train_loader))
        self._n_kept = self._indices.numel()
        return self._indices

    def convert_subnet_mask_to_indices(self, subnet_mask: Tensor) -> Tensor:
        """Indices of the ones of a mask `[P]` over the trainable parameters.

        Raises:
            InvalidArgument: It is not a binary vector of P integers or booleans.
        """
        if not isinstance(subnet_mask, Tensor) or not _is_binary(subnet_mask, self._n_params):
            raise InvalidArgument(
                f"the subnetwork mask is {_described(subnet_mask)}; accepted is a tensor [{self._n_params}] of "
                "booleans or integers 0 and 1, one per trainable parameter."
            )
        return subnet_mask.nonzero(as_tuple=True)[0]

    @abstractmethod
    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """The mask `[P]` over the trainable parameters, boolean."""


class WholeTensorSubnetMask(SubnetMask):
    """A mask of whole parameter tensors."""

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """The mask `[P]` of the chosen tensors, boolean."""
        chosen = {id(parameter) for parameter in self._chosen(train_loader)}
        pieces = [
            torch.full((parameter.numel(),), id(parameter) in chosen, device=parameter.device)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        return torch.cat(pieces)

    @abstractmethod
    def _chosen(self, train_loader: Iterable[Any] | None) -> Sequence[nn.Parameter]:
        """The tensors to select."""


class ParamNameSubnetMask(WholeTensorSubnetMask):
    """Selects parameter tensors by their names in `model.named_parameters()`.

    Args:
        model: The network.
        parameter_names: Names of trainable parameters; of a tied parameter either name works.

    Raises:
        InvalidArgument: No name is given, or one is unknown or that of a frozen parameter.
    """

    def __init__(self, model: nn.Module, parameter_names: Sequence[str]) -> None:
        super().__init__(model)
        known = dict(model.named_parameters(remove_duplicate=False))
        self.parameter_names = _known_names(parameter_names, known, "parameter_names")
        _require_trainable(self.parameter_names, [known[name] for name in self.parameter_names])

    def _chosen(self, train_loader: Iterable[Any] | None) -> list[nn.Parameter]:
        known = dict(self.model.named_parameters(remove_duplicate=False))
        return [known[name] for name in self.parameter_names]


class ModuleNameSubnetMask(WholeTensorSubnetMask):
    """Selects the trainable parameters of leaf modules by their names in `model.named_modules()`.

    Args:
        model: The network.
        module_names: Names of modules without children that hold trainable parameters.

    Raises:
        InvalidArgument: No name is given, or one is unknown, has children or has nothing to train.
    """

    def __init__(self, model: nn.Module, module_names: Sequence[str]) -> None:
        super().__init__(model)
        known = dict(model.named_modules(remove_duplicate=False))
        self.module_names = _known_names(module_names, known, "module_names")
        for name in self.module_names:
            _require_leaf(name, known[name])

    def _chosen(self, train_loader: Iterable[Any] | None) -> list[nn.Parameter]:
        return [p for name in self.module_names for p in self.model.get_submodule(name).parameters()]


class LastLayerSubnetMask(WholeTensorSubnetMask):
    """Selects the trainable parameters of the last layer, an `nn.Linear`.

    Args:
        model: The network.
        last_layer_name: Name of the layer; None to determine it by a forward pass on the first batch.
        dict_key_y: Where batches are mappings: key of the targets.

    Raises:
        InvalidArgument: The name is not that of an `nn.Linear`; on `select`, no loader to find it or nothing to train.
        InvalidData: On `select`, a loader without data.
    """

    def __init__(self, model: nn.Module, last_layer_name: str | None = None, dict_key_y: str = "labels") -> None:
        super().__init__(model)
        self.dict_key_y = dict_key_y
        self._last_layer_name = None if last_layer_name is None else require_linear(model, last_layer_name)

    def _chosen(self, train_loader: Iterable[Any] | None) -> list[nn.Parameter]:
        name = self._last_layer_name
        if name is None:
            x, _ = batches.split(_first(require_loader(self, train_loader)), self.dict_key_y)
            name = find_last_layer(self.model, batches.to_device(x, self.parameter_vector.device))
        trainable = [p for p in unwrap(self.model).get_submodule(name).parameters() if p.requires_grad]
        if not trainable:
            raise InvalidArgument(f"every parameter of the last layer {name!r} is frozen; set requires_grad=True.")
        return trainable


def require_loader(mask: SubnetMask, train_loader: Iterable[Any] | None) -> Iterable[Any]:
    """The loader.

    Raises:
        InvalidArgument: It is None.
    """
    if train_loader is None:
        raise InvalidArgument(f"{type(mask).__name__} looks at the data; call select(train_loader) with a loader.")
    return train_loader


def _first(loader: Iterable[Inputs]) -> Inputs:
    """The first batch; a loader draws a seed from the global random state, which is put back.

    Raises:
        InvalidData: There is none.
    """
    with torch.random.fork_rng(devices=[]):
        for batch in loader:
            return batch
    raise InvalidData("train_loader gave no data; the last layer is found by one batch, or by last_layer_name=.")


def _is_binary(mask: Tensor, n_params: int) -> bool:
    integral = not (mask.is_floating_point() or mask.is_complex())
    return mask.shape == (n_params,) and integral and bool(((mask == 0) | (mask == 1)).all())


def _described(mask: object) -> str:
    if not isinstance(mask, Tensor):
        return f"of type {type(mask).__name__}"
    return f"a tensor of shape {list(mask.shape)} and dtype {mask.dtype} with values {mask.unique()[:5].tolist()}"


def _known_names(names: Sequence[str], known: dict[str, Any], argument: str) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in listed if name not in known]
    if not listed or unknown:
        raise InvalidArgument(
            f"{argument}={names!r} {'is empty' if not listed else f'holds the unknown {unknown}'}; "
            f"accepted are one or more of {[name for name in known if name]}."
        )
    return listed


def _require_trainable(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    frozen = [name for name, parameter in zip(names, parameters, strict=True) if not parameter.requires_grad]
    if frozen:
        raise InvalidArgument(f"the parameters {frozen} are frozen; set requires_grad=True or leave them out.")


def _require_leaf(name: str, module: nn.Module) -> None:
    if any(True for _ in module.children()):
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        raise InvalidArgument(f"the module {name!r} is not a leaf; name its leaves, among {children}.")
    if not any(p.requires_grad for p in module.parameters()):
        raise InvalidArgument(
            f"the module {name!r} of type {type(module).__name__} has no trainable parameter; leave it out."
        )
