"""Fits that memory does not hold are refused before they begin, with choices that it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.core import memory as core_memory
from laplace.core.memory import Available
from laplace.curvature import GGNInterface, NativeHessian
from laplace.engines.profile import BatchProfile
from laplace.errors import OutOfMemory
from laplace.large_fits import planning
from laplace.large_fits.planning import MemoryCheck
from laplace.mixture import MixtureLaplace
from laplace.structures import STRUCTURES
from tests.conformance.cases import Case, few
from tests.robustness.faults import posterior_bits, same_bits

HUGE = 2**60


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, generator=generator), torch.randint(20, (8,), generator=generator)) for _ in range(2)]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how much there is, and looks at every fit, however small."""
    monkeypatch.setattr(planning, "LEAST", 0)

    def of(size: int) -> None:
        monkeypatch.setattr(planning, "available", lambda device: Available(size, "a test"))

    return of


def surveys(la: Any, loader: Any, monkeypatch: pytest.MonkeyPatch) -> list[BatchProfile]:
    """What a fit shows to the check."""
    seen: list[BatchProfile] = []
    monkeypatch.setattr(MemoryCheck, "__call__", lambda self, profile: seen.append(profile))
    la.fit(loader)
    return seen


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", structures=["diag", "kron", "full"]))
def test_a_fit_shows_what_a_plan_knows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shapes, without a pass of its own: but for the graph, which is there by then."""
    la = case.build()
    planned: list[BatchProfile] = []
    loader = case.problem.batches(None)
    monkeypatch.setattr("laplace.large_fits.planning.make_plan", lambda profile, *_: planned.append(profile))
    la.plan(loader)
    (shown,) = surveys(la, loader, monkeypatch)
    assert replace(planned[0], graph=0, widest=0) == shown


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "ekfac", "lowrank"])
def test_no_pass_is_run_for_it(structure: str) -> None:
    model = network()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    counts: list[int] = []
    for check in (True, False):
        calls.clear()
        Laplace(model, "classification", "all", structure).fit(data(), check_memory=check)
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_a_number_of_columns_is_not_taken_for_a_share_of_them(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fit takes is kept for others of its form: 1 column takes less than all, 1.0, which equals it."""
    seen: list[tuple[MemoryCheck, BatchProfile]] = []
    asked = MemoryCheck.lacking
    monkeypatch.setattr(MemoryCheck, "lacking", lambda self, profile: seen.append((self, profile)))
    options = {"rank": 1, "oversampling": 1}
    Laplace(network(), "classification", "all", "lowrank", structure_kwargs=options).fit(data())
    few, profile = seen[0]
    many = replace(few, options=replace(few.options, rank=1.0))
    whole = replace(profile, n_batches=few.n_batches)
    sizes = [check.structure.cost(whole, check.options).fit_bytes(profile) for check in (few, many)]
    assert sizes[0] < sizes[1]
    memory(sum(sizes) // 2)
    for check, fits in ((few, True), (many, False), (few, True)):
        assert (asked(check, profile) is None) == fits


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", tuple(STRUCTURES))
def test_a_fit_that_does_not_fit(structure: str, weights: str, memory: Any) -> None:
    """The message names the choice, what is there, and never again what was just used; the former posterior stays."""
    la = Laplace(network(), "classification", weights, structure)
    memory(HUGE)
    la.fit(data())
    before, needed = posterior_bits(la), la.plan(data()).peak_bytes
    cheaper = [o for o in la.plan(data()).cheaper if o.structure != structure or o.weights != weights]
    memory(1000 if not cheaper else cheaper[-1].peak_bytes)
    with pytest.raises(OutOfMemory) as caught:
        la.fit(data())
    said, _, mend = str(caught.value).partition("available (a test). ")
    assert f"subset_of_weights='{weights}', hessian_structure='{structure}'" in said
    assert "check_memory=False" in mend and needed > 1000
    for other in mend.split(", "):
        assert f"hessian_structure='{structure}'" not in other or "subset_of_weights=" in other
    if cheaper:
        assert f"hessian_structure='{cheaper[-1].structure}'" in mend
    assert same_bits(before, posterior_bits(la))
    la.fit(data(), check_memory=False)
    with pytest.raises(OutOfMemory):
        la.fit(data(), override=False)
    memory(HUGE)
    la.fit(data())


def test_smaller_batches_where_those_suffice(memory: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 5))
    la = Laplace(model, "classification", "all", "diag")
    x, y = torch.randn(400, 4), torch.randint(5, (400,))
    memory(la.plan([(x[:2], y[:2])]).peak_bytes)
    with pytest.raises(OutOfMemory, match="smaller batches"):
        la.fit([(x, y)])
    la.fit([(x[:1], y[:1])])
    memory(0)
    with pytest.raises(OutOfMemory, match="Choose fewer weights, of a subnetwork, or free memory"):
        la.fit([(x, y)])


def test_what_is_too_large_for_any_data_is_refused_before_it_is_held(memory: Any) -> None:
    """Vectors of a low rank and rows of the Hessian are there before the first batch; a batch says what is cheaper."""
    memory(200_000)
    for options in ({"structure_kwargs": {"rank": 500}}, {"backend": NativeHessian}):
        structure = "lowrank" if "structure_kwargs" in options else "full"
        la = Laplace(network(), "classification", "all", structure, **options)
        with pytest.raises(OutOfMemory, match="hessian_structure='diag'"):
            la.fit(data())
        assert not la.is_fitted


def test_nobody_looks_below_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(device: torch.device) -> Available:
        raise AssertionError("looked")

    monkeypatch.setattr(planning, "available", looked)
    for structure in STRUCTURES:
        Laplace(network(), "classification", "all", structure).fit(data())


def test_who_cannot_say_is_not_checked(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(GGNInterface):
        def diag(self, x: Tensor, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return super().diag(x, y, **kwargs)

    memory(0)
    Laplace(network(), "classification", "all", "gp", n_subset=4).fit(data(), check_memory=True)
    Laplace(network(), "classification", "all", "diag", backend=Own).fit(data())
    monkeypatch.setattr(planning, "available", lambda device: None)
    Laplace(network(), "classification", "all", "full").fit(data())


def test_mixtures_pass_it_on(memory: Any) -> None:
    mixture = MixtureLaplace([Laplace(network(), "classification", "all", "diag") for _ in range(2)])
    memory(0)
    with pytest.raises(OutOfMemory):
        mixture.fit(data())
    mixture.fit(data(), check_memory=False)
    assert mixture.is_fitted


# What there is.

MEMINFO = "MemTotal:       24684084 kB\nMemFree:         100 kB\nMemAvailable:    2000 kB\n"


def read(**files: str) -> core_memory.Read:
    named = {name.replace("__", "/"): text for name, text in files.items()}
    return lambda path: named.get(path)


def test_linux_says_what_it_could_give() -> None:
    assert core_memory.meminfo_available(MEMINFO) == 2000 * 1024
    assert core_memory.meminfo_available("MemTotal: 3 kB") is None and core_memory.meminfo_available("") is None
    assert core_memory.free_on_host({"/proc/meminfo": MEMINFO}.get) == Available(2000 * 1024, "/proc/meminfo")
    assert core_memory.free_on_host(lambda path: None) is None  # another system


@pytest.mark.parametrize(
    ("maximum", "current", "stat", "left"),
    [
        ("1000\n", "600\n", "active_file 7\ninactive_file 50\n", 457),
        ("1000", "600", None, 400),
        ("1000", "2000", "inactive_file 100", 0),
        ("max\n", "600", "", None),
        (None, None, None, None),
    ],
)
def test_a_control_group(maximum: str | None, current: str | None, stat: str | None, left: int | None) -> None:
    assert core_memory.left_by_group(maximum, current, stat, "") == left


def test_the_least_of_all_groups_counts() -> None:
    version_2 = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": "max",
        "/sys/fs/cgroup/a/b/memory.current": "5",
        "/sys/fs/cgroup/a/memory.max": "900",
        "/sys/fs/cgroup/a/memory.current": "500",
        "/sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 20",
        "/sys/fs/cgroup/memory.max": "10000",
        "/sys/fs/cgroup/memory.current": "600",
    }
    assert core_memory.free_on_host(version_2.get) == Available(420, "/sys/fs/cgroup/a/memory.max")
    version_1 = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "700",
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "650",
        "/sys/fs/cgroup/memory/job/memory.stat": "active_file 1\ntotal_inactive_file 20\ntotal_active_file 10",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    assert core_memory.free_on_host(version_1.get) == Available(80, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes")


def test_this_machine() -> None:
    found = core_memory.available(torch.device("cpu"))
    assert found is None or 0 < found.size < HUGE
    assert core_memory.available(torch.device("meta")) is None
