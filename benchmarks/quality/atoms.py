"""A potential of Lennard-Jones and a three-body term: shallow ensembles that are fine-tuned, labels that are bought.

Configurations are clusters of five atoms from Monte-Carlo runs at two temperatures, in reduced units. The network
passes messages within a cutoff. Heads of a fitted last layer are fine-tuned by the CRPS of energies and forces, in a
tenth of the steps in which as many heads are trained from scratch. Configurations to label are those of the largest
force variance under the last layer's posterior, or drawn at random.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.targets import Target, mean_and_error
from laplace import Laplace
from laplace.extensions.atoms import (
    EnergyForces,
    ShallowEnsemble,
    crps_loss,
    energy_forces,
    scale_to_residuals,
    shallow_ensemble,
)

NAME = "a potential of energies and forces"
N_ATOMS, THREE_BODY = 5, 2.0
N_TRAIN, N_TEST, N_MEMBERS, BATCH = 500, 300, 32, 25
STEPS, SHARE, RATE, FINE_RATE = 2000, 0.1, 1e-2, 3e-3
N_SEEDS, FIRST, STEP, MOST = 5, 20, 20, 160
N_COLD, N_HOT = 1000, 100
COLD, HOT = 0.1, 0.3
ENSEMBLES = (10, 11, 12, 13)
"""Seeds of the ensembles; the settings of the fine-tuning were chosen on seed 0."""
SIZES = ((5, 1), (10, 1), (20, 1), (40, 1), (5, 25), (10, 25))
"""Atoms of a configuration and configurations of a batch, of which the cost is measured."""


def energies(positions: Tensor) -> Tensor:
    """Σ 4 (r⁻¹² − r⁻⁶) over pairs, and Axilrod's and Teller's term over triples, `[B]` of positions `[B, n, 3]`."""
    i, j = torch.triu_indices(positions.shape[1], positions.shape[1], 1)
    squares = (positions[:, i] - positions[:, j]).square().sum(2)
    pairs = 4 * (squares**-6 - squares**-3)
    corners = [positions[:, index] for index in torch.combinations(torch.arange(positions.shape[1]), 3).T]
    sides = [corners[(k + 1) % 3] - corners[k] for k in range(3)]
    lengths = [side.norm(dim=2) for side in sides]
    cosines = [-(sides[k] * sides[k - 1]).sum(2) / (lengths[k] * lengths[k - 1]) for k in range(3)]
    product = cosines[0] * cosines[1] * cosines[2]
    triples = THREE_BODY * (1 + 3 * product) / (lengths[0] * lengths[1] * lengths[2]) ** 3
    return pairs.sum(1) + triples.sum(1)


def labelled(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Energies `[B]` and forces `[B, n, 3]`."""
    positions = positions.detach().requires_grad_()
    found = energies(positions)
    return found.detach(), -torch.autograd.grad(found.sum(), positions)[0]


def clusters(n: int, temperature: float, generator: torch.Generator) -> Tensor:
    """Ends of n Monte-Carlo runs of clusters that a wall keeps together, `[n, N_ATOMS, 3]`."""
    grid = torch.cartesian_prod(*[1.15 * torch.arange(3.0)] * 3)
    places = torch.stack([grid[torch.randperm(27, generator=generator)[:N_ATOMS]] for _ in range(n)])
    positions = places + 0.03 * torch.randn(places.shape, generator=generator)

    def walled(at: Tensor) -> Tensor:
        return energies(at) + (at - at.mean(1, keepdim=True)).square().sum(2).sub(4.0).clamp(min=0).sum(1)

    now = walled(positions)
    for _ in range(400):
        moved = positions + 0.06 * torch.randn(positions.shape, generator=generator)
        then = walled(moved)
        taken = torch.rand(n, generator=generator) < torch.exp((now - then) / temperature)
        positions, now = torch.where(taken[:, None, None], moved, positions), torch.where(taken, then, now)
    return positions


class Potential(nn.Module):
    """Energies `[B]` by two rounds of messages within a cutoff, as a sum over atoms."""

    def __init__(self, width: int = 16, n_radial: int = 10, cutoff: float = 3.5) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.centres = torch.linspace(0.8, cutoff, n_radial)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(n_radial, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2)
        )
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.hidden = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 1)

    def forward(self, positions: Tensor) -> Tensor:
        own = torch.eye(positions.shape[1], dtype=torch.bool)
        squares = (positions[:, :, None] - positions[:, None]).square().sum(3)
        lengths = torch.where(own, 1.0, squares).sqrt()
        smooth = torch.where(own | (lengths > self.cutoff), 0.0, 0.5 + 0.5 * torch.cos(math.pi * lengths / self.cutoff))
        radial = torch.exp(-7.0 * (lengths[..., None] - self.centres).square())
        h, rounds = torch.ones(*positions.shape[:2], self.head.in_features), []
        for filters, mix in zip(self.filters, self.mixes, strict=True):
            messages = filters(radial) * smooth[..., None] * h[:, None]
            h = h + nn.functional.silu(mix(messages.sum(2)))
            rounds.append(h)
        return self.head(self.hidden(torch.cat(rounds, 2))).sum((1, 2))


def trained(
    network: nn.Module, loss: Any, x: Tensor, y: Tensor, steps: int, rate: float, generator: torch.Generator
) -> None:
    """Adam with a cosine schedule on `loss(network(x), y)`."""
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        some = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator)
        optimizer.zero_grad()
        loss(network(x[some]), y[some]).backward()
        nn.utils.clip_grad_norm_(weights, 10.0)
        optimizer.step()
        schedule.step()


def errors_of(f: Tensor, y: Tensor) -> Tensor:
    """Mean Huber loss of energies and forces, as potentials are trained."""
    return nn.functional.smooth_l1_loss(f, y, beta=0.1)


def potential(x: Tensor, y: Tensor, steps: int, seed: int) -> EnergyForces:
    """A network trained on energies and forces."""
    torch.manual_seed(seed)
    found = EnergyForces(Potential())
    trained(found, errors_of, x, y, steps, RATE, torch.Generator().manual_seed(seed))
    return found


def fitted(network: EnergyForces, x: Tensor, y: Tensor) -> Any:
    """The posterior over its last layer, with the noise and the prior of the highest evidence."""
    la = Laplace(network, network.likelihood, "last_layer", "full")
    la.fit([(x, y)])
    la.optimize_hyperparameters(["prior_precision", "sigma_noise"])
    return la


def targets_of(positions: Tensor) -> Tensor:
    """Energies without that of five bound atoms, and forces."""
    found, forces = labelled(positions)
    return EnergyForces(Potential()).targets(found + 3.0, forces)


def untrained(seed: int) -> ShallowEnsemble:
    """Members with heads as PyTorch draws them."""
    torch.manual_seed(seed)
    network = EnergyForces(Potential())
    heads = [nn.Linear(network.model.head.in_features, 1) for _ in range(N_MEMBERS)]  # pyright: ignore
    tensors = {f"head.{name}": torch.stack([getattr(head, name) for head in heads]) for name in ("weight", "bias")}
    return ShallowEnsemble(network, {name: tensor.detach() for name, tensor in tensors.items()})


def cost(n_atoms: int = N_ATOMS, batch: int = 1, n: int = 25) -> float:
    """Processor time of all members' energies and forces, in passes of one network: a batch of cuts of a lattice."""
    generator = torch.Generator().manual_seed(0)
    lattice = 1.2 * torch.cartesian_prod(*[torch.arange(4.0)] * 3)[torch.randperm(64, generator=generator)[:n_atoms]]
    ensemble, x = untrained(0), lattice + 0.05 * torch.randn(batch, n_atoms, 3, generator=generator)
    seconds: list[list[float]] = [[], []]
    with torch.no_grad():
        for _ in range(n):
            for network, taken in zip((ensemble.potential, ensemble), seconds, strict=True):
                start = time.process_time()
                network(x)
                taken.append(time.process_time() - start)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def ensembles(seed: int, *, quick: bool) -> dict[str, float]:
    """CRPS on test configurations per number: drawn heads, fine-tuned ones, and those trained from scratch."""
    generator = torch.Generator().manual_seed(seed)
    x = clusters(N_TRAIN + N_TEST, HOT, generator)
    y = targets_of(x)
    steps = 20 if quick else STEPS
    network = potential(x[:N_TRAIN], y[:N_TRAIN], steps, seed)
    la = fitted(network, x[:N_TRAIN], y[:N_TRAIN])
    scale_to_residuals(la, [(x[:N_TRAIN], y[:N_TRAIN])])  # which leaves the test data alone
    drawn = shallow_ensemble(la, N_MEMBERS, generator=generator)

    def score(ensemble: ShallowEnsemble) -> float:
        with torch.no_grad():
            return float(crps_loss(ensemble(x[N_TRAIN:]), y[N_TRAIN:]))

    found = {"drawn": score(drawn)}
    few, batches = max(1, int(SHARE * steps)), torch.Generator().manual_seed(seed + 9)
    trained(drawn, crps_loss, x[:N_TRAIN], y[:N_TRAIN], few, FINE_RATE, batches)
    found["fine-tuned"] = score(drawn)
    scratch = untrained(seed + 1)
    trained(scratch, crps_loss, x[:N_TRAIN], y[:N_TRAIN], steps, RATE, torch.Generator().manual_seed(seed + 7))
    return {**found, "from scratch": score(scratch)}


def bought(way: str, seed: int, *, quick: bool) -> list[float]:
    """Root mean squared error of the forces on test configurations, label by label."""
    generator = torch.Generator().manual_seed(seed)
    cold, hot = clusters(N_COLD + N_TEST // 2, COLD, generator), clusters(N_HOT + N_TEST // 2, HOT, generator)
    pool, test = torch.cat([cold[:N_COLD], hot[:N_HOT]]), torch.cat([cold[N_COLD:], hot[N_HOT:]])
    pool = pool[torch.randperm(len(pool), generator=generator)]
    y, expected = targets_of(pool), targets_of(test)
    owned, rest, errors = torch.arange(FIRST), torch.arange(FIRST, len(pool)), []
    torch.manual_seed(seed)
    network = EnergyForces(Potential())
    while True:
        steps, rate = (300, RATE / 2) if errors else (600, RATE)  # it goes on from where it is
        trained(network, errors_of, pool[owned], y[owned], 10 if quick else steps, rate, generator)
        with torch.no_grad():
            errors.append(float((network(test) - expected)[:, 1:].square().mean().sqrt()))
        if len(owned) >= (2 * FIRST if quick else MOST):
            return errors
        chosen = torch.arange(STEP)
        if way != "random":
            la = fitted(network, pool[owned], y[owned])
            chosen = energy_forces(la, pool[rest]).force_variance.sum((1, 2)).topk(STEP).indices
        owned, rest = torch.cat([owned, rest[chosen]]), rest[~torch.isin(torch.arange(len(rest)), chosen)]


def labels_to(errors: list[float], goal: float) -> float:
    """Labels with which the error first is the goal, between two rounds by a line; the last ones where it never is."""
    for k, error in enumerate(errors):
        if error <= goal:
            before = errors[k - 1] if k else error
            part = (before - goal) / (before - error) if before > error else 0.0
            return FIRST + STEP * (k - 1 + part if k else 0.0)
    return FIRST + STEP * (len(errors) - 1.0)


def run(*, quick: bool) -> dict[str, Any]:
    """The comparisons, with the seconds of processor time that they took."""
    torch.set_num_threads(1)
    start = time.process_time()
    crps: list[dict[str, float]] = []
    errors: dict[str, list[list[float]]] = {"random": [], "force variance": []}
    for seed in ENSEMBLES[:1] if quick else ENSEMBLES:
        crps.append(ensembles(seed, quick=quick))
        print(f"{NAME}, ensembles of seed {seed}: {crps[-1]}, {time.process_time() - start:.0f} s", flush=True)
    for seed in range(1 if quick else N_SEEDS):
        for way, found in errors.items():
            found.append(bought(way, seed, quick=quick))
        print(f"{NAME}, seed {seed}: {errors}, {time.process_time() - start:.0f} s", flush=True)
    costs = [[*size, cost(*size)] for size in (SIZES[:1] if quick else SIZES)]
    return {"name": NAME, "costs": costs, "crps": crps, "errors": errors, "seconds": time.process_time() - start}


def shares(row: dict[str, Any]) -> list[float]:
    """Labels by force variance to random's last force error, over random's, seed by seed."""
    pairs = zip(row["errors"]["random"], row["errors"]["force variance"], strict=True)
    return [labels_to(ours, random[-1]) / labels_to(random, random[-1]) for random, ours in pairs]


def table(row: dict[str, Any] | None) -> str:
    """CRPS and labels seed by seed, and the cost of all members' forces by size."""
    if row is None:
        return "Not run."
    lines = ["| seed | CRPS: drawn | fine-tuned | from scratch | ratio |", "| --- |" + " --: |" * 4]
    for seed, one in zip(ENSEMBLES, row["crps"], strict=False):
        numbers = [*one.values(), one["fine-tuned"] / one["from scratch"]]
        lines.append(f"| {seed} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")
    for heading, found in (
        ("labels, seed", [(str(seed), f"{share:.2f}") for seed, share in enumerate(shares(row))]),
        ("atoms", [(f"{n}" if b == 1 else f"{b} × {n}", f"{passes:.1f}") for n, b, passes in row["costs"]]),
    ):
        names, numbers = zip(*found, strict=True)
        said = "over random's" if heading != "atoms" else f"passes for {N_MEMBERS} members"
        lines += ["", f"| {heading} | {' | '.join(names)} |", "| --- |" + " --: |" * len(names)]
        lines.append(f"| {said} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def targets(row: dict[str, Any] | None) -> list[Target]:
    """CRPS of heads from scratch in a tenth of their steps; the cost of a pass; labels beside those of a random way."""
    texts = (
        f"shallow ensemble: CRPS after {SHARE:.0%} of the steps at most 1.02 times that of heads trained from scratch",
        f"shallow ensemble: {N_MEMBERS} members' forces of one configuration at most 4 passes of energy and force",
        "configurations of the largest force variance: at most 0.8 times random's labels to the same force error",
    )
    if row is None:
        return [Target(text, "no row", None) for text in texts]
    ratio, spread = mean_and_error([one["fine-tuned"] / one["from scratch"] for one in row["crps"]])
    share, error = mean_and_error(shares(row))
    single = {n_atoms: passes for n_atoms, batch, passes in row["costs"] if batch == 1}
    said = ", ".join(f"{passes:.1f}" for passes in single.values())
    return [
        Target(texts[0], f"{ratio:.3f} ± {spread:.3f} times", ratio <= 1.02),
        Target(texts[1], f"{said} passes of {', '.join(map(str, single))} atoms", max(single.values()) <= 4),
        Target(texts[2], f"{share:.2f} ± {error:.2f} times", share <= 0.8),
    ]
