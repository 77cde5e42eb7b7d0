"""Predictions of a posterior over weights: one object for every quantity, which computes what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from laplace.core.arguments import checked
from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.core.overrides import PREDICTIONS, is_overridden
from laplace.core.random_numbers import drawn_seed, standard_normal
from laplace.enums import LinkApprox, PredType
from laplace.errors import UnsupportedError
from laplace.posterior import overridden, own_outputs
from laplace.posterior.weight_posterior import WeightPosterior
from laplace.predictive import latent
from laplace.predictive.names import WEIGHT_SPACE, PredictiveNames
from laplace.predictive.posterior_outputs import Draws, PosteriorOutputs, PredictionOptions
from laplace.predictive.prediction import Prediction
from laplace.predictive.reparameterised import ReparameterisedOutputs
from laplace.predictive.sources import GaussianSource, LinearisedOutputs, SampledOutputs, SampleSource


class WeightPredictor(WeightPosterior):
    """What a posterior says of new inputs; `ParametricLaplace` adds the older interface, tuning and state.

    The arguments are those of `BaseLaplace`.

    Attributes:
        pred_types: Names of its predictives.
    """

    pred_types: ClassVar[PredictiveNames] = WEIGHT_SPACE

    @checked
    def predict(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        *,
        local_reparameterization: bool = False,
        **model_kwargs: Any,
    ) -> Prediction:
        """The predictive distribution at x as one object; each of its quantities is computed when it is first read.

        Args:
            x: Inputs, a tensor, tuple or mapping.
            pred_type: `"glm"`, the linearised network (Immer et al., 2021), or `"nn"`, sampled weights.
            joint: Covariance over all inputs.
            link_approx: One of the links of the likelihood, names in `laplace.likelihoods.links.LINKS`; `"nn"` always
                samples.
            n_samples: Monte-Carlo samples, of whatever is sampled.
            diagonal_output: Only variances of the outputs.
            generator: Source of randomness; its state is copied, so that what is drawn does not depend on the order of
                reading, and it is advanced once.
            local_reparameterization: With `pred_type="nn"` and a diagonal posterior: draw noise on the pre-activations
                of linear and convolutional layers instead of weights, for every datum anew (Kingma et al., 2015).
            **model_kwargs: For the model, with `pred_type="nn"`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted.
            ModelChangedError: The network was trained further after `fit`; also when a quantity is read.
            UnsupportedError: Local reparameterisation without a diagonal posterior over sampled weights.
        """
        kind = latent.check_options(pred_type, link_approx, n_samples, generator, self.pred_types)
        form = "joint" if joint else "diagonal" if diagonal_output else "full"
        options = PredictionOptions(str(link_approx), n_samples, form)
        self.check_unchanged()
        draws = replayed(generator, self._like.device)
        if not local_reparameterization:
            rows = self._quantities(x, kind, options, draws, model_kwargs)
            return Prediction.of(self._as_overridden(rows, x, kind, model_kwargs), self.channel_dim)
        if kind != PredType.NN or self.structure.name != "diag":
            raise UnsupportedError(
                f"local_reparameterization=True with pred_type={str(kind)!r} and "
                f"hessian_structure={self.structure.name!r}: it draws from a diagonal posterior through the network; "
                "use pred_type='nn' and hessian_structure='diag'."
            )
        return Prediction.of(self._of(self._reparameterised(x, model_kwargs), options, draws), self.channel_dim)

    def _quantities(
        self, x: Inputs, kind: PredType, options: PredictionOptions, draws: Draws, model_kwargs: dict[str, Any]
    ) -> PosteriorOutputs:
        if kind == PredType.NN:
            latent.check_model_kwargs(self.problem.module, model_kwargs)
            return self._of(self._sampled(x, model_kwargs), options, draws)
        latent.refuse_model_kwargs(model_kwargs)
        return self._of(self._linearised(x), options, draws)

    def _of(self, source: GaussianSource | SampleSource, options: PredictionOptions, draws: Draws) -> PosteriorOutputs:
        sigma = self.sigma_noise if source.create_graph else self.sigma_noise.detach()
        return PosteriorOutputs(source, self.likelihood_object, sigma, options, draws)

    def _as_overridden(
        self, rows: PosteriorOutputs, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
    ) -> PosteriorOutputs:
        """A prediction with what users' classes override of it, besides covariances and samples of the weights."""
        if not is_overridden(self, *PREDICTIONS):
            return rows
        return own_outputs.own_quantities(self, rows, x, kind, model_kwargs)

    @property
    def _keeps_graph(self) -> bool:
        """Whether predictions are differentiable: in the inputs, or in hyper-parameters that ask for it."""
        return self.enable_backprop or self.keeps_graph

    def _linearised(self, x: Inputs) -> LinearisedOutputs:
        graph = self._keeps_graph
        with torch.set_grad_enabled(graph):
            precision = self.predictive_posterior()
        return LinearisedOutputs(
            self.engine, precision, x, self.refined_step, graph, self.check_unchanged, self.enable_backprop
        )

    def _sampled(self, x: Inputs, model_kwargs: dict[str, Any]) -> SampledOutputs:
        graph = self._keeps_graph
        latent.refuse_refined(self.refined_step, self.engine.problem)
        with torch.set_grad_enabled(graph):
            thetas = self._sampler()
        return SampledOutputs(
            self.engine, thetas, self.expansion_point, x, model_kwargs, graph, self.check_unchanged,
            self.enable_backprop,
        )  # fmt: skip

    def _reparameterised(self, x: Inputs, model_kwargs: dict[str, Any]) -> ReparameterisedOutputs:
        latent.refuse_refined(self.refined_step, self.problem)
        graph = self._keeps_graph
        with torch.set_grad_enabled(graph):
            variances = self.predictive_posterior().diagonal_of_inverse()
        return ReparameterisedOutputs(
            self.problem, self.mean, variances, self.coverage(), x, model_kwargs, graph, self.check_unchanged,
            self.enable_backprop,
        )  # fmt: skip

    def _latent(self, x: Inputs, form: str) -> Gaussian:
        """Gaussian of the linearised network's outputs; `form` is `"full"`, `"diagonal"` or `"joint"`."""
        return self._linearised(x).latent(form)

    def _sampler(self) -> Callable[[int, torch.Generator | None], Tensor]:
        """What draws samples of the treated weights, `[S, P]`, at the present hyper-parameters."""
        if is_overridden(self, "sample"):
            held = self.at_present()

            def drawn(n: int, generator: torch.Generator | None) -> Tensor:
                with held():
                    return own_outputs.users_samples(self, n, generator)

            return drawn
        precision, mean = overridden.posterior_before(self, "sample"), self.mean
        return lambda n, generator: mean + precision.sample(standard_normal((n, len(mean)), mean, generator))

    def weight_samples(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the treated weights as predictions use them, `[S, P]`; of a subnetwork of its entries alone."""
        return self._sampler()(n_samples, generator)


def replayed(generator: torch.Generator | None, device: torch.device) -> Draws:
    """Generators that all start where the given one is now, or, without one, where the global seed leads at first."""
    if generator is not None:
        state = generator.get_state()
        torch.randint(2, (1,), generator=generator, device=generator.device)  # the next prediction draws others

        def same() -> torch.Generator:
            copy = torch.Generator(device=generator.device)
            copy.set_state(state)
            return copy

        return same
    seeds: list[int] = []

    def seeded() -> torch.Generator:
        if not seeds:
            seeds.append(drawn_seed())
        return torch.Generator(device=device).manual_seed(seeds[0])

    return seeded
