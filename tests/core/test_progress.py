"""A progress bar counts data; its total follows from the batches so far."""

from __future__ import annotations

import pytest

from laplace.core import progress


class Bar:
    """What is asked of tqdm's."""

    def __init__(self) -> None:
        self.n, self.total, self.closed = 0, None, False

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("loader", "totals"), [([0, 0, 0], [12, 10, 8]), (iter([0, 0, 0]), [None, None, None])])
def test_the_total_is_as_if_all_batches_were_like_those_so_far(
    loader: object, totals: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_bar", lambda label: Bar())
    bar = progress.DataBar("fit", loader, shown=True)  # type: ignore[arg-type]
    for n, total in zip((4, 3, 1), totals, strict=True):
        bar.add(n)
        assert bar._bar.total == (total if total is None else round(total))
    bar.close()
    assert (bar._bar.n, bar._bar.total, bar._bar.closed) == (8, 8, True)


def test_a_bar_that_is_not_shown_is_none() -> None:
    bar = progress.DataBar("fit", [0], shown=False)
    bar.add(4)
    bar.close()
    assert bar._bar is None and bar.n_batches == 1
