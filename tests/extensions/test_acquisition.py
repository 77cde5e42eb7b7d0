"""Batches to label next, against brute force over the covariance of the same samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.errors import (
    InvalidArgument,
    InvalidData,
    InvalidInputs,
    InvalidType,
    ModelChangedError,
    NotFittedError,
)

N, C = 12, 3


def fitted(likelihood: str = "classification", structure: str = "full", weights: str = "all") -> Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C)).double()
    x = torch.randn(20, 2, dtype=torch.float64)
    la = Laplace(model, likelihood, weights, structure, prior_precision=0.5)
    if likelihood == "regression":
        la.sigma_noise = 0.4
    la.fit([(x, torch.randint(C, (20,)) if likelihood == "classification" else torch.randn(20, C).double())])
    return la


def pool(n: int = N, seed: int = 1) -> Tensor:
    return 2 * torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whitened(la: Laplace, x: Tensor, n_samples: int) -> Tensor:
    """A = Rᵀ F of all inputs side by side, `[S, N·K]`, with the symmetric root of Λ."""
    steps = la.sample(n_samples, generator=torch.Generator().manual_seed(0)) - la.mean
    jacobian = la.backend.jacobians(x)[0]
    f = la.model(x).detach()
    if la.likelihood == "regression":
        hessian = torch.eye(C, dtype=f.dtype).expand(len(x), -1, -1) / la.sigma_noise**2
    else:
        p = f.softmax(1)
        hessian = torch.diag_embed(p) - p.unsqueeze(1) * p.unsqueeze(2)
    values, vectors = torch.linalg.eigh(hessian)
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.mT
    outputs = torch.einsum("ncp,sp->snc", jacobian, steps) / n_samples**0.5
    return torch.einsum("snc,nck->snk", outputs, root)


def gain(a: Tensor, rows: list[int]) -> Tensor:
    joint = a[:, rows].flatten(1)
    return 0.5 * torch.logdet(torch.eye(joint.shape[1], dtype=a.dtype) + joint.T @ joint)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_bald_is_greedy_in_the_joint_information(likelihood: str) -> None:
    la, x = fitted(likelihood), pool()
    found = laplace.acquire(la, x, 5, n_samples=40, generator=torch.Generator().manual_seed(0))
    a, chosen = whitened(la, x, 40), []
    for index, step in zip(found.indices.tolist(), found.gains, strict=True):
        before = gain(a, chosen) if chosen else torch.zeros(())
        gains = torch.tensor([-1.0 if i in chosen else float(gain(a, [*chosen, i]) - before) for i in range(N)])
        assert index == int(gains.argmax())
        torch.testing.assert_close(float(step), float(gains.max()), rtol=1e-6, atol=1e-8)
        chosen.append(index)


def test_every_output_has_its_own_noise() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 2, dtype=torch.float64)
    sigma = torch.tensor([0.1, 1.0], dtype=torch.float64)
    la = Laplace(nn.Linear(2, 2).double(), "regression", "all", "full", sigma_noise=sigma)
    la.fit([(x, torch.randn(20, 2).double())])
    star = pool(2)
    found = laplace.acquire(la, star, 1, n_samples=20000, generator=torch.Generator().manual_seed(0))
    covariance = la(star)[1]
    gains = 0.5 * torch.logdet(torch.eye(2).double() + covariance / (sigma[:, None] * sigma))
    torch.testing.assert_close(found.gains[0], gains.max(), rtol=0.03, atol=0)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_epig_is_the_information_on_labels_elsewhere(likelihood: str) -> None:
    la, x, targets = fitted(likelihood), pool(), pool(4, 2)
    found = laplace.acquire(la, x, 3, "epig", targets=targets, n_samples=40, generator=torch.Generator().manual_seed(0))
    a = torch.cat([whitened(la, x, 40), whitened(la, targets, 40)], 1)
    chosen: list[int] = []
    for index, step in zip(found.indices.tolist(), found.gains, strict=True):

        def about(rows: list[int]) -> Tensor:
            """Mean over the targets of the joint information less that of the rows: what a target still tells."""
            own = gain(a, rows) if rows else torch.zeros(())
            return torch.stack([gain(a, [*rows, N + z]) - own for z in range(4)]).mean()

        before = about(chosen)
        gains = torch.tensor([-1.0 if i in chosen else float(before - about([*chosen, i])) for i in range(N)])
        assert index == int(gains.argmax())
        torch.testing.assert_close(float(step), float(gains.max()), rtol=1e-6, atol=1e-8)
        chosen.append(index)


def test_targets_of_a_large_pool_are_drawn_from_it() -> None:
    la, x, source = fitted(), pool(150), torch.Generator().manual_seed(0)
    found = laplace.acquire(la, x, 2, "epig", n_samples=40, generator=torch.Generator().manual_seed(0))
    la.sample(40, generator=source)
    drawn = x[torch.randperm(150, generator=source)[:100]]
    same = laplace.acquire(la, x, 2, "epig", targets=drawn, n_samples=40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.indices, same.indices)
    torch.testing.assert_close(found.gains, same.gains)


@pytest.mark.parametrize(("structure", "weights"), [("kron", "all"), ("diag", "last_layer"), ("lowrank", "all")])
def test_loaders_are_pools_and_equal_seeds_choose_equally(structure: str, weights: str) -> None:
    la, x = fitted(structure=structure, weights=weights), pool(30)
    whole = laplace.acquire(la, x, 6, generator=torch.Generator().manual_seed(3))
    parts = laplace.acquire(la, [(x[:11], None), (x[11:], None)], 6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(whole.indices, parts.indices)
    assert len(set(whole.indices.tolist())) == 6 and bool((whole.gains > 0).all())


def test_copies_are_not_chosen_twice() -> None:
    la, x = fitted("regression"), pool(8)
    la.sigma_noise = 0.05  # one label tells nearly all that there is
    first = int(laplace.acquire(la, x, 1, generator=torch.Generator().manual_seed(0)).indices)
    copies = torch.cat([x, x[first : first + 1].expand(4, -1)])
    found = laplace.acquire(la, copies, 3, generator=torch.Generator().manual_seed(0)).indices.tolist()
    assert sum(i == first or i >= 8 for i in found) == 1


def test_bad_input_is_refused() -> None:
    la, x = fitted(), pool()
    with pytest.raises(InvalidArgument, match="12 inputs"):
        laplace.acquire(la, x, 13)
    with pytest.raises(InvalidArgument, match="n=0"):
        laplace.acquire(la, x, 0)
    with pytest.raises(InvalidArgument, match="score"):
        laplace.acquire(la, x, 1, "random")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="targets"):
        laplace.acquire(la, x, 1, targets=x)
    with pytest.raises(InvalidArgument, match="n_samples"):
        laplace.acquire(la, x, 1, n_samples=1)
    with pytest.raises(InvalidData, match="pool holds no inputs"):
        laplace.acquire(la, [], 1)
    with pytest.raises(InvalidData, match="targets holds no inputs"):
        laplace.acquire(la, x, 1, "epig", targets=x[:0])
    with pytest.raises(InvalidType, match="pool=None"):
        laplace.acquire(la, None, 1)
    bad = x.clone()
    bad[3, 0] = torch.nan
    with pytest.raises(InvalidData, match=r"pool: .* at row 3"):
        laplace.acquire(la, bad, 1)
    with pytest.raises(InvalidData, match=r"targets: .* at row 3"):
        laplace.acquire(la, x, 1, "epig", targets=bad)
    with pytest.raises(InvalidInputs):
        laplace.acquire(la, x[:, :1], 1)
    with pytest.raises(NotFittedError):
        laplace.acquire(Laplace(nn.Linear(2, 2), "classification", "all", "full"), x, 1)
    la.model[0].weight.data.add_(1.0)  # type: ignore[index]
    with pytest.raises(ModelChangedError):
        laplace.acquire(la, x, 1)
