"""The options that every experiment takes, and the loop over seeds, which goes on where it stopped."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.records import Records, Scores, load_scores, save_scores


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        small: Tiny networks and few data, to try the script out; nothing is kept.
        seeds: Of data, networks and samples: one run each.
        output: Where the plot goes.
        data: File or folder of the real data set, in place of the one that is always there.
        folder: Where the scores of finished seeds are kept.
        processes: That many seeds at once, where their scores are kept.
    """

    small: bool
    seeds: tuple[int, ...]
    output: Path
    data: Path | None
    folder: Path
    processes: int = 1

    def run(self, settings: object, one_seed: Callable[[int], Scores]) -> Records:
        """Scores of every seed; those of finished seeds with the same settings are read, not made again.

        Args:
            settings: What the scores depend on besides the seed; its `repr` names the folder of the seeds.
            one_seed: Makes the scores of a seed.
        """
        torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other

        def finished(seed: int) -> Scores:
            scores = None if self.small else load_scores(self.folder, (settings, str(self.data)), seed)
            if scores is None:
                start = time.process_time()
                scores = one_seed(seed)
                scores = Scores(scores.values, (time.process_time() - start) / 60)
                if not self.small:
                    save_scores(scores, self.folder, (settings, str(self.data)), seed)
            print(f"seed {seed}: {scores.minutes:.1f} minutes", flush=True)
            return scores

        if self.processes > 1 and not self.small:
            _in_processes(finished, self.seeds, self.processes)
        return Records(self.seeds, tuple(finished(seed) for seed in self.seeds))


def one_of_three(seed: int) -> bool:
    """Whether rows that take long, or stand beside the claims, are made: of three of ten seeds."""
    return seed % 10 < 3


def _in_processes(finished: Callable[[int], object], seeds: Sequence[int], n: int) -> None:
    """Finishes seeds in n processes, which keep their scores; a seed that is not kept is made again by the caller."""
    fork = multiprocessing.get_context("fork")  # what is called need not be pickled
    workers = [fork.Process(target=lambda part=seeds[k::n]: [finished(seed) for seed in part]) for k in range(n)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def parse(description: str | None, name: str, seeds: Sequence[int] = (0, 1, 2, 3, 4)) -> Options:
    """The options of the command line.

    Args:
        description: The script's docstring.
        name: Of the script: of its plot and the folder of its seeds.
        seeds: Those of the full run; the small one takes the first.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny networks, few data, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--output", type=Path, default=Path(f"outputs/{name}.png"), help="where the plot goes")
    parser.add_argument("--data", type=Path, help="the real data set: a file .npz or .csv, or a folder of IDX files")
    parser.add_argument("--folder", type=Path, default=Path("outputs/seeds") / name, help="scores of finished seeds")
    parser.add_argument("--processes", type=int, default=1, help="that many seeds at once")
    given = parser.parse_args()
    if len(set(given.seeds)) < len(given.seeds):
        parser.error(f"seeds {given.seeds}: give each once, for a seed that counts twice makes errors too small.")
    chosen = tuple(given.seeds[:1] if given.small else given.seeds)
    return Options(given.small, chosen, given.output, given.data, given.folder, given.processes)
