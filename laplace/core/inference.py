"""The caller's inference mode, which is left for what is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def kept_for_later() -> AbstractContextManager[object]:
    """Leaves inference mode, if it is on, to compute what is kept: autograd could never use tensors made in it.

    Where it is off nothing changes, while `torch.inference_mode(False)` turns gradients on, also within `no_grad`.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
