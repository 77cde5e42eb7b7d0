"""CREPE, which tells the pitch of a sound and ends in a sigmoid: labels are free, since tones can be made."""

from __future__ import annotations

import pytest
import torch

from examples.pretrained_data import CrepeLogits, crepe, pitch_bins, tones
from laplace import Laplace
from laplace.errors import InvalidData
from tests.pretrained.loading import lent, loaded


@pytest.fixture
def sounds() -> tuple[torch.Tensor, torch.Tensor]:
    """Forty tones from 80 to 1000 Hz with noise, and the outputs that mean them."""
    frequencies = 80 * 12.5 ** torch.rand(40)
    x = tones(frequencies, 6.28 * torch.rand(40))
    return (x + 0.3 * torch.randn_like(x)) / 1.09**0.5, pitch_bins(frequencies)


def test_it_hears_tones():
    network = loaded(crepe)
    frequencies = torch.tensor([110.0, 220.0, 440.0, 880.0])
    with torch.no_grad():
        assert network(tones(frequencies)).argmax(1).tolist() == pitch_bins(frequencies).tolist()


def test_a_sigmoid_at_the_end_is_refused(sounds):
    x, y = sounds
    la = Laplace(loaded(crepe), "bernoulli", hessian_structure="diag")
    with pytest.raises(InvalidData, match="sigmoid"):
        la.fit([(x, torch.nn.functional.one_hot(y, 360))])


@pytest.mark.parametrize("likelihood", ["classification", "bernoulli"])
def test_logits_are_fitted(likelihood, sounds):
    x, y = sounds
    network = CrepeLogits(loaded(crepe))
    targets = y if likelihood == "classification" else torch.nn.functional.one_hot(y, 360)
    with lent(network):
        la = Laplace(network, likelihood)
        la.fit([(x[:20], targets[:20]), (x[20:], targets[20:])])
        probabilities = la(x)
    assert probabilities.shape == (40, 360)
    assert bool(probabilities.isfinite().all())
    assert bool(((probabilities.argmax(1) - y).abs() <= 2).float().mean() > 0.9)
