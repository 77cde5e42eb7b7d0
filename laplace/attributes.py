"""Constructors of the classes that have names, and attributes that posteriors have by their weights or their structure.

The classes themselves are rows of a table: `grid.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from laplace.base import BaseLaplace
from laplace.errors import InvalidArgument
from laplace.parametric import ParametricLaplace
from laplace.posterior.manual_fit import with_parts
from laplace.structures.kron import checked_damping

if TYPE_CHECKING:
    from laplace.structures.krylov import SolveReport

COMMON = frozenset(inspect.signature(BaseLaplace.__init__).parameters)
"""Names of the common constructor's arguments."""

PRECISION_OPTIONS = frozenset({"damping"})
"""Names of arguments that are options of the structure's precision."""


class NamedPosterior(ParametricLaplace):
    """Base of the classes whose constructor is made from the table: they differ in the order of their arguments."""

    def _construct(self, given: Mapping[str, Any]) -> None:
        """Calls the common constructor with all arguments of another one, by name, `self` included.

        What the common constructor does not have is an option: of the choice of weights, where `Weights.arguments`
        names it, of the precision, or else of the structure.
        """
        common: dict[str, Any] = {name: value for name, value in given.items() if name in COMMON}
        own = {name: value for name, value in given.items() if name not in COMMON}
        renamed = self.weights_type.arguments
        options = {
            "weights_options": {renamed[name]: own.pop(name) for name in renamed if name in own},
            "precision_options": {name: checked_damping(own.pop(name)) for name in PRECISION_OPTIONS if name in own},
            "structure_kwargs": own,
        }
        for name, values in options.items():
            common[name] = values | (common.get(name) or {})
        BaseLaplace.__init__(**common)


class LastLayerAttributes(NamedPosterior):
    """What every posterior over a last layer has.

    Args:
        feature_reduction: How the features of a sequence, `[B, T, D]`, become `[B, D]`: `"pick_first"`, `"pick_last"`
            or `"average"`; None if the model does that itself.
        last_layer_name: Name of the last layer, linear or convolutional; None to determine it at `fit`.
    """

    def _construct(self, given: Mapping[str, Any]) -> None:
        _refuse_asdl_kwargs(given)
        super()._construct(given)

    last_layer_name = property(attrgetter("weights.name"), doc="Name of the last layer; None while it is not known.")
    feature_reduction = property(attrgetter("weights.reduction"), doc="The `feature_reduction` that was given.")


_DAMPING = property(lambda la: la.precision_options["damping"], doc="The `damping` that was given, or False.")


class SubnetworkAttributes(NamedPosterior):
    """What every posterior over a subnetwork has.

    Args:
        subnetwork_indices: Indices of the weights with a distribution in the flattened trainable parameters, `[p]`,
            int64, distinct. The masks of `laplace.utils` compute them.
        damping: As in `KronLaplace`, with `hessian_structure="kron"`.
    """

    def _construct(self, given: Mapping[str, Any]) -> None:
        _refuse_asdl_kwargs(given)
        if given["damping"] and self.structure.name != "kron":
            raise InvalidArgument(
                f"damping=True is a Kronecker-factored posterior's; hessian_structure={self.structure.name!r} has none."
            )
        super()._construct(given)

    subnetwork_indices = property(
        attrgetter("weights.indices"), doc="Indices of the weights of the subnetwork, as they were given, `[p]`."
    )
    n_params_subnet = property(attrgetter("n_params"), doc="Number of weights of the subnetwork, p.")
    mean_subnet = property(attrgetter("mean"), doc="Trained values θ* of the weights of the subnetwork, `[p]`.")
    assemble_full_samples = property(
        attrgetter("weights.embed"), doc="Function from samples `[S, p]` to samples of all trainable parameters."
    )
    damping = _DAMPING


def _refuse_asdl_kwargs(given: Mapping[str, Any]) -> None:
    """Options of ASDL would not be read."""
    if given.get("asdl_fisher_kwargs"):
        raise InvalidArgument(
            "asdl_fisher_kwargs is only read by all-weights posteriors with an ASDL backend; pass backend_kwargs."
        )


class KronAttributes(NamedPosterior):
    """What every posterior with Kronecker factors has.

    Args:
        damping: False for the exact prior, P = s B ⊗ A + δ. Otherwise P = (√s B + √δ) ⊗ (√s A + √δ), a cheaper form
            (Ritter et al., 2018), with Kronecker factors normalised differently: True, B is a sum over the data and A a
            mean; `"mean"`, both are √N times means, as in that paper; `"sum"`, both are sums (Immer et al., 2021).
    """

    damping = _DAMPING

    @property
    def H_facs(self) -> Any:
        """Kronecker factors of H, a `Kron`, or None; assigning them also assigns H."""
        from laplace.compat.kron import Kron  # legacy values are imported by those who use them

        fit = None if self._posterior.data is None else self._posterior.data.factors_fit
        if fit is None or fit.H is None:
            return None
        return fit.H if isinstance(fit.H, Kron) else fit.complete.curvature.public().factors

    @H_facs.setter
    def H_facs(self, value: Any) -> None:
        self._posterior = with_parts(self._posterior, H_facs=value)


class LowRankAttributes(NamedPosterior):
    """What every posterior with the dominant eigenpairs of the curvature has."""

    def _construct(self, given: Mapping[str, Any]) -> None:
        others = dict(given["backend_kwargs"] or {})
        if "low_rank" in others:  # the place of the rank in older scripts
            rank = {"rank": others.pop("low_rank")}
            given = {**given, "backend_kwargs": others, "structure_kwargs": rank | (given["structure_kwargs"] or {})}
        super()._construct(given)

    @property
    def residual(self) -> float:
        """‖H U − U Λ‖ / ‖Λ‖ of the eigenpairs (U, Λ); 0 if they are exact.

        Raises:
            NotFittedError: Before `fit`.
        """
        curvature: Any = self.fitted().curvature
        return curvature.residual if curvature.name == "lowrank" else 0.0


class MatrixFreeAttributes(NamedPosterior):
    """What every posterior by matrix–vector products has."""

    @property
    def solve_reports(self) -> dict[str, SolveReport]:
        """Accuracy of the last iterative solves: their residuals, and the standard error of the log determinant.

        Keys are `"variances"`, `"samples"`, `"log determinant"` and `"solutions"`, as far as computed since the fit.
        Empty if the network is so small that the matrix was formed (`dense_below`): results are exact then.

        Raises:
            NotFittedError: Before `fit`.
        """
        from laplace.structures.matrix_free import MatrixFreeCurvature

        curvature = self.fitted().curvature
        return curvature.reports if isinstance(curvature, MatrixFreeCurvature) else {}
