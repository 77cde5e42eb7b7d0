"""Outputs and weights that users' classes draw by themselves, as predictions read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core.gaussian import Gaussian
from laplace.core.overrides import is_overridden
from laplace.core.positions import OutputRows, rows_of
from laplace.core.random_numbers import drawn_seed
from laplace.enums import PredType
from laplace.errors import InvalidArgument
from laplace.posterior.overridden import method_of, wrong_shape
from laplace.predictive.posterior_outputs import Draw, OwnSamples, PosteriorOutputs
from laplace.predictive.sources import GaussianSource

if TYPE_CHECKING:
    from laplace.core.batch import Inputs
    from laplace.posterior.weight_posterior import WeightPosterior


def users_samples(la: WeightPosterior, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Samples of the treated weights `[S, P]` by a user's own `sample`."""
    samples = _seeded(method_of(la, "sample"), generator)(n_samples)
    layout = la.problem.layout
    if not isinstance(samples, Tensor) or samples.ndim != 2 or len(samples) != n_samples:
        raise wrong_shape(la, "sample", samples, f"[{n_samples}, P]")
    samples = samples.to(la.mean)
    if samples.shape[1] != layout.n_params:  # of a subnetwork: of all trainable parameters
        samples = torch.stack([la.weights.restrict_prior(sample) for sample in samples])
    if samples.shape[1] != layout.n_params:
        raise wrong_shape(la, "sample", samples, f"[{n_samples}, P], P = {layout.n_params}")
    return samples


def own_quantities(
    la: WeightPosterior, rows: PosteriorOutputs, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
) -> PosteriorOutputs:
    """A prediction with users' own samples, and their own variances of the linearised outputs.

    Args:
        la: A fitted posterior.
        rows: The prediction as the library makes it.
        x: Inputs.
        kind: Linearised or sampled.
        model_kwargs: Further arguments of the model.
    """
    source = rows.source
    if isinstance(source, GaussianSource) and is_overridden(la, "functional_variance_fast"):
        source = OwnVariances(la, source, x, la.at_present())
    samples = {
        name: own_samples(la, name, x, kind, rows.options.form, model_kwargs)
        for name in ("functional_samples", "predictive_samples")
        if is_overridden(la, name)
    }
    own = OwnSamples(samples.get("functional_samples"), samples.get("predictive_samples"))
    return replace(rows, source=source, own=own)


def own_samples(
    la: WeightPosterior, name: str, x: Inputs, kind: PredType, form: str, model_kwargs: dict[str, Any]
) -> Draw:
    """A user's own `functional_samples` or `predictive_samples` at x.

    Args:
        la: A fitted posterior.
        name: Which of them.
        x: Inputs.
        kind: Linearised or sampled.
        form: Covariance of the latents: `"full"`, `"diagonal"` or `"joint"`.
        model_kwargs: Further arguments of the model.
    """
    method, options = method_of(la, name), dict(model_kwargs)
    # What has its default value is not passed on: a user's method need not know it.
    if kind != PredType.NN:
        options |= {"full": {}, "diagonal": {"diagonal_output": True}, "joint": {"joint": True}}[form]
    pred_type, held = PredType.GP if la.structure.name == PredType.GP else kind, la.at_present()

    def draw(n: int, generator: torch.Generator | None) -> OutputRows:
        with held():
            found = _seeded(method, generator)(x, pred_type=pred_type, n_samples=n, **options)
        if not isinstance(found, Tensor) or found.ndim < 3 or len(found) != n:
            raise wrong_shape(la, name, found, f"[{n}, B, C]")
        return rows_of(found, la.channel_dim, 1)

    return draw


@dataclass(frozen=True, eq=False)
class OwnVariances(GaussianSource):
    """Linearised outputs whose variances are those of a user's own `functional_variance_fast`.

    Attributes:
        la: Whose method is called.
        source: The rest.
        x: Inputs.
        held: Blocks with the hyper-parameters of this prediction.
    """

    la: WeightPosterior
    source: GaussianSource
    x: Inputs
    held: Callable[[], AbstractContextManager[None]]

    @property
    def create_graph(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source.create_graph

    def mean(self) -> OutputRows:
        return self.source.mean()

    def latent(self, form: str, *, wide: bool = False) -> Gaussian:
        if form != "diagonal":
            return self.source.latent(form, wide=wide)
        mean, variance = (rows_of(part, self.la.channel_dim) for part in self._found())
        return Gaussian(mean.values, variance.values, mean.positions)

    def _found(self) -> tuple[Tensor, Tensor]:
        with self.held():
            found = method_of(self.la, "functional_variance_fast")(self.x)
        if not isinstance(found, tuple) or len(found) != 2 or found[0].shape != found[1].shape:
            raise InvalidArgument(
                f"functional_variance_fast of class {type(self.la).__name__} must return mean and variances, [B, C] "
                "each."
            )
        return found


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
