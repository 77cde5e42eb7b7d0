"""What is kept for later is no tensor of inference mode, and nothing else changes."""

from __future__ import annotations

import torch

from laplace.core.inference import kept_for_later


def test_tensors_that_are_kept_can_be_differentiated() -> None:
    with torch.inference_mode():
        with kept_for_later():
            kept = torch.ones(2)
        assert torch.ones(2).is_inference() and not kept.is_inference()
    assert (kept.requires_grad_() * 2).requires_grad


def test_gradients_stay_off_where_they_were() -> None:
    with torch.no_grad(), kept_for_later():
        assert not torch.is_grad_enabled()
