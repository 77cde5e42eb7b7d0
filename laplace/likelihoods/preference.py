"""Reward modelling: pairwise preferences after Bradley and Terry (1952)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.errors import InvalidData
from laplace.likelihoods.checks import check_labels, check_outputs
from laplace.likelihoods.links import softmax
from laplace.likelihoods.softmax import SoftmaxLikelihood
from laplace.likelihoods.targets import ClassTarget, Decomposition, Target

if TYPE_CHECKING:
    from laplace.predictive.posterior_outputs import MixedOutputs


class RewardTarget(Target):
    """The reward of a single item: it is never observed, and known as a latent alone."""

    subject = "single rewards"

    def decomposition(self, rows: MixedOutputs) -> Decomposition:
        self.refuse("decomposition", rows.likelihood)


class PreferenceTarget(ClassTarget):
    """The preferred item of a pair, which many data sets put first."""

    labels_vary = False

    def of(self, rows: MixedOutputs) -> Target:
        return RewardTarget() if rows.latent_mean.shape[1] == 1 else self


@dataclass(frozen=True)
class Preference(SoftmaxLikelihood):
    """Preferences between two items: p(item y is preferred | f) = softmax(f)_y, with the rewards f of both items.

    Fit it to pairs: inputs `[B, 2, …]`, outputs `[B, 2]`, targets the index of the preferred item. It predicts
    preference probabilities of pairs, or, for single items with outputs `[B, 1]`, rewards with their variance.
    """

    name = "reward_modeling"
    target = PreferenceTarget()
    latent_prediction = True

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Indices of the preferred items, `[B]` of 0 and 1, as int64, or probabilities that they are, `[B, 2]`.

        Raises:
            InvalidData: Outputs other than `[B, 2]`, another shape or dtype, labels other than 0 and 1, rows that are
                no probabilities.
        """
        check_outputs(f)
        if f.shape[1] != 2:
            raise InvalidData(
                f"Outputs have shape {list(f.shape)}; a preference is learnt from pairs, inputs [B, 2, ...], for "
                "which the network returns one reward per item, [B, 2]."
            )
        return check_labels(f, y)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Preference probabilities of pairs `[..., 2]` (softmax); rewards of single items `[..., 1]` as they are."""
        return f if f.shape[-1] == 1 else softmax(f)

    def predict(
        self,
        mean: Tensor,
        covariance: Tensor,
        link: str,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Preference probabilities `[B, 2]` of pairs by `link`; mean rewards `[B, 1]` of single items.

        Raises:
            UnsupportedError: Unknown link.
        """
        return mean if mean.shape[1] == 1 else super().predict(mean, covariance, link, n_samples, generator)
