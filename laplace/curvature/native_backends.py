"""The library's own backends: `NativeGGN`, the default, `NativeEF` and `NativeHessian`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laplace.curvature.interface import CurvatureInterface, EFInterface, GGNInterface
from laplace.engines.engine import MAX_PASSES, MEMORY_BUDGET
from laplace.engines.native.kinds import HessianEngine
from laplace.likelihoods.base import Likelihood


class NativeGGN(GGNInterface):
    """Generalised Gauss–Newton matrix Σ_b J_bᵀ Λ_b J_b (= Fisher for exponential families), exact or sampled.

    Args:
        model: The network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        last_layer: Differentiate with respect to the last layer only.
        subnetwork_indices: Differentiate with respect to these weights only: indices of flattened parameters, `[p]`.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        stochastic: Replace Λ by gradients at targets drawn from the model: the Monte-Carlo Fisher.
        num_samples: Number of targets drawn per datum, with `stochastic`.
        generator: Random generator of these draws; by default a new one with the seed of `torch.manual_seed`.
        kfac_approx: Kronecker factors of layers that share weights over tokens or pixels: `"expand"` or `"reduce"`
            (Eschenhagen et al., 2023).
        memory_budget: Bytes of output gradients that may be stored at once; results depend on it by rounding only.
        max_passes: Largest number of backward passes for a batch, where outputs are per token or pixel: one per
            position and output. More raise an error.
    """

    engine_options = ("stochastic", "num_samples", "generator", "kfac_approx", "memory_budget", "max_passes")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        stochastic: bool = False,
        num_samples: int = 1,
        *,
        generator: torch.Generator | None = None,
        kfac_approx: str = "expand",
        memory_budget: int = MEMORY_BUDGET,
        max_passes: int = MAX_PASSES,
    ) -> None:
        super().__init__(
            model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y, stochastic, num_samples
        )
        self.generator = generator
        self.kfac_approx = kfac_approx
        self.memory_budget = memory_budget
        self.max_passes = max_passes


class NativeEF(EFInterface):
    """Empirical Fisher Σ_b g_b g_bᵀ, g_b the gradient of the unit negative log likelihood of datum b.

    Args:
        model: The network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        last_layer: Differentiate with respect to the last layer only.
        subnetwork_indices: Differentiate with respect to these weights only: indices of flattened parameters, `[p]`.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        kfac_approx: Kronecker factors of layers that share weights over tokens or pixels: `"expand"` or `"reduce"`.
        memory_budget: Bytes of output gradients that may be stored at once.
        max_passes: Largest number of backward passes for a batch, where outputs are per token or pixel: one per
            position. More raise an error.
    """

    engine_options = ("kfac_approx", "memory_budget", "max_passes")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        kfac_approx: str = "expand",
        memory_budget: int = MEMORY_BUDGET,
        max_passes: int = MAX_PASSES,
    ) -> None:
        super().__init__(model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y)
        self.kfac_approx = kfac_approx
        self.memory_budget = memory_budget
        self.max_passes = max_passes


class NativeHessian(CurvatureInterface):
    """The exact Hessian of the negative log likelihood, which may be indefinite.

    Structures `full`, `diag`, `block` and `lowrank` take it, and say by `structure_kwargs={"indefinite": ...}` what
    becomes of negative eigenvalues.

    Args:
        model: The network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        last_layer: Differentiate with respect to the last layer only.
        subnetwork_indices: Differentiate with respect to these weights only: indices of flattened parameters, `[p]`.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        memory_budget: Bytes of activations that vectorised products may hold.
        max_passes: Largest number of backward passes of a linearised prediction, where outputs are per token or pixel.
    """

    kind = "hessian"
    engine_type = HessianEngine
    engine_options = ("memory_budget", "max_passes")

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
        max_passes: int = MAX_PASSES,
    ) -> None:
        super().__init__(model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y)
        self.memory_budget = memory_budget
        self.max_passes = max_passes
