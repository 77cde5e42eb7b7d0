"""Damping of Kronecker factors: √δ on either side, in the normalisation of each paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from laplace.errors import InvalidArgument

DampingForm = bool | Literal["mean", "sum"]

FORMS: tuple[DampingForm, ...] = (False, True, "mean", "sum")


@dataclass(frozen=True)
class Damping:
    """(b √s B + √δ) ⊗ (a √s A + √δ) in place of s B ⊗ A + δ, where B is a sum over N data and A a mean.

    Attributes:
        output: Factor b of the output side.
        input: Factor a of the input side.
    """

    output: float = 1.0
    input: float = 1.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Damping | None:
        """From the options `damping` and, where that names a paper's normalisation, `n_data` of a precision.

        `True` takes the factors as they are, `"mean"` gives both √N times a mean (Ritter et al., 2018; Eschenhagen et
        al., 2021, algorithm 1), `"sum"` makes both sums (Immer et al., 2021, equations A.2 and A.4).
        """
        form = options.get("damping", False)
        if not form:
            return None
        if form is True:
            return cls()
        n_data = float(options["n_data"])
        return cls(n_data**-0.5, n_data**0.5) if form == "mean" else cls(1.0, n_data)

    def sides(self, *, output_first: bool) -> tuple[float, float]:
        """Factors of the left and of the right side."""
        return (self.output, self.input) if output_first else (self.input, self.output)


def checked_damping(form: Any) -> DampingForm:
    """A form of damping as users give it.

    Raises:
        InvalidArgument: An unknown one.
    """
    if not isinstance(form, bool | str) or form not in FORMS:
        raise InvalidArgument(
            f"damping={form!r}; accepted are False, True (factors as they are kept: the output side a sum, the input "
            "side a mean), 'mean' (both √N times a mean: Ritter et al., 2018) and 'sum' (both sums: Immer et al.)."
        )
    return form
