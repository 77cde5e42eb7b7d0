"""Generated images `[N, 3, 16, 16]` of several domains: land use, tissue, wealth.

A domain is a sensor: its matrix of colours, brightness and noise. Of the domains that are not trained on, colours and
noise lie farther from the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protocol.data import Part
from protocol.domains import Domains, DomainTask, Sizes

SIZE = 16
N_REGIONS = 4
"""Of land use: those that are known, and as many others; with 62 classes more would need many more data."""
N_KNOWN, N_UNKNOWN = 8, 32
"""Hospitals and countries."""
N_LAND_USES = 62


@dataclass(frozen=True)
class Sensors:
    """How domains look.

    Attributes:
        colours: `[D, 3, 3]`.
        brightness: `[D, 3]`.
        noise: `[D]`.
    """

    colours: Tensor
    brightness: Tensor
    noise: Tensor

    @classmethod
    def drawn(cls, n_domains: int, spread: float, noise: float, generator: torch.Generator) -> Sensors:
        """Random ones, `spread` from one that changes nothing."""
        colours = torch.eye(3) + spread * torch.randn(n_domains, 3, 3, generator=generator)
        brightness = 0.5 * spread * torch.randn(n_domains, 3, generator=generator)
        return cls(colours, brightness, noise * (0.5 + torch.rand(n_domains, generator=generator)))

    def __call__(self, images: Tensor, domain: Tensor, generator: torch.Generator) -> Tensor:
        """Images as domains `[N]` show them."""
        seen = torch.einsum("nij,njhw->nihw", self.colours[domain], images - 0.5) + 0.5
        seen = seen + self.brightness[domain][:, :, None, None]
        noise = torch.randn(images.shape, generator=generator) * self.noise[domain][:, None, None, None]
        return (seen + noise).clamp(0, 1)


def _two_kinds(
    spread: float, noise: float, generator: torch.Generator, n_known: int = N_KNOWN, n_unknown: int = N_UNKNOWN
) -> tuple[Sensors, Sensors]:
    """Sensors of known and of other domains."""
    known = Sensors.drawn(n_known, spread, noise, generator)
    return known, Sensors.drawn(n_unknown, 2 * spread, 1.5 * noise, generator)


def fields(n: int, size: int, coarse: int, generator: torch.Generator) -> Tensor:
    """Smooth random images `[n, 3, size, size]` in [0, 1]."""
    return F.interpolate(torch.rand(n, 3, coarse, coarse, generator=generator), (size, size), mode="bilinear")


def cropped(images: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Windows of `SIZE` pixels at corners `[N]`."""
    steps = torch.arange(SIZE)
    rows, columns = (top[:, None] + steps)[:, None, :, None], (left[:, None] + steps)[:, None, None, :]
    return images[torch.arange(len(images))[:, None, None, None], torch.arange(3)[None, :, None, None], rows, columns]


def network(x: Tensor, n_outputs: int, seed: int, width: int, n_channels: int) -> nn.Sequential:
    """Two convolutions with pooling, a layer of `width` features, a head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        n_pixels = (x.shape[2] // 4) * (x.shape[3] // 4)
        return nn.Sequential(
            nn.Conv2d(x.shape[1], n_channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(n_channels, 2 * n_channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * n_channels * n_pixels, width), nn.ReLU(), nn.Linear(width, n_outputs),
        )  # fmt: skip


# FMoW: which of 62 uses land is of.


def _land(templates: Tensor, domain: Tensor, sensors: Sensors, generator: torch.Generator) -> Part:
    """A window of the template of a class, under clutter."""
    n = len(domain)
    y = torch.randint(len(templates), (n,), generator=generator)
    top, left = torch.randint(5, (2, n), generator=generator).unbind()
    images = cropped(templates[y], top, left)
    share = 0.3 + 0.4 * torch.rand(n, 1, 1, 1, generator=generator)
    return Part(sensors((1 - share) * images + share * fields(n, SIZE, 6, generator), domain, generator), y)


def land_use(sizes: Sizes, generator: torch.Generator) -> Domains:
    """Four regions are known; others are in other colours."""
    templates = fields(N_LAND_USES, SIZE + 4, 6, generator)
    sensors, others = _two_kinds(0.08, 0.08, generator, N_REGIONS, N_REGIONS)
    known = _land(templates, torch.randint(N_REGIONS, (sizes.known,), generator=generator), sensors, generator)
    domain = torch.randint(N_REGIONS, (sizes.test,), generator=generator)
    return Domains.of(known, _land(templates, domain, others, generator), sizes)


def other_land_use(n_data: int, generator: torch.Generator) -> Part:
    """The same with other classes."""
    sizes = Sizes(n_data, 0, 0)
    return land_use(sizes, generator).train


# Camelyon17: whether tissue has a tumour.


def bumps(radius: Tensor, present: Tensor, generator: torch.Generator) -> Tensor:
    """Sum of round bumps, `[N, 1, SIZE, SIZE]`, at random places, of radii and presence `[N, K]`."""
    place = SIZE * torch.rand(*radius.shape, 2, generator=generator)
    steps = torch.arange(SIZE) + 0.5
    scaled = -0.5 / radius.square()
    vertical = (scaled[..., None] * (steps - place[..., :1]).square()).exp() * present[..., None]
    horizontal = (scaled[..., None] * (steps - place[..., 1:]).square()).exp()
    return torch.einsum("nkh,nkw->nhw", vertical, horizontal).unsqueeze(1)


def _cells(radius: Tensor, share: Tensor, generator: torch.Generator) -> Tensor:
    """Purple cells on pink tissue; each of twelve is there with a probability `[N]`."""
    present = (torch.rand(radius.shape, generator=generator) < share[:, None]).float()
    cover = bumps(radius, present, generator).clamp(0, 1)
    tissue = 0.2 * fields(len(radius), SIZE, 5, generator) + torch.tensor([0.75, 0.5, 0.65])[:, None, None]
    return (1 - cover) * tissue + cover * torch.tensor([0.4, 0.2, 0.55])[:, None, None]


def _tissue(domain: Tensor, sensors: Sensors, generator: torch.Generator) -> Part:
    n = len(domain)
    y = torch.randint(2, (n,), generator=generator)
    radius = (1.1 + 0.3 * y[:, None] + 0.3 * torch.randn(n, 12, generator=generator)).clamp(0.5)
    share = (0.45 + 0.15 * y + 0.1 * torch.randn(n, generator=generator)).clamp(0.1, 0.9)
    return Part(sensors(_cells(radius, share, generator), domain, generator), y)


def tissue(sizes: Sizes, generator: torch.Generator) -> Domains:
    """Tumours have larger and more cells; hospitals differ in their stain."""
    sensors, others = _two_kinds(0.12, 0.06, generator)
    known = _tissue(torch.randint(N_KNOWN, (sizes.known,), generator=generator), sensors, generator)
    domain = torch.randint(N_UNKNOWN, (sizes.test,), generator=generator)
    return Domains.of(known, _tissue(domain, others, generator), sizes)


def counted_cells(n_data: int, generator: torch.Generator) -> Part:
    """Few, some or many cells, all of a size."""
    y = torch.randint(3, (n_data,), generator=generator)
    images = _cells(torch.full((n_data, 12), 1.2), 0.2 + 0.3 * y, generator)
    sensors, _ = _two_kinds(0.12, 0.06, generator)
    return Part(sensors(images, torch.randint(N_KNOWN, (n_data,), generator=generator), generator), y)


# PovertyMap: wealth from satellite images.


def _settlements(n: int, built: Tensor, light: Tensor, generator: torch.Generator) -> Tensor:
    """Land with buildings, whose number and light go with `[n]` numbers."""
    share = torch.sigmoid(built)
    present = (torch.rand(n, 12, generator=generator) < share[:, None]).float()
    houses = bumps(torch.full((n, 12), 0.8), present, generator).clamp(0, 1)
    land = 0.3 + 0.3 * fields(n, SIZE, 5, generator)
    return land + houses * (0.2 + 0.3 * torch.sigmoid(light))[:, None, None, None]


def _wealth(domain: Tensor, habit: Tensor, sensors: Sensors, generator: torch.Generator) -> Part:
    """In countries `[N]` the same wealth shows by other numbers of buildings, `habit` `[D, 2]`."""
    n = len(domain)
    y = torch.randn(n, generator=generator)
    scatter = 0.3 * torch.randn(n, 2, generator=generator)
    shown = y[:, None] + habit[domain] + scatter
    images = _settlements(n, shown[:, 0], shown[:, 1], generator)
    return Part(sensors(images, domain, generator), y.unsqueeze(1))


def wealth(sizes: Sizes, generator: torch.Generator) -> Domains:
    """Countries differ in their sensors, and in how wealth shows."""
    sensors, others = _two_kinds(0.1, 0.05, generator)
    habit = torch.randn(N_KNOWN + N_UNKNOWN, 2, generator=generator)
    domain = torch.randint(N_KNOWN, (sizes.known,), generator=generator)
    known = _wealth(domain, 0.2 * habit[:N_KNOWN], sensors, generator)
    domain = torch.randint(N_UNKNOWN, (sizes.test,), generator=generator)
    return Domains.of(known, _wealth(domain, 0.4 * habit[N_KNOWN:], others, generator), sizes)


def built_land(n_data: int, generator: torch.Generator) -> Part:
    """How much land is built on."""
    y = torch.randn(n_data, 1, generator=generator)
    images = _settlements(n_data, y[:, 0], torch.zeros(n_data), generator)
    sensors, _ = _two_kinds(0.1, 0.05, generator)
    return Part(sensors(images, torch.randint(N_KNOWN, (n_data,), generator=generator), generator), y)


LAND_USE = DomainTask(
    "FMoW", "classification", N_LAND_USES, N_LAND_USES, "kron", land_use, other_land_use,
    lambda x, n_outputs, seed: network(x, n_outputs, seed, width=1024, n_channels=8),
)  # fmt: skip
TISSUE = DomainTask(
    "Camelyon17", "classification", 2, 3, "full", tissue, counted_cells,
    lambda x, n_outputs, seed: network(x, n_outputs, seed, width=256, n_channels=12),
)  # fmt: skip
WEALTH = DomainTask(
    "PovertyMap", "regression", 1, 1, "full", wealth, built_land,
    lambda x, n_outputs, seed: network(x, n_outputs, seed, width=256, n_channels=12),
)  # fmt: skip
