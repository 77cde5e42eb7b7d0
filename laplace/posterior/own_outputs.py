"""Outputs and weights that users' classes draw by themselves, as predictions read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.core.positions import OutputRows, rows_of
from laplace.core.random_numbers import drawn_seed
from laplace.enums import PredType
from laplace.errors import InvalidArgument
from laplace.posterior.overridden import wrong_shape
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import GaussianSource
from laplace.predictive.options import PredictionOptions
from laplace.predictive.posterior_outputs import Draw, OwnSamples, PosteriorOutputs


def users_samples(posterior: Posterior, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Samples of the random weights `[S, P]` by a user's own `sample`."""
    layout, weights = posterior.problem.layout, posterior.weights
    with posterior.owned() as la:
        samples = _seeded(la.sample, generator)(n_samples)
        if not isinstance(samples, Tensor) or samples.ndim != 2 or len(samples) != n_samples:
            raise wrong_shape(la, "sample", samples, f"[{n_samples}, P]")
        samples = samples.to(la.mean)
        if samples.shape[1] != layout.n_params:  # of a subnetwork: of all trainable parameters
            samples = torch.stack([weights.restrict_prior(sample) for sample in samples])
        if samples.shape[1] != layout.n_params:
            raise wrong_shape(la, "sample", samples, f"[{n_samples}, P], P = {layout.n_params}")
    return samples


def own_quantities(
    posterior: Posterior, rows: PosteriorOutputs, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
) -> PosteriorOutputs:
    """A prediction with users' own samples, and their own variances of the linearised outputs.

    Args:
        posterior: A fitted posterior, with the object that has their methods.
        rows: The prediction as the library makes it.
        x: Inputs.
        kind: Linearised or sampled.
        model_kwargs: Further arguments of the model.
    """
    source = rows.source
    if isinstance(source, GaussianSource) and posterior.overrides("functional_variance_fast"):
        source = OwnVariances(posterior, source, x)
    samples = {
        name: own_samples(posterior, name, x, kind, rows.options, model_kwargs)
        for name in ("functional_samples", "predictive_samples")
        if posterior.overrides(name)
    }
    own = OwnSamples(samples.get("functional_samples"), samples.get("predictive_samples"))
    return replace(rows, source=source, own=own)


def own_samples(
    posterior: Posterior, name: str, x: Inputs, kind: PredType, asked: PredictionOptions, model_kwargs: dict[str, Any]
) -> Draw:
    """A user's own `functional_samples` or `predictive_samples` at x.

    Args:
        posterior: A fitted posterior, with the object that has their methods.
        name: Which of them.
        x: Inputs.
        kind: Linearised or sampled.
        asked: Form of the covariance of the latents, and its groups.
        model_kwargs: Further arguments of the model.
    """
    options = dict(model_kwargs)
    # What has its default value is not passed on: a user's method need not know it.
    if kind != PredType.NN:
        options |= {"full": {}, "diagonal": {"diagonal_output": True}, "joint": {"joint": True}}[asked.form]
        options |= {} if asked.group_size is None else {"group_size": asked.group_size}
    pred_type = posterior.choices.pred_types.name(kind)

    def draw(n: int, generator: torch.Generator | None) -> OutputRows:
        with posterior.owned() as la:
            samples = _seeded(getattr(la, name), generator)(x, pred_type=pred_type, n_samples=n, **options)
            if not isinstance(samples, Tensor) or samples.ndim < 3 or len(samples) != n:
                raise wrong_shape(la, name, samples, f"[{n}, B, C]")
        return rows_of(samples, posterior.channel_dim, 1)

    return draw


@dataclass(frozen=True, eq=False)
class OwnVariances(GaussianSource):
    """Linearised outputs whose variances are those of a user's own `functional_variance_fast`.

    Attributes:
        posterior: The posterior that the method is called at, with the object that has it.
        source: The rest.
        x: Inputs.
    """

    posterior: Posterior
    source: GaussianSource
    x: Inputs

    @property
    def create_graph(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source.create_graph

    def mean(self) -> OutputRows:
        return self.source.mean()

    def latent(self, form: str, *, wide: bool = False) -> Gaussian:
        if form != "diagonal":
            return self.source.latent(form, wide=wide)
        mean, variance = (rows_of(part, self.posterior.channel_dim) for part in self._moments())
        return Gaussian(mean.values, variance.values, mean.positions)

    def _moments(self) -> tuple[Tensor, Tensor]:
        with self.posterior.owned() as la:
            moments = la.functional_variance_fast(self.x)
            if not isinstance(moments, tuple) or len(moments) != 2 or moments[0].shape != moments[1].shape:
                raise InvalidArgument(
                    f"functional_variance_fast of class {type(la).__name__} must return mean and variances, [B, C] "
                    "each."
                )
        return moments


def _seeded(method: Callable[..., Any], generator: torch.Generator | None) -> Callable[..., Any]:
    """A user's method with a source of randomness: as an argument if it takes one, else as the global seed."""
    if generator is None:
        return method
    known = inspect.signature(method).parameters.values()
    if any(p.name == "generator" or p.kind is p.VAR_KEYWORD for p in known):
        return partial(method, generator=generator)

    def seeded(*args: Any, **options: Any) -> Any:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(drawn_seed(generator))
            return method(*args, **options)

    return seeded
