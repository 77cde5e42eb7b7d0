"""What backends by other people's packages share: the arguments, and the native engine behind each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor, nn

from laplace.curvature.interface import CurvatureInterface, EFInterface, GGNInterface
from laplace.curvature.packages import MakeNative
from laplace.engines.engine import CurvatureEngine
from laplace.engines.native.empirical_fisher import EFEngine
from laplace.engines.native.engine import MEMORY_BUDGET
from laplace.engines.native.ggn import GGNEngine
from laplace.engines.native.hessian import HessianEngine
from laplace.likelihoods.base import Likelihood
from laplace.weights.problem import Problem


class PackageBackend(CurvatureInterface, ABC):
    """Base of backends by a package.

    Args:
        model: The network.
        likelihood: Its likelihood.
        last_layer: The last layer only.
        subnetwork_indices: These entries only.
        dict_key_x: Key of the inputs in mappings.
        dict_key_y: Key of the targets in mappings.
        memory_budget: Bytes of Jacobians, or of activations of vectorised passes, that are held at once.

    Attributes:
        kfac_approx: Which Kronecker factors the native engine computes where the package has none.

    Raises:
        MissingDependency: By the first batch, if the package is not installed.
    """

    kfac_approx: str = "expand"

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

    @abstractmethod
    def _by_package(
        self, make_native: MakeNative, problem: Problem, generator: torch.Generator | None
    ) -> CurvatureEngine:
        """The package's engine; the generator is that of sampled curvature, else None."""


class PackageGGN(PackageBackend, GGNInterface):
    """GGN by a package, exact or sampled.

    Args:
        model: The network.
        likelihood: Its likelihood.
        last_layer: The last layer only.
        subnetwork_indices: These entries only.
        dict_key_x: Key of the inputs in mappings.
        dict_key_y: Key of the targets in mappings.
        stochastic: The Monte-Carlo Fisher instead of the exact GGN.
        num_samples: Targets drawn per datum.
        generator: Source of the draws; the default is a new one with the seed of `torch.manual_seed`.
        memory_budget: Bytes of Jacobians, or of activations of vectorised passes, that are held at once.

    Raises:
        MissingDependency: By the first batch, if the package is not installed.
    """

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

    def _engine(self, problem: Problem, likelihood: Likelihood, split_outputs: bool) -> CurvatureEngine:
        generator = self.generator or torch.Generator(device=problem.device).manual_seed(torch.initial_seed())
        native = partial(
            GGNEngine, likelihood=likelihood, stochastic=self.stochastic, num_samples=self.num_samples,
            generator=generator, kfac_approx=self.kfac_approx, memory_budget=self.memory_budget,
            split_outputs=split_outputs,
        )  # fmt: skip
        return self._by_package(native, problem, generator if self.stochastic else None)


class PackageEF(PackageBackend, EFInterface):
    """Empirical Fisher by a package; arguments as of `PackageBackend`."""

    def _engine(self, problem: Problem, likelihood: Likelihood, split_outputs: bool) -> CurvatureEngine:
        native = partial(
            EFEngine, likelihood=likelihood, kfac_approx=self.kfac_approx, memory_budget=self.memory_budget,
            split_outputs=split_outputs,
        )  # fmt: skip
        return self._by_package(native, problem, None)


class PackageHessian(PackageBackend):
    """Exact Hessian by a package, which may be indefinite; arguments as of `PackageBackend`."""

    kind = "hessian"

    def _engine(self, problem: Problem, likelihood: Likelihood, split_outputs: bool) -> CurvatureEngine:
        native = partial(
            HessianEngine, likelihood=likelihood, memory_budget=self.memory_budget, split_outputs=split_outputs
        )
        return self._by_package(native, problem, None)
