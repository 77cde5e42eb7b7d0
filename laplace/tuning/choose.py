"""`optimize_prior_precision`: which method, started where."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.enums import PriorStructure, TuningMethod
from laplace.errors import InvalidArgument, TuningWarning
from laplace.hyperparameters import as_tensor, check_length, positive
from laplace.layout import Layout
from laplace.tuning.evidence import maximise_evidence
from laplace.tuning.grid import search_grid

if TYPE_CHECKING:
    from laplace.parametric import ParametricLaplace


@dataclass(frozen=True)
class TuningOptions:
    """The arguments of `optimize_prior_precision`, documented there."""

    pred_type: str
    method: str
    n_steps: int
    lr: float
    init_prior_prec: float | Tensor
    prior_structure: str
    val_loader: Iterable[Any] | None
    loss: Any
    log_prior_prec_min: float
    log_prior_prec_max: float
    grid_size: int
    link_approx: str
    n_samples: int
    progress_bar: bool
    log_prior_prec_base: float
    generator: torch.Generator | None


def choose_prior_precision(la: ParametricLaplace, options: TuningOptions) -> Tensor:
    """The best prior precision by the chosen method, detached.

    Raises:
        InvalidArgument: Unknown method or structure, or missing validation data.
    """
    if options.method == TuningMethod.MARGLIK:
        if options.val_loader is not None:
            warnings.warn(
                "val_loader is not used by method='marglik'; use method='gridsearch' to tune on validation data.",
                TuningWarning,
                stacklevel=3,
            )
        start = spread(options.init_prior_prec, options.prior_structure, la.problem.layout, la.prior_mean)
        return maximise_evidence(
            lambda delta: la.evidence(prior_precision=delta).log_marginal_likelihood,
            start, options.n_steps, options.lr, progress_bar=options.progress_bar,
        )  # fmt: skip
    if options.method in (TuningMethod.GRIDSEARCH, TuningMethod.CV):
        if options.val_loader is None:
            raise InvalidArgument(f"method={options.method!r} needs val_loader=, the validation data.")
        # One value is searched, whatever the structure it is then written in: the posterior is the same.
        spread(1.0, options.prior_structure, la.problem.layout, la.prior_mean)
        return spread(search_grid(la, options), options.prior_structure, la.problem.layout, la.prior_mean)
    raise InvalidArgument(f"method={options.method!r}; accepted are 'marglik', 'gridsearch' and 'CV'.")


def spread(init: float | Tensor, structure: str, layout: Layout, like: Tensor) -> Tensor:
    """A prior precision in the asked structure: a vector keeps its own, a scalar is spread over it.

    Raises:
        InvalidArgument: Unknown structure, or a vector whose length fits nothing.
    """
    lengths = {
        str(PriorStructure.SCALAR): 1,
        str(PriorStructure.LAYERWISE): layout.n_tensors,
        str(PriorStructure.DIAG): layout.n_params,
    }
    if structure not in lengths:
        raise InvalidArgument(f"prior_structure={structure!r}; accepted are {list(lengths)}.")
    value = positive("init_prior_prec", as_tensor("init_prior_prec", init, like=like)).detach().reshape(-1)
    if value.numel() == 1:
        return value.repeat(lengths[structure])
    check_length("init_prior_prec", value, lengths)
    return value
