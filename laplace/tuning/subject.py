"""What is tuned: a posterior, or several that share their hyper-parameters and predict as a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.layout import Layout
from laplace.enums import PriorStructure
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import same_random_state
from laplace.predictive.mixing import mixed
from laplace.tuning.candidates import Candidates, Predict, Predictive
from laplace.tuning.scores import Prediction
from laplace.tuning.settings import NAMES, Setting

if TYPE_CHECKING:
    from laplace.posterior.parametric import ParametricLaplace


class CandidateSet(Protocol):
    """Predictive distributions at every candidate of a grid, as `Candidates` has them."""

    @property
    def la(self) -> ParametricLaplace:
        """Whose likelihood and device count."""
        ...

    @property
    def settings(self) -> list[Setting]:
        """The candidates."""
        ...

    def groups(self, n_data: int) -> list[slice]:
        """Consecutive candidates that are predicted together."""
        ...

    def prepare(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        """Runs the networks on a batch: predictions of consecutive candidates, outputs `[B, C]`, their positions."""
        ...


@dataclass(frozen=True)
class PosteriorGroup:
    """Posteriors that share their hyper-parameters; one posterior is a mixture of one.

    Attributes:
        posteriors: K fitted posteriors; not changed.
        weigh: The mixture weights π `[K]` at a setting, with its graph; None for one posterior.
    """

    posteriors: tuple[ParametricLaplace, ...]
    weigh: Callable[[Setting], Tensor] | None = None

    @classmethod
    def of(cls, la: ParametricLaplace | PosteriorGroup) -> PosteriorGroup:
        """A posterior as a subject."""
        return la if isinstance(la, PosteriorGroup) else cls((la,))

    @property
    def first(self) -> ParametricLaplace:
        """The posterior whose likelihood, layout and device count."""
        return self.posteriors[0]

    @property
    def likelihood(self) -> Likelihood:
        """What the data are distributed by."""
        return self.first.likelihood_object

    @property
    def layout(self) -> Layout:
        """Which entries of a prior precision belong to which tensor."""
        return self.first.problem.layout

    def setting(self, tuned: Sequence[str]) -> Setting:
        """The shared hyper-parameters; of those that are tuned and differ, the geometric mean.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: The posteriors differ in one that is not tuned.
        """
        for la in self.posteriors:
            la.fitted()
        found = [Setting.of(la) for la in self.posteriors]
        values = {name: [getattr(one, name) for one in found] for name in NAMES}
        differ = [name for name, (first, *others) in values.items() if not all(_same(first, o) for o in others)]
        if not set(differ) <= set(tuned):
            fixed = " and ".join(name for name in differ if name not in tuned)
            raise InvalidArgument(
                f"the components differ in {fixed}, which is not tuned; assign one value to the mixture first."
            )
        return replace(found[0], **{name: _geometric_mean(values[name]) for name in differ})

    def assign(self, setting: Setting, names: Sequence[str] = NAMES) -> None:
        """Gives all posteriors these values, or none of them if one refuses."""
        former = [Setting.of(la) for la in self.posteriors]
        try:
            for la in self.posteriors:
                setting.assign(la, names)
        except BaseException:
            for la, values in zip(self.posteriors, former, strict=True):
                values.assign(la, names)
            raise

    @contextmanager
    def same_random_states(self) -> Iterator[None]:
        """The global random states of all devices of the posteriors are afterwards what they were."""
        with ExitStack() as stack:
            for la in self.posteriors:
                stack.enter_context(same_random_state(la.weights.model))
            yield

    def check_structure(self, structure: str | None) -> None:
        """Raises where posteriors of different shapes are to share more than one prior precision.

        Raises:
            InvalidArgument: They are.
        """
        if structure is None or structure == PriorStructure.SCALAR:
            return
        if len({la.problem.layout.sizes for la in self.posteriors}) > 1:
            raise InvalidArgument(
                f"prior_structure={structure!r}, but the components have different parameters, which can only share "
                "one prior precision; use prior_structure='scalar'."
            )

    def weights(self, setting: Setting) -> Tensor:
        """Mixture weights π at a setting, `[K]`."""
        return torch.ones(1, dtype=torch.float64) if self.weigh is None else self.weigh(setting)

    def log_evidences(self, setting: Setting) -> Tensor:
        """Log p(D | M_k) of every component at a setting, `[K]`, float64, with its graph."""
        values = [setting.log_evidence(la).double() for la in self.posteriors]
        return torch.stack([value.to(values[0].device) for value in values])

    def log_evidence(self, setting: Setting) -> Tensor:
        """Log p(D) under a uniform prior over the components, 0-dim."""
        return log_mean_exp(self.log_evidences(setting))

    def candidates(self, settings: list[Setting], predictive: Predictive, *, whole_covariance: bool) -> CandidateSet:
        """Predictions of candidates, from one pass of every network."""
        parts = [Candidates(la, settings, predictive, whole_covariance=whole_covariance) for la in self.posteriors]
        return parts[0] if self.weigh is None else MixedCandidates(parts, self.weights)


class MixedCandidates:
    """Predictive distributions of a mixture at every candidate of a grid.

    Args:
        parts: Those of every component.
        weights: Mixture weights at a setting, `[K]`.
    """

    def __init__(self, parts: list[Candidates], weights: Callable[[Setting], Tensor]) -> None:
        self.parts = parts
        self.la = parts[0].la
        self.settings = parts[0].settings
        self.weights = torch.stack([weights(setting) for setting in self.settings], 1)

    def groups(self, n_data: int) -> list[slice]:
        """Consecutive candidates that are predicted together: as many as the largest component allows."""
        return min((part.groups(n_data) for part in self.parts), key=lambda groups: groups[0].stop)

    def prepare(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        """Runs every network on a batch: mixed predictions of consecutive candidates, outputs `[B, C]`, positions."""
        prepared = [part.prepare(x) for part in self.parts]

        def predict(group: slice) -> Prediction:
            weights = self.weights[:, group]
            one = group.stop - group.start == 1
            return mixed([predict_one(group) for predict_one, *_ in prepared], weights[:, 0] if one else weights)

        return predict, *prepared[0][1:]


def log_mean_exp(values: Tensor) -> Tensor:
    """log((1/K) Σ_k exp v_k) of `[K]`, 0-dim."""
    return values.logsumexp(0) - torch.tensor(float(len(values)), dtype=values.dtype, device=values.device).log()


def _geometric_mean(values: list[Tensor]) -> Tensor:
    """Entry by entry where the shapes agree, else of all entries, in the shape of one number."""
    first = values[0]
    if all(value.shape == first.shape for value in values):
        return torch.stack([value.to(first).log() for value in values]).mean(0).exp()
    return torch.cat([value.to(first).log().flatten() for value in values]).mean().exp().reshape((1,) * first.ndim)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two hyper-parameters have the same values."""
    return a.shape == b.shape and bool((a == b.to(a)).all())
