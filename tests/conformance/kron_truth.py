"""What a Kronecker-factored curvature should hold for every tensor of every problem, dense.

Linear and convolution layers come from `tests.reference.kfac`, attention and recurrence from the same after they are
written out as such; here are embeddings, transposed convolutions, and the exact blocks of all that has no factors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from laplace.structures import KronCurvature
from tests import problems as catalogue
from tests.conformance.cases import Case, dense, truth
from tests.problems import Problem
from tests.reference import curvature, kfac
from tests.reference.explicit import chain, explicit

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d)
# Tensors of layers that are called once, but which influence the outputs in another way as well.
_BYPASSED = {("functional_reuse", "hidden.weight")}
# Layers that are written without their modules, with them.
_WRITTEN_OUT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "functional_only": lambda m: chain(inp=m.inp, tanh=nn.Tanh(), head=m.head),
}  # fmt: skip
# Parameters `[in, out]` that multiply from the right.
_STORED_BY_INPUT = {"bare_parameter": ["mix"], "stored_by_input": ["hidden.weight", "hidden.bias"]}


def _networks(problem: Problem) -> tuple[nn.Module, dict[str, str]]:
    """The network with every linear map in a module that is called, and names in it that differ."""
    model = problem.make_model()
    return explicit(_WRITTEN_OUT.get(problem.name, lambda m: m)(model))


def factored_names(problem: Problem) -> list[str]:
    """Parameters that have Kronecker factors: of known layers that run once, and used nowhere else."""
    return _factored_names(problem.name)


@cache
def _factored_names(name: str) -> list[str]:
    problem = catalogue.get(name)
    model, renamed = _networks(problem)
    calls: dict[str, int] = {}
    owners: dict[int, int] = {}
    for name, module in model.named_modules():
        for tensor in module._parameters.values():
            owners[id(tensor)] = owners.get(id(tensor), 0) + 1

        def count(*_: object, name: str = name) -> None:
            calls[name] = calls.get(name, 0) + 1

        module.register_forward_hook(count)
    curvature.outputs(model, problem.x)
    modules = dict(model.named_modules())
    former = {new: old for old, new in renamed.items()}
    found = list(_STORED_BY_INPUT.get(problem.name, []))
    for name, tensor in model.named_parameters():
        owner = name.rpartition(".")[0]
        known = isinstance(modules[owner], (*_LAYERS, *_TRANSPOSED, nn.Embedding))
        once = calls.get(owner) == 1 or owner.endswith(".recurrent")
        if known and once and owners[id(tensor)] == 1 and (problem.name, name) not in _BYPASSED:
            found.append(former.get(name, name))
    return found


def kron_truth(case: Case, approx: str = "expand", kind: str = "ggn") -> Tensor:
    """The block-diagonal matrix `[P, P]` of a case: the sub-block of the whole problem's."""
    return _whole(case.problem.name, approx, kind)[case.columns][:, case.columns]


@cache
def _whole(name: str, approx: str, kind: str) -> Tensor:
    problem, known = _counted(catalogue.get(name)), truth(name)
    (model, renamed), exact = _networks(problem), dense(catalogue.get(name), kind)
    modules = dict(model.named_modules())
    factored = factored_names(problem)
    own = {n: renamed.get(n, n) for n in factored}
    plain = [n for n, new in own.items() if isinstance(modules.get(new.rpartition(".")[0]), _LAYERS)]
    by_name = kfac.kfac(
        model, problem.x, problem.y, [own[n] for n in plain], problem.likelihood, approx, kind
    ) if plain else {}  # fmt: skip
    by_kfac = {n: by_name[own[n]] for n in plain}
    blocks: list[Tensor] = []
    for i, tensor in enumerate(known.names):
        inside = known.tensor_of == i
        if tensor in _STORED_BY_INPUT.get(name, []):
            blocks.append(_turned(problem, tensor, approx, kind))
        elif tensor in by_kfac:
            blocks.append(kfac.dense_block(by_kfac[tensor]))
        elif tensor in factored:
            blocks.append(_by_positions(problem, tensor, approx, kind))
        else:
            blocks.append(exact[inside][:, inside])
    return torch.block_diag(*blocks)


def _counted(problem: Problem) -> Problem:
    """The problem without its ignored data, which count nowhere: not in the mean of the inputs either."""
    kept = problem.y != curvature.IGNORED
    return replace(problem, x=problem.x[kept], y=problem.y[kept]) if "ignored_labels" in problem.tags else problem


def _turned(problem: Problem, name: str, approx: str, kind: str) -> Tensor:
    """A ⊗ B of z = x W + b: that of a linear layer with the transposed weight, with its two sides exchanged."""
    model = problem.make_model()
    stored = dict(model.named_parameters())
    weight, *bias = (stored[n] for n in _STORED_BY_INPUT[problem.name])
    layer = nn.Linear(*weight.shape, bias=bool(bias), dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight.T)
        if bias:
            layer.bias.copy_(bias[0])
    written = _MULTIPLIED[problem.name](model, layer)
    own = "layer.bias" if name.endswith("bias") else "layer.weight"
    factors = kfac.kfac(written, problem.x, problem.y, [own], problem.likelihood, approx, kind)
    return kfac.dense_block([pair[::-1] for pair in factors[own]])


class _Mixed(nn.Module):
    """`BareParameter` with its matrix in a layer."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.model, self.layer = model, layer

    def forward(self, x: Tensor) -> Tensor:
        m = self.model
        h = self.layer(torch.tanh(m.inp(x)))  # pyright: ignore
        return m.head(torch.tanh(h * m.scale)) * m.sharpness  # pyright: ignore


class _Stored(nn.Module):
    """`StoredByInput` with its weight in a layer."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.model, self.layer = model, layer

    def forward(self, x: Tensor) -> Tensor:
        m = self.model
        h = self.layer(torch.tanh(m.inp(x)))  # pyright: ignore
        return m.head(torch.tanh(h)).mean(1)  # pyright: ignore


_MULTIPLIED: dict[str, Callable[[nn.Module, nn.Module], nn.Module]] = {
    "bare_parameter": _Mixed,
    "stored_by_input": _Stored,
}


def _by_positions(problem: Problem, name: str, approx: str, kind: str) -> Tensor:
    """Block of an embedding's or a transposed convolution's parameter."""
    owner, _, attribute = name.rpartition(".")
    network = copy.deepcopy(problem.make_model()).requires_grad_(True)
    module = network.get_submodule(owner)
    kept: list[Tensor] = []
    n_data = len(problem.y)

    def keep(_: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> Tensor:
        """A table that is read without the data is read for each of them."""
        x = args[0].detach()
        if isinstance(module, nn.Embedding) and x.ndim == 1:
            x, z = x.expand(n_data, -1), z.expand(n_data, *z.shape)
        kept.extend([x, z])
        return z

    module.register_forward_hook(keep)
    f = curvature.outputs(network, problem.x)
    x, z = kept
    g = torch.stack([torch.autograd.grad(column.sum(), z, retain_graph=True)[0] for column in f.T])
    inner = curvature.output_hessian(f.detach(), problem.likelihood, problem.y)
    if kind == "ef":
        r = curvature.residual(f.detach(), problem.y, problem.likelihood)
        inner = r[:, :, None] * r[:, None, :]
    if isinstance(module, nn.Embedding):
        return _embedding(module, x, g, inner)
    if attribute == "bias":
        split = g.flatten(3).movedim(2, 3).unflatten(3, (module.groups, -1))  # pyright: ignore
        return torch.block_diag(*[_output_side(split[..., n, :], inner, approx) for n in range(split.shape[3])])
    return _transposed(module, x, g, inner, approx)


def _output_side(g: Tensor, inner: Tensor, approx: str) -> Tensor:
    """Σ_bt gᵀ Λ g `[O, O]` of `[C, B, T, O]`, the positions summed first under `"reduce"`."""
    g = g.sum(2, keepdim=True) if approx == "reduce" else g
    return torch.einsum("cbto,bcd,dbtp->op", g, inner, g)


def _embedding(module: nn.Embedding, x: Tensor, g: Tensor, inner: Tensor) -> Tensor:
    """Counts of the rows, as a frequency, ⊗ the second moment of the gradients; always `"expand"`."""
    valid = torch.ones_like(x, dtype=torch.bool) if module.padding_idx is None else x != module.padding_idx
    counts = torch.bincount(x[valid], minlength=module.num_embeddings).double()
    return kfac.kron(torch.diag(counts / counts.sum()), _output_side(g * valid[:, :, None], inner, "expand"))


def _transposed(module: nn.Module, x: Tensor, g: Tensor, inner: Tensor, approx: str) -> Tensor:
    """A ⊗ B of a transposed convolution: input position t writes a_t ⊗ g_t, g_t found by an impulse at t."""
    n_data, channels, *space = x.shape
    groups: int = module.groups  # pyright: ignore
    blocks: list[Tensor] = []
    for group in range(groups):
        first = group * (channels // groups)
        places = list(torch.cartesian_prod(*[torch.arange(n) for n in space]).view(-1, len(space)))
        a = torch.stack([x[(slice(None), slice(first, first + channels // groups), *p)] for p in places], 1)
        windows = [_window(module, x[:1], first, tuple(p.tolist()), g) for p in places]
        rows = torch.stack(windows, 2)  # [C, B, T, O·k]
        mean = a.mean(1, keepdim=True) if approx == "reduce" else a
        left = torch.einsum("bti,btj->ij", mean, mean) / (mean.shape[0] * mean.shape[1])
        blocks.append(kfac.kron(left, _output_side(rows, inner, approx)))
    assert n_data == g.shape[1]
    return torch.block_diag(*blocks)


def _window(module: nn.Module, like: Tensor, channel: int, place: tuple[int, ...], g: Tensor) -> Tensor:
    """Gradients `[C, B, O·k]` of the weight's row of one input channel, for an impulse at one place."""
    impulse = torch.zeros_like(like)
    impulse[(0, channel, *place)] = 1
    weight: Tensor = module.weight  # pyright: ignore
    z = module(impulse)
    rows = [torch.autograd.grad(z, weight, u[None], retain_graph=True)[0][channel].flatten() for u in g.flatten(0, 1)]
    return torch.stack(rows).unflatten(0, g.shape[:2])


def dense_of_factors(curvature_held: KronCurvature) -> Tensor:
    """The matrix that public factors stand for, `[P, P]`: left ⊗ right per group, restricted to what was selected."""
    blocks: list[Tensor] = []
    for factors, block in zip(curvature_held.kfacs, curvature_held.parts.blocks, strict=True):
        if block.kind == "diag":
            blocks.append(torch.diag(factors[0]))
            continue
        matrix = _product(factors) if block.kind == "kron" else factors[0]
        blocks.append(matrix if block.index is None else matrix[block.index][:, block.index])
    return torch.block_diag(*blocks)


def _product(factors: list[Tensor]) -> Tensor:
    sides = [torch.diag(factor) if factor.ndim == 1 else factor for factor in factors]
    if sides[0].ndim == 2 and len(sides) == 2 and sides[1].ndim == 2:
        return kfac.kron(*sides)
    if len(sides) == 1:
        return torch.block_diag(*sides[0]) if sides[0].ndim == 3 else sides[0]
    return torch.block_diag(*[kfac.kron(left, right) for left, right in zip(*sides, strict=True)])
