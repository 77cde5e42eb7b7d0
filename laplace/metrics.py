"""Scores of predictive distributions: proper scoring rules, calibration, selection, out-of-distribution detection.

Every function takes tensors on any device, ignores rows whose label is `ignore_index`, and returns a 0-dim tensor
in the dtype of the predictions. Logarithms are natural: negative log likelihoods are in nats per datum.

Labels are integers `[...]` or soft, probabilities of the classes `[..., C]`, under which a score is the expectation
(the Brier score their squared distance).
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from laplace.core import scores
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import check_generator, drawn_seed
from laplace.core.scores import Ranking
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods.checks import check_soft_labels

if TYPE_CHECKING:
    from laplace.comparison import Comparison

IGNORE_INDEX = -100
_OF_REGRESSION = "for a regression use gaussian_nll(p.mean, p.variance, y) with p = la.predict(x)."


def nll(probs: Tensor, y: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Mean negative log likelihood −(1/N) Σ_n log p_n[y_n] of labels, in nats; infinite where p_n[y_n] = 0.

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        ignore_index: Label of rows to be ignored.

    Raises:
        InvalidData: Shapes do not match, a label is out of range, a probability is outside [0, 1], or all labels are
            ignored.
    """
    probs, y = _counted(probs, y, ignore_index)
    return -scores.class_log_probability(probs, y).mean()


def brier(probs: Tensor, y: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Mean Brier score (1/N) Σ_n Σ_c (p_nc − 1[y_n = c])², between 0 and 2 (Brier, 1950).

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        ignore_index: Label of rows to be ignored.

    Raises:
        InvalidData: As for `nll`.
    """
    probs, y = _counted(probs, y, ignore_index)
    return scores.class_brier(probs, y).mean()


def accuracy(probs: Tensor, y: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Share of rows whose most probable class is the label.

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        ignore_index: Label of rows to be ignored.

    Raises:
        InvalidData: As for `nll`.
    """
    probs, y = _counted(probs, y, ignore_index)
    return scores.class_agreement(probs.argmax(1), y).to(probs.dtype).mean()


def mean_confidence(probs: Tensor) -> Tensor:
    """Mean of the largest class probability.

    Args:
        probs: Class probabilities `[..., C]`.
    """
    return scores.class_confidence(probs).mean()


def calibration_bins(
    probs: Tensor, y: Tensor, n_bins: int = 15, ignore_index: int = IGNORE_INDEX
) -> tuple[Tensor, Tensor, Tensor]:
    """Bins predictions by confidence: what a reliability diagram shows.

    Bin m of M holds the rows whose confidence lies in ((m−1)/M, m/M].

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        n_bins: Number of bins M of equal width.
        ignore_index: Label of rows to be ignored.

    Returns:
        Number of rows, mean confidence and accuracy of every bin, `[M]` each; the last two are 0 for an empty bin.

    Raises:
        InvalidArgument: `n_bins` is not positive.
        InvalidData: As for `nll`.
    """
    _check_bins(n_bins)
    probs, y = _counted(probs, y, ignore_index)
    confidence, predicted = probs.max(1)
    bins = scores.confidence_bins(confidence, n_bins)

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(n_bins, dtype=probs.dtype, device=probs.device).index_add_(0, bins, values)

    count = summed(torch.ones_like(confidence))
    size = count.clamp(min=1)
    return count, summed(confidence) / size, summed(scores.class_agreement(predicted, y).to(probs.dtype)) / size


def expected_calibration_error(probs: Tensor, y: Tensor, n_bins: int = 15, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Expected calibration error Σ_m (n_m / N) |accuracy_m − confidence_m| [Guo et al., 2017, eq. 3].

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        n_bins: Number of bins of equal width over the confidence.
        ignore_index: Label of rows to be ignored.

    Raises:
        InvalidArgument: `n_bins` is not positive.
        InvalidData: As for `nll`.
    """
    _check_bins(n_bins)
    probs, y = _counted(probs, y, ignore_index)
    return scores.binned_gaps(probs, y, n_bins).mean(0).abs().sum().to(probs.dtype)


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Area under the ROC curve of out-of-distribution detection: P(s_in > s_out) + ½ P(s_in = s_out) over all pairs.

    The Mann–Whitney statistic, exact with ties: 1 if every inlier scores above every outlier, ½ if the scores say
    nothing.

    Args:
        scores_in: Scores of in-distribution inputs, `[N]`, e.g. the largest class probability.
        scores_out: Scores of out-of-distribution inputs, `[M]`.

    Raises:
        InvalidData: A set is empty or holds NaN.
    """
    scores_in, scores_out = _checked_scores(scores_in, scores_out)
    ranked = scores_out.sort().values
    below = widened(torch.searchsorted(ranked, scores_in)) + torch.searchsorted(ranked, scores_in, right=True)
    return (below.mean() / (2 * ranked.numel())).to(scores_in.dtype)


def fpr95(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """False positive rate at 95 % true positives: share of outliers that pass for inliers (Liang et al., 2018).

    The threshold is the largest that at least 95 % of the inliers reach. Outliers with the same score pass, so that the
    order of equal scores does not matter: 0 is best, and 1 where all scores are equal.

    Args:
        scores_in: Scores of in-distribution inputs, `[N]`, e.g. the largest class probability.
        scores_out: Scores of out-of-distribution inputs, `[M]`.

    Raises:
        InvalidData: A set is empty or holds NaN.
    """
    scores_in, scores_out = _checked_scores(scores_in, scores_out)
    needed = -(-19 * scores_in.numel() // 20)
    threshold = scores_in.sort(descending=True).values[needed - 1]
    return (scores_out >= threshold).to(scores_in.dtype).mean()


def _checked_scores(scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    """Scores `[N]` and `[M]`."""
    scores_in, scores_out = scores_in.flatten(), scores_out.flatten()
    for name, values in (("scores_in", scores_in), ("scores_out", scores_out)):
        if values.numel() == 0 or bool(values.isnan().any()):
            raise InvalidData(f"{name} is empty or holds NaN; give one finite score per datum.")
    return scores_in, scores_out


def mean_calibration_error(probs: Tensor, y: Tensor, n_bins: int = 15, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Mean of |accuracy − confidence| over the bins that hold data, each counted once [Redux, appendix C, bins].

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        n_bins: Number of bins of equal width over the confidence.
        ignore_index: Label of rows to be ignored.

    Raises:
        InvalidArgument: `n_bins` is not positive.
        InvalidData: As for `nll`.
    """
    return _gaps(probs, y, n_bins, ignore_index).mean()


def maximum_calibration_error(probs: Tensor, y: Tensor, n_bins: int = 15, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """The largest |accuracy − confidence| of a bin [Guo et al., 2017, eq. 5] (Eschenhagen et al., 2021, H).

    Arguments and errors are those of `mean_calibration_error`.
    """
    return _gaps(probs, y, n_bins, ignore_index).max()


def aurc(probs: Tensor, y: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Area under the risk-coverage curve: mean over i of the share of errors among the i most confident predictions.

    AURC = (1/N) Σ_i (1/i) Σ_{j ≤ i} 1[prediction j is wrong], the predictions sorted by their largest probability
    (Geifman et al., 2019, "Bias-reduced uncertainty estimation for deep neural classifiers", section 2). Where
    confidences are equal it is the expectation over their order. Small is good; without errors it is 0.

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        ignore_index: Label of rows to be ignored.

    Raises:
        InvalidData: As for `nll`.
    """
    ranking = _ranking(probs, y, ignore_index)
    return ranking.curve(ranking.once).mean_risk()[0].to(probs.dtype)


def augrc(probs: Tensor, y: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Area under the generalised risk-coverage curve: the mean risk of an undetected error, between 0 and ½.

    AUGRC = ∫ P(wrong and accepted at coverage c) dc = (1 − AUROC_f) a (1 − a) + ½ (1 − a)² with the accuracy a and the
    area AUROC_f under the ROC curve of telling right predictions from wrong ones by their confidence (Traub et al.,
    2024, "Overcoming common flaws in the evaluation of selective classification systems", section 3). Unlike `aurc` it
    does not weigh the most confident predictions more than others. Arguments and errors are those of `aurc`.
    """
    ranking = _ranking(probs, y, ignore_index)
    return ranking.curve(ranking.once).mean_generalised_risk()[0].to(probs.dtype)


def coverage_at_risk(probs: Tensor, y: Tensor, risk: float = 0.05, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Largest share of the predictions that can be accepted with at most this share of errors among them.

    max over thresholds τ of P(confidence ≥ τ) with P(wrong | confidence ≥ τ) ≤ risk (Geifman and El-Yaniv, 2017,
    "Selective classification for deep neural networks", section 2); 0 if no threshold meets it. Predictions of equal
    confidence are accepted together, or not at all.

    Args:
        probs: Class probabilities `[..., C]`.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        risk: Largest acceptable share of errors, in [0, 1].
        ignore_index: Label of rows to be ignored.

    Raises:
        InvalidArgument: `risk` is outside [0, 1].
        InvalidData: As for `nll`.
    """
    if not 0 <= risk <= 1:
        raise InvalidArgument(f"risk={risk!r} is not accepted; give a share of errors between 0 and 1, such as 0.05.")
    ranking = _ranking(probs, y, ignore_index)
    return ranking.curve(ranking.once).coverage_at(risk)[0].to(probs.dtype)


def _ranking(probs: Tensor, y: Tensor, ignore_index: int) -> Ranking:
    probs, y = _counted(probs, y, ignore_index)
    confidence, predicted = probs.max(1)
    return Ranking.by_confidence(confidence, scores.class_agreement(predicted, y))


def ece_floor(
    probs: Tensor, n_bins: int = 15, n_resamples: int = 200, generator: torch.Generator | None = None
) -> Tensor:
    """Calibration error that these probabilities would show if they were perfectly calibrated, with as many data.

    The expected calibration error is positive also of a calibrated network, since the accuracy of a bin is that of few
    data (Kumar et al., 2019, "Verified uncertainty calibration"; the labels are resampled as in the consistency bars of
    Bröcker and Smith, 2007). The floor is its mean over labels drawn from the probabilities: of a datum, the predicted
    class is right with the probability that it has. An `expected_calibration_error` of this size is noise.

    Args:
        probs: Class probabilities `[..., C]`, without those of ignored labels.
        n_bins: Number of bins of equal width over the confidence, as of the calibration error.
        n_resamples: Number of times that all labels are drawn.
        generator: Random generator; None for seed 0. Equal seeds give equal results.

    Raises:
        InvalidArgument: `n_bins` or `n_resamples` is not positive.
        InvalidData: There are no probabilities, or they are outside [0, 1].
    """
    _check_bins(n_bins)
    if n_resamples < 1:
        raise InvalidArgument(f"n_resamples={n_resamples!r} is not accepted; give a positive number.")
    if not isinstance(probs, Tensor) or probs.ndim < 2 or not probs.numel():
        raise InvalidData(
            f"probs of shape {list(getattr(probs, 'shape', []))}; class probabilities [..., C] are accepted."
        )
    rows = probs.reshape(-1, probs.shape[-1])
    _check_probabilities(rows)
    confidence = scores.class_confidence(rows)
    return scores.calibration_floor(confidence, n_bins, n_resamples, generator).to(probs.dtype)


def compare_probabilities(
    network: Tensor,
    posterior: Tensor,
    y: Tensor,
    ignore_index: int = IGNORE_INDEX,
    *,
    names: tuple[str, str] = ("network", "posterior"),
    generator: torch.Generator | None = None,
    datum: Tensor | None = None,
) -> Comparison:
    """Comparison of two predictions of the same labels: the table of `la.compare`, without a posterior.

    The two may be of anything that gives probabilities: a network and its temperature scaling, two ensembles, … The
    NLL is that of `nll`, where a probability of 0 counts as the smallest number of its dtype, so that it is finite.
    The data are the first dimension, unless `datum` says otherwise: standard errors know that other labels of a datum,
    of its tokens or pixels, are not independent of each other.

    Args:
        network: Class probabilities `[..., C]`, those to compare with.
        posterior: Class probabilities `[..., C]` of the same data.
        y: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.
        ignore_index: Label of rows to be ignored.
        names: Names of the two in the table, e.g. `("network", "temperature scaling")`.
        generator: Random generator of resampled data and labels; None for seed 0. Equal seeds give equal results.
        datum: Index of the datum that every entry of the first dimension belongs to, `[N]`; None: each is one.

    Raises:
        InvalidArgument: There are not two names, or another number of indices.
        InvalidData: As for `nll`, or the shapes of the two differ.
    """
    from laplace.comparison import ScoredData, scores_of
    from laplace.likelihoods.categorical import Categorical

    check_generator(generator)
    if isinstance(names, str) or len(names) != 2:
        raise InvalidArgument(f"names={names!r}; give two, such as ('network', 'temperature scaling').")
    sides = [_counted(probs, y, ignore_index) for probs in (network, posterior)]
    if network.shape != posterior.shape:
        raise InvalidData(
            f"got probabilities {list(network.shape)} and {list(posterior.shape)}; both must be of the same data and "
            "classes."
        )
    datum = check_datum(datum, len(y)).repeat_interleave(math.prod(network.shape[1:-1]))
    if y.shape != network.shape:
        datum = datum[(y.reshape(-1) != ignore_index).cpu()]
    likelihood, nothing = Categorical(ignore_index=None), torch.zeros(())
    data = ScoredData()
    first, second = (scores_of(likelihood, rows.detach(), labels, nothing) for rows, labels in sides)
    data.add(first, second, datum)
    source = torch.Generator().manual_seed(0) if generator is None else generator
    return data.compared(torch.Generator().manual_seed(drawn_seed(source)), (str(names[0]), str(names[1])))


def check_datum(datum: Tensor | None, n_rows: int) -> Tensor:
    """Indices of the data that rows belong to, `[N]`; without any every row is a datum.

    Raises:
        InvalidArgument: Another shape, or no integers.
    """
    if datum is None:
        return torch.arange(n_rows)
    if not isinstance(datum, Tensor) or datum.shape != (n_rows,) or datum.is_floating_point():
        shape = list(getattr(datum, "shape", []))
        raise InvalidArgument(f"datum of shape {shape}; integers [{n_rows}], the datum of every row, are accepted.")
    return datum.cpu().unique(return_inverse=True)[1]


brier_score = brier
"""The Brier score under the name that scikit-learn has for it: `brier`."""

ece = expected_calibration_error
"""The expected calibration error under its short name: `expected_calibration_error`."""


def _check_bins(n_bins: int) -> None:
    if n_bins < 1:
        raise InvalidArgument(f"n_bins={n_bins!r} is not accepted; give a positive number of bins.")


def _gaps(probs: Tensor, y: Tensor, n_bins: int, ignore_index: int) -> Tensor:
    count, confidence, correct = calibration_bins(probs, y, n_bins, ignore_index)
    return (correct - confidence).abs()[count > 0]


def gaussian_nll(mean: Tensor, var: Tensor, y: Tensor) -> Tensor:
    """Mean negative log density −(1/N) Σ_n log N(y_n | m_n, V_n) of vector targets, in nats per datum.

    Args:
        mean: Predictive means `[B, C]`.
        var: Predictive variances `[B, C]` or covariances `[B, C, C]` of the target, the noise included: that is
            `la.predict(x).variance`. The variance of `la(x)` is without the noise; the score would be wrong.
        y: Targets `[B, C]`.

    Raises:
        InvalidData: Shapes do not match, or a variance is not positive.
    """
    if mean.ndim != 2 or y.shape != mean.shape or var.shape not in (mean.shape, (*mean.shape, mean.shape[1])):
        shapes = f"mean {tuple(mean.shape)}, var {tuple(var.shape)}, y {tuple(y.shape)}"
        raise InvalidData(f"got {shapes}; accepted are mean and y of [B, C] and var of [B, C] or [B, C, C].")
    covariance = torch.diag_embed(var) if var.ndim == 2 else var
    root, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed.any()):
        raise InvalidData(
            "var is not positive (definite) for some rows; add the observation noise to a latent variance."
        )
    white = torch.linalg.solve_triangular(root, (y - mean).unsqueeze(2), upper=False)
    log_det = root.diagonal(dim1=1, dim2=2).log().sum(1)
    return (0.5 * white.square().sum((1, 2)) + log_det + 0.5 * mean.shape[1] * math.log(2 * math.pi)).mean()


def gaussian_crps(mean: Tensor, var: Tensor, y: Tensor) -> Tensor:
    """Mean continuous ranked probability score of Gaussian predictions, summed over outputs, in units of the target.

    CRPS(N(m, s²), y) = s (z (2Φ(z) − 1) + 2φ(z) − 1/√π) with z = (y − m)/s   (Gneiting and Raftery, 2007, section 4.2,
    with the sign that makes small values good). As s goes to 0 it becomes the absolute error.

    Args:
        mean: Predictive means `[B, C]`.
        var: Predictive variances of the target `[B, C]`, the observation noise included.
        y: Targets `[B, C]`.

    Raises:
        InvalidData: Shapes do not match, there is no datum, or a variance is not positive.
    """
    _check_gaussian(mean, var, y)
    return scores.gaussian_crps(mean, var, y).mean()


def regression_calibration_error(mean: Tensor, var: Tensor, y: Tensor, n_levels: int = 20) -> Tensor:
    """Distance of quantiles from holding the share of targets that they claim [Kuleshov et al., 2018, eq. 9].

    Mean over levels p_j = j / (m + 1), j = 1 … m, of (p_j − p̂_j)², p̂_j the share of all entries whose target lies
    below the predictive p_j-quantile: 0 where predictions are calibrated, less than 1.

    Args:
        mean: Predictive means `[B, C]`.
        var: Predictive variances of the target `[B, C]`, the observation noise included.
        y: Targets `[B, C]`.
        n_levels: Number of levels m.

    Raises:
        InvalidArgument: `n_levels` is not positive.
        InvalidData: Shapes do not match, there is no datum, or a variance is not positive.
    """
    if n_levels < 1:
        raise InvalidArgument(f"n_levels={n_levels!r} is not accepted; give a positive number of levels.")
    _check_gaussian(mean, var, y)
    levels, shares = scores.quantile_shares(mean, var, y, n_levels)
    return (levels - shares).square().mean()


def _check_gaussian(mean: Tensor, var: Tensor, y: Tensor) -> None:
    if mean.ndim != 2 or y.shape != mean.shape or var.shape != mean.shape or not mean.numel():
        shapes = f"mean {tuple(mean.shape)}, var {tuple(var.shape)}, y {tuple(y.shape)}"
        raise InvalidData(f"got {shapes}; accepted are three tensors of [B, C] with B > 0.")
    if not bool((var > 0).all()):
        raise InvalidData("var is not positive for some rows; add the observation noise to a latent variance.")


@runtime_checkable
class AccumulatingMetric(Protocol):
    """Protocol of metrics over batches that are read once."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a batch of predictions and targets."""
        ...

    def compute(self) -> Any:
        """Returns the metric of everything since the last reset."""
        ...


@runtime_checkable
class RunningMetric(AccumulatingMetric, Protocol):
    """Protocol of metrics over batches that start anew; every `torchmetrics.Metric` follows it."""

    def reset(self) -> None:
        """Forgets everything."""
        ...


def accepted_by(metric: AccumulatingMetric, row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The part of `(mean, variance, y)` that a metric's `update` takes: all, or `(mean, y)`; a pair as it is.

    Three arguments where it requires three: `weight=None` would be another's third. Sums and wrappers of metrics have
    a signature of `*args`, which does not tell; a copy tries all three then.
    """
    pair = row[0], row[-1]
    parameters = inspect.signature(metric.update).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(row) == 2 or not any(p.kind is p.VAR_POSITIONAL for p in required):
        return row if len(required) >= len(row) else pair
    try:
        copy.deepcopy(metric).update(*row)
    except TypeError:
        return pair
    return row


class RunningNLLMetric:
    """Mean negative log likelihood of labels over batches of class probabilities, in nats per label.

    Batches accumulate until `reset`: the result does not depend on how the data were cut into batches. A label of
    probability zero makes it infinite. It follows the `torchmetrics` protocol without needing that package.

    Args:
        ignore_index: Label of entries to be ignored.

    Attributes:
        nll_sum: Sum of the negative log likelihoods, 0-dim, float64.
        n_valid_labels: Number of labels that were not ignored.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        """Forgets all batches."""
        self.nll_sum = torch.zeros((), dtype=wide_dtype())
        self.n_valid_labels = 0

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Adds a batch.

        Args:
            probs: Class probabilities `[..., C]`.
            targets: Integer labels `[...]`, or class probabilities (soft labels) `[..., C]`.

        Raises:
            InvalidData: Shapes do not match, a label is out of range, or a probability is outside [0, 1].
        """
        probs, targets = _flattened(probs, targets, self.ignore_index)
        logs = scores.class_log_probability(probs.detach(), targets)
        self.nll_sum = self.nll_sum - widened(logs.sum().cpu())
        self.n_valid_labels += len(targets)

    def compute(self) -> Tensor:
        """Mean over all labels since the last reset, 0-dim, float64.

        Raises:
            InvalidData: There was no label, or all were ignored.
        """
        if self.n_valid_labels == 0:
            raise InvalidData("no label was counted; call update with at least one label that is not ignore_index.")
        return self.nll_sum / self.n_valid_labels

    def __call__(self, probs: Tensor, targets: Tensor) -> Tensor:
        """Adds a batch and returns the mean over this batch alone (arguments as for `update`)."""
        self.update(probs, targets)
        return nll(probs, targets, self.ignore_index)


def _counted(probs: Tensor, y: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Rows that are not ignored, `[N, C]`, and labels `[N]` or `[N, C]`, with N > 0."""
    probs, y = _flattened(probs, y, ignore_index)
    if len(y) == 0:
        raise InvalidData(f"no label is left to score: the batch is empty or all labels are {ignore_index}.")
    return probs, y


def _flattened(probs: Tensor, y: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Checked rows without the ignored ones, `[N, C]`, and labels `[N]` or `[N, C]`."""
    if not isinstance(probs, Tensor):
        raise InvalidData(f"probs is a {type(probs).__name__}; {_OF_REGRESSION}")
    if probs.ndim < 2 or y.shape not in (probs.shape, probs.shape[:-1]):
        raise InvalidData(
            f"got probs {tuple(probs.shape)} and labels {tuple(y.shape)}; accepted are [..., C] and [...] or [..., C]."
        )
    rows = probs.reshape(-1, probs.shape[-1])
    if y.shape == probs.shape:
        labels = check_soft_labels(rows, y.reshape(rows.shape))
    else:
        labels = _check_indices(y.reshape(-1).to(probs.device), rows.shape[1], ignore_index)
        keep = labels != ignore_index
        rows, labels = rows[keep], labels[keep]
    _check_probabilities(rows)
    return rows, labels


def _check_probabilities(rows: Tensor) -> None:
    # A little above 1 is rounding of a softmax in low precision; logits and log probabilities are not.
    if not bool(((rows >= 0) & (rows <= 1.01)).all()):
        raise InvalidData("probs holds NaN or values outside [0, 1]; give probabilities, not logits (softmax first).")


def _check_indices(y: Tensor, n_classes: int, ignore_index: int) -> Tensor:
    """Integer labels `[N]`, int64."""
    if y.is_floating_point() or y.dtype == torch.bool:
        raise InvalidData(f"labels have dtype {y.dtype}; accepted are integer classes (y.long() converts).")
    labels = y.long()
    counted = labels[labels != ignore_index]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < n_classes:
        raise InvalidData(
            f"labels lie in [{int(counted.min())}, {int(counted.max())}]; "
            f"accepted are 0 to {n_classes - 1}, and {ignore_index} for an ignored label."
        )
    return labels
