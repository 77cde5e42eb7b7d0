"""`python -m tests.random_networks 2000 [first]`: so many seeds, their refusals by kind, a script of every failure."""

from __future__ import annotations

import sys
import time

import torch

from tests.random_networks.run import Outcome, run, script


def main(count: int, first: int) -> int:
    """Runs the seeds, or those until it is interrupted, and says what they found."""
    torch.set_num_threads(1)
    total, start, done = Outcome(), time.perf_counter(), 0
    try:
        for seed in range(first, first + count):
            one = run([seed])
            total.passed += one.passed
            total.refusals += one.refusals
            total.examples = one.examples | total.examples
            total.failures += one.failures
            done += 1
            for _, name, case, said in one.failures:
                print(f"# seed {seed} fails: {said}\n{script(name, case)}\n", flush=True)
            if not done % 100:
                print(f"# {done} seeds, {len(total.failures)} failed, {total.refusals.total()} refused", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(f"{done} seeds from {first} in {time.perf_counter() - start:.0f} s\n{total.report()}")
    for seed, _, case, said in total.failures:
        print(f"  seed {seed}: {said.strip().splitlines()[-1]}\n    {case}")
    return bool(total.failures)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
