"""The targets that have a name: what `target_kind` in a user's own class stands for."""

from __future__ import annotations

from laplace.likelihoods.label_targets import BinaryTarget, ClassTarget
from laplace.likelihoods.real_target import RealTarget
from laplace.likelihoods.sampled_target import SampledTarget
from laplace.likelihoods.target import Target

TARGETS: dict[str, Target] = {
    target.kind: target for target in (ClassTarget(), BinaryTarget(), RealTarget(), SampledTarget())
}
"""Targets by kind."""
