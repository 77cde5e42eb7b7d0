"""Mixtures of Laplace approximations: one posterior out of several networks (Eschenhagen et al., 2021).

    p(θ | D) ≈ Σ_k π_k N(θ; θ_k*, P_k⁻¹)

The networks are modes of one posterior, or models of any kind that predict the same targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from laplace.core import nested
from laplace.core.arguments import CheckedConstructor, checked
from laplace.core.batch import Inputs
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import replayed, uniform
from laplace.enums import (
    HessianStructure,
    LikelihoodName,
    LinkName,
    PredType,
    PredTypeName,
    StructureName,
    SubsetOfWeights,
    WeightsName,
)
from laplace.errors import InvalidArgument, InvalidType, StateError
from laplace.grid import from_names
from laplace.likelihoods.base import Likelihood
from laplace.parametric import ParametricLaplace
from laplace.posterior.calibration import Calibration
from laplace.posterior.posterior import Posterior
from laplace.predicting import Predicting
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import Prediction, mixed
from laplace.saving import Saved
from laplace.structures.base import Curvature
from laplace.tunable import Tunable
from laplace.tuning.group import PosteriorGroup, log_mean_exp, require_same_data
from laplace.weights.base import Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from laplace.core.batch import WeightFn

VERSION = 1
"""Version of the format of state dicts."""


class MixtureLaplace(CheckedConstructor, Predicting, Tunable, Saved):
    """A mixture of Laplace approximations of several networks, MoLA (Eschenhagen et al., 2021).

    Its predictions Σ_k π_k p_k(y | x) average those of the components, and it is fitted, tuned and saved
    like a single posterior. Regression returns mean and variance of the mixture, by the law of total variance. Where
    samples are drawn, every component has `n_samples`.

    Args:
        components: K trained networks, or K Laplace objects, fitted or not. Architectures, weights and structures may
            differ. The objects are used as they are, not copied.
        likelihood: As in `Laplace`; required if components are networks.
        subset_of_weights: As in `Laplace`, if components are networks.
        hessian_structure: As in `Laplace`, if components are networks.
        weights: Mixture weights π: `"uniform"`, `"evidence"` (proportional to p(D | M_k)) or numbers
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
        self.components = _components(components, likelihood, subset_of_weights, hessian_structure, options)
        self._rule: Rule = _checked_rule(weights, len(self.components))

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
        if isinstance(self._rule, Tensor):
            return self._rule.clone()
        if self._rule == "uniform":
            return _equal_weights(self.n_components)
        self._check_same_data()
        with torch.no_grad():
            values = [widened(la.log_marginal_likelihood()) for la in self.components]
            return by_evidence(torch.stack([value.to(values[0].device) for value in values]))

    @weights.setter
    def weights(self, value: str | Tensor | Sequence[float]) -> None:
        self._rule = _checked_rule(value, self.n_components)

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
        return self._shared("prior_precision")

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._assign("prior_precision", value)

    @property
    def sigma_noise(self) -> Tensor:
        """Observation noise σ that all components share; can be assigned.

        Raises:
            InvalidArgument: They differ.
        """
        return self._shared("sigma_noise")

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._assign("sigma_noise", value)

    @property
    def temperature(self) -> Tensor:
        """Temperature T that all components share; can be assigned.

        Raises:
            InvalidArgument: They differ.
        """
        return self._shared("temperature")

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        self._assign("temperature", value)

    def _shared(self, name: str) -> Tensor:
        first, *others = (getattr(la, name) for la in self.components)
        if any(value.shape != first.shape or bool((value.to(first) != first).any()) for value in others):
            raise InvalidArgument(
                f"the components have no common {name}; read it of each, `mixture.components[k].{name}`, or assign one "
                "to the mixture."
            )
        return first

    def _assign(self, name: str, value: Any) -> None:
        self._take_over(tuple(la.snapshot().assigned(**{name: value}) for la in self.components))

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
        if self.n_components > 1 and isinstance(train_loader, Iterator):
            raise InvalidArgument(
                f"the loader is a {type(train_loader).__name__}, which can be read once; each of the "
                f"{self.n_components} components reads the data: give a DataLoader or a list of batches."
            )
        # A user's own fit need not know what has its default value.
        more: dict[str, Any] = {} if decay == 1 else {"decay": decay}
        more |= {} if check_memory else {"check_memory": check_memory}
        more |= {} if group is None else {"group": group}
        more |= {} if weight_fn is None else {"weight_fn": weight_fn}
        more |= {} if dict_key_weight is None else {"dict_key_weight": dict_key_weight}
        with self._all_or_none():
            for la in tqdm(self.components, desc="components", disable=not progress_bar):
                la.fit(train_loader, override, progress_bar, **more)
            _check_same_outputs(self.components)

    @checked
    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        sigma_noise: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """Log evidence under a uniform prior over the K models, log p(D) = log (1/K) Σ_k p(D | M_k), 0-dim.

        The sum is the denominator of the weights by evidence (Eschenhagen et al., 2021, appendix E.1), with each
        p(D | M_k) by the Laplace approximation. The mixture weights do not enter it.

        Args:
            prior_precision: δ to evaluate at, for all components. It is also assigned, without its graph.
            sigma_noise: σ to evaluate at, also assigned (regression only).
            temperature: T to evaluate at, also assigned.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: A value is not accepted, or the components were fitted to different numbers of data.
        """
        self._check_same_data()
        more = {} if temperature is None else {"temperature": temperature}  # users' own evidences need not know it
        with self._all_or_none():
            values = [la.log_marginal_likelihood(prior_precision, sigma_noise, **more) for la in self.components]
        like = values[0]
        return log_mean_exp(torch.stack([widened(value.to(like.device)) for value in values])).to(like.dtype)

    def _check_same_data(self) -> None:
        """Evidences of different numbers of data are no basis of a comparison."""
        require_same_data([la.fitted().n_data for la in self.components])

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Gives every component its posterior back where one of them fails: a user's own `fit` may be what fails."""
        former = tuple(la.snapshot() for la in self.components)
        try:
            yield
        except BaseException:
            self._take_over(former)
            raise

    # Predictions: those of the components, by their public methods, as one.

    def _call_with(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Any:
        weights, more = self.weights, _changed_options(options) | model_kwargs
        predictions = [la(x, *_arguments(la, options), **more) for la in self.components]
        return mixed(predictions, weights, self.components[0].channel_dim)

    def predict_batch(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Prediction:
        weights, more = self.weights, _changed_options(options) | model_kwargs
        predictions = [la.predict(x, *_arguments(la, options), **more) for la in self.components]
        components = tuple(part for prediction in predictions for part in prediction.components)
        draws = replayed(options.generator, weights.device)

        def of_samples() -> Tensor:
            return drawn_components(weights, options.n_samples, draws())

        return Prediction(
            components, weights, self.components[0].channel_dim, of_samples if len(components) > 1 else None
        )

    def _samples_with(self, name: str, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Tensor:
        """A component per sample, then a sample of it [Mixtures, eq. 8]."""
        weights, more = self.weights, _changed_options(options) | model_kwargs
        options.kind()
        chosen = drawn_components(weights, options.n_samples, options.generator)
        counts = torch.bincount(chosen, minlength=self.n_components).tolist()
        parts = [
            getattr(la, name)(
                x, options.pred_type, n, options.diagonal_output, options.generator, options.joint, **more
            )
            for la, n in zip(self.components, counts, strict=True)
            if n
        ]
        samples = torch.cat([part.to(parts[0].device) for part in parts])
        return samples[chosen.argsort(stable=True).to(samples.device).argsort()]

    def predictive(
        self, x: Inputs, pred_type: PredTypeName, link_approx: LinkName, n_samples: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`self(x, ...)` with positional options."""
        return self(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)

    @checked
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> tuple[Tensor, list[Tensor]]:
        """Samples of the weights: a component with probability π_k, then a sample of its Gaussian [Mixtures, eq. 7].

        Returns:
            Index of the component of each sample, `[S]`; and a list with the samples of each component, `[S_k, P_k]`
            with Σ S_k = S, in the order in which they were drawn.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: No samples.
        """
        PredictOptions(PredType.NN, n_samples, generator=generator).kind()
        chosen = drawn_components(self.weights, n_samples, generator)
        counts = torch.bincount(chosen, minlength=self.n_components).tolist()
        return chosen, [la.sample(n, generator) for la, n in zip(self.components, counts, strict=True)]

    # Tuning.

    def snapshot(self) -> PosteriorGroup:
        """The posteriors with the rule of their weights, which later assignments to this object do not change.

        Raises:
            InvalidArgument: Weights by the evidence of components that were fitted to different numbers of data.
        """
        if self._rule == "evidence":
            self._check_same_data()
        return PosteriorGroup(tuple(la.snapshot() for la in self.components), partial(_weights_of_group, self._rule))

    @property
    def _group(self) -> PosteriorGroup:
        return self.snapshot()

    @property
    def _calibration(self) -> Calibration | None:
        stored = [known for la in self.components if (known := la.snapshot().calibration) is not None]
        return Calibration.of_mixture(stored) if len(stored) == self.n_components else None

    def _take_over(self, posteriors: tuple[Posterior, ...]) -> None:
        for la, posterior in zip(self.components, posteriors, strict=True):
            la.set_posterior(posterior)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """States of all components and the rule of the weights, as tensors, numbers and strings.

        Raises:
            NotFittedError: Before `fit`.
        """
        return {
            "version": VERSION,
            "cls_name": "MixtureLaplace",
            "weights": self._rule.clone() if isinstance(self._rule, Tensor) else self._rule,
            "components": [la.state_dict() for la in self.components],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces this mixture by a saved one of the same networks, as `state_dict` returned it.

        Raises:
            StateError: It belongs to other components; nothing is changed then.
        """
        try:
            version, name, weights, states = (state_dict[k] for k in ("version", "cls_name", "weights", "components"))
        except (TypeError, LookupError) as error:
            raise StateError("the state lacks an entry; it is truncated, or no state of a mixture.") from error
        if (version, name) != (VERSION, "MixtureLaplace"):
            raise StateError(
                f"the state is of {name!r}, version {version!r}; this is 'MixtureLaplace', version {VERSION}."
            )
        if not isinstance(states, list):
            raise StateError(f"the state's components are of type {type(states).__name__}, not a list; it is damaged.")
        if len(states) != self.n_components:
            raise StateError(f"the state has {len(states)} components, this mixture {self.n_components}.")
        try:
            rule = _checked_rule(weights, self.n_components)
        except (InvalidArgument, InvalidType) as error:
            raise StateError(f"the state's weights are not accepted: {error}") from error
        with self._all_or_none():
            for la, part in zip(self.components, states, strict=True):
                la.load_state_dict(part)
        self._rule = rule

    @property
    def _recipe(self) -> dict[str, Any]:
        return {"components": [_recipe_of(la) for la in self.components]}

    @property
    def _holding_inputs(self) -> list[str]:
        return [name for la in self.components for name in la._holding_inputs]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MixtureLaplace:
        """Moves all components and their models to a device or dtype, in place, as `nn.Module.to`; returns itself."""
        for la in self.components:
            la.to(device, dtype)
        return self

    def __repr__(self) -> str:
        rule = self._rule
        weights = rule if isinstance(rule, str) else "[" + ", ".join(f"{value:.4g}" for value in rule.tolist()) + "]"
        parts = [f"({k}): {la!r}".replace("\n", "\n  ") for k, la in enumerate(self.components)]
        lines = [f"{self.n_components} components, weights={weights}", *parts]
        return "MixtureLaplace(\n  " + ",\n  ".join(lines) + "\n)"


def _recipe_of(la: ParametricLaplace) -> dict[str, Any]:
    """Class and arguments of one component; a call of its network that is known by name as its fields."""
    from laplace.recipe import CALLS, Recipe

    own, call = Recipe.from_object(la), la.forward_fn
    name = getattr(type(call), "saved_as", None)
    if name is None or name not in CALLS:
        return own.plain()
    others = {argument: value for argument, value in own.objects.items() if argument != "forward_fn"}
    return replace(own, objects=others).plain() | {name: list(nested.entries(call).values())}


# Options of a mixture's prediction as arguments of its components.


def _arguments(la: ParametricLaplace, options: PredictOptions) -> tuple[Any, ...]:
    """Positional arguments: a posterior over functions has a name of its own for the linearised predictive."""
    linearised = str(options.pred_type) == PredType.GLM
    return (
        la.pred_types.name(PredType.GLM) if linearised else options.pred_type,
        options.joint,
        options.link_approx,
        options.n_samples,
        options.diagonal_output,
        options.generator,
    )


_BY_NAME = ("fitting", "observation_noise", "outputs", "group_size")


def _changed_options(options: PredictOptions) -> dict[str, Any]:
    """Arguments by name: a user's own method need not know what has its default value.

    Raises:
        InvalidArgument: The largest outputs are asked for, of which every component has its own.
    """
    if isinstance(options.outputs, int):
        raise InvalidArgument(
            f"outputs={options.outputs} of a mixture: the largest outputs of one network are not those of another. "
            "Give indices, e.g. those of la.components[0].predict(x, outputs=...).outputs."
        )
    values = {name: getattr(options, name) for name in _BY_NAME}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def drawn_components(weights: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """The component of every sample, `[S]`, drawn with probabilities π `[K]`."""
    steps = weights.cumsum(0)
    steps = steps / steps[-1]  # rounding must leave no gap below 1
    return torch.searchsorted(steps, uniform((n_samples,), weights, generator), right=True).cpu()


# Mixture weights π: uniform, by the evidence, or given.

RULES = ("uniform", "evidence")

Rule = str | Tensor
"""One of `RULES`, or weights `[K]`."""


def _checked_rule(weights: str | Tensor | Sequence[float], n_components: int) -> Rule:
    """A rule as users give it: a name, or weights `[K]`, which are copied in float64 on the CPU."""
    if isinstance(weights, str):
        if weights not in RULES:
            raise InvalidArgument(f"weights={weights!r}; accepted are {list(RULES)} and {n_components} numbers.")
        return weights
    try:
        given = torch.as_tensor(weights, dtype=wide_dtype(), device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidType(
            f"weights={weights!r} is no list of numbers; accepted are {list(RULES)} and {n_components} numbers."
        ) from error
    if given.shape != (n_components,):
        raise InvalidArgument(
            f"weights has shape {tuple(given.shape)}; give one for each of the {n_components} components."
        )
    # What a float32 tensor of any length that was normalised may be off by.
    if not bool(((given >= 0) & given.isfinite()).all()) or abs(given.sum().item() - 1) > 1e-4:
        raise InvalidArgument(f"weights={given.tolist()}; they must not be negative, and must sum to 1.")
    return given / given.sum()


def by_evidence(log_evidences: Tensor) -> Tensor:
    """π_k = p(D | M_k) / Σ_l p(D | M_l), `[K]` [Mixtures, eq. 10], from logarithms `[K]`."""
    return log_evidences.softmax(0)


def _equal_weights(n_components: int) -> Tensor:
    return torch.full((n_components,), 1 / n_components, dtype=wide_dtype())


def _weights_of_group(rule: Rule, group: PosteriorGroup) -> Tensor:
    """π of posteriors, `[K]`, float64, with the graph of their hyper-parameters."""
    if isinstance(rule, Tensor):
        return rule
    return _equal_weights(len(group.posteriors)) if rule == "uniform" else by_evidence(group.log_evidences())


# Components: made from networks, checked against each other.


def _components(
    components: Sequence[ParametricLaplace | nn.Module],
    likelihood: Likelihood | LikelihoodName | None,
    subset_of_weights: WeightsName | type[Weights],
    hessian_structure: StructureName | type[Curvature],
    options: dict[str, Any],
) -> tuple[ParametricLaplace, ...]:
    """Posteriors: those that are given, and new ones of the networks among the components."""
    if isinstance(components, nn.Module | ParametricLaplace) or not isinstance(components, Iterable):
        raise InvalidType(
            f"components is of type {type(components).__name__}; give a sequence of networks or Laplace objects."
        )
    given = list(components)
    if not given:
        raise InvalidArgument("components is empty; a mixture has at least one.")
    networks = [part for part in given if not isinstance(part, ParametricLaplace)]
    for part in networks:
        if not isinstance(part, nn.Module):
            raise InvalidType(
                f"components holds a {type(part).__name__}; give networks (torch.nn.Module) or Laplace objects over "
                "weights."
            )
    if networks and likelihood is None:
        raise InvalidArgument("components holds networks, whose likelihood= is needed: 'classification', for example.")
    if options and not networks:
        raise InvalidArgument(
            f"{sorted(options)} are arguments for new Laplace objects, but all components are such objects already."
        )
    made = tuple(
        part
        if isinstance(part, ParametricLaplace)
        else from_names(part, likelihood, subset_of_weights, hessian_structure, **options)
        for part in given
    )
    if len({id(part) for part in made}) < len(made):
        raise InvalidArgument("components holds the same Laplace object more than once; give weights= instead.")
    _check_likelihoods(made, likelihood)
    dims = [la.channel_dim for la in made]
    if any(dim != dims[0] for dim in dims):
        raise InvalidArgument(
            f"the components have channel_dim={dims}; the predictions of a mixture are averaged entry by entry: give "
            "networks whose outputs have one layout, or bring them to one by forward_fn=."
        )
    _check_same_outputs([la for la in made if la.is_fitted])
    return made


def _check_likelihoods(posteriors: Sequence[ParametricLaplace], likelihood: Any) -> None:
    names = [la.likelihood_object.name for la in posteriors]
    if any(name != names[0] for name in names):
        raise InvalidArgument(f"the components have the likelihoods {names}; those of a mixture are the same.")
    wanted = likelihood if isinstance(likelihood, str | None) else likelihood.name
    if wanted is not None and str(wanted) != names[0]:
        raise InvalidArgument(f"likelihood={str(wanted)!r}, but the components have {names[0]!r}.")


def _check_same_outputs(posteriors: Sequence[ParametricLaplace]) -> None:
    widths = [la.n_outputs for la in posteriors]
    if any(width != widths[0] for width in widths):
        raise InvalidArgument(f"the networks of the components have {widths} outputs; those of a mixture have as many.")
