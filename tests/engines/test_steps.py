"""PyTorch's fused encoder layers: another function than the same layers with gradients where data are padded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import Laplace
from laplace.core import pieces
from laplace.network.model_guard import private_copy
from tests.reference.compare import assert_close

WIDTH, LENGTH = 8, 5


class Encoder(nn.Module):
    """Classifies padded sequences by the mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padded).mean(1))


def problem() -> tuple[Encoder, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x, y = torch.randn(6, LENGTH, WIDTH), torch.randint(3, (6,))
    padded = torch.arange(LENGTH) >= torch.tensor([[2], [3], [4], [5], [2], [3]])
    return Encoder().eval(), x, padded, y


def test_a_network_is_one_function_with_and_without_gradients() -> None:
    model, x, padded, y = problem()
    f = model(x, padded).detach()  # with gradients
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype of PyTorch
        assert (model(x, padded) - f).abs().max() > 1e-2, "the fused layers are not another function any more"
    loss = nn.functional.cross_entropy(f, y, reduction="sum")
    for weights in ("all", "last_layer"):
        la = Laplace(model, "classification", weights, "diag", prior_precision=1e12)
        la.fit([(x, padded, y)])
        assert_close(la.loss, loss, "float32")
        for kind in ("glm", "nn"):
            probabilities = la((x, padded), pred_type=kind, link_approx="mc", n_samples=3)
            assert_close(probabilities, f.softmax(1), "float32")


@pytest.mark.parametrize("before", [True, False])
def test_the_switch_is_put_back(before: bool) -> None:
    model = Encoder()
    try:
        torch.backends.mha.set_fastpath_enabled(before)
        with pytest.raises(ZeroDivisionError), private_copy(model):
            with private_copy(Encoder()):
                assert not torch.backends.mha.get_fastpath_enabled()
            assert not torch.backends.mha.get_fastpath_enabled()
            _ = 1 / 0
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Fused(nn.Module):
    """Attention as a function, of which PyTorch has no backward pass for many cotangents."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize(("length", "passes"), [(6, 0), (20, 3)], ids=["short", "long"])
def test_fused_attention_is_no_loop_over_cotangents_where_operations_are_dear(
    length: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But over texts whose scores would be larger than all else."""

    class Backward(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model, x, y, seen = Fused().eval(), torch.randn(5, length, 8), torch.arange(5) % 3, list[str]()
    expected = Laplace(model, "classification", "all", "diag")
    expected.fit([(x, y)])
    monkeypatch.setattr(pieces, "_CHEAP", frozenset({"meta"}))
    la = Laplace(model, "classification", "all", "diag")
    la.fit([(x, y)])
    assert torch.allclose(la.H, expected.H, rtol=1e-4)
    with Backward():
        la(x)
    assert sum("attention" in name and "backward" in name for name in seen) == passes
