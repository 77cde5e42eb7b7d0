"""Areas of discs that a U-Net finds in blurred and noisy images: intervals, failures, memory and time.

Intervals of areas by posteriors over the last layer and over all weights are told as they are, after `calibrate`, and
scaled by the errors of held-out areas; beside them those of pixels that are taken for independent. Failures are images
of a small Dice coefficient, which a score is to put last.
"""

from __future__ import annotations

import statistics
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.quality.data import Pair
from benchmarks.quality.summary import number, table
from benchmarks.quality.targets import Target, mean_and_error
from laplace import Laplace, totals
from laplace.errors import CalibrationWarning
from laplace.extensions.volumes import Totals, standardised_errors

NAME = "areas of discs by a U-Net"
SIZE, N_TRAIN, N_VAL, N_HELD, N_TEST = 32, 200, 100, 1000, 1000
STEPS, BATCH, RATE = 300, 20, 1e-2
N_SEEDS, LARGE = 5, 512
LAST, ALL = "last layer", "all weights"
POSTERIORS: dict[str, Any] = {LAST: ("last_layer", "full", {}), ALL: ("all", "kron", {"stochastic": True})}


def shapes(n: int, generator: torch.Generator) -> Pair:
    """Images `[n, 1, H, W]` of one to three discs with another contrast and blur each, and their pixels `[n, H, W]`."""

    def drawn(*shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator)

    places = torch.arange(float(SIZE))
    radii, centres = SIZE * (0.06 + 0.16 * drawn(3)), SIZE * (0.15 + 0.7 * drawn(3, 2))
    there = torch.arange(3) < 1 + (3 * drawn(1)).floor()
    squares = (places[:, None] - centres[..., 0, None, None]) ** 2 + (places - centres[..., 1, None, None]) ** 2
    y = ((squares <= radii.square()[..., None, None]) & there[..., None, None]).any(1)
    kernels = torch.exp(-0.5 * (torch.arange(-6.0, 7.0) / (0.5 + 2 * drawn(1))).square())
    kernels = (kernels / kernels.sum(1, keepdim=True))[:, None]
    blurred = nn.functional.conv2d(nn.functional.pad(y[None].float(), (6,) * 4), kernels[:, :, :, None], groups=n)
    blurred = nn.functional.conv2d(blurred, kernels[:, :, None, :], groups=n)[0]
    x = (0.5 + drawn(1, 1)) * blurred + 0.3 * torch.randn(n, SIZE, SIZE, generator=generator)
    return x[:, None], y.long()


def _block(n_in: int, n_out: int) -> nn.Module:
    parts = ((nn.Conv2d(n, n_out, 3, padding=1), nn.GroupNorm(4, n_out), nn.ReLU()) for n in (n_in, n_out))
    return nn.Sequential(*(layer for part in parts for layer in part))


class UNet(nn.Module):
    """Two levels, `[B, 1, H, W]` to logits `[B, 2, H, W]`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(1, width), _block(width, 2 * width), _block(2 * width, 4 * width)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * n, n, 2, 2) for n in (2 * width, width)])
        self.merge = nn.ModuleList([_block(2 * n, n) for n in (2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for down in self.down[:-1]:
            kept.append(down(x))
            x = nn.functional.max_pool2d(kept[-1], 2)
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


def trained(x: Tensor, y: Tensor, seed: int, steps: int) -> UNet:
    """A U-Net, by Adam with a cosine schedule."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        network = UNet()
        optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = torch.randint(len(x), (BATCH,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[some]), y[some]).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def batches(pair: Pair) -> list[Pair]:
    """Batches of 50."""
    return list(zip(pair[0].split(50), pair[1].split(50), strict=True))


def area_under_risk(risk: Tensor, doubt: Tensor) -> float:
    """Mean over all coverages of the mean risk of the images of the least doubt, `[N]` each."""
    sums = risk[doubt.argsort()].cumsum(0)
    return float((sums / torch.arange(1, len(risk) + 1)).mean())


def areas_of(la: Any, data: Pair) -> Totals:
    """Areas of all images."""
    found = [totals(la, x, of=1) for x, _ in batches(data)]
    return Totals(torch.cat([part.mean for part in found]), torch.cat([part.covariance for part in found]))


def fitted(network: UNet, name: str, train: Pair, seed: int) -> Any:
    """A posterior with the prior of the highest evidence."""
    subset, structure, options = POSTERIORS[name]
    la = Laplace(network, "classification", subset, structure, backend_kwargs=options)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)  # of sampled labels
        la.fit(batches(train))
    la.optimize_prior_precision()
    return la


def measured(seed: int, *, quick: bool) -> dict[str, Any]:
    """Coverage and half widths of 95 % intervals by way, areas under the risk by score, of one network."""
    generator = torch.Generator().manual_seed(seed)
    train, val, held, test = (shapes(n, generator) for n in (N_TRAIN, N_VAL, N_HELD, N_TEST))
    network, y, ways = trained(*train, seed, 10 if quick else STEPS), test[1], dict[str, Any]()
    widths: dict[str, Tensor] = {}
    for name in POSTERIORS:
        la = fitted(network, name, train, seed)
        areas = areas_of(la, test)
        ways[f"{name}, prior by the evidence"] = areas.interval()
        if name == LAST:  # of all weights the probabilities of single pixels take a pass each
            la.calibrate(batches(val))
            areas = areas_of(la, test)
            ways[f"{name}, calibrate"] = areas.interval()
        ways[f"{name}, held-out areas"] = areas.interval(errors=standardised_errors(la, batches(held), of=1))
        widths |= {f"width, {name}": areas.std, f"width over the area, {name}": areas.std / areas.mean}
    with torch.no_grad():
        p, p_held = (torch.cat([network(x).softmax(1) for x, _ in batches(pair)]) for pair in (test, held))
    mean, mean_held = p[:, 1].sum((1, 2)), p_held[:, 1].sum((1, 2))
    variance, held_variance = ((q[:, 1] * q[:, 0]).sum((1, 2)) for q in (p, p_held))
    pixels = Totals(mean, variance.reshape(-1, 1, 1))
    ways["independent pixels"] = pixels.interval()
    ways["independent pixels, held-out areas"] = pixels.interval(
        errors=(held[1].sum((1, 2)) - mean_held).abs() / held_variance.sqrt()
    )
    inside = {way: ((low <= y.sum((1, 2))) & (y.sum((1, 2)) <= high)).float() for way, (low, high) in ways.items()}
    hard = p.argmax(1)
    dice = 2 * (hard * y).sum((1, 2)) / (hard + y).sum((1, 2)).clamp(min=1)
    entropy = -(p * p.clamp(min=1e-12).log()).sum(1).mean((1, 2))
    scores = {"mean entropy": entropy, "entropy over the area": entropy / mean, "one over the area": 1 / mean}
    return {
        "dice": float(dice.mean()),
        "rmse": float((y.sum((1, 2)) - mean).square().mean().sqrt()),
        "area": float(mean.mean()),
        "coverage": {way: float(found.mean()) for way, found in inside.items()},
        "half width": {way: float((high - low).mean() / 2) for way, (low, high) in ways.items()},
        "aurc": {name: area_under_risk(1 - dice, score) for name, score in (widths | scores).items()},
    }


class Held(TorchDispatchMode):
    """Bytes of the tensors that are alive of those that were made within, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata], self.alive[storage._cdata] = storage.nbytes(), 0
                    self.now += storage.nbytes()
                self.alive[storage._cdata] += 1
                weakref.finalize(tensor, self._gone, storage._cdata)
        self.peak = max(self.peak, self.now)
        return found

    def _gone(self, key: int) -> None:
        self.alive[key] -= 1
        if not self.alive[key]:
            self.now -= self.sizes.pop(key)
            del self.alive[key]


def cost(repeats: int) -> dict[str, float]:
    """Peak of memory and processor time of an area of one large image, in forward passes; of the first call, and later.

    By a last layer. The time is the median of paired ratios.
    """
    la = fitted(UNet().eval(), LAST, shapes(4, torch.Generator().manual_seed(0)), 0)
    x = torch.zeros(1, 1, LARGE, LARGE)

    def seconds(run: Callable[[], Any]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    def peak(run: Callable[[], Any]) -> float:
        with Held() as held:
            run()
        return held.peak

    def forward() -> Any:
        with torch.no_grad():
            return la.model(x)

    def area() -> Any:
        return totals(la, x, of=1)

    first, of_forward = peak(area), peak(forward)
    ratios = [seconds(area) / seconds(forward) for _ in range(repeats)]
    return {
        "memory": peak(area) / of_forward,
        "memory, first call": first / of_forward,
        "time": statistics.median(ratios),
    }


def run(*, quick: bool) -> dict[str, Any]:
    """The comparisons, with the seconds of processor time that they took."""
    torch.set_num_threads(1)
    start, seeds = time.process_time(), list[dict[str, Any]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # of the widths without held-out areas
        for seed in range(1 if quick else N_SEEDS):
            seeds.append(measured(seed, quick=quick))
            print(f"{NAME}, seed {seed}: {seeds[-1]}, {time.process_time() - start:.0f} s", flush=True)
    return {"name": NAME, "seeds": seeds, "cost": cost(1 if quick else 9), "seconds": time.process_time() - start}


def tables(row: dict[str, Any] | None) -> dict[str, str]:
    """Intervals by way, and failures by score, by seed; empty without a row."""
    if row is None:
        return {"areas": "Not run.", "failures": "Not run."}
    seeds = row["seeds"]

    def cells(name: str, key: str, digits: int) -> list[str]:
        found = [one[key][name] for one in seeds]
        mean, error = mean_and_error(found)
        return [f"{number(mean, digits)} ± {number(error, digits)}", ", ".join(number(one, digits) for one in found)]

    ways = ([way, *cells(way, "coverage", 3), cells(way, "half width", 1)[0]] for way in seeds[0]["coverage"])
    scores = ([score, *cells(score, "aurc", 4)] for score in seeds[0]["aurc"])
    return {
        "areas": table(["95 % intervals", "coverage", "by seed", "mean half width in pixels"], ways),
        "failures": table(["images are ranked by", "AURC of 1 − Dice", "by seed"], scores),
    }


def targets(row: dict[str, Any] | None) -> list[Target]:
    """Coverage with and without the correlation of pixels, failures, memory and time."""
    texts = (
        f"areas: 95 % intervals after calibrate hold 93 to 97 % of {N_TEST:,} images, independent pixels under 60 %",
        "areas: AURC of Dice by the interval's width at most that by mean entropy on 4 of 5 seeds",
        f"areas: peak of memory at most 1.2 times that of a forward pass at {LARGE}²",
        f"areas: at most 1.3 forward passes at {LARGE}²",
    )
    if row is None:
        return [Target(text, "no row", None) for text in texts]
    seeds, found, ways = row["seeds"], row["cost"], (f"{LAST}, held-out areas", "independent pixels")
    ours, pixels = (statistics.mean(one["coverage"][way] for one in seeds) for way in ways)
    lower = sum(one["aurc"][f"width, {LAST}"] <= one["aurc"]["mean entropy"] for one in seeds)
    return [
        Target(texts[0], f"{ours:.1%} and {pixels:.1%}", 0.93 <= ours <= 0.97 and pixels < 0.6),
        Target(texts[1], f"{lower} of {len(seeds)}", lower >= 0.8 * len(seeds)),
        Target(texts[2], f"{found['memory']:.2f}, first {found['memory, first call']:.2f}", found["memory"] <= 1.2),
        Target(texts[3], f"{found['time']:.2f}", found["time"] <= 1.3),
    ]
