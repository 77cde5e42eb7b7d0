"""Names by which users ask for a predictive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laplace.enums import PredType
from laplace.errors import InvalidArgument


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
    "given alone, without targets: la(x, pred_type='glm').",
)
FUNCTION_SPACE = PredictiveNames(
    {"gp": PredType.GLM, "glm": PredType.GLM}, "a posterior over functions has the predictive 'gp'."
)
