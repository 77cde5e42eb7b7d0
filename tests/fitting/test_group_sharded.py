"""Posteriors that stay spread over processes: equal to those of one process, a share of the bytes, collective calls."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from laplace import DiagLaplace, Laplace, ParametricLaplace, checkpoint
from laplace.curvature import NativeHessian
from laplace.errors import (
    ApproximationWarning,
    CurvatureError,
    InvalidArgument,
    LaplaceError,
    ModelChangedError,
    ProcessError,
    StateError,
    UnsupportedError,
)
from laplace.structures import STRUCTURES, DiagCurvature
from tests.fitting import ranks
from tests.fitting.test_group import SKIPPED, batches, data, make, network, outcomes, refused

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without torch.distributed")

SIZE = 3
SHARDS = [(0, 4), (4, 4), (4, 23)]  # one process has no data
SEPARABLE = ("kron", "ekfac", "diag", "block", "lowrank_kron")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def mine(rank: int) -> list[tuple[Tensor, Tensor]]:
    return batches(*SHARDS[rank])


def alone(la: ParametricLaplace, loader: Any = None) -> ParametricLaplace:
    """Fitted to all data in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)  # one of several processes
        la.fit(batches() if loader is None else loader)
    return la


def spread(la: ParametricLaplace, loader: Any, **options: Any) -> ParametricLaplace:
    la.fit(loader, group=distributed.group.WORLD, sharded=True, **options)
    return la


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def asked(la: ParametricLaplace) -> dict[str, Tensor]:
    """All that can be asked of a sharded posterior."""
    x, theta = data()[0][:3], la.mean + 0.1
    la.prior_precision = 3.0
    _, n = la.mean.shape, len(la.mean)
    J = torch.linspace(-1, 1, 2 * 4 * n, dtype=torch.float64).view(2, 4, n)
    found = {
        "prediction": la(x),
        "bridge": la(x, link_approx="bridge"),
        "covariance": la.predictive_moments(x)[1],
        "variance": la.functional_variance_fast(x)[1],
        "joint": la.predictive_moments(x, joint=True)[1],
        "of Jacobians": la.functional_variance(J),
        "joint of Jacobians": la.functional_covariance(J),
        "samples of outputs": la.functional_samples(x, n_samples=4, generator=seeded()),
        "nn": la(x, "nn", n_samples=4, generator=seeded()),
        "samples": la.sample(4, seeded()),
        "variances of weights": la.posterior_variance,
        "density": la.log_prob(theta),
        "square norm": la.square_norm(torch.stack([theta, theta + 1])),
        "evidence": la.log_marginal_likelihood(),
        "log det": la.log_det_posterior_precision,
    }
    return {name: value.detach() for name, value in found.items()}


def slopes(la: ParametricLaplace, prior: Tensor, **given: Any) -> list[Tensor]:
    """The evidence, and its derivatives in all hyper-parameters, at a prior."""
    delta = prior.clone().requires_grad_()
    la.temperature = temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    value = la.log_marginal_likelihood(delta, **given)
    value.backward()
    la.temperature = 1.0
    assert delta.grad is not None and temperature.grad is not None
    return [value.detach(), delta.grad, temperature.grad]


def answers_are_those_of_one_process(rank: int) -> None:
    for weights in ("all", "last_layer", "subnetwork"):
        for structure in SEPARABLE:
            la, whole = spread(make(weights, structure), mine(rank)), alone(make(weights, structure))
            found, expected = asked(la), asked(whole)
            for name, value in expected.items():
                torch.testing.assert_close(
                    found[name], value, **CLOSE, msg=partial("{} {}: {}".format, structure, name)
                )
            for length in (1, la.n_layers, la.n_params):
                prior = torch.linspace(1, 4, length, dtype=torch.float64)
                torch.testing.assert_close(slopes(la, prior), slopes(whole, prior), **CLOSE)
            assert la.n_data == whole.n_data and la.coverage() == whole.coverage()
            assert f"sharded over {SIZE} processes" in repr(la)


class Doubled(DiagCurvature):
    """A structure of a user's."""

    def precision(self, weights: Tensor, prior: Any, **options: Any) -> Any:
        return super().precision(2 * weights, prior, **options)


def structures_of_users_are_taken_apart(rank: int) -> None:
    with STRUCTURES.temporarily():
        STRUCTURES.register("doubled")(Doubled)
        la, whole = spread(make("all", "doubled"), batches()[rank::SIZE]), alone(make("all", "doubled"))
        torch.testing.assert_close(la(data()[0]), whole(data()[0]), **CLOSE)


def noise_of_every_output_and_options(rank: int) -> None:
    x, y = data()[0], torch.randn(23, 4, generator=seeded(), dtype=torch.float64)
    loader = [(x[i : i + 5], y[i : i + 5]) for i in range(0, 23, 5)]
    corrected = {"structure_kwargs": {"corrected": True}}
    for structure, options in (
        ("kron", {"damping": True}), ("ekfac", {}), ("diag", {}), ("block", {}), ("lowrank_kron", corrected),
    ):  # fmt: skip
        first, second = (
            Laplace(network(), "regression", "all", structure, sigma_noise=torch.linspace(0.5, 2, 4), **options)
            for _ in range(2)
        )
        la, whole = spread(first, loader[rank::SIZE]), alone(second, loader)
        sigma = torch.linspace(0.4, 1, 4, dtype=torch.float64).requires_grad_()
        found: list[list[Tensor]] = []
        for one in (la, whole):
            terms = slopes(one, torch.ones(4, dtype=torch.float64), sigma_noise=sigma)
            found.append([*terms, torch.autograd.grad(one.log_marginal_likelihood(sigma_noise=sigma), sigma)[0]])
            sigma.grad = None
        torch.testing.assert_close(*found, **CLOSE)
        torch.testing.assert_close(la(x[:2])[1], whole(x[:2])[1], **CLOSE)
    hessian = {"backend": NativeHessian}
    for structure in ("diag", "block"):
        la = spread(Laplace(network(), "classification", "all", structure, **hessian), mine(rank))
        whole = alone(Laplace(network(), "classification", "all", structure, **hessian))
        for prior in (30.0, 1e-6):
            la.prior_precision = whole.prior_precision = prior
            if prior > 1:
                torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), **CLOSE)
                continue
            for one in (whole, la):  # indefinite in one process, an error of the same kind in all
                with pytest.raises(CurvatureError, match="not positive"):
                    one.log_marginal_likelihood()


def tensors_of(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Tensors that an object leads to, by its attributes, also those that were computed on first use."""
    if id(value) in seen or isinstance(value, str | int | float | type | nn.Module | torch.dtype | None):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield value
        return
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if not isinstance(inner, list | tuple):
        inner = [*getattr(value, "__dict__", {}).values(), *(getattr(value, "__closure__", None) or ())]
        inner += [value.cell_contents] if type(value).__name__ == "cell" else []
    for part in inner:
        yield from tensors_of(part, seen)


def bytes_of(la: ParametricLaplace) -> int:
    """Of curvature and precision, with what was factorised of them."""
    held = tensors_of([la.fitted().curvature, la._posterior.cache._precision], {})
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


def deep(width: int = 16, n_layers: int = 6) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [module for _ in range(n_layers) for module in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 4)).double()


def every_process_holds_its_share(rank: int) -> None:
    x = data()[0][:2]
    for structure in SEPARABLE:
        la = spread(Laplace(deep(), "classification", "all", structure), mine(rank))
        whole = alone(Laplace(deep(), "classification", "all", structure))
        for one in (la, whole):
            one.log_marginal_likelihood()
            one(x)
        share = bytes_of(la) / bytes_of(whole)
        assert 0.1 < share <= 1 / SIZE + 0.1, (structure, share)
        kept: list[Any] = [None] * SIZE
        distributed.all_gather_object(kept, la.fitted().curvature.tensors)
        assert sorted(i for tensors in kept for i in tensors) == list(range(16))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of the collective calls of a block."""
    gathered, reduced, calls = distributed.all_gather_object, distributed.all_reduce, list[str]()

    def gather(*arguments: Any, **options: Any) -> Any:
        calls.append("gather")
        return gathered(*arguments, **options)

    def reduce(*arguments: Any, **options: Any) -> Any:
        calls.append("reduce")
        return reduced(*arguments, **options)

    distributed.all_gather_object, distributed.all_reduce = gather, reduce
    try:
        yield calls
    finally:
        distributed.all_gather_object, distributed.all_reduce = gathered, reduced


def one_sum_for_each_question(rank: int) -> None:
    x = torch.randn(200, 3, generator=seeded()).double()
    once = ["gather", "reduce"]
    with counted() as calls:
        la = spread(make("all", "kron"), mine(rank))
    assert calls == ["gather", *once]
    for ask in (la, lambda x: la(x, joint=True, link_approx="mc", generator=seeded()), la.functional_variance_fast):
        with counted() as calls:
            ask(x)
        assert calls == once
    delta = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with counted() as calls:
        la.log_marginal_likelihood(delta).backward()
    assert calls == once
    with counted() as calls:
        la.log_marginal_likelihood()
    assert calls == once
    logs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(logs.exp()), logs, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        slope.backward()


def differences_are_told(rank: int) -> None:
    x = data()[0]
    la = spread(make("all", "kron"), mine(rank))
    expected = la(x)
    with pytest.raises(ProcessError, match=r"rank 1.*other inputs or hyper-parameters than rank 0"):
        la(x[:2] + (rank == 1))
    for hypers in ({"prior_precision": 2.0}, {"temperature": 0.5}):
        for name, value in hypers.items():
            setattr(la, name, value if rank == 2 else 1.0)
            for ask in (lambda: la(x), la.log_marginal_likelihood, lambda: la.posterior_variance):
                with pytest.raises(ProcessError, match=r"rank 2.*other inputs or hyper-parameters"):
                    ask()
            setattr(la, name, 1.0)
    with pytest.raises(ProcessError, match="other inputs"):
        la.sample(2, torch.Generator().manual_seed(rank))
    with pytest.raises(ProcessError, match="other inputs"):
        _ = la(x) if rank else la.log_marginal_likelihood()
    with pytest.raises(LaplaceError if rank == 1 else ProcessError, match=r"do not fit the network|rank 1"):
        la(x[:, : 2 if rank == 1 else 3])
    parameter = next(la.model.parameters())
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(rank == 0)
    with pytest.raises(ProcessError if rank else ModelChangedError, match="changed after fit"):
        la(x)
    with torch.no_grad():
        parameter.copy_(kept)
    torch.testing.assert_close(la(x), expected, rtol=0, atol=0)


class Own(DiagLaplace):
    """A class of a user's."""

    @property
    def posterior_variance(self) -> Tensor:
        return 2 * super().posterior_variance


def what_takes_the_whole_is_refused(rank: int) -> None:
    la, x = spread(make("all", "kron"), mine(rank)), data()[0]
    for structure in sorted(set(STRUCTURES) - set(SEPARABLE)):  # in the same order in every process
        why = "couples all tensors|asks the network"
        refused(why, make("all", structure), mine(rank), UnsupportedError, sharded=True)
    refused("overrides moments", Own(network(), "classification"), mine(rank), UnsupportedError, sharded=True)
    refused("sharded=True was not given", la, mine(rank), UnsupportedError, override=False)
    refused(r"rank \d.*sharded = ", make("all", "kron"), mine(rank), sharded=rank == 1)
    with pytest.raises(InvalidArgument, match="group"):
        la.fit(batches(), sharded=True)
    with pytest.raises(InvalidArgument, match="group"):
        la.forget(batches())
    for read in (
        lambda: la.H, lambda: la.H_facs, lambda: la.posterior_covariance, lambda: la.posterior_scale,
        lambda: la.posterior_precision, la.state_dict, lambda: la.refine(batches()), lambda: pickle.dumps(la),
        lambda: la.save("nowhere"),
        lambda: la.optimize_prior_precision(method="gridsearch", val_loader=batches()),
        lambda: la.optimize_hyperparameters(objective="nll", method="adam", val_loader=batches()),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"sharded|checkpoint"):
            read()
    with pytest.raises(UnsupportedError, match="state_dict"):
        checkpoint.save(alone(make("all", "kron")), "nowhere")
    la.prior_precision = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="derivatives of predictions"):
        la(x)
    la.prior_precision = 1.0
    la.enable_backprop = True
    with pytest.raises(UnsupportedError, match="derivatives of predictions"):
        la(x.clone().requires_grad_())
    la.enable_backprop = False
    twin = copy.deepcopy(la)
    torch.testing.assert_close(twin(x), la(x), rtol=0, atol=0)
    torch.testing.assert_close(la.to(dtype=torch.float32)(x.float()), twin(x).float(), rtol=1e-5, atol=1e-6)


def data_are_added_and_removed(rank: int) -> None:
    x, y = data()
    later = [[(x[:3], y[:3])], [(x[3:9], y[3:9])], []][rank]
    for structure in SEPARABLE:
        la, whole = spread(make("all", structure), mine(rank)), alone(make("all", structure))
        spread(la, later, override=False, decay=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)
            whole.fit([(x[:9], y[:9])], override=False, decay=0.9)
        if structure != "lowrank_kron":  # which is stacked in another order
            torch.testing.assert_close(la(x), whole(x), **CLOSE)
            torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), **CLOSE)
        again = make("all", structure)
        again.fit(mine(rank), group=distributed.group.WORLD)
        spread(again, later, override=False, decay=0.9)  # the former fit is not sharded
        torch.testing.assert_close(again(x), la(x), **CLOSE)
        if structure not in ("ekfac", "lowrank_kron"):
            la.forget(later, group=distributed.group.WORLD)
            again = spread(make("all", structure), mine(rank))
            la.forget([(x[:1], y[:1])] if rank == 0 else [], weight=0.9, group=distributed.group.WORLD)
            again.forget([(x[:1], y[:1])] if rank == 0 else [], group=distributed.group.WORLD)
            assert la.n_data == pytest.approx(0.9 * 22) and again.n_data == 22
            torch.testing.assert_close(again(x), alone(make("all", structure), [(x[1:], y[1:])])(x), **CLOSE)
            before = again._posterior
            with pytest.raises((CurvatureError, ProcessError)):
                again.forget([(5 * x[1:8], y[1:8])] if rank == 0 else [], group=distributed.group.WORLD)
            assert again._posterior is before


def the_evidence_tunes(rank: int) -> None:
    la, whole = spread(make("all", "kron"), mine(rank)), alone(make("all", "kron"))
    for structure in ("scalar", "layerwise", "diag"):
        for one in (la, whole):
            one.optimize_prior_precision(n_steps=8, prior_structure=structure)
        torch.testing.assert_close(la.prior_precision, whole.prior_precision, rtol=1e-8, atol=0)
    loader = [(x, x.new_ones(len(x), 4) * x.sum(1, keepdim=True)) for x, _ in batches()]
    la, whole = (Laplace(network(), "regression", "all", "diag", sigma_noise=0.7) for _ in range(2))
    spread(la, loader[rank::SIZE])
    for one in (la, alone(whole, loader)):
        one.optimize_hyperparameters(["prior_precision", "sigma_noise"])
    torch.testing.assert_close(la.prior_precision, whole.prior_precision, rtol=1e-4, atol=0)
    torch.testing.assert_close(la.sigma_noise, whole.sigma_noise, rtol=1e-4, atol=0)
    both: list[Any] = [None] * SIZE
    distributed.all_gather_object(both, la.prior_precision)
    assert all(torch.equal(both[0], other) for other in both)


def assert_equal_states(one: Any, other: Any, name: str = "state") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_equal_states(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, list | tuple):
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal_states(*pair, f"{name}.{i}")
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, (name, one, other)


def states_are_read_by_other_numbers_of_processes(rank: int) -> None:
    names = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(names, 0)
    (folder,), x = names, data()[0]
    _written_and_read(rank, str(folder), x)
    distributed.barrier()
    shutil.rmtree(str(folder), ignore_errors=True)


def _written_and_read(rank: int, folder: str, x: Tensor) -> None:
    path, two = "", distributed.new_group([0, 1])
    for weights, structure in [("all", name) for name in SEPARABLE] + [("last_layer", "kron")]:
        la, whole = spread(make(weights, structure), mine(rank)), make(weights, structure)
        whole.fit(mine(rank), group=distributed.group.WORLD)
        la.prior_precision = whole.prior_precision = 2.0
        path = f"{folder}/{weights}-{structure}"
        checkpoint.save(la, path)
        one = make(weights, structure)
        checkpoint.load(one, path)
        states = [posterior.state_dict() | {"draws": None} for posterior in (one, whole)]
        assert_equal_states(*states, structure)
        again = make(weights, structure)
        checkpoint.load(again, path, group=distributed.group.WORLD)
        assert again.fitted().curvature.owners == la.fitted().curvature.owners
        torch.testing.assert_close(again(x), la(x), rtol=0, atol=0)
        if rank < 2:
            part = make(weights, structure)
            checkpoint.load(part, path, group=two)
            torch.testing.assert_close(part(x), one(x), **CLOSE)
            assert f"sharded over {min(2, SIZE)} processes" in repr(part)
    with pytest.raises(StateError, match="class"):
        checkpoint.load(make("all", "diag"), path)
    with pytest.raises(StateError if rank == 1 else ProcessError, match="holds no posterior"):
        checkpoint.load(make(weights, structure), f"{path}-none" if rank == 1 else path, group=distributed.group.WORLD)
    distributed.barrier()
    if rank == 0:
        with open(f"{path}/__0_0.distcp", "r+b") as file:
            file.truncate(100)
    distributed.barrier()
    with pytest.raises(StateError):
        checkpoint.load(make(weights, structure), path)
    other = f"{folder}/all-kron", f"{folder}/again"
    la = spread(make("all", "kron"), mine(rank))
    checkpoint.save(la, other[1])
    with pytest.raises(ProcessError, match="reads another posterior"):
        checkpoint.load(make("all", "kron"), other[rank == 2], group=distributed.group.WORLD)


def networks_that_are_spread_are_refused(rank: int) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    pytest.importorskip("torch.distributed.fsdp._fully_shard")
    pytest.importorskip("torch.distributed.tensor.parallel")
    whole, x = network(), data()[0]
    la = Laplace(whole, "classification", "all", "kron")
    la.fit(mine(rank), group=distributed.group.WORLD)
    parallel = network()
    mesh = distributed.device_mesh.init_device_mesh("cpu", (SIZE,))
    distributed.tensor.parallel.parallelize_module(parallel, mesh, {"2": distributed.tensor.parallel.ColwiseParallel()})
    with pytest.raises(UnsupportedError, match=r"'2\.weight' is spread over processes"):
        Laplace(parallel, "classification", "all", "kron")
    model = network()
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    fsdp.fully_shard(whole)
    for structure in STRUCTURES:
        with pytest.raises(UnsupportedError, match=r"spread over processes.*full_state_dict"):
            Laplace(model, "classification", "subnetwork", structure, subnetwork_indices=torch.tensor([1, 2]))
    with pytest.raises(UnsupportedError, match="spread over processes"):
        Laplace(model, "classification", "all", "gp", n_subset=5)
    with pytest.raises(ModelChangedError, match="spread over processes after it"):
        la(x)
    refused("spread over processes", la, mine(rank), (UnsupportedError, ProcessError))


CHECKS = [
    answers_are_those_of_one_process, structures_of_users_are_taken_apart, noise_of_every_output_and_options,
    every_process_holds_its_share, one_sum_for_each_question, differences_are_told, what_takes_the_whole_is_refused,
    data_are_added_and_removed, the_evidence_tunes, states_are_read_by_other_numbers_of_processes,
    networks_that_are_spread_are_refused,
]  # fmt: skip


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return ranks.run(outcomes, CHECKS, size=SIZE, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_three_processes(check: Callable[..., None], of_ranks: list[dict[str, str]]) -> None:
    for rank, found in enumerate(of_ranks):
        assert check.__name__ in found, "one before it failed"
        if found[check.__name__].startswith(SKIPPED):
            pytest.skip(found[check.__name__])
        assert not found[check.__name__], f"rank {rank}: {found[check.__name__]}"
