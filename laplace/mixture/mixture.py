"""Mixtures of Laplace approximations: one posterior out of several networks (Eschenhagen et al., 2021).

    p(θ | D) ≈ Σ_k π_k N(θ; θ_k*, P_k⁻¹)    (equation 7)

The networks are modes of one posterior, or models of any kind that predict the same targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs
from laplace.enums import (
    HessianStructure,
    LikelihoodName,
    LinkApprox,
    LinkName,
    PredType,
    PredTypeName,
    StructureName,
    SubsetOfWeights,
    WeightsName,
)
from laplace.errors import InvalidArgument
from laplace.grid import from_names
from laplace.likelihoods.base import Likelihood
from laplace.mixture import mimo, state
from laplace.mixture.components import check_same_data, weights_of
from laplace.mixture.posterior import MixturePosterior, MixturePredictor, choose
from laplace.posterior.calibration import Calibration
from laplace.posterior.posterior import Posterior
from laplace.predicting import OutputSampling
from laplace.predictive.options import PredictOptions
from laplace.predictive.predict import is_loader
from laplace.predictive.prediction import Prediction
from laplace.saving import Saved
from laplace.structures.base import Curvature
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.tunable import Tunable
from laplace.weights.last_layer import network_of


class MixtureLaplace(MixturePosterior, OutputSampling, Tunable, Saved):
    """A mixture of Laplace approximations of several networks, MoLA (Eschenhagen et al., 2021).

    Its predictions average those of the components, and it is fitted, tuned and saved like a single posterior.
    """

    @classmethod
    def from_mimo(
        cls,
        model: nn.Module,
        n_heads: int,
        likelihood: Likelihood | LikelihoodName = "classification",
        subset_of_weights: WeightsName = SubsetOfWeights.LAST_LAYER,
        hessian_structure: StructureName | type[Curvature] = HessianStructure.FULL,
        *,
        last_layer_name: str | None = None,
        example: Tensor | None = None,
        weights: Literal["uniform", "evidence"] | Tensor | Sequence[float] = "uniform",
        **options: Any,
    ) -> MixtureLaplace:
        """A multi-input multi-output network (MIMO; Havasi et al., 2021) with M heads, as a mixture of M.

        Component m is the network x ↦ f_m(x, …, x), with head m's rows of the last layer (or all weights) random.
        Loaders give one x per target, `[B, D, …]`, which is repeated M times, as in prediction. To fit a head at the
        inputs it was trained with, fit its component with batches `(x_1, …, x_M, y_m)`.

        Args:
            model: Takes M inputs concatenated along dimension 1; returns `[B, M·C]`, head after head, or `[B, M, C]`.
            n_heads: M.
            likelihood: As in `Laplace`.
            subset_of_weights: `"last_layer"` or `"all"`.
            hessian_structure: As in `Laplace`; by default a full matrix per head, as in the paper.
            last_layer_name: Name of the layer with the heads, an `nn.Linear`. If you do not give it, give
            example: inputs `[B, D, …]`, from which the layer is determined.
            weights: Mixture weights π, as in the class.
            **options: Further arguments of `Laplace`, except `forward_fn`.

        Raises:
            InvalidArgument: No such layer, a number of outputs that M does not divide, or another subset of weights.
        """
        check_counts(n_heads=n_heads)
        model = network_of(model)
        calls = [mimo.HeadCall(head, n_heads) for head in range(n_heads)]
        subset = str(subset_of_weights)
        if subset not in (SubsetOfWeights.LAST_LAYER, SubsetOfWeights.ALL):
            raise InvalidArgument(f"subset_of_weights={subset!r}; accepted for heads are 'last_layer' and 'all'.")
        each: list[dict[str, Any]] = [options | {"forward_fn": call} for call in calls]
        if subset == SubsetOfWeights.LAST_LAYER:
            subset, name = SubsetOfWeights.SUBNETWORK, mimo.last_layer_of(model, n_heads, last_layer_name, example)
            for own, call in zip(each, calls, strict=True):
                own["subnetwork_indices"] = mimo.head_indices(model, name, call)
        parts = [from_names(model, likelihood, subset, hessian_structure, **own) for own in each]
        return cls(parts, weights=weights)

    # Predictions.

    @property
    def _predictor(self) -> MixturePredictor:
        return MixturePredictor(self.components, self.weights)

    @checked
    def __call__(
        self,
        x: Inputs,
        pred_type: PredTypeName = PredType.GLM,
        joint: bool = False,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Any:
        """Predictive distribution of the mixture at x: Σ_k π_k p_k(y | x) (equation 9).

        Shapes are those of `ParametricLaplace.__call__`. Regression returns mean and variance of the mixture, by the
        law of total variance. Where samples are drawn, every component has `n_samples`.

        Args:
            x: Inputs of B data: a tensor, tuple or mapping.
            pred_type: `"glm"`: the linearised networks. `"nn"`: sampled weights.
            joint: Also compute covariances between inputs.
            link_approx: Link approximation, as in `ParametricLaplace.__call__`.
            n_samples: Number of Monte-Carlo samples of each component.
            diagonal_output: Compute variances of the outputs only, no covariances between them.
            generator: Random generator; equal seeds give bitwise equal results.
            **options: Further options of the components' predictions: `observation_noise`, `fitting`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted.
            ModelChangedError: A network was trained further after `fit`.
        """
        asked = PredictOptions(pred_type, n_samples, diagonal_output, generator, joint, link_approx)
        return self._predictor.call(x, asked, **options)

    @overload
    def predict(  # pyright: ignore[reportOverlappingOverload]  (a tensor is iterable, too)
        self, x: Tensor | tuple[Any, ...] | Mapping[Any, Any], pred_type: PredTypeName = ..., joint: bool = ...,
        link_approx: LinkName = ..., n_samples: int = ..., diagonal_output: bool = ...,
        generator: torch.Generator | None = ..., *, progress_bar: bool = ..., **options: Any,
    ) -> Prediction: ...  # fmt: skip

    @overload
    def predict(
        self, x: Iterable[Any], pred_type: PredTypeName = ..., joint: bool = ...,
        link_approx: LinkName = ..., n_samples: int = ..., diagonal_output: bool = ...,
        generator: torch.Generator | None = ..., *, progress_bar: bool = ..., **options: Any,
    ) -> Iterator[Prediction]: ...  # fmt: skip

    @checked
    def predict(
        self,
        x: Any,
        pred_type: PredTypeName = PredType.GLM,
        joint: bool = False,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        *,
        progress_bar: bool = False,
        **options: Any,
    ) -> Any:
        """The predictive distribution of the mixture as one object; for a loader, an iterator with one per batch.

        Arguments and errors are those of `ParametricLaplace.predict`. Every component draws `n_samples` samples.
        Weights π that are assigned later have no effect on the object.
        """
        asked = PredictOptions(pred_type, n_samples, diagonal_output, generator, joint, link_approx)
        if is_loader(x):
            return self._predictor.stream(x, asked, progress_bar=progress_bar, **options)
        return self._predictor.predict(x, asked, **options)

    def predictive(
        self, x: Inputs, pred_type: PredTypeName, link_approx: LinkName, n_samples: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`self(x, ...)` with positional options."""
        return self(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)

    @checked
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> tuple[Tensor, list[Tensor]]:
        """Samples of the weights: a component with probability π_k, then a sample of its Gaussian (equation 7).

        Returns:
            Index of the component of each sample, `[S]`; and a list with the samples of each component, `[S_k, P_k]`
            with Σ S_k = S, in the order in which they were drawn.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: No samples.
        """
        PredictOptions(PredType.NN, n_samples, generator=generator).kind()
        chosen = choose(self.weights, n_samples, generator)
        counts = torch.bincount(chosen, minlength=self.n_components).tolist()
        return chosen, [la.sample(n, generator) for la, n in zip(self.components, counts, strict=True)]

    # Tuning and state.

    @property
    def _group(self) -> PosteriorGroup:
        if self._rule == "evidence":
            check_same_data(self.components)
        return PosteriorGroup(tuple(la.snapshot() for la in self.components), partial(weights_of, self._rule))

    @property
    def _calibration(self) -> Calibration | None:
        stored = [la.snapshot().calibration for la in self.components]
        return None if None in stored else stored[0]

    def _take_over(self, posteriors: tuple[Posterior, ...]) -> None:
        for la, posterior in zip(self.components, posteriors, strict=True):
            la.set_posterior(posterior)

    def state_dict(self) -> dict[str, Any]:
        """States of all components and the rule of the weights, as tensors, numbers and strings.

        Raises:
            NotFittedError: Before `fit`.
        """
        return state.save(self.components, self._rule)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces this mixture by a saved one of the same networks, as `state_dict` returned it.

        Raises:
            StateError: It belongs to other components; nothing is changed then.
        """
        self._rule = state.load(self.components, state_dict)

    @property
    def _recipe(self) -> dict[str, Any]:
        return state.recipe(self.components)

    @property
    def _structures(self) -> list[type[Curvature]]:
        return [la.structure for la in self.components]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MixtureLaplace:
        """Moves all components and their models to a device or dtype, in place, as `nn.Module.to`; returns itself."""
        for la in self.components:
            la.to(device, dtype)
        return self

    def __repr__(self) -> str:
        return state.describe(self.components, self._rule)
