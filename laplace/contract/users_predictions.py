"""What users' classes predict at given inputs: their own samples, and variances of the linearised outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.gaussian import GaussianOutputs
from laplace.core.overrides import wrong_shape
from laplace.core.positions import OutputRows, rows_of
from laplace.core.random_numbers import seeded
from laplace.enums import PredType
from laplace.errors import InvalidArgument
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import GaussianSource, LatentForm
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import OutputSampler, PosteriorOutputs


def users_outputs(
    posterior: Posterior, rows: PosteriorOutputs, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
) -> PosteriorOutputs:
    """The library's prediction `rows` with users' own samples, and their own variances of the linearised outputs."""
    source = rows.source
    if isinstance(source, GaussianSource) and posterior.overrides("functional_variance_fast"):
        source = _UsersVariances(posterior, source, x)
    samples = {
        name: users_samples(posterior, name, x, kind, rows.options, model_kwargs)
        for name in ("functional_samples", "predictive_samples")
        if posterior.overrides(name)
    }
    latents, targets = samples.get("functional_samples"), samples.get("predictive_samples")
    return replace(rows, source=source, users_latents=latents, users_targets=targets)


def users_samples(
    posterior: Posterior, name: str, x: Inputs, kind: PredType, asked: PredictOptions, model_kwargs: dict[str, Any]
) -> OutputSampler:
    """A user's own `functional_samples` or `predictive_samples` at x; `asked` is the form of the covariance."""
    options = dict(model_kwargs)
    # What has its default value is not passed on: a user's method need not know it.
    if kind != PredType.NN:
        options |= {"full": {}, "diagonal": {"diagonal_output": True}, "joint": {"joint": True}}[asked.form]
        options |= {} if asked.group_size is None else {"group_size": asked.group_size}
    pred_type = posterior.choices.pred_types.name(kind)

    def draw(n: int, generator: torch.Generator | None) -> OutputRows:
        with posterior.as_user_object() as la:
            samples = seeded(getattr(la, name), generator)(x, pred_type=pred_type, n_samples=n, **options)
            if not isinstance(samples, Tensor) or samples.ndim < 3 or len(samples) != n:
                raise wrong_shape(la, name, samples, f"[{n}, B, C]")
        return rows_of(samples, posterior.channel_dim, 1)

    return draw


@dataclass(frozen=True, eq=False)
class _UsersVariances(GaussianSource):
    """Linearised outputs whose variances are those of a user's own `functional_variance_fast`."""

    posterior: Posterior
    source: GaussianSource
    x: Inputs

    @property
    def create_graph(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source.create_graph

    def mean(self) -> OutputRows:
        return self.source.mean()

    def gaussian(self, form: LatentForm, *, wide: bool = False) -> GaussianOutputs:
        if form != "diagonal":
            return self.source.gaussian(form, wide=wide)
        with self.posterior.as_user_object() as la:
            moments = la.functional_variance_fast(self.x)
            if not isinstance(moments, tuple) or len(moments) != 2 or moments[0].shape != moments[1].shape:
                raise InvalidArgument(
                    f"functional_variance_fast of class {type(la).__name__} must return mean and variances, [B, C] "
                    "each."
                )
        mean, variance = (rows_of(part, self.posterior.channel_dim) for part in moments)
        return GaussianOutputs(mean.values, variance.values, mean.positions)
