"""scikit-learn's estimators: a network with a Laplace approximation of its posterior behind `fit` and `predict`."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace.core.precision_policy import wide_dtype
from laplace.errors import InvalidArgument, MissingDependency
from laplace.grid import from_names
from laplace.integrations.fitted_head import FittedHead
from laplace.network.model_guard import private_copy
from laplace.parametric import ParametricLaplace

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise MissingDependency(
        "laplace.integrations.sklearn needs pip install 'scikit-learn>=1.6'; without it use laplace.Laplace."
    ) from error

Module = nn.Module | Callable[[int, int], nn.Module] | None
"""A network, a function (numbers of features and of outputs) that makes one, or None for the built-in one."""

_TUNING = ("marglik", None)


class LaplaceEstimator(BaseEstimator, ABC):
    """Base of both estimators: `fit` trains a network by MAP and fits a Laplace approximation around its weights.

    The built-in network is a multilayer perceptron with tanh, in float64, which standardises its inputs by the training
    data. Networks of your own get X as it is, in their own dtype and on their own device, and are copied before they
    are trained.

    Args:
        module: The network: an `nn.Module`; or a function `module(n_features, n_outputs)` that returns one; or None
            for the built-in multilayer perceptron.
        hidden_layer_sizes: Widths of the hidden layers of the built-in network.
        trained: Set it to True if `module` is trained already, to use it as it is.
        max_epochs: Number of passes over the training data, by Adam with a cosine schedule.
        learning_rate: Initial step size of Adam.
        batch_size: Number of data in a batch, in training, fit and predictions.
        prior_precision: δ, the inverse variance of the Gaussian prior, in training and at the start of the tuning.
        tune: `"marglik"`: choose δ (and in regression the noise) by the log evidence after the fit; None: keep them.
        subset_of_weights: As in `laplace.Laplace`; with `"all"` the hidden layers are uncertain too.
        hessian_structure: As in `laplace.Laplace`.
        laplace_options: Further options of `laplace.Laplace`, e.g. `{"temperature": 0.5}`.
        random_state: Seed of the initial weights, the order of the data, and samples.

    Attributes:
        la_: The posterior, a Laplace object.
        module_: The trained network.
        n_features_in_: Number of features.
        feature_names_in_: Names of the features, if X was a DataFrame.
    """

    _likelihood: str

    _log_scale = 0.0
    """Sum of the logarithms of what the targets were divided by."""

    def __init__(
        self,
        module: Module = None,
        *,
        hidden_layer_sizes: Sequence[int] | int = (64, 64),
        trained: bool = False,
        max_epochs: int = 200,
        learning_rate: float = 1e-2,
        batch_size: int = 128,
        prior_precision: float = 1.0,
        tune: str | None = "marglik",
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        laplace_options: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.module = module
        self.hidden_layer_sizes = hidden_layer_sizes
        self.trained = trained
        self.max_epochs = max_epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.prior_precision = prior_precision
        self.tune = tune
        self.subset_of_weights = subset_of_weights
        self.hessian_structure = hessian_structure
        self.laplace_options = laplace_options
        self.random_state = random_state

    def log_marginal_likelihood(self) -> float:
        """Log evidence log p(D) of the training data in nats, with y in its original units; higher is better."""
        check_is_fitted(self)
        return float(self.la_.log_marginal_likelihood()) - self._log_scale

    # Training and fit.

    def _fit(self, X: NDArray[Any], targets: NDArray[Any], weights: NDArray[Any], n_outputs: int) -> None:
        """Trains, fits and tunes, for inputs `[N, …]`, classes `[N]` or values `[N, C]`, and weights `[N]`."""
        if self.tune not in _TUNING:
            raise InvalidArgument(f"tune={self.tune!r}; accepted are {_TUNING}.")
        if self.trained and not isinstance(self.module, nn.Module):
            raise InvalidArgument("trained=True needs module=, the trained network.")
        if self.module is not None and not callable(self.module):
            raise InvalidArgument(f"module={self.module!r}; give a network, a function that makes one, or None.")
        if self.max_epochs < 0:
            raise InvalidArgument(f"max_epochs={self.max_epochs}; give 0 or more.")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = self._new_module(X, weights, n_outputs)
            x, w = _tensor_for(module, X), _tensor_for(module, weights)
            y = torch.tensor(targets, device=x.device) if targets.dtype.kind in "iu" else _tensor_for(module, targets)
            _check_outputs(module, x, n_outputs)
            la = from_names(
                module,
                self._likelihood,
                self.subset_of_weights,
                self.hessian_structure,
                prior_precision=self.prior_precision,
                **(self.laplace_options or {}),
            )
            if not self.trained:
                self._train(module, TensorDataset(x, y, w))
            batches = list(zip(x.split(self.batch_size), y.split(self.batch_size), strict=True))
            # A batch is known by its targets, which are one object in every reading of the data.
            counts = {id(labels): part for (_, labels), part in zip(batches, w.split(self.batch_size), strict=True)}
            la.fit(batches, weight_fn=(lambda _, y: counts[id(y)]) if np.ptp(weights) or weights[0] != 1 else None)
            if self.tune is not None:
                self._choose_hyperparameters(la)
        self.la_, self.module_ = la, module

    def _new_module(self, X: NDArray[Any], weights: NDArray[Any], n_outputs: int) -> nn.Module:
        """The network to be trained, or the trained one."""
        if isinstance(self.module, nn.Module):
            return self.module if self.trained else copy.deepcopy(self.module)
        if self.module is not None:
            return self.module(X.shape[1], n_outputs)
        return _perceptron(X, weights, self.hidden_layer_sizes, n_outputs)

    def _train(self, module: nn.Module, data: TensorDataset) -> None:
        """Minimises the negative log posterior over Σw, (Σ w loss + δ ‖θ‖² / 2) / Σw, in place; data are (x, y, w)."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimiser = torch.optim.Adam(parameters, self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, self.max_epochs))
        total = data.tensors[2].sum()
        decay, scale = 0.5 * self.prior_precision / total, len(data) / total
        module.train()
        for _ in range(self.max_epochs):
            for x, y, weight in DataLoader(data, self.batch_size, shuffle=True):
                optimiser.zero_grad()
                squares = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
                (scale * (weight * self._loss(module(x), y)).mean() + decay * squares).backward()
                optimiser.step()
            schedule.step()
        module.eval()

    @abstractmethod
    def _loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Negative log likelihood of every datum at noise 1, `[B]`, up to a constant."""

    @abstractmethod
    def _choose_hyperparameters(self, la: ParametricLaplace) -> None:
        """Maximises the log evidence."""

    # Predictions.

    def _inputs(self, X: ArrayLike) -> Iterator[Tensor]:
        """Checked inputs, batch by batch."""
        check_is_fitted(self)
        checked: Any = validate_data(self, X, reset=False, **self._shapes)  # pyright: ignore[reportArgumentType]
        return iter(_tensor_for(self.module_, checked).split(self.batch_size))

    def _data(self, X: ArrayLike, y: ArrayLike, sample_weight: Any, **options: Any) -> tuple[Any, Any, NDArray[Any]]:
        """Checked training data and weights, without the data that do not count."""
        given: tuple[Any, Any] = (X, y)
        checked: Any = validate_data(self, *given, **options, **self._shapes)
        inputs, targets = checked
        weights = _checked_weights(sample_weight, len(inputs))
        counts = weights > 0
        return inputs[counts], targets[counts], weights[counts]

    @property
    def _shapes(self) -> dict[str, Any]:
        """Shapes of X that are accepted: of a user's network those that it takes."""
        return {"allow_nd": self.module is not None}


class LaplaceClassifier(ClassifierMixin, LaplaceEstimator):
    """Classifier: a network with a Laplace approximation, whose probabilities average over its weights.

    Example:
        LaplaceClassifier().fit(X, y).predict_proba(X)

    Args:
        module: This and all other arguments are described in `LaplaceEstimator`.
        link_approx: Link approximation, from a Gaussian over logits to probabilities: `"probit"`, `"mc"`, `"bridge"`, …
        n_samples: Number of Monte-Carlo samples with `link_approx="mc"`.

    Attributes:
        classes_: The class labels, sorted.
    """

    _likelihood = "classification"

    def __init__(
        self,
        module: Module = None,
        *,
        link_approx: str = "probit",
        n_samples: int = 100,
        hidden_layer_sizes: Sequence[int] | int = (64, 64),
        trained: bool = False,
        max_epochs: int = 200,
        learning_rate: float = 1e-2,
        batch_size: int = 128,
        prior_precision: float = 1.0,
        tune: str | None = "marglik",
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        laplace_options: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(
            module,
            hidden_layer_sizes=hidden_layer_sizes,
            trained=trained,
            max_epochs=max_epochs,
            learning_rate=learning_rate,
            batch_size=batch_size,
            prior_precision=prior_precision,
            tune=tune,
            subset_of_weights=subset_of_weights,
            hessian_structure=hessian_structure,
            laplace_options=laplace_options,
            random_state=random_state,
        )
        self.link_approx = link_approx
        self.n_samples = n_samples

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> LaplaceClassifier:
        """Trains the network, unless `trained=True`, and fits its posterior.

        Args:
            X: Inputs, `[N, D]`.
            y: Labels, `[N]`.
            sample_weight: Weights of the data in training, curvature and evidence, `[N]`; None for 1.

        Raises:
            InvalidArgument: Fewer than two classes; another number of classes than a given network has outputs; or
                weights that are not accepted.
        """
        inputs, labels, weights = self._data(X, y, sample_weight)
        check_classification_targets(labels)
        self.classes_, targets = np.unique(labels, return_inverse=True)
        n_classes = len(self.classes_)
        if n_classes < 2:
            raise InvalidArgument(f"y has one class alone, {self.classes_.tolist()}; a classifier needs two.")
        self._fit(inputs, targets.astype(np.int64), weights, n_classes)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Class probabilities, `[N, C]`, averaged over the posterior of the weights."""
        batches = self._inputs(X)
        options: dict[str, Any] = {"link_approx": self.link_approx, "n_samples": self.n_samples}
        options["generator"] = torch.Generator(next(self.module_.parameters()).device).manual_seed(0)
        probabilities = _array_of(torch.cat([self.la_(x, **options) for x in batches]))
        return probabilities / probabilities.sum(1, keepdims=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable labels, `[N]`."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def _loss(self, f: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f, y, reduction="none")

    def _choose_hyperparameters(self, la: ParametricLaplace) -> None:
        la.optimize_prior_precision(method="marglik")


class LaplaceRegressor(RegressorMixin, LaplaceEstimator):
    """Regressor: a network with a Laplace approximation and Gaussian observation noise σ, which gives error bars.

    Unless `trained=True`, the network learns standardised targets, (y − y_mean_) / y_scale_, and `la_` is in these
    units. Predictions of this object are in the units of y.

    Example:
        mean, std = LaplaceRegressor().fit(X, y).predict(X, return_std=True)

    Args:
        module: This and all other arguments are described in `LaplaceEstimator`.

    Attributes:
        y_mean_: Mean of y, `[C]`; 0 with `trained=True`.
        y_scale_: Standard deviation of y, `[C]`; 1 with `trained=True`.
    """

    _likelihood = "regression"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> LaplaceRegressor:
        """Trains the network, unless `trained=True`, and fits its posterior.

        Args:
            X: Inputs, `[N, D]`.
            y: Values, `[N]` or `[N, C]`.
            sample_weight: Weights of the data in training, curvature and evidence, `[N]`; None for 1.

        Raises:
            InvalidArgument: Another number of columns of y than a given network has outputs, or weights that are not
                accepted.
        """
        inputs, values, weights = self._data(X, y, sample_weight, multi_output=True, y_numeric=True)
        if values.ndim == 2 and values.shape[1] == 1:
            values = column_or_1d(values, warn=True)
        self._is_flat = values.ndim == 1
        values = values.reshape(len(values), -1).astype(float)
        self.y_mean_, self.y_scale_ = np.zeros(values.shape[1]), np.ones(values.shape[1])
        if not self.trained:
            self.y_mean_, self.y_scale_ = _moments_of(values, weights)
        self._log_scale = float(weights.sum()) * float(np.log(self.y_scale_).sum())
        self._fit(inputs, (values - self.y_mean_) / self.y_scale_, weights, values.shape[1])
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False, return_cov: bool = False
    ) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]:
        """Predictive mean of y, `[N]` or `[N, C]`; on request with its uncertainty.

        Args:
            X: Inputs, `[N, D]`.
            return_std: Also return the standard deviation of y, noise included, `[N]` or `[N, C]`.
            return_cov: Also return the covariance of y between inputs, `[N, N]` or `[N, N, C]`.

        Raises:
            InvalidArgument: Both are True.
        """
        if return_std and return_cov:
            raise InvalidArgument("return_std=True and return_cov=True; ask for one of them.")
        if return_cov:
            return self._joint(X)
        parts = [self.la_(x, diagonal_output=True, observation_noise=True) for x in self._inputs(X)]
        mean, variance = (_array_of(torch.cat(both)) for both in zip(*parts, strict=True))
        mean = self._shaped(mean * self.y_scale_ + self.y_mean_)
        return (mean, self._shaped(np.sqrt(variance) * self.y_scale_)) if return_std else mean

    def sample_y(
        self, X: ArrayLike, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0
    ) -> NDArray[Any]:
        """Draws of y at all inputs together, noise included, `[N, S]`, or `[N, C, S]` of several outputs.

        Args:
            X: Inputs.
            n_samples: S.
            random_state: Source of the random numbers.
        """
        x = torch.cat(list(self._inputs(X)))
        generator = torch.Generator(x.device).manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        f = self.la_.functional_samples(x, n_samples=n_samples, joint=True, generator=generator)
        f = f + self.la_.snapshot().predictive().noise_of_targets * torch.randn(
            f.shape, generator=generator, dtype=f.dtype, device=f.device
        )
        draws = _array_of(f) * self.y_scale_ + self.y_mean_  # [S, N, C]
        return self._shaped(draws.transpose(1, 2, 0), axis=1)

    def _joint(self, X: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """Means, and covariances of every output between inputs."""
        x = torch.cat(list(self._inputs(X)))
        f, covariance = (_array_of(part) for part in self.la_(x, joint=True, observation_noise=True))
        n_outputs = len(self.y_mean_)
        each = covariance.reshape(len(x), n_outputs, len(x), n_outputs).diagonal(axis1=1, axis2=3)
        mean = f.reshape(len(x), n_outputs) * self.y_scale_ + self.y_mean_
        return self._shaped(mean), self._shaped(each * self.y_scale_**2)

    def _shaped(self, values: NDArray[Any], axis: int = -1) -> NDArray[Any]:
        """Values without the dimension of the outputs where y had none."""
        return values.squeeze(axis) if self._is_flat else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _loss(self, f: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (f - y).square().sum(1)

    def _choose_hyperparameters(self, la: ParametricLaplace) -> None:
        la.optimize_hyperparameters(("prior_precision", "sigma_noise"))


class DecisionHead(ClassifierMixin, BaseEstimator):
    """Classifier for few labels on features of a frozen model: `laplace.integrations.decision` for arrays.

    Nothing is to be chosen: weight decay, posterior, temperatures and scales are found from the labels, by exact
    leave-one-out predictions.

    Example:
        DecisionHead().fit(features, y).predict_proba(more_features)

    Args:
        class_weight: How often data of every class count: None for once, `"balanced"`, or a mapping from classes.

    Attributes:
        classes_: The class labels, sorted.
        head_: The fitted head, with left-out predictions; `head_.predict(features)` is a `Prediction`.
        la_: Its posterior, a Laplace object over the weights of the head.
        n_features_in_: Number of features.
        feature_names_in_: Names of the features, if X was a DataFrame.
    """

    def __init__(self, *, class_weight: str | Mapping[Any, float] | None = None) -> None:
        self.class_weight = class_weight

    def fit(self, X: ArrayLike, y: ArrayLike) -> DecisionHead:
        """Finds head and posterior.

        Args:
            X: Features, `[N, D]`.
            y: Labels, `[N]`.

        Raises:
            InvalidArgument: Fewer than two classes, or weights of them that are negative, not finite or all zero.
        """
        given: tuple[Any, Any] = (X, y)
        checked: Any = validate_data(self, *given)
        features, labels = checked
        check_classification_targets(labels)
        self.classes_, targets = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise InvalidArgument(f"y has one class alone, {self.classes_.tolist()}; a classifier needs two.")
        weights = compute_class_weight(self.class_weight, classes=self.classes_, y=labels)  # pyright: ignore[reportArgumentType]
        if not np.isfinite(weights).all() or weights.min() < 0 or weights.max() == 0:
            raise InvalidArgument(
                f"class_weight gives {weights.tolist()}; finite numbers of at least 0 are accepted, not all zero."
            )
        self.head_ = FittedHead.of_classes(
            _features(features),
            torch.tensor(targets, dtype=torch.int64),
            len(self.classes_),
            None if self.class_weight is None else weights.tolist(),
        )
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Class probabilities, `[N, C]`."""
        check_is_fitted(self)
        checked: Any = validate_data(self, X, reset=False)  # pyright: ignore[reportArgumentType]
        probabilities = _array_of(self.head_.call(_features(checked)))
        return probabilities / probabilities.sum(1, keepdims=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable labels, `[N]`."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    @property
    def la_(self) -> ParametricLaplace:
        """The head's posterior over its weights; its inputs are features."""
        check_is_fitted(self)
        return self.head_.la


def _features(values: NDArray[Any]) -> Tensor:
    return torch.tensor(values, dtype=wide_dtype())


# The built-in network, a multilayer perceptron on standardised features, and training by a loss with a Gaussian prior.


class Standardise(nn.Module):
    """(x − mean) / std of every feature, with constants as buffers.

    Args:
        mean: `[D]`.
        std: `[D]`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: NDArray[Any], std: NDArray[Any]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=wide_dtype()))
        self.register_buffer("std", torch.tensor(std, dtype=wide_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """Standardised features, `[B, D]`."""
        return (x - self.mean) / self.std


def _checked_weights(given: Any, n_data: int) -> NDArray[Any]:
    """Weights of data as users give them, `[N]`: None for 1 each, or one number for all.

    Raises:
        InvalidArgument: Another shape, negative or infinite numbers, NaN, or none that is positive.
    """
    weights = np.ones(n_data) if given is None else np.asarray(given, dtype=float)
    weights = np.full(n_data, weights) if weights.ndim == 0 else weights
    if weights.shape != (n_data,) or not np.isfinite(weights).all() or weights.min() < 0 or weights.max() == 0:
        raise InvalidArgument(
            f"sample_weight of shape {weights.shape}; {n_data} finite ones of at least 0 are accepted, not all zero."
        )
    return weights


def _moments_of(values: NDArray[Any], weights: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Means and standard deviations `[D]` of values `[N, D]` that count `[N]` times, with 1 in the place of 0.

    Zero is what rounding of equal values leaves: divided by that, a feature that is new by a last digit would be huge.
    """
    mean = np.average(values, axis=0, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    largest = np.abs(values).max(0)
    return mean, np.where(std > len(values) * np.finfo(float).eps * largest, std, 1.0)


def _tensor_for(module: nn.Module, values: NDArray[Any]) -> Tensor:
    """Values in the dtype and on the device of a module's first parameter."""
    like = next(module.parameters())
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _array_of(values: Tensor) -> NDArray[Any]:
    """Values as an array of floats."""
    return values.detach().cpu().numpy().astype(float)


def _perceptron(X: NDArray[Any], weights: NDArray[Any], widths: Sequence[int] | int, n_outputs: int) -> nn.Sequential:
    """A perceptron with tanh, in float64, for inputs like X `[N, D]`, which count `[N]` times."""
    sizes = [X.shape[1], *map(int, np.atleast_1d(widths))]
    layers: list[nn.Module] = [Standardise(*_moments_of(X, weights))]
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out, dtype=wide_dtype()), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], n_outputs, dtype=wide_dtype()))


def _check_outputs(module: nn.Module, x: Tensor, n_outputs: int) -> None:
    """Raises unless a network's outputs at x are `[B, C]`.

    Raises:
        InvalidArgument: They have another shape.
    """
    with torch.no_grad(), private_copy(module) as own:
        shape = own(x[:2]).shape
    if tuple(shape) != (len(x[:2]), n_outputs):
        raise InvalidArgument(
            f"the network's outputs of {len(x[:2])} data have shape {list(shape)}; y asks for {n_outputs} outputs, one "
            "per class or value."
        )
