"""Fits over the processes of a group: equal to a fit of all data in one process, or an error in all of them."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace import Laplace, MixtureLaplace, OnlineLaplace, ParametricLaplace, marglik_training
from laplace.core.processes import Processes
from laplace.curvature import NativeEF, NativeGGN, NativeHessian
from laplace.errors import (
    ApproximationWarning,
    InvalidData,
    InvalidType,
    LaplaceError,
    ProcessError,
    TuningWarning,
    UnsupportedError,
)
from laplace.structures import STRUCTURES
from laplace.structures.kron import KronCurvature
from tests.large_fits import ranks
from tests.pairs import nightly

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without torch.distributed")

SHARDS = {"uneven": [(0, 12), (12, 23)], "one without data": [(0, 4), (4, 4), (4, 23)]}
BACKENDS: dict[str, Any] = {"ggn": NativeGGN, "ef": NativeEF, "hessian": NativeHessian}
CELLS = [
    (weights, structure, "ggn") for weights in ("all", "last_layer", "subnetwork") for structure in STRUCTURES
    if structure != "matrix_free"
] + [("all", structure, kind) for structure in ("full", "kron", "diag") for kind in ("ef", "hessian")
     if (structure, kind) != ("kron", "hessian")]  # fmt: skip


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(23, 3, generator=generator).double(), torch.randint(4, (23,), generator=generator)


def batches(start: int = 0, stop: int = 23) -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return [(x[i : min(i + 5, stop)], y[i : min(i + 5, stop)]) for i in range(start, stop, 5)]


def make(weights: str, structure: str, kind: str = "ggn", **options: Any) -> ParametricLaplace:
    if weights == "subnetwork":
        options["subnetwork_indices"] = torch.tensor([0, 3, 4, 19, 20, 30, 47])
    return Laplace(network(), "classification", weights, structure, backend=BACKENDS[kind], **options)


def found(la: ParametricLaplace) -> dict[str, Any]:
    la.prior_precision = 30.0  # where an exact Hessian is positive
    evidence, prediction = la.log_marginal_likelihood(), la(data()[0][:3])
    return {
        "evidence": evidence.detach(), "prediction": prediction.detach(), "loss": la.loss, "n_data": la.n_data,
        "n_outputs": la.n_outputs, "coverage": la.coverage(),
    }  # fmt: skip


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12)
        else:
            assert other[name] == value, name


def fits(rank: int, shards: list[tuple[int, int]]) -> dict[tuple[str, ...], Any]:
    torch.set_num_threads(1)
    result: dict[tuple[str, ...], Any] = {}
    for cell in CELLS:
        la = make(*cell)
        la.fit(batches(*shards[rank]), group=distributed.group.WORLD)
        result[cell] = found(la)
    return result


@pytest.fixture(scope="module")
def shared_fits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What the processes of a division of the data found; every division is made once."""
    made: dict[str, list[Any]] = {}

    def of(name: str) -> list[Any]:
        if name not in made:
            shards = SHARDS[name]
            made[name] = ranks.run(fits, shards, size=len(shards), folder=tmp_path_factory.mktemp("ranks"))
        return made[name]

    return of


@pytest.mark.parametrize("shards", ["uneven", *nightly("one without data")])
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_fit_over_processes_is_one_of_all_data(
    cell: tuple[str, str, str], shards: str, shared_fits: Callable[[str], list[Any]]
) -> None:
    la = make(*cell)
    la.fit([data()])
    for of_rank in shared_fits(shards):
        assert_same(found(la), of_rank[cell])


def of_both(rank: int, **options: Any) -> ParametricLaplace:
    la = make("all", "kron", **options)
    la.fit(batches(*SHARDS["uneven"][rank]), group=distributed.group.WORLD)
    return la


def alone(*parts: Any, **options: Any) -> ParametricLaplace:
    la = make("all", "kron", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)  # one of two processes
        la.fit(list(parts) or [data()])
    return la


def adds_and_forgets(rank: int) -> None:
    x, y = data()
    la, other = of_both(rank), alone()
    more = [(x[:6], y[:6])] if rank else [(x[6:9], y[6:9])]
    la.fit(more, override=False, decay=0.5, group=distributed.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)
        other.fit([(x[:9], y[:9])], override=False, decay=0.5)
    assert_same(found(other), found(la))
    la.forget(more, group=distributed.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)
        other.forget([(x[:9], y[:9])])
    assert_same(found(other), found(la))


def wide_matrices_arrive_whole(rank: int) -> None:
    """Of any width: both triangles are the sum's."""
    processes = Processes.from_argument(distributed.group.WORLD)
    assert processes is not None
    for n in (3, 64, 256, 257, 300, 1000, 2049):
        parts = [torch.randn(n, n, generator=torch.Generator().manual_seed(k)) for k in range(2)]
        mine = parts[rank] + parts[rank].T
        processes.add_({"": mine}, lambda _: True)
        assert torch.equal(mine, (parts[0] + parts[0].T) + (parts[1] + parts[1].T))


def padded_data_count_once(rank: int) -> None:
    x, y = data()
    for size in (4, 12, 30):
        for shuffle in (False, True):
            sampler = DistributedSampler(TensorDataset(x, y), shuffle=shuffle)
            la = make("all", "full")
            la.fit(DataLoader(TensorDataset(x, y), size, sampler=sampler), group=distributed.group.WORLD)
            assert la.n_data == 23
            other = make("all", "full")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ApproximationWarning)
                other.fit([(x, y)])
            assert_same(found(other), found(la))
    few = TensorDataset(x[:1], y[:1])  # one of two processes has nothing left
    la.fit(DataLoader(few, 4, sampler=DistributedSampler(few)), group=distributed.group.WORLD)
    assert la.n_data == 1
    mappings = [{"input": x[i], "labels": y[i]} for i in range(23)]
    loader = DataLoader(mappings, 5, sampler=DistributedSampler(mappings))  # pyright: ignore[reportArgumentType]

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, batch: Any) -> Tensor:
            return self.inner(batch["input"])

    la = Laplace(Reader(), "classification", "all", "diag")
    la.fit(loader, group=distributed.group.WORLD)
    assert la.n_data == 23


def wrapped_models_are_unwrapped(rank: int) -> None:
    la = Laplace(nn.parallel.DistributedDataParallel(network()), "classification", "all", "kron")
    la.fit(batches(*SHARDS["uneven"][rank]), group=distributed.group.WORLD)
    assert_same(found(alone()), found(la))


def sampled_targets_differ(rank: int) -> None:
    """Both processes have the same data: with the same draws the sum would be twice that of one of them."""
    options = {"backend_kwargs": {"stochastic": True}}
    la, one = make("all", "diag", **options), make("all", "diag", **options)
    with pytest.warns(ApproximationWarning, match="same first batch"):
        la.fit(batches(), group=distributed.group.WORLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)
        one.fit(batches())
    assert la.n_data == 46
    assert not torch.allclose(la.H, 2 * one.H)


def refused(match: str, la: ParametricLaplace, loader: Any, error: Any = ProcessError, **options: Any) -> None:
    """All processes raise, and keep their posteriors."""
    before = la._posterior
    with pytest.raises(error, match=match):
        la.fit(loader, group=distributed.group.WORLD, **options)
    assert la._posterior is before


class Broken(list):
    """Batches of which the second one cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        raise OSError("the disk is gone")


class Unread(list):
    """Batches of which only the first is read."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        raise AssertionError("it was to be refused before")


def errors_reach_all_processes(rank: int) -> None:
    mine = batches(*SHARDS["uneven"][rank])
    la = of_both(rank)
    for broken in (0, 1):
        if rank == broken:
            refused("disk is gone", la, Broken(mine), OSError)
        else:
            refused(f"rank {broken} of the group failed.*disk is gone", la, mine)
    nan = [(torch.full((5, 3), torch.nan).double(), torch.zeros(5, dtype=torch.long))]
    refused("finite", la, mine + nan if rank else mine, LaplaceError)
    refused("train_loader", la, 3 if rank else mine, LaplaceError)
    refused("gave no data", la, [], LaplaceError)
    refused(r"rank 1.*override = False", la, mine, override=rank == 0)
    other = Laplace(network(rank), "classification", "all", "kron")
    refused(r"rank 1.*other numbers in '0.weight'.*broadcast", other, mine)
    other = make("all", "diag" if rank else "kron")
    refused("rank 1.*hessian_structure = 'diag', rank 0 'kron'", other, mine)
    other = Laplace(network(), "classification", "subnetwork", "diag", subnetwork_indices=torch.tensor([1, 2 + rank]))
    refused("rank 1.*other parameters random", other, mine)
    wider = nn.Sequential(nn.Linear(3, 6 + rank), nn.Linear(6 + rank, 4)).double()
    refused("rank 1.*other tensors", Laplace(wider, "classification", "all", "diag"), mine)
    refused("subset=3.*all data|all the data", la, mine, UnsupportedError, subset=3)
    gp = Laplace(network(), "classification", "all", "gp", n_subset=5)
    refused("does not add up.*group= at None", gp, Unread(mine), UnsupportedError)
    assert_same(found(alone()), found(la))


def of_rank_0(rank: int, make_value: Callable[[], Any]) -> list[Any]:
    """A value that rank 0 makes."""
    value = [make_value() if rank == 0 else None]
    distributed.broadcast_object_list(value)
    return value


class Once(list):
    """Batches of which one cannot be read, counted over all readings; None for none."""

    def __init__(self, batches: Any, reads: int | None) -> None:
        super().__init__(batches)
        self.reads = reads

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.reads is not None:
                self.reads -= 1
                if self.reads < 0:
                    raise OSError("the disk is gone")
            yield batch


def mixtures_pass_the_group_on(rank: int) -> None:
    whole, mixture = (MixtureLaplace([network(0), network(1)], "classification", "all", "kron") for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)
        whole.fit([data()])
    mixture.fit(batches(*SHARDS["uneven"][rank]), group=distributed.group.WORLD)
    x, _ = data()
    torch.testing.assert_close(mixture(x), whole(x), rtol=1e-10, atol=1e-12)
    assert [la.n_data for la in mixture.components] == [23, 23]


def collectives_are_few(rank: int) -> None:
    """One gather at the start, then one exchange and one sum per pass; symmetric matrices travel by half."""
    gathered, reduced = distributed.all_gather_object, distributed.all_reduce
    calls: list[int] = []

    def gather(*arguments: Any, **options: Any) -> Any:
        calls.append(0)
        return gathered(*arguments, **options)

    def reduce(tensor: Tensor, **options: Any) -> Any:
        calls.append(tensor.numel())
        return reduced(tensor, **options)

    distributed.all_gather_object, distributed.all_reduce = gather, reduce
    try:
        for structure, n_passes in (("full", 1), ("kron", 1), ("diag", 1), ("ekfac", 2), ("lowrank", 2)):
            calls.clear()
            la = make("all", structure)
            la.fit(batches(*SHARDS["uneven"][rank]), group=distributed.group.WORLD)
            sums = [n for n in calls if n]
            assert len(calls) == 1 + 2 * len(sums), structure
            assert len(sums) == n_passes or structure == "lowrank"  # whose readings depend on its options
            if structure in ("full", "diag"):
                assert sums == [la.n_params * (la.n_params + 1) // 2 if structure == "full" else la.n_params]
            if structure == "kron":
                factors = cast("KronCurvature", la.fitted().curvature).parts.factors.values()
                matrices = [factor.shape for factor in factors if factor.ndim > 2]
                rest = sum(factor.numel() for factor in factors if factor.ndim <= 2)
                triangles = sum(shape[:-2].numel() * shape[-1] * (shape[-1] + 1) // 2 for shape in matrices)
                assert sums == [triangles + rest]
    finally:
        distributed.all_gather_object, distributed.all_reduce = gathered, reduced


def grids_are_of_all_validation_data(rank: int) -> None:
    x, y = data()
    whole, mine = [(x, y)], batches(*SHARDS["uneven"][rank])
    ood = torch.randn(9, 3, generator=torch.Generator().manual_seed(5)).double() * 3
    la = alone()
    for structure in ("kron", "full"):
        la = make("all", structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)
            la.fit(whole)
        for loss in ("nll", "brier", "ece"):
            for outside in (False, True):
                options: dict[str, Any] = {"objective": loss, "grid": {"prior_precision": [0.01, 0.1, 1, 10, 100]}}
                one = {"ood_loader": [ood], "ood_weight": 0.1} if outside else {}
                two = {"ood_loader": [ood[:2]] if rank else [ood[2:6], ood[6:]], "ood_weight": 0.1} if outside else {}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", TuningWarning)
                    expected = la.optimize_hyperparameters(**options, **one, val_loader=whole)
                    result = la.optimize_hyperparameters(
                        **options, **two, val_loader=mine, group=distributed.group.WORLD
                    )
                torch.testing.assert_close(result.values, expected.values, rtol=1e-10, atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        la.optimize_prior_precision(method="gridsearch", val_loader=whole)
        expected = la.prior_precision
        shard = whole if rank else []  # a process without validation data
        la.optimize_prior_precision(method="gridsearch", val_loader=shard, group=distributed.group.WORLD)
    assert torch.equal(la.prior_precision, expected)
    for wrong, loader, options in (
        (InvalidData, [], {"objective": "nll"}),
        (UnsupportedError, mine, {"objective": "nll", "method": "adam"}),
        (LaplaceError, mine, {"objective": nn.functional.nll_loss}),
        (ProcessError if rank else OSError, mine if rank else Broken(mine), {"objective": "nll"}),
    ):
        with pytest.raises(wrong, match="group at None" if "method" in options else None):
            la.optimize_hyperparameters(val_loader=loader, group=distributed.group.WORLD, **options)
    assert torch.equal(la.prior_precision, expected)


def training_follows_the_evidence_of_all_data(rank: int) -> None:
    """Each process has half of every batch of the process that trains alone."""
    x, y = data()
    both = TensorDataset(x[:22], y[:22])
    options: dict[str, Any] = {"n_epochs": 4, "n_hypersteps": 3, "optimizer_kwargs": {"lr": 0.05}}
    sampler = DistributedSampler(both, shuffle=False)
    for weights in ("last_layer", "all"):
        chosen: dict[str, Any] = {"subset_of_weights": weights, **options}
        model = nn.parallel.DistributedDataParallel(network())
        la, trained, margliks, _ = marglik_training(
            model, DataLoader(both, 11, sampler=sampler), "classification", "kron", group=distributed.group.WORLD,
            **chosen,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)
            single = DataLoader(both, 22)
            other, _, expected, _ = marglik_training(network(), single, "classification", "kron", **chosen)
        torch.testing.assert_close(torch.tensor(margliks), torch.tensor(expected), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(la.prior_precision, other.prior_precision, rtol=1e-6, atol=1e-8)
        assert trained is model and la.n_data == other.n_data == 22
    padded = DataLoader(TensorDataset(x, y), 12, sampler=DistributedSampler(TensorDataset(x, y)))
    assert OnlineLaplace(model, padded, group=distributed.group.WORLD).n_data == 23


def lightning_trains_with_two_devices(rank: int) -> None:
    lightning = pytest.importorskip("lightning")
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    from laplace.integrations.lightning import OnlineLaplaceCallback

    class Net(lightning.LightningModule):
        def __init__(self, net: nn.Module, evidence: Any) -> None:
            super().__init__()
            self.net, self.evidence = net, evidence

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.evidence.loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.05)

    net = network()
    evidence = OnlineLaplaceCallback("classification", model=net, n_hypersteps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[evidence], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Net(net, evidence), DataLoader(TensorDataset(*data()), 6))
    assert trainer.world_size == 2 and evidence.la.n_data == 23
    both: list[Any] = [None, None]
    distributed.all_gather_object(both, evidence.la.prior_precision)
    assert torch.equal(*both)


def products_are_of_one_process(rank: int) -> None:
    """Before any data are read."""
    la = make("all", "matrix_free")
    with pytest.raises(UnsupportedError, match=r"group=.*matrix_free.*'kron'"):
        la.fit(batches(12 * rank, 12), group=distributed.group.WORLD)
    la = make("all", "kron" if rank else "matrix_free")  # no process waits for one that refuses
    refused("matrix_free", la, batches(), ProcessError if rank else UnsupportedError)


def the_trainer_ends_with_the_posterior_of_all_data(rank: int) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    from laplace.integrations.transformers import LaplaceCallback

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            f = self.net(x)
            return f if labels is None else (nn.functional.cross_entropy(f, labels), f)

    rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    callback = LaplaceCallback("classification", subset_of_weights="all", hessian_structure="kron", dict_key_x="x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        arguments = transformers.TrainingArguments(
            output_dir=folder[0], max_steps=2, per_device_train_batch_size=5, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", ddp_backend="gloo",
        )  # fmt: skip
        trainer = transformers.Trainer(Net(), arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
        single = Laplace(trainer.model, "classification", "all", "kron", dict_key_x="x")
        single.fit([{"x": data()[0], "labels": data()[1]}])
    assert arguments.world_size == 2 and callback.la.n_data == 23
    torch.testing.assert_close(callback.la.log_marginal_likelihood(), single.log_marginal_likelihood())
    distributed.barrier()
    assert [path.name for path in Path(folder[0]).glob("*.pt")] == ["laplace.pt"]


CHECKS = [
    products_are_of_one_process, adds_and_forgets, padded_data_count_once, wrapped_models_are_unwrapped,
    sampled_targets_differ, wide_matrices_arrive_whole,
    errors_reach_all_processes, mixtures_pass_the_group_on,
    collectives_are_few, grids_are_of_all_validation_data,
    training_follows_the_evidence_of_all_data,
    lightning_trains_with_two_devices, the_trainer_ends_with_the_posterior_of_all_data,
]  # fmt: skip


SKIPPED = "skipped: "


def outcomes(rank: int, checks: list[Callable[[int], None]]) -> dict[str, str]:
    """Of the checks up to the first that fails, after which the processes have lost each other."""
    torch.set_num_threads(1)
    result: dict[str, str] = {}
    try:
        for check in checks:
            result[check.__name__] = "it did not end"
            try:
                check(rank)
                result[check.__name__] = ""
            except pytest.skip.Exception as missing:  # in every process alike
                result[check.__name__] = f"{SKIPPED}{missing}"
    except BaseException:
        result[[*result][-1]] = traceback.format_exc()
    return result


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return ranks.run(outcomes, CHECKS, size=2, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_in_two_processes(check: str, of_ranks: list[dict[str, str]]) -> None:
    for rank, found in enumerate(of_ranks):
        assert check in found, "one before it failed"
        if found[check].startswith(SKIPPED):
            pytest.skip(found[check])
        assert not found[check], f"rank {rank}: {found[check]}"


def test_what_is_no_group_is_refused() -> None:
    la = make("all", "diag")
    with pytest.raises(InvalidType, match=r"group is a str.*WORLD"):
        la.fit(batches(), group="world")  # pyright: ignore[reportArgumentType]
