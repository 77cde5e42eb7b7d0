"""Candidates of temperature and scale by their formulas: the network is one of them, and weights are of a mixture."""

from __future__ import annotations

import math

import torch
from torch.distributions import Normal

from laplace.tuning.stacked import OF_NUMBERS, SCALES, TEMPERATURES, Stacked
from laplace.tuning.stacking import stacking_weights

MEAN, VARIANCE = torch.randn(5, 3).double(), torch.rand(5, 3).double()


def test_every_candidate_is_its_probit() -> None:
    candidates = Stacked.equal(MEAN)
    found = candidates.log_probabilities(MEAN, VARIANCE)
    pairs = [(t, c) for t in TEMPERATURES for c in SCALES]
    for row, (t, c) in zip(found, pairs, strict=True):
        logits = MEAN / t / (1 + math.pi / 8 * c * VARIANCE / t**2).sqrt()
        torch.testing.assert_close(row, logits.log_softmax(1))
    torch.testing.assert_close(candidates.probabilities(MEAN, VARIANCE), found.exp().mean(0))


def test_the_network_is_one_of_them() -> None:
    network = [(t, c) for t in TEMPERATURES for c in SCALES].index((1.0, 0.0))
    torch.testing.assert_close(Stacked.equal(MEAN).log_probabilities(MEAN, VARIANCE)[network], MEAN.log_softmax(1))
    variances = Stacked.equal(MEAN, OF_NUMBERS).variances(VARIANCE[:, :1], torch.tensor(0.3).double())
    assert torch.equal(variances[OF_NUMBERS.index(1.0) * len(SCALES)], torch.full((5, 1), 0.3).double())


def test_weights_are_those_of_a_mixture_of_densities() -> None:
    labels, noise = MEAN.argmax(1), torch.tensor(0.1).double()
    found = Stacked.of_classes(MEAN, VARIANCE, labels, torch.ones(5).double())
    densities = Stacked.equal(MEAN).log_probabilities(MEAN, VARIANCE)[:, torch.arange(5), labels]
    assert torch.equal(found.weights, stacking_weights(densities.T, torch.ones(5).double()))
    mean, variance, y = MEAN[:, :1], VARIANCE[:, :1], MEAN[:, 1:2]
    numbers = Stacked.of_numbers(mean, variance, noise, y)
    pairs = [(t, c) for t in OF_NUMBERS for c in SCALES]
    # The widths of every scale are those of the left-out residuals on the mean, but for the temperature.
    own = [noise + c * variance for _, c in pairs]
    widths = [t**2 * ((y - mean).square() / each).mean() * each for (t, _), each in zip(pairs, own, strict=True)]
    densities = torch.cat([Normal(mean, each.sqrt()).log_prob(y) for each in widths], 1)
    torch.testing.assert_close(numbers.weights, stacking_weights(densities))
