"""Activation checkpointing: parts of a network that run once more in every backward pass, as the network is then.

`torch.utils.checkpoint` keeps no activations: where a backward pass asks for them, their part of the network runs
again. It must find the network as it was in the forward pass, since tensors that require gradients decide what is
saved. Of a reentrant checkpoint PyTorch gives no gradients of chosen tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from laplace.errors import UnsupportedError

COMPUTED_AGAIN = "activations of this pass are to be computed once more"
"""The message of `disable_saved_tensors_hooks`, by which a pass is told that does not keep its activations."""

_OFF = (
    "switch activation checkpointing off for the calls of this library (model.gradient_checkpointing_disable() of "
    "transformers, model.set_grad_checkpointing(False) of timm)"
)

GRADIENTS_LATER = (
    "gradients through predictions (enable_backprop=True) of a network that checkpoints activations would be computed "
    f"when the network is no longer as it was: {_OFF}."
)
"""The message of a refusal of graphs that outlive the call in which activations can be computed once more."""


@contextmanager
def computable_again() -> Iterator[None]:
    """A block of backward passes, through checkpoints that allow it."""
    try:
        yield
    except RuntimeError as error:
        if "torch.utils.checkpoint" not in str(error):
            raise
        if "use_reentrant" in str(error):
            raise UnsupportedError(
                "the network checkpoints activations with use_reentrant=True, of which PyTorch gives no gradients of "
                f"chosen tensors. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or {_OFF}."
            ) from error
        raise UnsupportedError(
            "a part of the network that checkpoints activations does not run a second time as it did before: "
            f"{_OFF}. PyTorch says: {error}"
        ) from error
