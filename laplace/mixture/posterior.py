"""The posterior of a mixture: components, weights, fit and evidence (Eschenhagen et al., 2021).

    p(θ | D) ≈ Σ_k π_k N(θ; θ_k*, P_k⁻¹)    (equation 7)

The networks are modes of one posterior, or models of any kind that predict the same targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from laplace.core.arguments import CheckedConstructor, checked
from laplace.core.batch import Inputs
from laplace.core.positions import Given
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import uniform
from laplace.enums import HessianStructure, LikelihoodName, PredType, StructureName, SubsetOfWeights, WeightsName
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.mixture.components import (
    Rule,
    all_or_none,
    check_repeatable,
    check_same_data,
    check_same_outputs,
    checked_rule,
    make_components,
    shared,
    weights_now,
)
from laplace.parametric import ParametricLaplace
from laplace.predictive.options import PredictOptions
from laplace.predictive.posterior_outputs import MixedOutputs, mixed
from laplace.predictive.predict import Predictor, replayed
from laplace.predictive.prediction import Prediction
from laplace.structures.base import Curvature
from laplace.tuning.group import log_mean_exp
from laplace.weights.base import Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from laplace.core.batch import WeightFn


# Samples of a mixture: a component by its weight, then a sample of that component.


def choose(weights: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """The component of every sample, `[S]`, drawn with probabilities π `[K]`."""
    steps = weights.cumsum(0)
    steps = steps / steps[-1]  # rounding must leave no gap below 1
    return torch.searchsorted(steps, uniform((n_samples,), weights, generator), right=True).cpu()


def in_order(draws: Sequence[Callable[[int], Tensor]], chosen: Tensor) -> Tensor:
    """Samples `[S, …]`, each of the component `[S]` that was chosen for it.

    Args:
        draws: Samples `[n, …]` of each component; called where n is positive.
        chosen: The component of every sample, `[S]`.
    """
    counts = torch.bincount(chosen, minlength=len(draws)).tolist()
    parts = [draw(count) for draw, count in zip(draws, counts, strict=True) if count]
    stacked = torch.cat([part.to(parts[0].device) for part in parts])
    place = chosen.argsort(stable=True).to(stacked.device)
    return stacked[place.argsort()]


# Predictions of a mixture: those of its components, by their public methods, as one.


@dataclass(frozen=True, eq=False)
class MixturePredictor(Predictor):
    """Several posteriors as they are asked for predictions together.

    Attributes:
        components: The K Laplace objects, whose methods may be users' own.
        weights: π, `[K]`.
    """

    components: tuple[ParametricLaplace, ...]
    weights: Tensor

    @property
    def _channel_dim(self) -> int:
        return self.components[0].channel_dim

    def call(self, x: Inputs, options: PredictOptions, /, **more: Any) -> Any:
        """Σ_k π_k p_k(y | x), or its first two moments."""
        _shared(more.get("outputs"))
        predictions = [la(x, *_arguments(la, options), **more) for la in self.components]
        return mixed(predictions, self.weights, self._channel_dim)

    def predict(self, x: Inputs, options: PredictOptions, /, **more: Any) -> Prediction:
        """One object over the outputs of all components."""
        _shared(more.get("outputs"))
        predictions = [la.predict(x, *_arguments(la, options), **more) for la in self.components]
        rows = tuple(outputs for prediction in predictions for outputs in prediction.rows.components)
        draws = replayed(options.generator, self.weights.device)

        def choice() -> Tensor:
            return choose(self.weights, options.n_samples, draws())

        return Prediction(MixedOutputs(rows, self.weights, choice), self._channel_dim)

    def check_whole(self, what: str) -> None:
        """Refuses what takes whole posteriors, if every process holds a part of a component."""
        for la in self.components:
            la.snapshot().refuse_sharded(what)
            la.fitted()

    def functional_samples(self, x: Inputs, options: PredictOptions, /, **model_kwargs: Any) -> Tensor:
        """A component per sample, then a sample of its outputs."""
        chosen = _shared(options.outputs) | _groups(options)

        def draw(la: ParametricLaplace, n_samples: int) -> Tensor:
            return la.functional_samples(x, *_sampling_arguments(options, n_samples), **chosen, **model_kwargs)

        return self._drawn(draw, options)

    def predictive_samples(self, x: Inputs, options: PredictOptions, /, **model_kwargs: Any) -> Tensor:
        """A component per sample, then a sample of the mean of its target."""
        chosen = _shared(options.outputs) | _groups(options)

        def draw(la: ParametricLaplace, n_samples: int) -> Tensor:
            return la.predictive_samples(x, *_sampling_arguments(options, n_samples), **chosen, **model_kwargs)

        return self._drawn(draw, options)

    def _drawn(self, draw: Callable[[ParametricLaplace, int], Tensor], options: PredictOptions) -> Tensor:
        """Samples `[S, …]`, each of a component by its weight."""
        options.kind()
        chosen = choose(self.weights, options.n_samples, options.generator)
        return in_order([partial(draw, la) for la in self.components], chosen)


def _arguments(la: ParametricLaplace, options: PredictOptions) -> tuple[Any, ...]:
    """Arguments of `la(x, ...)`: a posterior over functions has a name of its own for the linearised predictive."""
    linearised = str(options.pred_type) == PredType.GLM
    return (
        la.pred_types.name(PredType.GLM) if linearised else options.pred_type,
        options.joint,
        options.link_approx,
        options.n_samples,
        options.diagonal_output,
        options.generator,
    )


def _groups(options: PredictOptions) -> dict[str, Any]:
    """Groups of inputs as an argument of all components, which is not passed on where there are none."""
    return {} if options.group_size is None else {"group_size": options.group_size}


def _shared(outputs: Given) -> dict[str, Given]:
    """The chosen outputs as an argument of all components.

    Raises:
        InvalidArgument: The largest ones, of which every component has its own.
    """
    if isinstance(outputs, int):
        raise InvalidArgument(
            f"outputs={outputs} of a mixture: the largest outputs of one network are not those of another. Give "
            "indices, e.g. those of la.components[0].predict(x, outputs=...).outputs."
        )
    return {} if outputs is None else {"outputs": outputs}


def _sampling_arguments(options: PredictOptions, n_samples: int) -> tuple[Any, ...]:
    return options.pred_type, n_samples, options.diagonal_output, options.generator, options.joint


class MixturePosterior(CheckedConstructor):
    """Posterior over the weights of several networks; `MixtureLaplace` adds predictions, tuning and saving.

    Args:
        components: K trained networks, or K Laplace objects, fitted or not. Architectures, weights and structures may
            differ. The objects are used as they are, not copied.
        likelihood: As in `Laplace`; required if components are networks.
        subset_of_weights: As in `Laplace`, if components are networks.
        hessian_structure: As in `Laplace`, if components are networks.
        weights: Mixture weights π: `"uniform"`, `"evidence"` (proportional to p(D | M_k), equation 10) or numbers
            `[K]`.
        **options: Further arguments of `Laplace`, if components are networks.

    Attributes:
        components: The K Laplace objects.

    Raises:
        InvalidArgument: No component, the same one twice, different likelihoods, or weights that are no distribution.
        InvalidType: A component is neither a network nor a Laplace object.
    """

    def __init__(
        self,
        components: Sequence[ParametricLaplace | nn.Module],
        likelihood: Likelihood | LikelihoodName | None = None,
        subset_of_weights: WeightsName | type[Weights] = SubsetOfWeights.LAST_LAYER,
        hessian_structure: StructureName | type[Curvature] = HessianStructure.KRON,
        *,
        weights: Literal["uniform", "evidence"] | Tensor | Sequence[float] = "uniform",
        **options: Any,
    ) -> None:
        self.components = make_components(components, likelihood, subset_of_weights, hessian_structure, options)
        self._rule: Rule = checked_rule(weights, len(self.components))

    # What was chosen, and what is shared.

    @property
    def n_components(self) -> int:
        """Number of components, K."""
        return len(self.components)

    @property
    def weights(self) -> Tensor:
        """Mixture weights π, `[K]`, float64; can be assigned. With `"evidence"` at the present hyper-parameters.

        Raises:
            NotFittedError: `"evidence"` before `fit`.
            InvalidArgument: `"evidence"`, but the components were fitted to different numbers of data.
        """
        return weights_now(self._rule, self.components)

    @weights.setter
    def weights(self, value: str | Tensor | Sequence[float]) -> None:
        self._rule = checked_rule(value, self.n_components)

    @property
    def likelihood_object(self) -> Likelihood:
        """The likelihood p(y | f) of all components, an object."""
        return self.components[0].likelihood_object

    @property
    def is_fitted(self) -> bool:
        """True if every component is fitted."""
        return all(la.is_fitted for la in self.components)

    @property
    def prior_precision(self) -> Tensor:
        """Prior precision δ that all components share; can be assigned.

        Raises:
            InvalidArgument: They differ.
        """
        return shared(self.components, "prior_precision")

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._assign("prior_precision", value)

    @property
    def sigma_noise(self) -> Tensor:
        """Observation noise σ that all components share; can be assigned.

        Raises:
            InvalidArgument: They differ.
        """
        return shared(self.components, "sigma_noise")

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._assign("sigma_noise", value)

    @property
    def temperature(self) -> Tensor:
        """Temperature T that all components share; can be assigned.

        Raises:
            InvalidArgument: They differ.
        """
        return shared(self.components, "temperature")

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        self._assign("temperature", value)

    def _assign(self, name: str, value: Any) -> None:
        posteriors = [la.snapshot().assigned(**{name: value}) for la in self.components]
        for la, posterior in zip(self.components, posteriors, strict=True):
            la.set_posterior(posterior)

    # Fit and evidence.

    @checked
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        decay: float = 1.0,
        check_memory: bool = True,
        group: ProcessGroup | None = None,
        weight_fn: WeightFn | None = None,
        dict_key_weight: str | None = None,
    ) -> None:
        """Fits every component to the same data, as `ParametricLaplace.fit` does.

        Args:
            train_loader: The training data; read at least once per component.
            override: Start from scratch; False adds these data to those of the former fits.
            progress_bar: Show progress bars, over the components and within each.
            decay: With `override=False`: factor in (0, 1] on the curvature and loss of all former data.
            check_memory: Raise `OutOfMemory` before a fit that needs more than the free memory.
            group: Process group, as in `ParametricLaplace.fit`; all processes have the same components.
            weight_fn: Weights of the data, as in `ParametricLaplace.fit`.
            dict_key_weight: Where batches are mappings: key of such weights.

        Raises:
            InvalidData: A batch cannot be used.
            ProcessError: Another process failed, or has other components.
            InvalidArgument: The loader can be read only once, or the networks have different numbers of outputs. After
                every error all former posteriors are kept.
        """
        check_repeatable(train_loader, self.n_components)
        # A user's own fit need not know what has its default value.
        more: dict[str, Any] = {} if decay == 1 else {"decay": decay}
        more |= {} if check_memory else {"check_memory": check_memory}
        more |= {} if group is None else {"group": group}
        more |= {} if weight_fn is None else {"weight_fn": weight_fn}
        more |= {} if dict_key_weight is None else {"dict_key_weight": dict_key_weight}
        with all_or_none(self.components):
            for la in tqdm(self.components, desc="components", disable=not progress_bar):
                la.fit(train_loader, override, progress_bar, **more)
            check_same_outputs(self.components)

    @checked
    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        sigma_noise: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """Log evidence under a uniform prior over the K models, log p(D) = log (1/K) Σ_k p(D | M_k), 0-dim.

        The sum is the denominator of equation 10 (derived in appendix E.1 of Eschenhagen et al., 2021), with
        each p(D | M_k) by the Laplace approximation. The mixture weights do not enter it.

        Args:
            prior_precision: δ to evaluate at, for all components. It is also assigned, without its graph.
            sigma_noise: σ to evaluate at, also assigned (regression only).
            temperature: T to evaluate at, also assigned.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: A value is not accepted, or the components were fitted to different numbers of data.
        """
        check_same_data(self.components)
        more = {} if temperature is None else {"temperature": temperature}  # users' own evidences need not know it
        with all_or_none(self.components):
            values = [la.log_marginal_likelihood(prior_precision, sigma_noise, **more) for la in self.components]
        like = values[0]
        return log_mean_exp(torch.stack([widened(value.to(like.device)) for value in values])).to(like.dtype)
