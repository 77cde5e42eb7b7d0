"""Saving to one file, from which `laplace.load` makes the same object: its state, its class and its arguments."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from laplace.core import nested
from laplace.core.arguments import check_flag
from laplace.errors import UnsupportedError


class Saved(ABC):
    """An object with a state that is saved to one file."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The posterior as a dictionary of tensors, numbers and strings, without the weights of the networks."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a saved state."""

    @property
    @abstractmethod
    def _recipe(self) -> dict[str, Any]:
        """Class and arguments by which the object is made again, as a file holds them."""

    @property
    @abstractmethod
    def _holding_inputs(self) -> list[str]:
        """Names of the structures whose states hold what networks or their layers see of training data."""

    def save(self, path: str | os.PathLike[str], *, inputs: bool = True) -> None:
        """Saves the posterior to a safetensors file, without the network; `laplace.load(path, model)` reads it.

        The file has the class, its arguments and the state, and no pickled code. It is replaced atomically: after an
        error or a crash the former file is intact. A likelihood object, a backend other than the native GGN and a
        `forward_fn` cannot be saved: give them to `laplace.load` again.

        Args:
            path: The file.
            inputs: Whether the file may hold inputs of training data, as the networks or their layers see them. Those
                of `"matrix_free"`, Gaussian processes on a subset and `VaLLA` do, others hold sums over the data.

        Raises:
            NotFittedError: Before `fit`.
            UnsupportedError: The class is not registered, or its loss was assigned; or the state holds inputs, and
                `inputs=False`. The message says what to do.
            MissingDependency: safetensors is not installed.
        """
        check_flag("inputs", inputs, "Give False to refuse a file that holds inputs of training data.")
        names = self._holding_inputs
        if names and not inputs:
            raise UnsupportedError(
                f"la.save with inputs=False of hessian_structure={names[0]!r}, whose state holds inputs of training "
                "data: use 'kron', 'diag', 'full' or another structure that sums over the data, or "
                "accept them by inputs=True."
            )
        nested.write(path, {"recipe": self._recipe, "state": self.state_dict()})
