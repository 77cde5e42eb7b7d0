"""Reports on the predictions of any model: class probabilities, or mean and variance of the targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace import metrics
from laplace.comparison import ScoredData, scores_of
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import check_generator
from laplace.errors import InvalidArgument, InvalidData
from laplace.extensions.document import Report
from laplace.extensions.verdicts import (
    LEVEL,
    Predictions,
    advice_on,
    class_rows,
    ood_scores_of,
    verdict_of_classes,
    verdict_of_targets,
)
from laplace.likelihoods.gaussian import Gaussian

_SHOWN = 20
"""Classes in the table of classes: those that are furthest from their frequency."""

_SUM = 1e-3
"""Distance from 1 of a sum of probabilities that is rounding, as in a file with three decimals."""


def of_probabilities(
    probs: Tensor,
    y: Tensor,
    *,
    network: Tensor | None = None,
    ood: Tensor | tuple[Tensor, Tensor] | None = None,
    classes: Sequence[str] | None = None,
    names: tuple[str, str] = ("network", "posterior"),
    generator: torch.Generator | None = None,
    datum: Tensor | None = None,
) -> Report:
    """Report on class probabilities of any model.

    Args:
        probs: Class probabilities `[N, C]` of the model in question.
        y: Labels `[N]`, integers; rows with the label −100 do not count.
        network: Class probabilities `[N, C]` of the model to compare with; None for none.
        ood: Class probabilities `[M, C]` for inputs of another kind; with `network` those of both, as a pair
            `(network, posterior)`.
        classes: Names of the C classes; None for their indices.
        names: Names of the model to compare with and of the one in question; the second alone without `network`.
        generator: Random generator of what is drawn; None for seed 0. Equal seeds give equal reports.
        datum: Index of the input that every row belongs to, `[N]`, of tokens or pixels, which are not independent; None
            where every row is one.

    Raises:
        InvalidArgument: Names that are no two texts, or not one per class; one prediction of other inputs where there
            are two models; or not one index per row.
        InvalidData: Shapes do not match, rows are no probabilities, or labels are no classes.
    """
    source = _source(generator)
    first, second = _checked_names(names)
    _require_rows(probs, "probs")
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or len(y) != len(probs):
        raise InvalidData(f"y of shape {list(getattr(y, 'shape', []))}; integer labels [N] of {len(probs)} inputs.")
    counts = y != metrics.IGNORE_INDEX
    of = metrics.check_datum(datum, len(y))[counts.cpu()].unique(return_inverse=True)[1]
    probs, y, network = probs[counts], y[counts], None if network is None else network[counts]
    for rows, name in ((probs, "probs"), (network, "network")):
        if rows is not None:
            _require_sums(rows, name)
    comparison = metrics.compare_probabilities(
        probs if network is None else network, probs, y, names=(second if network is None else first, second),
        generator=source, datum=of,
    )  # fmt: skip
    if classes is not None and len(classes) != probs.shape[1]:
        raise InvalidArgument(f"classes= has {len(classes)} names for {probs.shape[1]} classes.")
    if classes is not None:
        classes = [printable(str(name)) for name in classes]
        require_distinct("classes=", classes)
    models = _models(probs, network, first, second)
    strange = _checked_ood(ood, network is not None, probs.shape[1])
    for rows in strange:
        _require_sums(rows, "ood")
    verdicts = [verdict_of_classes(model, y, of, source) for model in models]
    rows = class_rows(probs.detach(), y, of, classes)
    flagged = tuple(row.name for row in rows if row.p_value < LEVEL / len(rows))  # Bonferroni's correction
    n_data = comparison.n_data
    advice = advice_on(verdicts, comparison, len(models), n_data, flagged)
    shown = tuple(sorted(rows, key=lambda row: row.p_value)[:_SHOWN])
    found = Report(tuple(verdicts), comparison, shown, {}, advice, n_data, models, y)
    return found.with_ood(dict(map(ood_scores_of, models, strange)))


def of_gaussians(
    mean: Tensor,
    variance: Tensor,
    y: Tensor,
    *,
    network: tuple[Tensor, Tensor] | None = None,
    ood: Tensor | tuple[Tensor, Tensor] | None = None,
    names: tuple[str, str] = ("network", "posterior"),
    generator: torch.Generator | None = None,
    datum: Tensor | None = None,
) -> Report:
    """Report on Gaussian predictions of any model.

    Args:
        mean: Predicted means `[N, C]` or `[N]`.
        variance: Variances of the targets of the same shape, the observation noise included.
        y: Targets of the same shape.
        network: Mean and variance of the model to compare with; None for none.
        ood: Variances `[M, C]` or `[M]` for inputs of another kind; with `network` those of both, as a pair.
        names: Names of the model to compare with and of the one in question; the second alone without `network`.
        generator: Random generator of what is drawn; None for seed 0. Equal seeds give equal reports.
        datum: As in `of_probabilities`.

    Raises:
        InvalidArgument: Names that are no two texts; one prediction of other inputs where there are two models.
        InvalidData: Shapes do not match, there is no input, or a variance is not positive.
    """
    source = _source(generator)
    first, second = _checked_names(names)
    y = _as_rows(y)
    sides = [Predictions(second, _checked_moments(mean, variance, y))]
    if network is not None:
        sides.append(Predictions(first, _checked_moments(*network, y)))
    n_outputs, datum = y.shape[1], metrics.check_datum(datum, len(y))
    data = ScoredData()
    data.add(_scores_of_targets(sides[-1], y), _scores_of_targets(sides[0], y), datum)
    comparison = data.compared(source, (sides[-1].name, second))
    strange = _checked_ood(ood, network is not None, n_outputs)
    verdicts, n_data = [verdict_of_targets(side, y, datum) for side in sides], comparison.n_data
    advice = advice_on(verdicts, comparison, len(sides), n_data, ())
    found = Report(tuple(verdicts), comparison, (), {}, advice, n_data, tuple(sides), y)
    return found.with_ood(dict(map(ood_scores_of, sides, strange)))


def _scores_of_targets(model: Predictions, y: Tensor) -> dict[str, Tensor]:
    """Scores of every row, `[N]`, as `la.compare` has them."""
    mean, variance, y = (widened(values.detach().cpu()) for values in (*model.moments, y))
    return scores_of(Gaussian(), (mean, variance), y, mean.new_zeros(()))


# Checks.


def _source(generator: torch.Generator | None) -> torch.Generator:
    check_generator(generator)
    return torch.Generator().manual_seed(0) if generator is None else generator


def _checked_names(names: tuple[str, str]) -> tuple[str, str]:
    if isinstance(names, str) or len(names) != 2 or names[0] == names[1]:
        raise InvalidArgument(f"names={names!r}; give two different ones, such as ('network', 'posterior').")
    return str(names[0]), str(names[1])


def _require_rows(probs: Tensor, name: str) -> None:
    if not isinstance(probs, Tensor) or probs.dim() != 2 or probs.shape[1] < 2 or not probs.is_floating_point():
        shape = list(getattr(probs, "shape", []))
        raise InvalidData(f"{name} of shape {shape}; class probabilities [N, C] of at least two classes are accepted.")


def _require_sums(probs: Tensor, name: str) -> None:
    """Refuses rows that are no probabilities: logits, say, or sigmoids of them."""
    values = widened(probs.detach())
    tolerance = max(_SUM, 4 * torch.finfo(probs.dtype).eps)
    wrong = ~(((values.sum(1) - 1).abs() <= tolerance) & (values >= -tolerance).all(1))  # so is NaN
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InvalidData(
            f"{name}: row {row} is no distribution over the classes, its sum is {values[row].sum().item():.4g}, its "
            f"smallest entry {values[row].min().item():.3g}; give probabilities that add up to 1, by softmax(1)."
        )


def require_distinct(what: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgument(f"{what} has {', '.join(map(repr, twice[:3]))} more than once; names must be distinct.")


def printable(name: str) -> str:
    """A name without codes that a terminal would carry out."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def _models(probs: Tensor, network: Tensor | None, first: str, second: str) -> tuple[Predictions, ...]:
    models = (Predictions(second, (probs,)),)
    return models if network is None else (*models, Predictions(first, (network,)))


def _checked_ood(ood: Tensor | tuple[Tensor, Tensor] | None, several: bool, n_columns: int) -> tuple[Tensor, ...]:
    """Predictions for data of another kind, those of the model in question first."""
    if ood is None:
        return ()
    if several == isinstance(ood, Tensor) or (not isinstance(ood, Tensor) and len(ood) != 2):
        raise InvalidArgument("ood= is one tensor without network=, and the pair (network, posterior) with it.")
    parts = (ood,) if isinstance(ood, Tensor) else (ood[1], ood[0])
    rows = tuple(_as_rows(part).detach() for part in parts)
    for part in rows:
        if part.shape[1] != n_columns or len(part) == 0 or not bool(part.isfinite().all()):
            raise InvalidData(f"ood of shape {list(part.shape)}: finite predictions [M, {n_columns}] are accepted.")
    return rows


def _as_rows(values: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() not in (1, 2):
        raise InvalidData(f"got shape {list(getattr(values, 'shape', []))}; [N] and [N, C] are accepted.")
    return values.unsqueeze(1) if values.dim() == 1 else values


def _checked_moments(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = _as_rows(mean), _as_rows(variance)
    if not mean.shape == variance.shape == y.shape or len(y) == 0:
        shapes = f"{list(mean.shape)}, {list(variance.shape)} and {list(y.shape)}"
        raise InvalidData(f"mean, variance and y have the shapes {shapes}; the same shape [N, C] is needed.")
    if not all(bool(values.isfinite().all()) for values in (mean, variance, y)):
        raise InvalidData("mean, variance or y holds numbers that are not finite; leave such rows out.")
    if bool((variance <= 0).any()):
        raise InvalidData("variance holds numbers that are not positive; give variances, the noise included.")
    return mean, variance
