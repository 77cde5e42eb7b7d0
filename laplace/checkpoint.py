"""States of sharded posteriors, written and read by `torch.distributed.checkpoint`.

Every process writes what it holds, one entry for each tensor, so that any number of processes can read them: each its
own part, or one process all of it. What is read is bit for bit what was written.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace import state
from laplace.core import nested
from laplace.core.layout import Layout
from laplace.core.memory import ran_out
from laplace.core.nested import digest
from laplace.core.processes import Processes
from laplace.errors import ProcessError, StateError, UnsupportedError
from laplace.parametric import ParametricLaplace
from laplace.posterior.posterior import Posterior
from laplace.structures.base import Curvature
from laplace.structures.sharded import ShardedCurvature, placed, separation_of
from laplace.weights.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import FileSystemReader

_FRAME = "frame"
"""Name of the entry that says what the others are."""

Unit = tuple[int, ...]
"""Indices of tensors that are written together."""


def save(la: ParametricLaplace, path: str | os.PathLike[str]) -> None:
    """Saves a sharded posterior: call it in every process; each writes its own part.

    Args:
        la: A posterior fitted with `sharded=True`.
        path: A folder that all processes can access; it is created.

    Raises:
        UnsupportedError: The posterior is not sharded: use `la.save(path)`.
        ProcessError: Another process failed.
    """
    from torch.distributed import checkpoint

    curvature = la.snapshot().shards
    if curvature is None:
        raise UnsupportedError(
            "checkpoint.save of a posterior that is not sharded; it is written by torch.save(la.state_dict(), path)."
        )
    states = {} if curvature.own is None else _unit_states(curvature.own, curvature.tensors, curvature.layout)
    processes = curvature.processes
    forms = processes.gather_results(lambda: {unit: nested.form_of(part) for unit, part in states.items()})
    entries = {name: tensor for unit, part in states.items() for name, tensor in _named(unit, part)}
    if processes.rank == 0:
        units = [[list(unit), form] for some in forms for unit, form in some.items()]
        entries[_FRAME] = _packed(state.save_with(la, units))
    checkpoint.save(entries, checkpoint_id=path, process_group=processes.group)


def load(la: ParametricLaplace, path: str | os.PathLike[str], *, group: ProcessGroup | None = None) -> None:
    """Loads a posterior that `save` wrote, of the same model, into `la`.

    Args:
        la: An object constructed like the one that was saved; its posterior is replaced.
        path: The folder.
        group: Process group in which every process makes this call and stores a part; their number may differ from the
            number that saved. None: this process stores the whole posterior.

    Raises:
        StateError: The folder holds no such posterior, or one of another class, model, likelihood or choice of weights.
        ProcessError: Another process failed, or reads another folder.
    """
    processes, read = Processes.of(group), list[tuple[Posterior, bool, str]]()

    def attempt() -> str:
        read.append(_read(la, path, processes))
        return read[0][-1]

    digests = [attempt()] if processes is None else processes.gather_results(attempt)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ProcessError(f"rank {rank} of the group reads another posterior than rank 0; nothing was loaded.")
    posterior, enable_backprop, _ = read[0]
    la.set_posterior(posterior)
    la.enable_backprop = enable_backprop


def _read(
    la: ParametricLaplace, path: str | os.PathLike[str], processes: Processes | None
) -> tuple[Posterior, bool, str]:
    """The posterior of a folder, `enable_backprop`, and a digest of what was written about them."""
    try:
        files = _Files(path)
        frame = files.frame()
        known = torch.load(io.BytesIO(frame.numpy().tobytes()), weights_only=True)
    except Exception as error:  # of files that are cut off, whatever pickle and zip raise
        if ran_out(error):
            raise
        raise StateError(
            f"{os.fspath(path)!r} holds no posterior that laplace.checkpoint.save wrote: {error}"
        ) from error

    def made(problem: Problem, units: Any) -> Curvature:
        return _curvature(files, la.structure, problem.layout, units, processes, la.prior_precision.device)

    return state.loaded(la, known, made), known["enable_backprop"], digest([frame])


def _curvature(
    files: _Files,
    structure: type[Curvature],
    layout: Layout,
    units: Sequence[Any],
    processes: Processes | None,
    device: torch.device,
) -> Curvature:
    """The curvature of all tensors, or this process's part of it."""
    separation = structure.separation
    if separation is None:
        raise StateError(f"hessian_structure={structure.name!r} was never sharded.")
    forms = {tuple(tensors): form for tensors, form in units}

    def part(tensors: Sequence[int]) -> Curvature:
        places = {i: place for place, i in enumerate(tensors)}
        mine = [unit for unit in forms if unit[0] in places]
        states = files.states({unit: forms[unit] for unit in mine}, device)
        parts = {tuple(places[i] for i in unit): structure.from_state(states[unit]) for unit in mine}
        return separation.joined(parts, layout.part(tensors))

    if processes is None:
        return part(range(layout.n_tensors))
    form = separation.joined({unit: structure.from_state(form) for unit, form in forms.items()}, layout)
    owners = placed(form, layout, processes.size)
    spread = ShardedCurvature(processes, owners, layout, None, form.n_terms)
    return spread.holding(part(spread.tensors)) if spread.tensors else spread


class _Files:
    """The entries of a folder, each process reads by itself."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self.reader: FileSystemReader = FileSystemReader(path)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def frame(self) -> Tensor:
        """Bytes `[n]` that say what the other entries are."""
        entry = self.metadata.state_dict_metadata[_FRAME]
        frame = torch.empty(entry.size, dtype=torch.uint8)  # pyright: ignore[reportAttributeAccessIssue]
        self._read({_FRAME: frame})
        return frame

    def states(self, forms: Mapping[Unit, Any], device: torch.device) -> dict[Unit, Any]:
        """The states of units of these forms."""
        states = {unit: nested.zeros_of(form, device) for unit, form in forms.items()}
        entries = {name: tensor for unit, part in states.items() for name, tensor in _named(unit, part)}
        if entries:
            self._read(entries)
        return states

    def _read(self, entries: dict[str, Any]) -> None:
        """Reads into tensors; by the steps of `checkpoint.load`, which in a group are collective calls."""
        from torch.distributed.checkpoint import DefaultLoadPlanner

        planner = DefaultLoadPlanner()
        planner.set_up_planner(entries, self.metadata, is_coordinator=True)
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self.reader.prepare_global_plan(planner.create_global_plan([plan]))
        self.reader.read_data(planner.finish_plan(plan), planner).wait()


def _unit_states(own: Curvature, tensors: Sequence[int], layout: Layout) -> dict[Unit, Any]:
    """The state of every unit of some tensors, by their indices among all."""
    inner, separation = layout.part(tensors), separation_of(own)
    units = separation.units(own, inner)
    return {tuple(tensors[i] for i in unit): separation.part(own, unit, inner).state() for unit in units}


def _named(unit: Unit, part: Any) -> list[tuple[str, Tensor]]:
    """Floating point tensors of a unit's state, by the names of their entries."""
    return [(f"H.{unit[0]}.{name}", tensor) for name, tensor in nested.named_tensors(part)]


def _packed(value: Any) -> Tensor:
    """Bytes `[n]` of tensors, numbers, strings, lists and dicts of them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
