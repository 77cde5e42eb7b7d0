"""Common base of the posteriors over functions: a Gaussian process is the linearised network seen from its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core.arguments import checked
from laplace.core.batch import Inputs
from laplace.enums import (
    LinkApprox,
    LinkName,
    PredType,
    PredTypeName,
    PriorStructure,
    PriorStructureName,
    TuningMethod,
    TuningMethodName,
)
from laplace.errors import InvalidArgument
from laplace.parametric import ParametricLaplace
from laplace.predictive.options import FUNCTION_SPACE
from laplace.tuning.objectives import Loss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BaseFunctionalLaplace(ParametricLaplace):
    """Base of posteriors over functions: Gaussian processes, Nyström and variational approximations.

    You use them like any other posterior. Internally they work with kernels between data. Their predictive is called
    `"gp"`: the linearised network under this posterior (Immer et al., 2021, equations 15 and 16).
    """

    pred_types = FUNCTION_SPACE

    @checked
    def __call__(
        self,
        x: Inputs,
        pred_type: PredTypeName = PredType.GP,
        joint: bool = False,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **options: Any,
    ) -> Any:
        """Predictive distribution at x, as for `ParametricLaplace`.

        Args:
            x: Inputs of B data: a tensor, tuple or mapping.
            pred_type: `"gp"`.
            joint: Also compute covariances between inputs.
            link_approx: Link approximation of classification.
            n_samples: Number of Monte-Carlo samples.
            diagonal_output: Compute variances of the outputs only, no covariances between them.
            generator: Random generator; equal seeds give bitwise equal results.
            fitting: In reward modelling: return preference probabilities of pairs.
            **options: Further options of `ParametricLaplace.__call__`.

        Raises:
            InvalidArgument: Another predictive.
            NotFittedError: Before `fit`.
        """
        if str(pred_type) != PredType.GP:
            raise InvalidArgument(
                f"pred_type={str(pred_type)!r}; a {type(self).__name__} has the predictive 'gp' only."
            )
        return super().__call__(
            x, pred_type, joint, link_approx, n_samples, diagonal_output, generator, fitting, **options
        )

    @checked
    def optimize_prior_precision(
        self,
        pred_type: PredTypeName = PredType.GP,
        method: TuningMethodName | None = None,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: PriorStructureName = PriorStructure.SCALAR,
        val_loader: Iterable[Any] | None = None,
        loss: Loss | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        generator: torch.Generator | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        """Chooses the prior precision and assigns it, as `ParametricLaplace.optimize_prior_precision` does.

        `method=None` is `"gridsearch"` if `val_loader` is given, else `"marglik"`.

        Only the product of prior precision and `prior_factor` matters, so that this tunes the factor as well (Immer et
        al., 2021, appendix A.2.2: it is "selected on the held-out validation set").
        """
        self.pred_types.kind(pred_type)
        chosen = method or (TuningMethod.MARGLIK if val_loader is None else TuningMethod.GRIDSEARCH)
        super().optimize_prior_precision(
            pred_type, chosen, n_steps, lr, init_prior_prec, prior_structure, val_loader, loss, log_prior_prec_min,
            log_prior_prec_max, grid_size, link_approx, n_samples, verbose, progress_bar, log_prior_prec_base,
            generator, group=group,
        )  # fmt: skip
