"""What is timed, by the public interface of either package, whatever `laplace` is there to import."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peer import script
from benchmarks.peer.workloads import Workload
from benchmarks.timing import Job
from laplace import Laplace, curvature

make: Callable[..., Any] = Laplace  # of names that are known at run time alone


class Loader:
    """Batches that are there already, with what else a `DataLoader` has that posteriors ask for.

    A `DataLoader` takes its data apart and stacks them again, which costs both packages alike and hides the rest.

    Args:
        batches: Inputs and targets.
    """

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches
        self.batch_size = len(batches[0][0])
        self.dataset = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class Work:
    """A workload with its network and its data.

    Attributes:
        workload: What to do.
        model: With the weights of the file.
        loader: Data of the file, on the device.
        state: The file of weights and data.
        backend: Class in `laplace.curvature`, by its name; empty for the package's default.
    """

    workload: Workload
    model: nn.Module
    loader: Loader | DataLoader
    state: Path
    backend: str = ""

    def fitted(self) -> Any:
        """A posterior after its fit."""
        w = self.workload
        backend = {"backend": getattr(curvature, self.backend)} if self.backend else {}
        la = make(self.model, "classification", w.subset, w.structure, **w.options, **backend)
        la.fit(self.loader)
        return la

    def ready(self) -> Any:
        """A posterior after its fit and a first prediction, which factorises what was not yet."""
        la = self.fitted()
        la(self.loader.dataset[:1][0], **self.kind())
        return la

    def job(self) -> Job:
        """What to time."""
        return ACTIONS[self.workload.action](self)

    def result(self) -> float:
        """A number by which backends are compared: the log evidence of a fit.

        Of a process in function space, of which not all have one, the sum of squares of the predicted probabilities.
        """
        if self.workload.structure != "gp":
            return float(self.fitted().log_marginal_likelihood())
        la = self.fitted()
        return float(sum(la(x, **self.kind()).square().sum() for x, _ in self.loader))

    def kind(self) -> dict[str, Any]:
        """What a prediction of the linearised network is called."""
        return {"pred_type": "gp" if self.workload.action.startswith("gp") else "glm", "link_approx": "probit"}

    def predict(self, la: Any, **options: Any) -> None:
        """Predictions of all data, batch by batch."""
        for x, _ in self.loader:
            la(x, **options)


def _fit(work: Work) -> Job:
    """Construction, fit, and one sample of the weights: it needs every factorisation that predictions need."""
    return Job(lambda _: work.fitted().sample(1))


def _process(work: Work) -> Job:
    """Construction, fit, and one prediction: a process in function space has no weights to sample."""
    return Job(lambda _: work.ready())


def _probit(work: Work) -> Job:
    la = work.ready()
    return Job(lambda _: work.predict(la, **work.kind()))


def _nn(work: Work) -> Job:
    la = work.ready()
    options = {"pred_type": "nn", "link_approx": "mc", "n_samples": work.workload.amount}
    return Job(lambda _: work.predict(la, **options))


def _evidence(work: Work) -> Job:
    """Of a fresh fit every time: a factorisation that was left to the evidence counts."""
    steps = work.workload.amount
    return Job(lambda la: la.optimize_prior_precision(method="marglik", n_steps=steps), prepare=work.fitted)


def _grid(work: Work) -> Job:
    la = work.ready()
    options = {"method": "gridsearch", "val_loader": work.loader, "grid_size": work.workload.amount}
    return Job(lambda _: la.optimize_prior_precision(**options))


def _script(work: Work) -> Job:
    """Import, construction, fit and predictions, in a fresh process."""
    device = next(work.model.parameters()).device
    return Job(lambda _: script.run(work.workload, work.state, device, work.backend))


ACTIONS: dict[str, Callable[[Work], Job]] = {
    "fit": _fit,
    "probit": _probit,
    "gp fit": _process,
    "gp probit": _probit,
    "nn": _nn,
    "evidence": _evidence,
    "grid": _grid,
    "script": _script,
}


def read(workload: Workload, state: Path, device: torch.device, backend: str) -> Work:
    """What to do, from the file of weights and data."""
    warnings.simplefilter("ignore")
    saved = torch.load(state, weights_only=True)
    model = workload.setting.build()
    model.load_state_dict(saved["weights"])
    loader = Loader([(x.to(device), y.to(device)) for x, y in saved["batches"]])
    torch.manual_seed(0)
    if workload.structure == "gp":  # a subset of its data is read in batches of its own
        loader = DataLoader(loader.dataset, batch_size=loader.batch_size)
    return Work(workload, model.to(device), loader, state, backend)
