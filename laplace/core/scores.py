"""Scores of predictive distributions, one per input, and rankings by confidence: for metrics, tuning and reports.

Probabilities and moments of one posterior are `[B, C]`, of n candidates `[n, B, C]`; scores `[B]` and `[n, B]`. Every
score can be differentiated in the prediction. Nothing is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.special import entr

from laplace.core.precision_policy import widened
from laplace.core.random_numbers import uniform


def summed(terms: Callable[[Tensor], Tensor], y: Tensor, at: Tensor) -> Tensor:
    """Σ_c of terms of targets y `[B, C]`, over the entries that were observed: those that are not NaN, `[..., B]`.

    Terms are taken at `at` where nothing was observed, so that derivatives are finite there, too.
    """
    seen = ~y.isnan()
    return torch.where(seen, terms(torch.where(seen, y, at)), 0.0).sum(-1)


def class_brier(probs: Tensor, y: Tensor, ignore_index: int | None = None) -> Tensor:
    """Σ_c (p_c − 1[y = c])² of labels `[B]` (Brier, 1950), Σ_c (p_c − q_c)² of soft ones q, `[B, C]`.

    Of an ignored label it means nothing.
    """
    if not y.is_floating_point():
        labels = y if ignore_index is None else y.where(y != ignore_index, 0)
        y = one_hot(labels, probs.shape[-1])
    return (probs - y).square().sum(-1)


def class_log_probability(probs: Tensor, y: Tensor) -> Tensor:
    """Log p_y of labels `[B]`, Σ_c q_c log p_c of soft ones q, `[B, C]`, where classes of q_c = 0 count nothing."""
    if not y.is_floating_point():
        return probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).log()
    return torch.xlogy(y, probs).sum(-1)


def class_agreement(predicted: Tensor, y: Tensor) -> Tensor:
    """1[k = y] of predicted classes k, `[..., B]`, and labels `[B]`; q_k, its expectation, of soft ones q, `[B, C]`."""
    if not y.is_floating_point():
        return predicted == y
    return y.expand(*predicted.shape, -1).gather(-1, predicted.unsqueeze(-1)).squeeze(-1)


def binary_brier(probs: Tensor, y: Tensor) -> Tensor:
    """Σ_c (p_c − y_c)² of labels `[B, C]`."""
    return summed(lambda y: (probs - y).square(), y, probs)


def class_confidence(probs: Tensor) -> Tensor:
    """max_c p_c."""
    return probs.amax(-1)


def binary_confidence(probs: Tensor) -> Tensor:
    """Mean over labels of max(p, 1 − p)."""
    return torch.maximum(probs, 1 - probs).mean(-1)


def class_entropy(probs: Tensor) -> Tensor:
    """−Σ_c p_c log p_c, of one label."""
    return _entropy_terms(probs).sum(-1)


def binary_entropy(probs: Tensor) -> Tensor:
    """Σ_c of the entropies of labels that are independent."""
    return (_entropy_terms(probs) + _entropy_terms(1 - probs)).sum(-1)


def gaussian_entropy(variance: Tensor) -> Tensor:
    """½ Σ_c log(2πe v_c), the differential entropy of independent Gaussians."""
    return 0.5 * (2 * math.pi * math.e * variance).log().sum(-1)


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """−Σ_c log N(y_c; m_c, v_c)."""
    return summed(lambda y: 0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)), y, mean)


def gaussian_crps(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Σ_c of the continuous ranked probability scores of N(m_c, v_c); see `laplace.metrics.gaussian_crps`."""
    scale = variance.sqrt()

    def each(y: Tensor) -> Tensor:
        z = (y - mean) / scale
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        # 2Φ(z) − 1 = erf(z/√2), which keeps its digits around 0.
        return scale * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))

    return summed(each, y, mean)


def confidence_bins(confidence: Tensor, n_bins: int) -> Tensor:
    """Bins of equal width, from 0: bin m − 1 of M holds what lies in ((m−1)/M, m/M]."""
    return (confidence.detach() * n_bins).ceil().long().sub(1).clamp(0, n_bins - 1)


def binned_gaps(probs: Tensor, y: Tensor, n_bins: int) -> Tensor:
    """1[the most probable class is y] − max_c p_c in the bin of the latter, 0 in the others, `[..., B, M]`, float64.

    The expected calibration error is (1/N) Σ_m |Σ_n gap_nm|. Of soft labels `[B, C]` the
    indicator is its expectation, the label's probability of that class.
    """
    confidence, predicted = probs.max(-1)
    gap = widened(class_agreement(predicted, y)) - widened(confidence)
    return one_hot(confidence_bins(confidence, n_bins), n_bins) * gap.unsqueeze(-1)


def _entropy_terms(probs: Tensor) -> Tensor:
    """−p log p of probabilities at least the smallest normal number away from 0, where its slope is infinite."""
    return entr(probs.clamp(min=torch.finfo(probs.dtype).tiny))


def quantile_shares(mean: Tensor, var: Tensor, y: Tensor, n_levels: int) -> tuple[Tensor, Tensor]:
    """Levels p_j = j / (m + 1), j = 1 … m, and the share of targets below the Gaussian p_j-quantiles, `[m]` each."""
    reached = torch.special.ndtr((y - mean) / var.sqrt()).flatten()
    levels = torch.arange(1, n_levels + 1, dtype=reached.dtype, device=reached.device) / (n_levels + 1)
    return levels, (reached <= levels.unsqueeze(1)).to(reached.dtype).mean(1)


# Rows of a classification from the most confident one on, their errors, and what both say of the confidence.
#
# Rows may count several times, as in samples of the data with replacement: counts `[R, N]` are whole numbers, and every
# statistic is `[R]`. Rows of equal confidence are in random order, so that nothing depends on the order of the data:
# where they are accepted one after another a statistic is the expectation, and a threshold accepts them together.


_SLACK = 1e-12
"""Relative rounding of sums of errors that are no whole numbers, by which a risk may exceed its limit."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Rows in descending order of their confidence."""

    order: Tensor  # indices of the rows, `[N]`
    confidence: Tensor  # probabilities of the predicted classes in this order, `[N]`, float64
    errors: Tensor  # 1 for a wrong class, 0 for the right one, of soft labels the probability of another class, `[N]`
    last: Tensor  # place of the last row of every group of equal confidence, `[G]`

    @classmethod
    def by_confidence(cls, confidence: Tensor, agreement: Tensor) -> Ranking:
        """Ranking of rows with these confidences and whether the predicted class is the label, `[N]` each."""
        ordered, order = widened(confidence).sort(descending=True, stable=True)
        return cls(order, ordered, 1 - widened(agreement)[order], _ends(ordered))

    @property
    def once(self) -> Tensor:
        """Counts of the data themselves, `[1, N]`."""
        return torch.ones_like(self.errors).unsqueeze(0)

    def ordered(self, counts: Tensor) -> Tensor:
        """Counts `[R, N]` of rows in the order of the data, from the most confident row on."""
        return counts[:, self.order]

    def curve(self, counts: Tensor) -> RiskCurve:
        """Errors among the accepted rows, of rows that count so often, `[R, N]` from the most confident on."""
        size, errors = counts, counts * self.errors
        if len(self.last) < counts.shape[1]:
            size, errors = (_steps(values.cumsum(1)[:, self.last]) for values in (size, errors))
        return RiskCurve(size, errors, size.cumsum(1), errors.cumsum(1))

    def calibration_error(self, counts: Tensor, n_bins: int) -> Tensor:
        """Σ_m |Σ_n gap_nm| / N [Guo et al., 2017, eq. 3], of rows that count so often, from the most confident on."""
        return self.binned(counts * (1 - self.errors - self.confidence), n_bins) / counts.sum(1)

    def binned(self, gaps: Tensor, n_bins: int) -> Tensor:
        """Σ_m |Σ_n g_n|, the outer sum over bins of equal width of the confidence, of g `[R, N]` in this order."""
        ends = _ends(confidence_bins(self.confidence, n_bins))
        return _steps(gaps.cumsum(1)[:, ends]).abs().sum(1)


@dataclass(frozen=True, eq=False)
class RiskCurve:
    """Numbers of rows and of errors in groups of equal confidence, from the most confident on, `[R, G]` each."""

    size: Tensor  # rows of a group
    errors: Tensor  # errors among them
    accepted: Tensor  # rows down to the end of the group
    wrong: Tensor  # errors among those

    def mean_risk(self) -> Tensor:
        """(1/N) Σ_i E_i / i with the errors E_i among the first i rows, expected over the order of equal confidences.

        With a rows and E errors before a group of t rows and e errors, E_(a+s) = E + s e/t on average, so that the
        group adds e + (E − a e/t) Σ_(s=1..t) 1/(a + s).
        """
        n_rows = self.accepted[:, -1]
        sums = torch.arange(int(n_rows.max()) + 1, dtype=n_rows.dtype, device=n_rows.device)
        sums[1:] = sums[1:].reciprocal().cumsum(0)
        rate = self.errors / self.size.clamp(min=1)
        before = (self.wrong - self.errors) - (self.accepted - self.size) * rate
        return (self.errors + before * _steps(sums[self.accepted.long()])).sum(1) / n_rows

    def mean_generalised_risk(self) -> Tensor:
        """∫ E(c) dc with the share E(c) of all rows that are accepted and wrong at a coverage c, linear in a group."""
        return (self.size * (self.wrong - 0.5 * self.errors)).sum(1) / self.accepted[:, -1].square()

    def coverage_at(self, risk: float) -> Tensor:
        """Largest share of rows that a threshold accepts with a share of errors of at most `risk` among them."""
        within = self.wrong <= risk * (1 + _SLACK) * self.accepted
        return (self.accepted * within).amax(1) / self.accepted[:, -1]


def _ends(values: Tensor) -> Tensor:
    """Places of the last of equal values that follow each other, of `[N]`."""
    ends = torch.ones_like(values, dtype=torch.bool)
    ends[:-1] = values[1:] != values[:-1]
    return ends.nonzero().flatten()


def _steps(sums: Tensor) -> Tensor:
    """Differences between consecutive sums `[R, G]`, the first one from 0."""
    return sums.diff(dim=1, prepend=torch.zeros_like(sums[:, :1]))


def calibrated_draws(
    confidence: Tensor, n_bins: int, n_draws: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Calibration errors and accuracies, `[R]` each, float64, of rows that are right with the probability they have."""
    source = torch.Generator().manual_seed(0) if generator is None else generator
    ranking = Ranking.by_confidence(confidence, torch.ones_like(confidence))
    errors, accuracies = [], []
    for _ in range(n_draws):  # one at a time: the numbers do not depend on how many fit into memory
        right = widened(uniform(tuple(confidence.shape), confidence, source) < ranking.confidence)
        errors.append(ranking.binned((right - ranking.confidence).unsqueeze(0), n_bins)[0])
        accuracies.append(right.mean())
    return torch.stack(errors) / len(confidence), torch.stack(accuracies)


def sums_by_datum(values: Tensor, datum: Tensor) -> Tensor:
    """Sums `[N, ...]` over the rows `[R, ...]` of every datum, whose indices `[R]` are 0 to N − 1."""
    return values.new_zeros(int(datum.max()) + 1, *values.shape[1:]).index_add_(0, datum, values)


def gaps_by_datum(confidence: Tensor, agreement: Tensor, datum: Tensor, n_bins: int) -> Tensor:
    """Σ (agreement − confidence) over the rows of every datum in every bin of the confidence, `[N, M]`, float64."""
    gap = widened(agreement) - widened(confidence)
    cells = datum * n_bins + confidence_bins(confidence, n_bins)
    n_data = int(datum.max()) + 1
    return gap.new_zeros(n_data * n_bins).index_add_(0, cells, gap).view(n_data, n_bins)


def clustered_floor(confidence: Tensor, agreement: Tensor, datum: Tensor, n_bins: int) -> Tensor:
    """Calibration error expected of calibrated rows that depend on each other within a datum, 0-dim, float64.

    The gap of a bin is a sum over data, about normal, whose variance is estimated by Σ_n (g_n − ḡ)² (Liang and Zeger,
    1986): the mean of its absolute value is √(2/π) standard deviations.
    """
    gaps = gaps_by_datum(confidence, agreement, datum, n_bins)
    variance = (gaps - gaps.mean(0)).square().sum(0) * len(gaps) / max(1, len(gaps) - 1)
    return (2 / math.pi * variance).sqrt().sum() / len(confidence)


def signed_draws(gaps: Tensor, n_rows: int, n_draws: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Calibration errors, and accuracies less mean confidences, `[R]` each, under the hypothesis of calibration.

    Then the gaps of a datum, `[N, M]`, are as likely with the other sign, whatever its rows have to do with each other
    (the wild bootstrap: Wu, 1986).
    """
    source = torch.Generator().manual_seed(0) if generator is None else generator
    signs = widened(torch.randint(2, (n_draws, len(gaps)), generator=source)).to(gaps) * 2 - 1
    drawn = signs @ gaps / n_rows
    return drawn.abs().sum(1), drawn.sum(1)


def calibration_floor(confidence: Tensor, n_bins: int, n_draws: int, generator: torch.Generator | None) -> Tensor:
    """Mean calibration error of calibrated rows, 0-dim, float64; arguments as of `calibrated_draws`."""
    return calibrated_draws(confidence, n_bins, n_draws, generator)[0].mean()
