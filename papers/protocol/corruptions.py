"""Corruptions of images `[N, C, H, W]` in [0, 1] at five severities, after those of Hendrycks and Dietterich (2019).

Theirs are for photographs of 32 pixels and more; these are the ones that leave something to see of 8 × 8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from protocol.data import blurred, noisy

SEVERITIES = (1, 2, 3, 4, 5)
Corruption = Callable[[Tensor, int, torch.Generator], Tensor]


def _gaussian_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    return noisy(x, 0.08 * severity, generator)


def _shot_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Counts of 20, 10, … photons per pixel at full brightness."""
    photons = (20.0, 10.0, 6.0, 4.0, 2.0)[severity - 1]
    return (torch.poisson(x * photons, generator=generator) / photons).clamp(0, 1)


def _impulse_noise(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """A share of the pixels is black or white."""
    drawn = torch.rand(x.shape, generator=generator)
    share = 0.04 * severity
    return torch.where(drawn < share / 2, 0.0, torch.where(drawn > 1 - share / 2, 1.0, x))


def _blur(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    return blurred(x, 0.3 + 0.15 * severity)


def _shift(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Moved in a random direction of its own by ⅓, ⅔, … pixels."""
    angle = 2 * torch.pi * torch.rand(len(x), generator=generator)
    step = torch.stack([angle.cos(), angle.sin()], 1) * (severity / 3) * (2 / x.shape[-1])
    turn = torch.eye(2).expand(len(x), 2, 2)
    grid = F.affine_grid(torch.cat([turn, step.unsqueeze(2)], 2), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _fog(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Mixed with a smooth bright pattern."""
    n_data, _, height, width = x.shape
    pattern = torch.rand(n_data, 1, 3, 3, generator=generator)
    smooth = F.interpolate(pattern, (height, width), mode="bilinear", align_corners=True)
    weight = 0.12 * severity
    return (1 - weight) * x + weight * (0.5 + 0.5 * smooth)


def _brightness(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    return (x + 0.1 * severity).clamp(0, 1)


def _contrast(x: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Towards the image's mean."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (1 - 0.16 * severity) * (x - mean)


CORRUPTIONS: dict[str, Corruption] = {
    "Gaussian noise": _gaussian_noise,
    "shot noise": _shot_noise,
    "impulse noise": _impulse_noise,
    "blur": _blur,
    "shift": _shift,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
}


def corrupted(x: Tensor, name: str, severity: int, generator: torch.Generator) -> Tensor:
    """Images with one of `CORRUPTIONS`, at a severity from 1 to 5."""
    return CORRUPTIONS[name](x, severity, generator)
