"""How pytest-xdist deals out tests: those of a file to one process, and none again that ended its process.

And what a run costs: processor time, which says more than a clock where a machine is shared.
"""

from __future__ import annotations

import os
from typing import Any

from xdist.scheduler import LoadFileScheduling

BUDGET = 700
"""Seconds of processor time that the tests of `make test` take at most, over all workers."""


def processor_time() -> float:
    """Seconds that this process has computed, and all processes that it started and that have ended."""
    return sum(os.times()[:4])


class ByFile(LoadFileScheduling):
    """A file's tests run in one process: what they share, such as the processes of a group, is then made once.

    Where a worker dies, the test that it ran has failed, and another worker runs those after it. pytest-xdist would run
    that test again until no worker is left, and also hands out files of which nothing is left: such a worker waits for
    ever.
    """

    def remove_node(self, node: Any) -> str | None:
        left = {file: tests for file, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
        # In the order in which they were handed out: the first is the one that ran.
        crashed = next((name for tests in left.values() for name, done in tests.items() if not done), None)
        if crashed is not None:
            left[self._split_scope(crashed)][crashed] = True
        self.workqueue.update({file: tests for file, tests in left.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
