"""Memory of a fit of every structure, against what `la.plan` says before it.

Of a ResNet-50 with 100 outputs where a structure suits that, else of a small network. Of a language model with 50,257
outputs at each of 4 × 64 positions, of which no matrix between outputs is made, fit and prediction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.timing import Case, Job
from laplace import ParametricLaplace
from laplace.grid import from_names

TARGET_GIB = 6.0
"""Of the whole process, on a CPU."""


def fit_job(structure: str, device: torch.device) -> Job:
    """Fits two batches of eight images; low rank a single one."""
    model = models.resnet50().to(device).eval()
    batches = models.data((3, 32, 32), 100, 16, 8, device)[: 1 if structure == "lowrank" else 2]
    # Power iterations take time, and no memory.
    options: dict[str, Any] = {"structure_kwargs": {"power_iterations": 0}} if structure == "lowrank" else {}

    def made() -> ParametricLaplace:
        return from_names(model, "classification", "all", structure, **options)

    return Job(lambda _: made().fit(batches), planned=lambda: made().plan(batches).peak_bytes)


def small_job(structure: str, device: torch.device) -> Job:
    """Fits four batches of 64 data: blocks of 6,060 entries, or a matrix of 5,360."""
    sizes = (100, 60, 10) if structure == "block" else (48, 80, 15, 10)
    model = models.mlp(*sizes).to(device).eval()
    batches = models.data(sizes[:1], sizes[-1], 256, 64, device)

    def made() -> ParametricLaplace:
        return from_names(model, "classification", "all", structure)

    return Job(lambda _: made().fit(batches), planned=lambda: made().plan(batches).peak_bytes)


def vocabulary_job(structure: str, device: torch.device) -> Job:
    """Fits the head of a GPT-2, and predicts: probabilities of all tokens, and of ten with their covariances."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config())
    model.to(device).eval()
    ids = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": ids, "labels": ids}
    made = partial(from_names, model, "classification", "last_layer", structure)

    def run() -> None:
        la = made()
        la.fit([batch])
        la({"input_ids": ids})
        la({"input_ids": ids}, link_approx="mc", outputs=10)

    def planned() -> int:
        plan = made().plan([batch])
        return max(plan.peak_bytes, plan.kept_bytes + plan.predict_bytes)

    return Job(lambda _: run(), planned=planned)


def cases() -> list[Case]:
    """The lines of the table."""
    small = [Case(f"small MLP, {name} fit", TARGET_GIB, "GiB", partial(small_job, name)) for name in ("block", "full")]
    vocabulary = [
        Case(f"GPT-2, C=50,257, last-layer {name}", target, "GiB added", partial(vocabulary_job, name))
        for name, target in (("diag", 2.0), ("lowrank_kron", 6.0))
    ]
    resnet = [
        Case(f"ResNet-50, C=100, {structure} fit", TARGET_GIB, "GiB", partial(fit_job, structure))
        for structure in ("diag", "kron", "lowrank", "ekfac", "lowrank_kron")
    ]
    return small + resnet + vocabulary
