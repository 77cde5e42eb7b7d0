"""Networks in which every weight belongs to a `nn.Linear` that is called: attention and recurrence written out.

The same functions of the same numbers, by other means than PyTorch's, so that Kronecker factors are those of plain
linear layers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import ClassVar

import torch
from torch import Tensor, nn


def explicit(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """A network with the same outputs, and where each parameter of the model is found in it.

    Only attention and recurrent layers are replaced; what is not among the names has kept its own.
    """
    network, names = copy.deepcopy(model), {}
    for path, module in list(network.named_modules()):
        kind = next((kind for known, kind in _KINDS.items() if isinstance(module, known)), None)
        if kind is None:
            continue
        own = kind(module)
        parent, _, attribute = path.rpartition(".")
        setattr(network.get_submodule(parent), attribute, own)
        names |= {f"{path}.{old}": f"{path}.{new}" for old, new in own.names.items()}
    return network, names


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


class Attention(nn.Module):
    """Multi-head attention with a packed projection, which is called once for every different input."""

    names: ClassVar = {"in_proj_weight": "packed.weight", "in_proj_bias": "packed.bias",
             "out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}  # fmt: skip
    batch_first = False  # of the encoder layer's question, which would look for more otherwise

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.packed = _linear(module.in_proj_weight, module.in_proj_bias)
        self.out = _linear(module.out_proj.weight, module.out_proj.bias)
        self.heads, self.data_first = module.num_heads, module.batch_first

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> tuple[Tensor, None]:
        """Without masks."""
        if query is key and key is value:
            q, k, v = self.packed(query).chunk(3, -1)
        else:
            q, k, v = (self.packed(x).chunk(3, -1)[i] for i, x in enumerate((query, key, value)))
        q, k, v = ((x if self.data_first else x.transpose(0, 1)).unflatten(-1, (self.heads, -1)) for x in (q, k, v))
        scores = torch.einsum("nlhd,nshd->nhls", q, k) / q.shape[-1] ** 0.5
        context = torch.einsum("nhls,nshd->nlhd", scores.softmax(-1), v).flatten(2)
        return self.out(context if self.data_first else context.transpose(0, 1)), None


class Recurrent(nn.Module):
    """One layer of an LSTM or a GRU in one direction, from zero states."""

    names: ClassVar = {f"{kind}_{side}_l0": f"{layer}.{kind}" for kind in ("weight", "bias")
             for side, layer in (("ih", "given"), ("hh", "recurrent"))}  # fmt: skip

    def __init__(self, module: nn.RNNBase) -> None:
        super().__init__()
        own = dict(module.named_parameters())
        self.given = _linear(own["weight_ih_l0"], own["bias_ih_l0"])
        self.recurrent = _linear(own["weight_hh_l0"], own["bias_hh_l0"])
        self.mode, self.size, self.data_first = module.mode, module.hidden_size, module.batch_first

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Outputs in the layout of the inputs."""
        x = x if self.data_first else x.transpose(0, 1)
        given, h = self.given(x), x.new_zeros(len(x), self.size)
        c, steps = h, []
        for t in range(x.shape[1]):
            h, c = self._step(given[:, t], self.recurrent(h), h, c)
            steps.append(h)
        found = torch.stack(steps, 1)
        return (found if self.data_first else found.transpose(0, 1)), None

    def _step(self, a: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        n = self.size
        if self.mode == "LSTM":
            keep, take, out = (torch.sigmoid((a + b)[:, i * n : (i + 1) * n]) for i in (1, 0, 3))
            c = keep * c + take * torch.tanh((a + b)[:, 2 * n : 3 * n])
            return out * torch.tanh(c), c
        reset, keep = torch.sigmoid((a + b)[:, :n]), torch.sigmoid((a + b)[:, n : 2 * n])
        return keep * h + (1 - keep) * torch.tanh(a[:, 2 * n :] + reset * b[:, 2 * n :]), c


_KINDS: dict[type[nn.Module], type[Attention] | type[Recurrent]] = {
    nn.MultiheadAttention: Attention, nn.LSTM: Recurrent, nn.GRU: Recurrent,
}  # fmt: skip


def chain(**layers: nn.Module) -> nn.Module:
    """Layers one after another, by name."""
    return nn.Sequential(OrderedDict(layers))
