"""Constructors that the backends of several packages share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laplace.curvature.interface import CurvatureInterface, GGNInterface
from laplace.engines.engine import MEMORY_BUDGET
from laplace.likelihoods.base import Likelihood


class PackageInterface(CurvatureInterface):
    """Base of backends by a package.

    Args:
        model: The network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        last_layer: Differentiate with respect to the last layer only.
        subnetwork_indices: Differentiate with respect to these weights only: indices of flattened parameters, `[p]`.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        memory_budget: Bytes of Jacobians, or of activations of vectorised passes, that are held at once.

    Raises:
        MissingDependency: By the first batch, if the package is not installed.
    """

    engine_options = ("memory_budget",)

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        super().__init__(model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y)
        self.memory_budget = memory_budget


class PackageGGN(PackageInterface, GGNInterface):
    """Base of GGN backends by a package, exact or sampled.

    Args:
        model: The network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        last_layer: Differentiate with respect to the last layer only.
        subnetwork_indices: Differentiate with respect to these weights only: indices of flattened parameters, `[p]`.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        stochastic: The Monte-Carlo Fisher instead of the exact GGN.
        num_samples: Number of targets drawn per datum, with `stochastic`.
        generator: Source of the draws; the default is a new one with the seed of `torch.manual_seed`.
        memory_budget: Bytes of Jacobians, or of activations of vectorised passes, that are held at once.

    Raises:
        MissingDependency: By the first batch, if the package is not installed.
    """

    engine_options = ("stochastic", "num_samples", "generator", "memory_budget")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        stochastic: bool = False,
        *,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        GGNInterface.__init__(
            self, model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y, stochastic, num_samples
        )
        self.generator = generator
        self.memory_budget = memory_budget
