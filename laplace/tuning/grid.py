"""Grid search on validation data: batches outside, candidates inside, so that the network runs once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace import batch as batches
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, TuningWarning
from laplace.fitting import without_ignored
from laplace.tuning.candidates import Candidates
from laplace.tuning.objectives import Objective, Prediction, make_objective

if TYPE_CHECKING:
    from laplace.parametric import ParametricLaplace
    from laplace.tuning.choose import TuningOptions


def search_grid(la: ParametricLaplace, options: TuningOptions) -> Tensor:
    """The scalar candidate with the smallest validation loss, `[1]`.

    Raises:
        InvalidData: No validation data.
        InvalidArgument: A grid of no candidate, or no candidate with a finite loss.
    """
    if options.grid_size < 1:
        raise InvalidArgument(f"grid_size={options.grid_size}; it must be at least 1.")
    like = la.prior_precision.detach()
    grid = torch.logspace(
        options.log_prior_prec_min, options.log_prior_prec_max, options.grid_size, options.log_prior_prec_base,
        dtype=like.dtype, device=like.device,
    )  # fmt: skip
    losses = torch.tensor(_losses(la, grid, options), dtype=torch.float64)
    best = int(losses.where(losses.isfinite(), math.inf).argmin())
    _report(losses, best, grid)
    return grid[best : best + 1].clone()


def _losses(la: ParametricLaplace, grid: Tensor, options: TuningOptions) -> list[float]:
    fresh = make_objective(options.loss, la.likelihood_object, la.sigma_noise)
    objectives: list[Objective] = [fresh() for _ in grid]
    failed: set[int] = set()
    n_data = 0
    with torch.inference_mode(False), torch.no_grad():
        candidates = Candidates(la, grid, options)
        for batch in tqdm(options.val_loader, desc="grid search", disable=not options.progress_bar):
            x, y = batches.split(batch, la.dict_key_y)
            device = la.prior_precision.device
            kept = without_ignored(batches.to_device(x, device), y.to(device), la.likelihood_object)
            if kept is None:
                continue
            x, y = kept
            predict, f = candidates.prepare(x)
            y = la.likelihood_object.check_targets(f, y)
            n_data += len(y)
            failed |= {i for i, objective in enumerate(objectives) if not _taken_in(objective, predict, i, y)}
    if n_data == 0:
        raise InvalidData("the validation loader gave no data that count; the prior precision is left as it was.")
    return [math.inf if i in failed else objective.result() for i, objective in enumerate(objectives)]


def _taken_in(objective: Objective, predict: Callable[[int], Prediction], i: int, y: Tensor) -> bool:
    """Feeds the prediction of candidate i to its objective; False where its posterior does not exist."""
    try:
        objective.update(predict(i), y)
    except (CurvatureError, torch.linalg.LinAlgError):
        return False
    return True


def _report(losses: Tensor, best: int, grid: Tensor) -> None:
    finite = losses.isfinite()
    if not finite.any():
        raise InvalidArgument(
            "no candidate of the grid has a finite validation loss; the prior precision is left as it was. Check the "
            "loss, the validation data and the range of the grid."
        )
    notes: list[str] = []
    if not finite.all():
        notes.append(f"{int((~finite).sum())} of {len(losses)} candidates had no finite loss and were passed over")
    spread = losses[finite].max() - losses[finite].min()
    if len(losses) > 1 and spread <= 1e-7 * losses[finite].abs().max():
        notes.append("the loss does not depend on the prior precision; choose one that reads the predictive variance")
    elif len(losses) > 2 and best in (0, len(losses) - 1):
        notes.append(f"the best candidate, {grid[best].item():g}, is on the edge of the grid; widen it")
    if notes:
        warnings.warn("grid search: " + "; ".join(notes) + ".", TuningWarning, stacklevel=5)
