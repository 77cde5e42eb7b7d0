"""Questions that users ask of a posterior: names of predictives, options of predictions, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from laplace.core.arguments import check_counts, hint
from laplace.core.positions import OutputChoice, WhichOutputs
from laplace.core.random_numbers import check_generator
from laplace.enums import LinkApprox, PredType
from laplace.errors import InvalidArgument, InvalidCall
from laplace.likelihoods.links import LINKS
from laplace.structures.precision import Form


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
        """The predictive of a name."""
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


@dataclass(frozen=True, eq=False)
class PredictOptions:
    """Options of a prediction, as users give them.

    Attributes:
        pred_type: Name of the predictive.
        n_samples: Monte-Carlo samples.
        diagonal_output: Only variances of the outputs.
        generator: Source of randomness; None for the global one.
        joint: Covariance over all inputs.
        link_approx: Name of the link; None for samples, which need none.
        outputs: Which outputs; None for all.
        group_size: Inputs of a group, within which a joint covariance is; None for all.
        choice: `outputs` as rows of the network read them, after `for_network`.
        fitting: Of `la(x)`: preference probabilities of pairs.
        observation_noise: Of `la(x)`: σ² is added to the variance.
    """

    pred_type: PredType | str = PredType.GLM
    n_samples: int = 100
    diagonal_output: bool = False
    generator: torch.Generator | None = None
    joint: bool = False
    link_approx: LinkApprox | str | None = None
    outputs: WhichOutputs = None
    group_size: int | None = None
    choice: OutputChoice | None = None
    fitting: bool = False
    observation_noise: bool = False

    @property
    def form(self) -> Form:
        """Covariance of the latents: `"joint"`, `"diagonal"` or `"full"`."""
        return "joint" if self.joint else "diagonal" if self.diagonal_output else "full"

    @property
    def link(self) -> str:
        """Name of the link by which latents become probabilities."""
        return str(self.link_approx or LinkApprox.PROBIT)

    def kind(self, names: PredictiveNames = WEIGHT_SPACE) -> PredType:
        """The predictive, linearised or sampled, after the options were checked."""
        kind = names.kind(self.pred_type)
        if self.link_approx is not None and str(self.link_approx) not in LINKS:
            raise InvalidArgument(f"link_approx={str(self.link_approx)!r}; accepted are {list(LINKS)}.")
        check_generator(self.generator)
        check_counts(n_samples=self.n_samples)
        return kind

    def for_network(self, channel_dim: int) -> PredictOptions:
        """The options with the outputs of a network that has its channels in `channel_dim`."""
        if self.group_size is not None:
            check_counts(group_size=self.group_size)
            if not self.joint:
                raise InvalidArgument(
                    f"group_size={self.group_size} says which inputs are joint; give joint=True with it."
                )
        if self.outputs is None:
            return self
        return replace(self, choice=OutputChoice.from_argument(self.outputs, channel_dim))


_OPTIONS = ("pred_type", "joint", "link_approx", "n_samples", "diagonal_output", "generator", "outputs", "group_size")
"""Options of predictions, one of which an argument that is not known may be meant to be."""


def refuse_model_kwargs(model_kwargs: dict[str, Any]) -> None:
    """Raises if arguments were given that only sampled predictions pass on."""
    for name in model_kwargs:
        meant = hint(name, _OPTIONS) or "it is no option of predictions."
        raise InvalidCall(
            f"unexpected argument {name!r}; {meant} pred_type='glm' passes none to the model; use pred_type='nn' for "
            "arguments of the model, or bind them with forward_fn=."
        )


def check_model_kwargs(model: torch.nn.Module, model_kwargs: dict[str, Any]) -> None:
    """Raises if arguments were given that the model does not take."""
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
