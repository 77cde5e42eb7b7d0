"""Fits and predictions of networks under FSDP2, against those of the whole network in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import Laplace
from laplace.curvature import NativeEF
from laplace.curvature.curvlinops import CurvlinopsGGN
from laplace.errors import InvalidArgument, ModelChangedError, ProcessError, UnsupportedError
from tests.large_fits import ranks
from tests.large_fits.test_group import outcomes
from tests.versions import newer_torch

fsdp = pytest.importorskip("torch.distributed.fsdp")

pytestmark = newer_torch("networks under FSDP2 cannot be fitted")

SIZE = 2
STRUCTURES = ("kron", "diag", "ekfac")
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def network() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten())
    return nn.Sequential(first, nn.Sequential(nn.Linear(12, 7), nn.Tanh()), nn.Linear(7, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(23, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (23,), generator=generator)


def mine(size: int = 5) -> DataLoader[Any]:
    """This process's shard, of which one repeats a datum that does not count."""
    dataset = TensorDataset(*data())
    return DataLoader(dataset, size, sampler=DistributedSampler(dataset, shuffle=False))


def spread(model: nn.Module) -> nn.Module:
    for layer in model:
        fsdp.fully_shard(layer)
    return fsdp.fully_shard(model)


def local(model: nn.Module) -> list[int]:
    """Bytes of the parameters that this process holds; those of what FSDP has gathered are no DTensors."""
    assert all(isinstance(p, distributed.tensor.DTensor) for p in model.parameters())
    return [p.to_local().untyped_storage().nbytes() for p in model.parameters()]


def answers(la: Any, x: Tensor) -> list[Tensor]:
    delta = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    evidence = la.log_marginal_likelihood(delta)
    (slope,) = torch.autograd.grad(evidence, delta)
    mean, variance = la._glm_predictive_distribution(x)
    samples = la.predictive_samples(x, n_samples=4, generator=torch.Generator().manual_seed(3))
    return [evidence.detach(), slope, mean, variance, la(x), la(x, link_approx="bridge"), samples, la.mean, la.sample(
        3, generator=torch.Generator().manual_seed(4)
    )]  # fmt: skip


def answers_are_those_of_the_whole(rank: int) -> None:
    x, y = data()
    for structure in STRUCTURES:
        for backend in (None, NativeEF):
            la = Laplace(spread(network()), "classification", "all", structure, backend=backend)
            la.fit(mine(), group=distributed.group.WORLD)
            truth = Laplace(network(), "classification", "all", structure, backend=backend)
            truth.fit(DataLoader(TensorDataset(x, y), 23))
            assert la.n_data == 23
            assert la.coverage() == truth.coverage()
            part = x[rank : 3 + 2 * rank]  # other data, and other numbers of them, in every process
            for found, expected in zip(answers(la, part), answers(truth, part), strict=True):
                torch.testing.assert_close(found, expected, **CLOSE, msg=structure)
            assert sum(local(la.model)) < 0.7 * sum(p.nbytes for p in truth.model.parameters())
            assert all(p.grad is None for p in la.model.parameters())
            la.optimize_prior_precision(method="marglik")
            truth.optimize_prior_precision(method="marglik")
            torch.testing.assert_close(la.prior_precision, truth.prior_precision, rtol=1e-6, atol=0)


def regression_and_frozen_layers(rank: int) -> None:
    x, _ = data()
    y = torch.randn(23, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    dataset = TensorDataset(x, y)
    models = [network(), network()]
    for model in models:
        model[0].requires_grad_(False)
    sampler = DistributedSampler(dataset, shuffle=False)
    la = Laplace(spread(models[0]), "regression", "all", "kron", sigma_noise=0.7)
    la.fit(DataLoader(dataset, 4, sampler=sampler), group=distributed.group.WORLD)
    truth = Laplace(models[1], "regression", "all", "kron", sigma_noise=0.7)
    truth.fit(DataLoader(dataset, 23))
    for found, expected in zip(la(x[:3]), truth(x[:3]), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def last_layers_of_a_spread_network(rank: int) -> None:
    x, y = data()
    for weights in ({"subset_of_weights": "all"}, {"subset_of_weights": "last_layer", "last_layer_name": "2"}):
        la = Laplace(spread(network()), "classification", hessian_structure="kron", **weights)
        la.fit(mine(), group=distributed.group.WORLD)
        truth = Laplace(network(), "classification", hessian_structure="kron", **weights)
        truth.fit(DataLoader(TensorDataset(x, y), 23))
        torch.testing.assert_close(la(x), truth(x), **CLOSE)
        torch.testing.assert_close(la.log_marginal_likelihood(), truth.log_marginal_likelihood(), **CLOSE)


def states_fit_the_whole_network(rank: int) -> None:
    x, _ = data()
    model = spread(network())
    la = Laplace(model, "classification", "all", "kron")
    la.fit(mine(), group=distributed.group.WORLD)
    state = la.state_dict() if rank == 0 else None  # needs no other process
    parts = [state]
    distributed.broadcast_object_list(parts, 0)
    again = Laplace(model, "classification", "all", "kron")
    again.load_state_dict(parts[0])
    one = Laplace(network(), "classification", "all", "kron")
    one.load_state_dict(parts[0])
    for other in (again, one):
        torch.testing.assert_close(other(x), la(x), **CLOSE)


def the_network_stays_as_it_was(rank: int) -> None:
    x, y = data()
    model, twin = spread(network()), network()
    la = Laplace(model, "classification", "all", "kron")
    la.fit(mine(), group=distributed.group.WORLD)
    la(x)
    model.eval()
    with torch.no_grad():
        model(x)  # FSDP leaves what the outermost module holds gathered
    torch.testing.assert_close(la(x), la(x), rtol=0, atol=0)
    for some in (model, twin):
        optimizer = torch.optim.SGD(some.parameters(), 0.1)
        nn.functional.cross_entropy(some(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(model(x), twin(x), **CLOSE)
    with pytest.raises(ModelChangedError, match="fit again"):
        la(x)


def what_takes_whole_weights_is_refused(rank: int) -> None:
    x, _ = data()
    model = spread(network())
    for structure in ("full", "block", "lowrank", "lowrank_kron", "matrix_free", "gp"):
        options = {"n_subset": 5} if structure == "gp" else {}
        with pytest.raises(UnsupportedError, match=r"spread over processes.*full_state_dict"):
            Laplace(model, "classification", "all", structure, **options)
    with pytest.raises(UnsupportedError, match="spread over processes"):
        Laplace(model, "classification", "subnetwork", "diag", subnetwork_indices=torch.tensor([1, 2]))
    with pytest.raises(UnsupportedError, match="give last_layer_name="):
        Laplace(model, "classification", "last_layer", "kron").fit(mine(), group=distributed.group.WORLD)
    with pytest.raises(UnsupportedError, match="CurvlinopsGGN with 'kron'"):
        Laplace(model, "classification", "all", "kron", backend=CurvlinopsGGN)
    la = Laplace(model, "classification", "all", "kron")
    with pytest.raises(InvalidArgument, match="spread over the ranks"):
        la.fit(mine())
    with pytest.raises(UnsupportedError, match="spread over processes"):
        la.plan(mine())
    la.fit(mine(), group=distributed.group.WORLD)
    for refused in (
        lambda: la(x, pred_type="nn", link_approx="mc"),
        lambda: la.refine(mine(), method="map"),
        lambda: la.predictive_samples(x, pred_type="nn", n_samples=2),
    ):
        with pytest.raises(UnsupportedError, match="spread over processes"):
            refused()
    with pytest.raises(UnsupportedError, match="spread over processes"):
        Laplace(fsdp.fully_shard(_Scaled().double()), "classification", "all", "kron").fit(
            mine(), group=distributed.group.WORLD
        )


class _Scaled(nn.Module):
    """A network with a weight of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = network(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def processes_out_of_step_all_learn_of_it(rank: int) -> None:
    x, y = data()
    la = Laplace(spread(network()), "classification", "all", "kron")
    batches = list(zip(x[rank::2].split(4), y[rank::2].split(4), strict=True))
    with pytest.raises(ProcessError, match="as many batches"):
        la.fit(batches[: 2 + rank], group=distributed.group.WORLD)
    wrong = copy.deepcopy(batches)
    if rank == 1:
        wrong[1][1][0] = 7
    with pytest.raises(Exception, match="rank 1 of the group failed" if rank == 0 else "label"):
        la.fit(wrong, group=distributed.group.WORLD)
    la.fit(batches, group=distributed.group.WORLD)
    assert la.n_data == 23


CHECKS = [
    answers_are_those_of_the_whole, regression_and_frozen_layers, last_layers_of_a_spread_network,
    states_fit_the_whole_network, the_network_stays_as_it_was, what_takes_whole_weights_is_refused,
    processes_out_of_step_all_learn_of_it,
]  # fmt: skip


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return ranks.run(outcomes, CHECKS, size=SIZE, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_two_processes(check: Callable[..., None], of_ranks: list[dict[str, str]]) -> None:
    for rank, found in enumerate(of_ranks):
        assert check.__name__ in found, "one before it failed"
        assert not found[check.__name__], f"rank {rank}: {found[check.__name__]}"
