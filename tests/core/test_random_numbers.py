"""Random numbers: equal seeds, devices, parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.core import random_numbers
from laplace.core.gaussian import GaussianOutputs
from tests.core.test_gaussian import B, C, covariances, spd
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable


@pytest.mark.parametrize("kind", covariances())
def test_equal_seeds_give_equal_numbers_and_the_global_state_is_left_alone(kind) -> None:
    gaussian = GaussianOutputs(torch.zeros(B, C, dtype=torch.float64), covariances()[kind][0])
    before = torch.random.get_rng_state()
    first, again = (gaussian.sample(4, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.shape == (4, B, C)


def test_follows_the_device(device) -> None:
    mean, covariance = torch.zeros(B, C), spd(B, c=C, dtype=torch.float32)
    there = GaussianOutputs(mean.to(device), covariance.to(device)).sample(2, torch.Generator().manual_seed(0))
    here = GaussianOutputs(mean, covariance).sample(2, torch.Generator().manual_seed(0))
    assert there.device.type == device.type
    assert_close(there, here, "float32")


@pytest.mark.parametrize("kind", covariances())
@pytest.mark.parametrize("n", [1, 7, 50, 96])
def test_averages_in_parts_are_those_of_all_draws(kind, n, monkeypatch) -> None:
    """Parts are of 16 to 31 draws here: the random numbers are those of one call, and none is drawn twice."""
    covariance, _ = covariances()[kind]
    gaussian = GaussianOutputs(torch.randn(B, C, dtype=torch.float64), covariance)
    whole = gaussian.sample(n, torch.Generator().manual_seed(2))
    monkeypatch.setattr(random_numbers, "_AT_ONCE", 16 * B * C)
    in_parts = gaussian.sample(n, torch.Generator().manual_seed(2))
    torch.testing.assert_close(in_parts, whole, rtol=1e-12, atol=1e-12)  # the products may be of other kernels
    sizes: list[int] = []

    def function(draws: Tensor) -> Tensor:
        sizes.append(len(draws))
        return torch.softmax(draws, -1)

    average = gaussian.average(function, n, torch.Generator().manual_seed(2))
    assert max(sizes) < 32 and sum(sizes) == n
    torch.testing.assert_close(average, torch.softmax(whole, -1).mean(0), rtol=1e-12, atol=1e-14)
