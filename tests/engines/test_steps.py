"""PyTorch's fused encoder layers: another function than the same layers with gradients where data are padded."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
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
