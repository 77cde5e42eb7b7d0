"""Questions that users ask of a posterior: names of predictives, options of predictions, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laplace.core.argument_checks import check_counts
from laplace.core.arguments import hint
from laplace.core.output_choice import OutputChoice
from laplace.core.random_numbers import check_generator
from laplace.enums import PredType
from laplace.errors import InvalidArgument, InvalidCall
from laplace.likelihoods.links import LINKS


@dataclass(frozen=True)
class PredictiveNames:
    """Predictives of a kind of posterior.

    Attributes:
        kinds: Linearised (`"glm"`) or sampled (`"nn"`), by the names that users have for it.
        accepted: The end of the error for other names.
    """

    kinds: Mapping[str, PredType]
    accepted: str

    def kind(self, pred_type: PredType | str) -> PredType:
        """The predictive of a name.

        Raises:
            InvalidArgument: It is none of this kind of posterior.
        """
        if str(pred_type) in self.kinds:
            return self.kinds[str(pred_type)]
        given = f"={str(pred_type)!r}" if isinstance(pred_type, str) else f" is a {type(pred_type).__name__}"
        raise InvalidArgument(f"pred_type{given}; {self.accepted}")

    def name(self, kind: PredType) -> str:
        """The name of a predictive, the first of several."""
        return next((name for name, own in self.kinds.items() if own == kind), str(kind))


WEIGHT_SPACE = PredictiveNames(
    {"glm": PredType.GLM, "nn": PredType.NN},
    "accepted are 'glm' and 'nn' ('gp' is the predictive of hessian_structure='gp'). It follows the inputs, which are "
    "given alone, without targets: la(x, pred_type='glm'); several inputs are one tuple: la((x1, x2)).",
)
FUNCTION_SPACE = PredictiveNames(
    {"gp": PredType.GLM, "glm": PredType.GLM}, "a posterior over functions has the predictive 'gp'."
)


@dataclass(frozen=True)
class PredictionOptions:
    """Options of a prediction.

    Attributes:
        link: How latents become probabilities.
        n_samples: Monte-Carlo samples.
        form: `"full"`, `"diagonal"` or `"joint"`: the covariance of the latents.
        choice: Which outputs; None for all.
        group_size: Inputs of a group, within which a joint covariance is; None for all.
    """

    link: str = "probit"
    n_samples: int = 100
    form: str = "full"
    choice: OutputChoice | None = None
    group_size: int | None = None


def check_options(
    pred_type: PredType | str,
    link_approx: str | None,
    n_samples: int,
    generator: torch.Generator | None,
    names: PredictiveNames = WEIGHT_SPACE,
) -> PredType:
    """Validates what a prediction was asked for.

    Args:
        pred_type: Name of the predictive.
        link_approx: Name of the link, or None where there is none.
        n_samples: Number of samples.
        generator: Source of randomness.
        names: Names of predictives that the posterior knows.

    Returns:
        Linearised or sampled.

    Raises:
        InvalidArgument: Unknown predictive or link, or no samples.
        InvalidType: The generator is no `torch.Generator`.
    """
    kind = names.kind(pred_type)
    if link_approx is not None and str(link_approx) not in LINKS:
        raise InvalidArgument(f"link_approx={str(link_approx)!r}; accepted are {list(LINKS)}.")
    check_generator(generator)
    check_counts(n_samples=n_samples)
    return kind


_OPTIONS = ("pred_type", "joint", "link_approx", "n_samples", "diagonal_output", "generator", "outputs", "group_size")
"""Options of predictions, one of which an argument that is not known may be meant to be."""


def refuse_model_kwargs(model_kwargs: dict[str, Any]) -> None:
    """Raises if arguments were given that only sampled predictions pass on.

    Raises:
        InvalidCall: There are some.
    """
    for name in model_kwargs:
        meant = hint(name, _OPTIONS) or "it is no option of predictions."
        raise InvalidCall(
            f"unexpected argument {name!r}; {meant} pred_type='glm' passes none to the model; use pred_type='nn' for "
            "arguments of the model, or bind them with forward_fn=."
        )


def check_model_kwargs(model: torch.nn.Module, model_kwargs: dict[str, Any]) -> None:
    """Raises if arguments were given that the model does not take.

    Raises:
        InvalidCall: There are some.
    """
    if not model_kwargs:
        return
    accepted = inspect.signature(model.forward).parameters
    unknown = [name for name in model_kwargs if name not in accepted]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        meant = hint(unknown[0], _OPTIONS) or "it is no option of predictions."
        raise InvalidCall(
            f"unexpected argument {unknown[0]!r}; {meant} pred_type='nn' passes what is none to the model, whose "
            f"forward takes {', '.join(accepted)}."
        )
