"""Kronecker factors of Linear and convolution modules, one datum at a time.

With G_t = ∂f/∂z_t `[C, O]` at the layer's output and a_t `[I]` at its input, t over the positions that share the
weight (Eschenhagen et al. 2023, "Kronecker-Factored Approximate Curvature for Modern Neural Network
Architectures", eqs. 6 and 11):

    expand:  B = Σ_n Σ_t G_ntᵀ Λ_n G_nt              A = Σ_n Σ_t a_nt a_ntᵀ / (number of n, t)
    reduce:  B = Σ_n (Σ_t G_nt)ᵀ Λ_n (Σ_t G_nt)      A = Σ_n ā_n ā_nᵀ / N,  ā_n = mean_t a_nt

One datum per forward pass makes every row that reaches a layer a position of that datum, wherever the model keeps
its batch dimension.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.reference.curvature import output_hessian, outputs, residual, samples

# One entry per parameter: its diagonal blocks (one per group of a convolution), each a list of Kronecker factors.
Factors = dict[str, list[list[Tensor]]]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Rows(NamedTuple):
    """What one datum shows of one layer: inputs `[groups, T, I]`, output gradients `[groups, C, T, O]`."""

    inputs: Tensor
    gradients: Tensor


def kfac(
    model: nn.Module,
    x: Any,
    y: Tensor,
    names: Sequence[str],
    likelihood: str,
    approx: str = "expand",
    kind: str = "ggn",
) -> Factors:
    """Kronecker factors of the named parameters of Linear and convolution modules.

    The positions of a module that is called several times are those of all its calls.

    Args:
        model: The network.
        x: Inputs.
        y: Targets.
        names: Parameters; each must be the weight or bias of a Linear or Conv module.
        likelihood: Name of the likelihood.
        approx: `"expand"` or `"reduce"`.
        kind: `"ggn"`, or `"ef"` for the empirical Fisher (Λ replaced by r rᵀ).

    Returns:
        For a weight `[[B, A]]`, B `[O, O]` summed over the data and A `[I, I]` a mean over positions, with one
        such pair per group of a grouped convolution; for a bias `[[B]]`, groups as diagonal blocks too.
    """
    modules = dict(model.named_modules())
    layers = {name: modules[name.rpartition(".")[0]] for name in names}
    total: dict[str, list[list[Tensor]]] = {}
    rows_seen: dict[str, int] = {}
    for n, datum in enumerate(samples(x)):
        seen, f = _observe(model, datum, list(dict.fromkeys(name.rpartition(".")[0] for name in names)))
        target = y[n : n + 1]
        r = residual(f, target, likelihood)
        inner = output_hessian(f, likelihood, target)[0] if kind == "ggn" else r.T @ r
        for name in layers:
            rows = seen[name.rpartition(".")[0]]
            blocks = _one_datum(rows, inner, approx)
            total[name] = blocks if name not in total else _add(total[name], blocks)
            rows_seen[name] = rows_seen.get(name, 0) + (rows.inputs.shape[1] if approx == "expand" else 1)
    return {name: _finish(blocks, name, rows_seen[name]) for name, blocks in total.items()}


def kron(left: Tensor, right: Tensor) -> Tensor:
    """`torch.kron`, which refuses transposed factors such as an `einsum` may return."""
    return torch.kron(left.contiguous(), right.contiguous())


def dense_block(blocks: list[list[Tensor]]) -> Tensor:
    """The `[p, p]` block of one parameter that its Kronecker factors stand for, row-major."""
    dense = [kron(*factors) if len(factors) == 2 else factors[0] for factors in blocks]
    return torch.block_diag(*dense)


def dense_kfac(factors: Factors, names: Sequence[str]) -> Tensor:
    """The block-diagonal `[P, P]` matrix of all parameters, in the order of the names."""
    return torch.block_diag(*[dense_block(factors[name]) for name in names])


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs of a convolution as rows: `[B, in, *size]` -> `[groups, B·positions, in/groups · kernel]`.

    The columns follow `weight.flatten(1)`. Written with strided slices, not `unfold`, so that it serves one, two
    and three dimensions, every padding mode and dilation.
    """
    mode = "constant" if module.padding_mode == "zeros" else str(module.padding_mode)
    padded = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)  # type: ignore[arg-type]
    kernel, stride, dilation = list(module.kernel_size), list(module.stride), list(module.dilation)  # type: ignore[arg-type]
    size = [
        (s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(padded.shape[2:], kernel, stride, dilation, strict=True)
    ]
    taps = []
    for offset in itertools.product(*[range(k) for k in kernel]):
        window = [
            slice(o * d, o * d + (n - 1) * t + 1, t) for o, d, n, t in zip(offset, dilation, size, stride, strict=True)
        ]
        taps.append(padded[(slice(None), slice(None), *window)])
    stacked = torch.stack(taps, dim=2).flatten(3)  # [B, in, taps, positions]
    groups = int(module.groups)  # type: ignore[arg-type]
    split = stacked.unflatten(1, (groups, -1))  # [B, groups, in/groups, taps, positions]
    return split.permute(1, 0, 4, 2, 3).flatten(3).flatten(1, 2)


def _observe(model: nn.Module, x: Any, layer_names: Sequence[str]) -> tuple[dict[str, _Rows], Tensor]:
    """Rows of every named layer for one datum, and f `[1, C]`."""
    network = copy.deepcopy(model).requires_grad_(True)
    modules = dict(network.named_modules())
    calls: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
            calls.append((name, args[0].detach().clone(), result))
            return result.clone()  # an in-place activation after the layer must not write into what was kept

        return hook

    for name in layer_names:
        modules[name].register_forward_hook(keep(name))
    f = outputs(network, x)
    kept = [z for _, _, z in calls]
    by_output = [torch.autograd.grad(f[0, c], kept, retain_graph=True) for c in range(f.shape[1])]
    found: dict[str, list[_Rows]] = {name: [] for name in layer_names}
    for i, (name, a, _) in enumerate(calls):
        found[name].append(_rows(modules[name], a, torch.stack([grads[i] for grads in by_output])))
    return {name: _joined(rows) for name, rows in found.items()}, f.detach()


def _joined(rows: list[_Rows]) -> _Rows:
    """The rows of all calls of a layer."""
    return _Rows(torch.cat([r.inputs for r in rows], 1), torch.cat([r.gradients for r in rows], 2))


def _rows(module: nn.Module, a: Tensor, g: Tensor) -> _Rows:
    """Rows of one layer from its input a and the gradients g `[C, *output shape]`."""
    if isinstance(module, nn.Linear):
        return _Rows(a.flatten(0, -2)[None], g.flatten(1, -2)[None])
    if not isinstance(module, _CONVOLUTIONS):
        raise TypeError(f"Kronecker factors are defined here for Linear and Conv, not {type(module).__name__}")
    split = g.unflatten(2, (module.groups, -1)).flatten(4)  # [C, B, groups, O, positions]
    return _Rows(patches(module, a), split.permute(2, 0, 1, 4, 3).flatten(2, 3))


def _one_datum(rows: _Rows, inner: Tensor, approx: str) -> list[list[Tensor]]:
    """Unnormalised factors `[B, A]` of each group for one datum."""
    blocks = []
    for a, g in zip(rows.inputs, rows.gradients, strict=True):
        if approx == "reduce":
            a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
        elif approx != "expand":
            raise ValueError(f"approx={approx!r}: 'expand' or 'reduce'")
        blocks.append([torch.einsum("cto,cd,dtp->op", g, inner, g), a.T @ a])
    return blocks


def _add(left: list[list[Tensor]], right: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[p + q for p, q in zip(one, two, strict=True)] for one, two in zip(left, right, strict=True)]


def _finish(blocks: list[list[Tensor]], name: str, count: int) -> list[list[Tensor]]:
    if name.endswith("bias"):
        return [[b] for b, _ in blocks]
    return [[b, a / count] for b, a in blocks]


def averages(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Column l is the diagonal of k((F − λ_l) / τ) over its trace, of a factor F with eigenvalues λ in rising order.

    The Gaussian k of a matrix, of width √ε λ_max: u_l² where λ_l is simple, the mean of u² over equal eigenvalues.
    """
    values, vectors = torch.linalg.eigh(factor)
    values = values.clamp(min=0)
    width = torch.finfo(dtype).eps ** 0.5 * values.max()
    columns: list[Tensor] = []
    for value in values:
        near = vectors @ torch.diag(torch.exp(-(((values - value) / width) ** 2) / 2)) @ vectors.T
        columns.append(near.diagonal() / near.trace())
    return torch.stack(columns, 1)
