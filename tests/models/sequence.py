"""Networks on tokens: attention, recurrence, embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TransformerEncoder(nn.Module):
    """One encoder layer with `nn.MultiheadAttention` on embedded tokens with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 4]` -> `[B, 3]`."""
        return self.head(self.encoder(x)[:, 0])


class TimeMajorAttention(nn.Module):
    """`nn.MultiheadAttention` in its default layout, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 4]` -> `[B, 3]`."""
        h = x.transpose(0, 1)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        return self.head(h[0] - 0.5 * h[-1])


class HandWrittenAttention(nn.Module):
    """Scaled dot-product attention from dense layers, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 4]` -> `[B, 3]`."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 2.0
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v
        return self.head(self.norm(x + self.out(h))[:, -1])


class Recurrent(nn.Module):
    """An LSTM or GRU, read at the last step."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.rnn = cell(3, 4, batch_first=batch_first)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, 2]`."""
        if self.batch_first:
            return self.head(self.rnn(x)[0][:, -1])
        return self.head(self.rnn(x.transpose(0, 1))[0][-1])


class Tokens(nn.Module):
    """Token and position embeddings; the positions carry no batch dimension."""

    def __init__(self, padding_idx: int | None = None, positions: bool = True) -> None:
        super().__init__()
        self.token = nn.Embedding(9, 4, padding_idx=padding_idx)
        self.position = nn.Embedding(6, 4) if positions else None
        self.norm, self.hidden, self.head = nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Indices `[B, T]` -> `[B, 3]`."""
        h = self.token(x)
        if self.position is not None:
            h = h + self.position(torch.arange(x.shape[1], device=x.device))
        return self.head(torch.tanh(self.hidden(self.norm(h))).mean(1))


class TiedHead(nn.Module):
    """An embedding whose weight is the head's as well: next-token logits over four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(4, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 4)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """Indices `[B, T]` -> `[B, 4]`."""
        return self.head(torch.tanh(self.hidden(self.token(x))).mean(1))


class ProductByInput(nn.Module):
    """A layer whose weight is stored `[in, out]`, as GPT-2's are, on a view of all positions."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size_in, size_out) / 2), nn.Parameter(torch.zeros(size_out))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class StoredByInput(nn.Module):
    """Positions through a layer with a weight `[in, out]`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.hidden, self.head = nn.Linear(3, 4), ProductByInput(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, 3]`."""
        return self.head(torch.tanh(self.hidden(torch.tanh(self.inp(x))))).mean(1)


class ScaleOnly(nn.Module):
    """A norm with a scale alone, stored as w or as w − 1."""

    def __init__(self, size: int, shift: float) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.full((size,), 1 - shift)), shift

    def forward(self, x: Tensor) -> Tensor:
        """The shape of the input."""
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return h * (self.shift + self.weight.to(h.dtype)) if self.shift else self.weight * h


class Patches(nn.Module):
    """A class token and positions as bare parameters, norms with a scale alone, attention between unequal inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 6, 4))
        self.before, self.after = ScaleOnly(4, 0.0), ScaleOnly(4, 1.0)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, 3]`."""
        h = torch.cat([self.token.expand(len(x), -1, -1), self.inp(x)], 1)
        h = self.before(h + self.positions[:, : h.shape[1]])
        h = self.after(h[:, :1] + self.attention(h[:, :1], h, h.sin(), need_weights=True)[0])
        return self.head(h[:, 0])
