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
    """All weights, by a variational posterior of M inducing outputs (after Ortega et al., 2024).

    The mean is the network's output; the covariance between outputs is J (δ + J_Zᵀ L Lᵀ J_Z)⁻¹ Jᵀ with a lower triangle
    L. `fit` trains L, the prior precision, the noise and the locations by Adam on α-energies of the data and the
    divergence from the prior. The evidence is the lower bound `elbo`.

    States and pickles hold the locations, which may be data, and the inputs of the layers there.

    Args:
        model: The trained network.
        likelihood: Name or object.
        inducing_locations: Inputs of M data; a tensor of real numbers is trained, other inputs stay. Or `"random"`,
            data by `seed`; or `"kmeans"`, centres of the data.
        num_inducing: M, of a strategy.
        inducing_classes: Which output of every location, `[M]`. None is the first; of a strategy that of the label, or
            all in turn where the targets are no labels.
        sigma_noise: Observation noise, where it starts.
        prior_precision: δ, one number, where it starts.
        prior_mean: μ₀.
        temperature: T.
        enable_backprop: Differentiable predictions.
        dict_key_x: Key of the inputs in mappings.
        dict_key_y: Key of the targets in mappings.
        backend: A GGN backend; None for the native one.
        backend_kwargs: Its options.
        seed: Of the choice of locations and of samples.
        alpha: α of the energies: 0 is the evidence lower bound, 1 the predictive density.
        mc_softmax_samples: Samples of the energies of a likelihood without noise; 0 for the probit approximation, which
            is of α = 1.
        forward_fn: `forward_fn(model, x)`, for models that need another call than `model(x)`.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    _key = ("all", "gp", "variational")
    structure = VariationalCurvature
    num_inducing = property(attrgetter("structure_options.num_inducing"), doc="M of a strategy, or None.")
    alpha = property(attrgetter("structure_options.alpha"), doc="α.")
    mc_softmax_samples = property(attrgetter("structure_options.mc_softmax_samples"), doc="Samples of the energies.")
    seed = property(attrgetter("structure_options.seed"), doc="Seed of the choice of locations and of samples.")
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
        """Trains the posterior, and assigns the prior precision and the noise that were learnt.

        The loader is read once to count (and to choose locations), then for the training, one step of Adam a batch,
        and once for the bound. L starts at the posterior in which every inducing output stands for N·C/M outputs.

        Args:
            train_loader: Batches, which can be read several times.
            override: Start anew, with L and the locations; else go on from the former ones. The hyper-parameters go on
                from their present values in either case.
            progress_bar: Show one for every reading.
            iterations: Steps; 0 keeps L as it starts.
            lr: Step size of Adam, of L, log δ, log σ² and the locations.
            n_epochs: Readings of the data, instead of `iterations`.
            val_loader: Data whose negative log predictive density is recorded in `fit_history_["val_nll"]`.
            val_steps: Steps between records; None for one at the end.
            learn: Which of `"prior_precision"`, `"sigma_noise"` and `"inducing_locations"` are learnt besides L.
            **options: As of `ParametricLaplace.fit`; former data cannot fade.

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
        """The locations as they were trained; before `fit` what was given."""
        return self._trained.places.x if self.is_fitted else self.structure_options.inducing_locations

    @property
    def inducing_classes(self) -> Tensor | None:
        """The output of every location, `[M]`; before `fit` what was given."""
        return self._trained.places.classes if self.is_fitted else self.structure_options.inducing_classes

    @property
    def L(self) -> Tensor:
        """The lower triangle, `[M, M]`, float64."""
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
    """The last layer, by a variational posterior of M inducing outputs."""

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
