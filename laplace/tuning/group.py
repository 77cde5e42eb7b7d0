"""Posteriors that are tuned together: one, or several that share hyper-parameters and predict as a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.core.hyperparameters import Hyperparameters
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype, widened
from laplace.enums import PriorStructure
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import same_random_state
from laplace.posterior.posterior import HyperparameterValue, Posterior
from laplace.tuning.candidates import Candidates, MixedCandidates, Predictive
from laplace.tuning.search import NAMES


def log_mean_exp(values: Tensor) -> Tensor:
    """log((1/K) Σ_k exp v_k) of `[K]`, 0-dim."""
    return values.logsumexp(0) - torch.tensor(float(len(values)), dtype=values.dtype, device=values.device).log()


def require_same_data(counts: Sequence[float]) -> None:
    """Requires evidences to be of as many data.

    Raises:
        InvalidArgument: Their numbers differ.
    """
    if any(count != counts[0] for count in counts):
        raise InvalidArgument(
            f"the components were fitted to {list(counts)} data; evidences can only be compared, or averaged, for the "
            "same data."
        )


@dataclass(frozen=True)
class PosteriorGroup:
    """Posteriors that are tuned together and share their hyper-parameters; a single posterior is a group of one.

    Attributes:
        posteriors: K fitted posteriors.
        weigh: Function from a group to its mixture weights π, `[K]`, with their graph; None for a single posterior.
    """

    posteriors: tuple[Posterior, ...]
    weigh: Callable[[PosteriorGroup], Tensor] | None = None

    def at_hyperparameters(self, hypers: Hyperparameters) -> PosteriorGroup:
        """The posteriors at shared hyper-parameters, with their graph; each keeps its own prior mean."""
        return replace(self, posteriors=tuple(one.at_hyperparameters(_shared(hypers, one)) for one in self.posteriors))

    def assigned(self, **values: HyperparameterValue) -> tuple[Posterior, ...]:
        """The posteriors at hyper-parameters as users give them, by name.

        Raises:
            InvalidArgument: One of them does not accept a value.
        """
        return tuple(one.assigned(**values) for one in self.posteriors)

    @property
    def first(self) -> Posterior:
        """The first posterior, whose likelihood, layout and device are used."""
        return self.posteriors[0]

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood p(y | f), an object."""
        return self.first.likelihood

    @property
    def layout(self) -> Layout:
        """Layout of the tensors that the entries of a prior precision belong to."""
        return self.first.problem.layout

    def hypers(self, tuned: Sequence[str]) -> Hyperparameters:
        """The shared hyper-parameters; of those that are tuned and differ, the geometric mean.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: The posteriors differ in one that is not tuned.
        """
        for posterior in self.posteriors:
            posterior.require_fitted()
        every = [posterior.hypers.detached() for posterior in self.posteriors]
        values = {name: [getattr(one, name) for one in every] for name in NAMES}
        differ = [name for name, (first, *others) in values.items() if not all(_same(first, o) for o in others)]
        if not set(differ) <= set(tuned):
            fixed = " and ".join(name for name in differ if name not in tuned)
            raise InvalidArgument(
                f"the components differ in {fixed}, which is not tuned; assign one value to the mixture first."
            )
        return replace(every[0], **{name: _geometric_mean(values[name]) for name in differ})

    @contextmanager
    def same_random_states(self) -> Iterator[None]:
        """The global random states of all devices of the posteriors are afterwards what they were."""
        with ExitStack() as stack:
            for posterior in self.posteriors:
                stack.enter_context(same_random_state(posterior.model))
            yield

    def check_structure(self, structure: str | None) -> None:
        """Raises where posteriors of different shapes are to share more than one prior precision.

        Raises:
            InvalidArgument: They are.
        """
        if structure is None or structure == PriorStructure.SCALAR:
            return
        if len({posterior.problem.layout.sizes for posterior in self.posteriors}) > 1:
            raise InvalidArgument(
                f"prior_structure={structure!r}, but the components have different parameters, which can only share "
                "one prior precision; use prior_structure='scalar'."
            )

    def weights(self) -> Tensor:
        """Mixture weights π, `[K]`, with their graph."""
        return torch.ones(1, dtype=wide_dtype()) if self.weigh is None else self.weigh(self)

    def log_evidences(self) -> Tensor:
        """Log p(D | M_k) of every component, `[K]`, float64, with its graph."""
        values = [widened(one.log_evidence().to(one.hypers.dtype)) for one in self.posteriors]
        return torch.stack([value.to(values[0].device) for value in values])

    def log_evidence(self) -> Tensor:
        """Log p(D) under a uniform prior over the components, 0-dim, in the widest type of its terms."""
        if len(self.posteriors) == 1:  # a tuning asks a hundred times, for the price of few small operations
            return self.first.log_evidence()
        return log_mean_exp(self.log_evidences())

    def candidates(
        self, settings: list[Hyperparameters], predictive: Predictive, *, whole_covariance: bool
    ) -> MixedCandidates:
        """Predictions of candidates, from one pass of every network."""
        parts = [
            Candidates(
                one, [_shared(setting, one) for setting in settings], predictive, whole_covariance=whole_covariance
            )
            for one in self.posteriors
        ]
        return MixedCandidates(
            parts, torch.stack([self.at_hyperparameters(setting).weights() for setting in settings], 1)
        )


def _shared(hypers: Hyperparameters, posterior: Posterior) -> Hyperparameters:
    """Shared hyper-parameters with the prior mean of one posterior."""
    return replace(hypers, prior_mean=posterior.hypers.prior_mean)


def _geometric_mean(values: list[Tensor]) -> Tensor:
    """Entry by entry where the shapes agree, else of all entries, in the shape of one number."""
    first = values[0]
    if all(value.shape == first.shape for value in values):
        return torch.stack([value.to(first).log() for value in values]).mean(0).exp()
    return torch.cat([value.to(first).log().flatten() for value in values]).mean().exp().reshape((1,) * first.ndim)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b.to(a)).all())
