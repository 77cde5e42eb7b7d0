"""`Kron` and `KronDecomposed` against dense float64 matrices and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace.compat.kron import Kron, KronDecomposed, dense
from laplace.errors import CurvatureError, InvalidArgument

F64 = torch.float64


def psd(*shape: int) -> torch.Tensor:
    root = torch.randn(*shape, shape[-1] + 1, dtype=F64)
    return root @ root.mT


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def kron() -> Kron:
    """Every kind of block: pair, single, counts of an embedding, groups, a shared factor, grouped single, scalar."""
    torch.manual_seed(0)
    counts = torch.tensor([3.0, 0.5, 2.0, 7.0], dtype=F64)
    blocks = [
        [psd(3), psd(2)],
        [psd(3)],
        [counts, psd(2)],
        [psd(2, 3), psd(2, 2)],
        [psd(2, 3), psd(2)],
        [psd(2, 2)],
        [psd(1)],
        [counts],
        [psd(2), counts],
    ]
    return Kron(blocks)


def by_hand(block: list[torch.Tensor]) -> torch.Tensor:
    """The dense block, by torch.kron and torch.block_diag only."""
    full = [torch.diag(factor) if factor.ndim == 1 else factor for factor in block]
    groups = max(factor.shape[0] if factor.ndim == 3 else 1 for factor in full)
    per_group = [[factor[g] if factor.ndim == 3 else factor for factor in full] for g in range(groups)]
    return torch.block_diag(*(torch.kron(*part) if len(part) == 2 else part[0] for part in per_group))


def by_hand_all(kron: Kron) -> torch.Tensor:
    return torch.block_diag(*(by_hand(block) for block in kron.kfacs))


def deltas(n: int) -> torch.Tensor:
    return torch.linspace(0.3, 2.0, n, dtype=F64)


def test_dense_forms(kron):
    expected = by_hand_all(kron)
    close(kron.to_matrix(), expected)
    close(kron.diag(), expected.diagonal())
    close(kron.logdet(), torch.logdet(expected))
    for block in kron.kfacs:
        close(dense(block), by_hand(block))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 1), (3, 5), (1, 5)])
def test_bmm_keeps_the_shape(kron, shape):
    matrix = by_hand_all(kron)
    W = torch.randn(*shape, len(matrix), dtype=F64)
    close(kron.bmm(W), W @ matrix)
    posterior = kron.decompose() + 0.7
    inverse = torch.linalg.inv(matrix + 0.7 * torch.eye(len(matrix), dtype=F64))
    close(posterior.bmm(W), W @ inverse, 1e-8)


def test_addition_and_scaling(kron):
    double = kron + kron
    for block, former in zip(double.kfacs, kron.kfacs, strict=True):
        assert [f.ndim for f in block] == [f.ndim for f in former]
        for a, b in zip(block, former, strict=True):
            close(a, 2 * b)
    close((kron * 3.0).to_matrix(), 3 * by_hand_all(kron))
    close((torch.tensor(3.0, dtype=F64) * kron).to_matrix(), 3 * by_hand_all(kron))
    assert len(kron) == 9
    mixed = Kron([[torch.ones(3, dtype=F64)]]) + Kron([[torch.ones(3, 3, dtype=F64)]])
    close(mixed.to_matrix(), torch.ones(3, 3, dtype=F64) + torch.eye(3, dtype=F64))


@pytest.mark.parametrize("exponent", [-1, -0.5, 0.5, 1])
def test_decomposed_powers(kron, exponent):
    posterior = 1.7 * (kron.decompose() + deltas(len(kron)))
    sizes = [len(by_hand(block)) for block in kron.kfacs]
    prior = deltas(len(kron)).repeat_interleave(torch.tensor(sizes))
    matrix = 1.7 * (by_hand_all(kron) + torch.diag(prior))
    values, vectors = torch.linalg.eigh(matrix)
    power = (vectors * values.pow(exponent)) @ vectors.T
    close(posterior.to_matrix(exponent), power, 1e-9)
    close(posterior.diag(exponent), power.diagonal(), 1e-9)
    close(posterior.logdet(), torch.logdet(matrix))
    W = torch.randn(4, 3, len(matrix), dtype=F64)
    close(posterior.inv_square_form(W), W @ torch.linalg.inv(matrix) @ W.mT, 1e-8)


def test_damping_survives_sum_and_product(kron):
    """(F₁ + √δ I) ⊗ (F₂ + √δ I) after scaling the curvature: the order in which a posterior is made."""
    scale, delta = 0.6, 0.4
    posterior = kron.decompose(damping=True) * scale + delta
    assert posterior.damping

    def damped(block):
        factor = scale if len(block) == 1 else scale**0.5
        shift = delta if len(block) == 1 else delta**0.5
        shifted = []
        for f in block:
            full = torch.diag(f) if f.ndim == 1 else f
            shifted.append(factor * full + shift * torch.eye(full.shape[-1], dtype=F64))
        return by_hand(shifted)

    expected = torch.block_diag(*(damped(block) for block in kron.kfacs))
    close(posterior.to_matrix(), expected)
    close(posterior.logdet(), torch.logdet(expected))
    close(posterior.to_matrix(-1), torch.linalg.inv(expected), 1e-8)
    close(posterior.diag(), expected.diagonal())
    undamped = kron.decompose() * scale + delta
    assert not torch.allclose(posterior.logdet(), undamped.logdet())


@pytest.mark.parametrize("damping", [False, True])
def test_gradients_through_scale_and_deltas(kron, damping):
    decomposed = kron.decompose(damping)
    W = torch.randn(2, 2, kron.diag().numel(), dtype=F64)

    def evidence(scale, prior):
        posterior = decomposed * scale + prior
        return posterior.logdet(), posterior.inv_square_form(W), posterior.diag(-0.5)

    scale = torch.tensor(0.8, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(evidence, (scale, deltas(len(kron)).requires_grad_()))
    one = torch.tensor([0.8], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(evidence, (one, torch.tensor(0.5, dtype=F64, requires_grad=True)))
    assert torch.autograd.gradcheck(lambda s: (kron * s).diag(), (scale,))


def test_detach(kron):
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    posterior = kron.decompose(damping=True) * scale + scale
    assert posterior.logdet().requires_grad
    free = posterior.detach()
    assert not free.logdet().requires_grad
    assert free.damping
    close(free.logdet(), posterior.logdet().detach())


def test_accepted_deltas(kron):
    decomposed = kron.decompose()
    expected = (decomposed + torch.full((9,), 2.0, dtype=F64)).logdet()
    for value in (2.0, 2, torch.tensor(2.0, dtype=F64), torch.tensor([2.0], dtype=F64)):
        close((decomposed + value).logdet(), expected)
        close((value + decomposed).logdet() if not isinstance(value, torch.Tensor) else expected, expected)
    for bad in (torch.ones(4), torch.ones(9, 1), "1", True, None):
        with pytest.raises(InvalidArgument, match="one per block"):
            decomposed + bad


def test_bad_arguments(kron):
    with pytest.raises(InvalidArgument, match="not to int"):
        kron + 1
    with pytest.raises(InvalidArgument, match="real number"):
        kron * torch.ones(2)
    with pytest.raises(InvalidArgument, match="at least 0"):
        kron * -1.0
    with pytest.raises(InvalidArgument, match="exponent=1"):
        kron.bmm(torch.ones(3), exponent=-1)
    with pytest.raises(InvalidArgument, match="number of parameters"):
        kron.bmm(torch.ones(3))
    with pytest.raises(InvalidArgument, match=r"\[B, K, P\]"):
        kron.decompose().inv_square_form(torch.ones(3))
    with pytest.raises(InvalidArgument, match="cannot be added"):
        Kron([[psd(2)]]) + Kron([[psd(3)]])
    with pytest.raises(InvalidArgument, match="factors per block"):
        Kron([[psd(2)]]) + Kron([[psd(2), psd(1)]])
    for bad in ([torch.ones(2, 3)], [], [psd(2)] * 3, [psd(2, 2), psd(3, 2)], [torch.ones(())]):
        with pytest.raises(InvalidArgument, match="block of Kronecker factors"):
            Kron([bad])


def test_not_finite_is_an_error_and_never_ends_the_interpreter():
    with pytest.raises(CurvatureError, match="NaN or infinite"):
        Kron([[torch.tensor([[float("nan")]])]]).decompose()


def test_rank_deficient_float32_is_clamped():
    torch.manual_seed(0)
    root = 1e3 * torch.randn(300, 3)
    decomposed = Kron([[root @ root.T]]).decompose()
    assert decomposed.eigenvalues[0][0].dtype == torch.float32
    assert decomposed.eigenvalues[0][0].min() >= 0
    assert torch.isfinite((decomposed + 1e-4).logdet())


def test_bfloat16_factors_decompose_in_float32():
    decomposed = Kron([[psd(3).bfloat16(), psd(2).bfloat16()]]).decompose()
    assert (decomposed + 1.0).logdet().dtype == torch.float32


def test_embedding_counts_are_never_dense():
    counts, small = torch.ones(30_000), torch.eye(4)
    decomposed = (Kron([[counts, small]]) * 2.0).decompose() + 1.0
    assert [q.numel() for q in decomposed.eigenvectors[0]] == [30_000, 16]
    close(decomposed.logdet(), torch.tensor(120_000 * 3.0).log() * 0 + 120_000 * torch.tensor(3.0).log(), 1e-4)
    assert decomposed.bmm(torch.ones(2, 120_000)).shape == (2, 120_000)


def test_init_from_model():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Conv2d(2, 4, 3), nn.Linear(3, 2))
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.many = nn.Parameter(torch.ones(2, 1, 3, 2, 2))
    model[2].bias.requires_grad_(False)
    kron = Kron.init_from_model(model)
    shapes = {tuple(tuple(f.shape) for f in block) for block in kron.kfacs}
    assert shapes == {
        ((1, 1),),
        ((2, 2), (12, 12)),
        ((5,), (3, 3)),
        ((4, 4), (18, 18)),
        ((4, 4),),
        ((2, 2), (3, 3)),
    }
    n_params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert kron.to_matrix().shape == (n_params, n_params)
    assert not kron.to_matrix().any()
    listed = Kron.init_from_model(list(model[2].parameters()), "cpu", F64)
    assert listed.kfacs[0][0].dtype == F64
    wide = Kron.init_from_model([torch.empty(100_000, 2)])
    assert wide.kfacs[0][0].shape == (100_000,)
    summed = Kron.init_from_model(model) + kron
    assert summed.kfacs[2][0].shape == kron.kfacs[2][0].shape


def test_repr(kron):
    assert "blocks=9" in repr(kron)
    assert "damping=True" in repr(kron.decompose(damping=True))
    assert isinstance(kron.decompose(), KronDecomposed)
