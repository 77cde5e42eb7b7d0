"""The start of a fit that goes on where another process was interrupted: it must be the same fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch

from laplace.core.progress import known_length
from laplace.fitting import Resumable
from laplace.posterior.account import Account
from laplace.posterior.together import Started
from laplace.structures import fields


def started_again(
    resume: Resumable,
    loader: Iterable[Any],
    device: torch.device,
    start: Callable[[], Started],
    settings: Mapping[str, Any],
) -> Started:
    """Begins the reading of the data that a fit was interrupted in, or the first one where there is no file.

    Args:
        resume: The file.
        loader: What `fit` was given, which has the generators of its order.
        device: Where the sums are to be.
        start: Begins the reading.
        settings: What else both fits must have in common, by name.

    Raises:
        InvalidArgument: The order of the loader's data is another one every time.
        StateError: The file is no checkpoint, or of another fit.
    """
    resume.begin(loader, device)
    started = start()
    account = Account.of(started.posterior, {**settings, **_sizes(loader)})
    if resume.former is not None:
        _require_same(resume, account, fields.from_state(Account, resume.former))
    resume.account = fields.state_of(account)
    return replace(started, reading=resume.reading)


def _require_same(resume: Resumable, account: Account, former: Account) -> None:
    difference, _ = account.difference(former, "the fit in the file")
    if difference:
        raise resume.refusal(difference)
    if (account.random, account.layer) != (former.random, former.layer):
        raise resume.refusal("makes other parameters random than the fit in the file")
    if account.channel_dim != former.channel_dim:
        raise resume.refusal("reads the outputs' channels in another dimension than the fit in the file")


def _sizes(loader: Iterable[Any]) -> dict[str, Any]:
    """Numbers of batches and data, where they are known."""
    data = getattr(loader, "dataset", None)
    number = len(data) if isinstance(data, Sized) else None
    return {"number of batches": known_length(loader), "size of the data set": number}
