"""What a batch of a fit, and a prediction of one datum, cost besides the mathematics, on small networks."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import models, work
from benchmarks.timing import Case, Job

_CALLS = 200
"""Predictions of one datum that are timed together."""


def _small_batches(structure: str, device: torch.device) -> Job:
    """A fit of 100 batches of eight sequences, against R."""
    model = models.Encoder(64, 5).to(device).eval()
    batches = models.data((8, 64), 5, 800, 8, device)
    return Job(lambda _: work.fitted(model, batches, "all", structure), work.per_output_gradients(model, batches))


def _one_datum(device: torch.device) -> Job:
    """Predictions of one datum, of which the forward pass takes a fiftieth."""
    model = models.mlp(64, 256, 256, 10).to(device).eval()
    batches = models.data((64,), 10, 512, 128, device)
    la = work.fitted(model, batches, "last_layer", "kron")
    x = batches[0][0][:1]
    note = work.factorised(la, x)

    def run(_: object) -> None:
        for _ in range(_CALLS):
            la(x, link_approx="probit")

    return Job(run, note=note)


def cases() -> list[Case]:
    """The lines of the table."""
    lines = [
        Case(f"small batches, encoder, {structure} fit", 2.0, "× R", partial(_small_batches, structure))
        for structure in ("kron", "diag")
    ]
    lines.append(Case(f"{_CALLS} predictions of one datum", 0.9e-3 * _CALLS, "s", _one_datum))
    return lines
