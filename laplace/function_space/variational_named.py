"""The named variational posteriors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from laplace.base import Backend, Options
from laplace.constructors import bind
from laplace.core.arguments import check_call, checked
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.hyperparameters import GaussianPrior
from laplace.engines.engine import CurvatureEngine
from laplace.enums import FeatureReductionName, LikelihoodName
from laplace.errors import NotFittedError
from laplace.fitting import check_override
from laplace.function_space.base import BaseFunctionalLaplace
from laplace.function_space.held_out import held_out_nll
from laplace.function_space.variational import InducingPass, VariationalCurvature
from laplace.function_space.variational_energy import Energy
from laplace.function_space.variational_inducing import Inducing
from laplace.function_space.variational_training import LEARNT, Training
from laplace.likelihoods.base import Likelihood
from laplace.named import OfLastLayer
from laplace.posterior import learning
from laplace.structures.gp.subset_precision import SubsetPrecision


class VaLLA(BaseFunctionalLaplace):
    """All weights, by a sparse variational posterior with M inducing points: VaLLA (after Ortega et al., 2024).

    The predictive mean is the network's output. The covariance between outputs is J (δ + J_Zᵀ L Lᵀ J_Z)⁻¹ Jᵀ, with the
    Jacobians J_Z at the inducing points Z and a lower-triangular matrix L. `fit` trains L, Z, the prior precision and
    the noise by Adam, on α-energies of the data plus the divergence from the prior. The evidence is the lower bound
    `elbo`.

    Privacy: saved states and pickles hold the inducing points, which may be training data, and the inputs of the layers
    there.

    Args:
        model: The trained network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        inducing_locations: Initial inducing points: inputs of M data; `"random"`, a random choice of training data; or
            `"kmeans"`, cluster centres of them. A floating-point tensor is trained, other inputs stay fixed.
        num_inducing: M, with `"random"` and `"kmeans"`.
        inducing_classes: Index of the output that each inducing point stands for, `[M]`. None: output 0; with
            `"random"` and `"kmeans"` the label of the datum, or all outputs in turn if the targets are no labels.
        sigma_noise: Initial standard deviation σ of the observation noise (regression).
        prior_precision: Initial inverse variance δ of the prior, one number.
        prior_mean: μ₀, the mean of the prior.
        temperature: T of the tempered likelihood p(y | f)^(1/T).
        enable_backprop: Whether predictions can be differentiated with respect to the inputs.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        backend: A GGN backend; None for the native one.
        backend_kwargs: Its options.
        seed: Seed of the choice of inducing points and of samples.
        alpha: α of the energies: 0 gives the evidence lower bound, 1 the predictive density.
        mc_softmax_samples: Number of samples in the energies of a likelihood without noise; 0 for the probit
            approximation, which needs α = 1.
        forward_fn: `forward_fn(model, x)`, for models that need another call than `model(x)`.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    _key = ("all", "gp", "variational")
    structure = VariationalCurvature
    num_inducing = property(attrgetter("structure_options.num_inducing"), doc="M, if it was given.")
    alpha = property(attrgetter("structure_options.alpha"), doc="α of the energies.")
    mc_softmax_samples = property(attrgetter("structure_options.mc_softmax_samples"), doc="Samples of the energies.")
    seed = property(attrgetter("structure_options.seed"), doc="Seed of inducing points and samples.")
    fit_history_: dict[str, list[float]]

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        inducing_locations: Inputs | Literal["random", "kmeans"],
        num_inducing: int | None = None,
        inducing_classes: Tensor | None = None,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        backend_kwargs: Options = None,
        seed: int = 0,
        alpha: float = 1.0,
        mc_softmax_samples: int = 0,
        *,
        forward_fn: ForwardFn | None = None,
        weights_options: Options = None,
    ) -> None:
        _bind(self, locals())

    @checked
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        iterations: int = 100,
        lr: float = 1e-3,
        n_epochs: int | None = None,
        val_loader: Iterable[Any] | None = None,
        val_steps: int | None = None,
        learn: Sequence[str] = LEARNT,
        **options: Any,
    ) -> None:
        """Trains the posterior, and assigns the learnt prior precision and noise.

        The loader is read once to count the data (and to choose inducing points), then for training, with one step of
        Adam per batch, and once more for the evidence lower bound.

        Args:
            train_loader: The training data, as in `ParametricLaplace.fit`; it must be readable several times.
            override: Start again with new L and inducing points; False continues from the former ones. Hyper-parameters
                continue from their present values in both cases.
            progress_bar: Show a progress bar for each pass over the data.
            iterations: Number of Adam steps; 0 keeps the initial L.
            lr: Step size of Adam, for L, log δ, log σ² and the inducing points.
            n_epochs: Number of passes over the data, instead of `iterations`.
            val_loader: Validation data, whose negative log predictive density is recorded in
                `fit_history_["val_nll"]`.
            val_steps: Number of steps between records; None for one record at the end.
            learn: Which of `"prior_precision"`, `"sigma_noise"` and `"inducing_locations"` are learnt besides L.
            **options: Further options of `ParametricLaplace.fit`, except `decay`.

        Raises:
            InvalidData: A batch cannot be used; the former posterior is kept, as after every error.
            InvalidArgument: A value that is not accepted, or a loader that can be read only once.
            UnsupportedError: More than one prior precision.
            CurvatureError: The training diverged.
        """
        history: dict[str, list[float]] = {"objective": [], "val_step": [], "val_nll": []}
        training = Training(
            iterations, n_epochs, lr, learn, self.prior_precision.detach(), self.sigma_noise.detach(),
            self.temperature.detach(), lambda problem: (problem.mean() - self.prior_mean.detach()).square().sum(),
            self.seed, self._watch(val_loader, history), val_steps, history["objective"],
        )  # fmt: skip
        check_override(override)
        check_call(super().fit, "fit", (train_loader,), options)
        former = self._trained if self.is_fitted and not override else None
        posterior = learning.fitted_to(
            self.snapshot(), train_loader, progress_bar=progress_bar,
            first_pass=lambda engine: InducingPass(engine, self.structure_options, training, former), **options,
        )  # fmt: skip
        self.set_posterior(posterior.assigned(**training.learnt))
        self.fit_history_ = history

    def _watch(self, val_loader: Iterable[Any] | None, history: dict[str, list[float]]) -> Any:
        """Callback that records the negative log predictive density of validation data."""
        if val_loader is None:
            return None

        def watch(engine: CurvatureEngine, inducing: Inducing, delta: Tensor, sigma: Tensor, step: int) -> None:
            like = self.prior_precision.detach()
            prior = GaussianPrior(delta.to(like).reshape(1), self.prior_mean.detach(), engine.problem.layout)
            precision = SubsetPrecision((inducing,), like.new_ones(1), prior, like.dtype)
            history["val_step"].append(step)
            history["val_nll"].append(held_out_nll(self.snapshot(), engine, precision, sigma, val_loader))

        return watch

    @property
    def _trained(self) -> VariationalCurvature:
        curvature = self.fitted().curvature
        if not isinstance(curvature, VariationalCurvature):
            raise NotFittedError("this VaLLA is not fitted; call fit(train_loader) first.")
        return curvature

    @property
    def inducing_locations(self) -> Inputs:
        """The trained inducing points; before `fit` the argument."""
        return self._trained.places.x if self.is_fitted else self.structure_options.inducing_locations

    @property
    def inducing_classes(self) -> Tensor | None:
        """Index of the output of each inducing point, `[M]`; before `fit` the argument."""
        return self._trained.places.classes if self.is_fitted else self.structure_options.inducing_classes

    @property
    def L(self) -> Tensor:
        """The lower-triangular matrix L, `[M, M]`, float64."""
        return self._trained.inducing.root

    @property
    def elbo(self) -> Tensor:
        """The evidence lower bound of all data, 0-dim; it is also `log_marginal_likelihood()`."""
        return self.log_marginal_likelihood().detach()


def _bind(la: VaLLA, given: Mapping[str, Any]) -> None:
    bind(la, given)
    Energy(la.likelihood_object, la.alpha, la.mc_softmax_samples)  # refused now, not at fit
    la.fit_history_ = {}


class LLVaLLA(OfLastLayer, VaLLA):
    """The last layer, by a sparse variational posterior with M inducing points."""

    _key = ("last_layer", "gp", "variational")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        inducing_locations: Inputs | Literal["random", "kmeans"],
        num_inducing: int | None = None,
        inducing_classes: Tensor | None = None,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReductionName | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        last_layer_name: str | None = None,
        backend: Backend = None,
        backend_kwargs: Options = None,
        seed: int = 0,
        alpha: float = 1.0,
        mc_softmax_samples: int = 0,
        *,
        forward_fn: ForwardFn | None = None,
    ) -> None:
        _bind(self, locals())
