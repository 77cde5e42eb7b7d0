"""Layers that map four features to four, each of which uses its weights in another way: PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

D = 4
"""Width of every layer."""


class Shaped(nn.Module):
    """A layer on another shape of the four features, `[B, *shape]`."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(-1, *self.shape)).reshape(len(x), D)


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Closing(nn.Module):
    """A weight that is read again behind a ReLU, which is dead for data whose first feature is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return F.linear(torch.relu(h - 1e3 * (x[:, :1] < 0)), self.a.weight) + h


class ZeroGate(nn.Module):
    """A residual branch behind a gate that is zero at the trained weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Parameter(torch.zeros(1)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.inner(x))


class Switched(nn.Module):
    """A second use of a weight behind a factor that is a number of the module's, not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.factor = nn.Linear(D, D), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return h + self.factor * self.a(h)


class Masked(nn.Module):
    """A second use of a weight that a mask hides for some data."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return h + self.a(h) * (x[:, :1] > 0)


class Branch(nn.Module):
    """A use that batches without such a datum do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h, open_ = torch.tanh(self.a(x)), x[:, :1] > 0
        return h + self.a(h) * open_ if bool(open_.any()) else h


class Saturated(nn.Module):
    """Sigmoids whose slope underflows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(1e3 * self.a(x))


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x)))


class Autoencoder(nn.Module):
    """A weight and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T)


class OneTranspose(nn.Module):
    """A transpose that is made once and read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.T
        return x @ turned + torch.relu(x - 1e3 * (x[:, :1] < 0)) @ turned


class Squared(nn.Module):
    """A weight times itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight @ self.weight)


class StoredByInput(nn.Module):
    """Weights `[in, out]` and their bias in one function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D) / 2), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Expanded(nn.Module):
    """A weight that is expanded over the data, and multiplied batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.unsqueeze(1), self.weight.expand(len(x), D, D)).squeeze(1)


class Contracted(nn.Module):
    """A product by Einstein's convention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,ijk->bk", x.view(-1, 2, 2), self.weight)


class Pruned(nn.Module):
    """A weight behind a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer("mask", (torch.rand(D, D) > 0.4).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight * self.mask, self.a.bias)


class Cast(nn.Module):
    """A weight in another dtype on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.double(), self.a.weight.double(), self.a.bias.double()).to(x.dtype)


class Affine(nn.Module):
    """A scale around one, a shift, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(D) / 3), nn.Parameter(torch.randn(1, D))
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * (x * (1 + self.scale) + self.shift)


class Sine(nn.Module):
    """A parameter that no rule explains."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sin(self.power * x)


class Slopes(nn.Module):
    """Slopes of a PReLU that are computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithms = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.logarithms.exp())


class Idle(nn.Module):
    """Weights that no output depends on: one is detached, one not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused = nn.Linear(D, D), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.a.weight.detach())


class LoRA(nn.Module):
    """A fixed weight and an adapter whose second factor is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 1, bias=False), nn.Linear(1, D, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


class Attention(nn.Module):
    """Self-attention of two tokens, the batch first or second."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.attention, self.batch_first = nn.MultiheadAttention(2, 1, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 2, 2)
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        seen = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return x + (seen if self.batch_first else seen.transpose(0, 1)).reshape(-1, D)


class AttentionByHand(nn.Module):
    """The same of one projection, by products."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x.view(-1, 2, 2)).chunk(3, -1)
        return x + ((q @ k.transpose(1, 2)).softmax(-1) @ v).flatten(1)


class Recurrent(nn.Module):
    """States of a recurrent layer over two steps."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool = True) -> None:
        super().__init__()
        self.cell, self.batch_first = kind(2, 2, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        steps = x.view(-1, 2, 2)
        if self.batch_first:
            return self.cell(steps)[0].reshape(-1, D)
        return self.cell(steps.transpose(0, 1))[0].transpose(0, 1).reshape(-1, D)


class Table(nn.Module):
    """Rows of a table that the signs of the features choose, added to them."""

    def __init__(self, padding: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(4, D, padding_idx=0 if padding else None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


class Bag(nn.Module):
    """Means of rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(4, D, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bag(torch.stack([(x[:, 0] > 0).long(), 2 + (x[:, 1] > 0).long()], 1))


class Positions(nn.Module):
    """A table of positions, read without the data, in front of a layer of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a = nn.Embedding(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.view(-1, 2, 2) + self.table(torch.arange(2))).flatten(1)


class Folded(nn.Module):
    """A layer that sees the tokens of all data as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.reshape(-1, 2)).reshape(-1, D)


class RowByRow(nn.Module):
    """A layer that is called once for every datum, on its features alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(row) for row in x])


class TokenByToken(nn.Module):
    """A convolution and a table that are called without a dimension for the data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv1d(2, 3, 2), nn.Embedding(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.conv(row.view(2, 2)).flatten() + self.table((row[0] > 0).long()) for row in x]
        return torch.cat([torch.stack(seen), x[:, :1]], 1)


class Routed(nn.Module):
    """Two experts for data, chosen by the first sign; one that gets no datum is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for chosen, expert in zip((x[:, 0] > 0, x[:, 0] <= 0), self.experts, strict=True):
            if bool(chosen.any()):
                h = h.index_put((chosen,), expert(x[chosen]))
        return torch.tanh(h)


class RoutedTokens(nn.Module):
    """Two experts for tokens, always called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 2)
        h = torch.zeros_like(tokens)
        for chosen, expert in zip((tokens[:, 0] > 0, tokens[:, 0] <= 0), self.experts, strict=True):
            h = h.index_put((chosen,), expert(tokens[chosen]))
        return h.reshape(-1, D)


class Soft(nn.Module):
    """Experts that all see all data, mixed by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 2), nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Shuffled(nn.Module):
    """A layer that sees the data in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.a(x[order])[order.argsort()]


class Checkpointed(nn.Module):
    """A part that is computed again in every backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Product(torch.autograd.Function):
    """x Wᵀ as a function of a user's, with forward- and vectorised rules."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class OwnFunction(nn.Module):
    """A layer by a user's `autograd.Function`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)


class Bilinear(nn.Module):
    """A bilinear form of the features with themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(D, D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.form(x, x))


class PaddedByHand(nn.Module):
    """A convolution that is called through its weight, on images that were padded before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.view(-1, 2, 2), (1, 1), mode="circular")
        return F.conv1d(padded, self.conv.weight, self.conv.bias).flatten(1)


class Symmetric(nn.Module):
    """W + Wᵀ, as a parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.T


class Cached(nn.Module):
    """A parametrised layer that is called twice while its weight is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        parametrize.register_parametrization(self.a, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.a(torch.tanh(self.a(x)))


def symmetric() -> nn.Module:
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def moved(norm: nn.Module) -> nn.Module:
    """A norm with weights and statistics that are not trivial."""
    with torch.no_grad():
        for tensor in [*norm.parameters(), *norm.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand_like(tensor))
    return norm


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "no bias": lambda: nn.Linear(D, D, bias=False),
    "narrow": lambda: nn.Sequential(nn.Linear(D, 1), nn.Tanh(), nn.Linear(1, D)),
    "tanh": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()),
    "relu": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU()),
    "relu in place": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True)),
    "gelu": lambda: nn.Sequential(nn.Linear(D, D), nn.GELU()),
    "residual": lambda: Residual(nn.Linear(D, D)),
    "closing": Closing,
    "zero gate": ZeroGate,
    "masked": Masked,
    "switched": Switched,
    "branch": Branch,
    "saturated": Saturated,
    "twice": Twice,
    "autoencoder": Autoencoder,
    "one transpose": OneTranspose,
    "squared": Squared,
    "stored by input": StoredByInput,
    "expanded": Expanded,
    "contracted": Contracted,
    "pruned": Pruned,
    "cast": Cast,
    "affine": Affine,
    "sine": Sine,
    "idle": Idle,
    "lora": LoRA,
    "attention": Attention,
    "attention, time first": lambda: Attention(batch_first=False),
    "attention by hand": AttentionByHand,
    "transformer": lambda: Shaped(nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True), 2, 2),
    "rnn": lambda: Recurrent(nn.RNN),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm, time first": lambda: Recurrent(nn.LSTM, batch_first=False),
    "layer norm": lambda: moved(nn.LayerNorm(D)),
    "layer norm of one": lambda: Shaped(moved(nn.LayerNorm(1)), D, 1),
    "group norm": lambda: moved(nn.GroupNorm(1, D)),
    "group norm of one": lambda: moved(nn.GroupNorm(D, D)),
    "group norm of two": lambda: moved(nn.GroupNorm(2, D)),
    "rms norm": lambda: moved(nn.RMSNorm(D)),
    "batch norm": lambda: moved(nn.BatchNorm1d(D)),
    "instance norm": lambda: Shaped(moved(nn.InstanceNorm1d(2, affine=True)), 2, 2),
    "prelu": nn.PReLU,
    "prelu of channels": lambda: nn.PReLU(D),
    "prelu, computed": Slopes,
    "embedding": Table,
    "embedding with padding": lambda: Table(padding=True),
    "embedding bag": Bag,
    "positions": Positions,
    "folded": Folded,
    "tokens": lambda: Shaped(nn.Linear(2, 2), 2, 2),
    "row by row": lambda: RowByRow(nn.Linear(D, D)),
    "row by row, normalised": lambda: RowByRow(nn.Sequential(moved(nn.LayerNorm(D)), nn.Linear(D, D, bias=False))),
    "token by token": TokenByToken,
    "routed": Routed,
    "routed tokens": RoutedTokens,
    "soft experts": Soft,
    "shuffled": Shuffled,
    "checkpoint": lambda: Checkpointed(nn.Sequential(nn.Linear(D, D), nn.Tanh())),
    "checkpoint twice": lambda: Checkpointed(Twice()),
    "own function": OwnFunction,
    "bilinear": Bilinear,
    "conv": lambda: Shaped(nn.Conv1d(2, 2, 3, padding=1), 2, 2),
    "conv of images": lambda: Shaped(nn.Conv2d(1, 1, 3, padding="same"), 1, 2, 2),
    "conv, strided": lambda: Shaped(nn.Conv1d(2, 4, 2, stride=2), 2, 2),
    "conv, grouped": lambda: Shaped(nn.Conv1d(4, 4, 1, groups=2), 4, 1),
    "conv, depthwise": lambda: Shaped(nn.Conv1d(2, 2, 3, padding=1, groups=2), 2, 2),
    "conv, then linear": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(8, D)
    ),
    "conv, dilated": lambda: Shaped(nn.Conv1d(2, 2, 2, padding=1, dilation=2), 2, 2),
    "conv, circular": lambda: Shaped(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), 2, 2),
    "conv, reflect": lambda: Shaped(nn.Conv2d(1, 1, (1, 3), padding=(0, 1), padding_mode="reflect"), 1, 2, 2),
    "conv, replicate": lambda: Shaped(nn.Conv1d(2, 2, 3, padding=1, padding_mode="replicate", bias=False), 2, 2),
    "conv, transposed": lambda: Shaped(nn.ConvTranspose1d(4, 2, 2), 4, 1),
    "conv, padded by hand": PaddedByHand,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, D)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(D, D, bias=False)),
    "symmetric": symmetric,
    "cached": Cached,
}
