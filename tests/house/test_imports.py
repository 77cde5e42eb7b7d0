"""Names that are imported when they are first read: complete, the same objects, and nothing else is loaded.

What an import brings is counted in a process of its own, never timed.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import laplace
from tests.fresh import printed
from tests.house.stubs import table_of
from tests.pairs import nightly
from tests.source import PACKAGE, name_of
from tests.versions import newer_torch

LAZY = sorted(path for path in PACKAGE.rglob("__init__.py") if "attach(" in path.read_text("utf-8"))
"""Packages whose names are imported when they are first read."""

NOT_FOR_A_FIT = (
    "laplace.curvature.asdl", "laplace.curvature.backpack", "laplace.curvature.curvlinops", "laplace.extensions",
    "laplace.integrations", "laplace.mixture", "laplace.refinement", "laplace.gp",
    "laplace.large_structures",
    "laplace.training", "matplotlib", "sympy", "torch._dynamo", "torch._inductor",
    "torch.fx.experimental.symbolic_shapes", "torch.onnx", "tqdm.auto",
)  # fmt: skip
"""Packages that neither `from laplace import Laplace` loads, nor the first fit and prediction of the default."""

FIRST_FIT = """
import torch
from laplace import Laplace
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
la = Laplace(model, "classification")
la.fit([(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))])
la(torch.randn(4, 2))
"""

COMPILER = {"sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "torch.onnx"}

NETWORKS = """
import warnings
import torch
from torch import nn
from laplace import Laplace
from laplace.curvature import NativeEF, NativeHessian

class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
        self.places, self.shift = nn.Embedding(4, 3), nn.Parameter(torch.randn(3))
        self.table = nn.Parameter(torch.randn(300, 4))  # of more numbers than a dense block may have
    def forward(self, x):
        x = (x.unsqueeze(1) + self.table).mean(1)
        return (x * (1 + self.scale.exp())) @ self.weight.T + self.places(torch.tensor(1)) - self.shift

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner, self.filter = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        words, more = self.words(x[:, :2]), self.words(x[:, 2:])
        hidden = self.filter(self.filter(self.inner(torch.tanh(self.inner(words.sum(1)))).unsqueeze(1)))
        return self.head(hidden.squeeze(1) + more.sum(1))

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)

class Last(nn.Module):
    def forward(self, states):
        return states[0][:, -1]

torch.manual_seed(0)
reflecting = nn.Conv1d(2, 2, 2, padding=1, padding_mode="reflect", groups=2)
dense = nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.GroupNorm(1, 5), nn.Linear(5, 3))
networks = [
    (dense, (4,)), (Raw(), (4,)),
    (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), (1, 4, 4)),
    (nn.Sequential(nn.ConvTranspose2d(2, 2, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)), (2, 2, 2)),
    (nn.Sequential(reflecting, nn.Flatten(), nn.LayerNorm(10), nn.Linear(10, 3)), (2, 4)),
    (Tied(), (4,)),
    (nn.Sequential(nn.GRU(4, 3, batch_first=True), Last(), nn.Linear(3, 3)), (3, 4)),
    (nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), Mean(), nn.Linear(4, 3)), (3, 4)),
]

def fitted(structure, some=networks, **options):
    for model, shape in some:
        x = torch.randint(5, (6, 4)) if isinstance(model, Tied) else torch.randn(6, *shape)
        loader = [(x, torch.tensor([0, 1, 2, 0, 1, 2]))]
        la = Laplace(model, "classification", "all", structure, prior_precision=1e4, **options)
        la.fit(loader)
        yield la, loader, x
"""
"""Networks of all kinds of layers, after which `fitted` gives posteriors of each, with their data."""

USES = {
    **{
        f"{structure}, {backend}": f"for la, _, x in fitted({structure!r}, backend={backend}): la(x)"
        for structure, backend in [
            ("diag", "None"), ("kron", "None"), ("ekfac", "None"), ("lowrank", "None"), ("full", "NativeEF"),
            ("full", "NativeHessian"),
        ]
    },
    "gradients by inputs": """
for la, _, x in fitted('kron', networks[:4], enable_backprop=True):
    la(x.requires_grad_()).sum().backward()
""",
    "tuning": """
warnings.simplefilter('ignore')
for la, loader, x in fitted('kron', networks[:1]):
    la.log_marginal_likelihood(torch.ones(1, requires_grad=True)).backward()
    la.optimize_prior_precision(n_steps=2)
    la.optimize_prior_precision(method='gridsearch', val_loader=loader)
""",
    "a subnetwork": """
warnings.simplefilter('ignore')
for model, shape in networks:
    subset = {"subset_of_weights": "subnetwork", "subnetwork_indices": torch.tensor([0, 3, 5, 6, 11, 30])}
    la = Laplace(model, "classification", hessian_structure="full", **subset)
    x = torch.randint(5, (6, 4)) if isinstance(model, Tied) else torch.randn(6, *shape)
    la.fit([(x, torch.tensor([0, 1, 2, 0, 1, 2]))])
    la(x)
""",
    "refinement": """
warnings.simplefilter('ignore')
for la, loader, x in fitted('diag', networks[:1]):
    la.refine(loader)
    la(x)
""",
    "a Gaussian process": "for la, _, x in fitted('gp', networks[:2], n_subset=4): la(x)",
}  # fmt: skip
"""Scripts after `NETWORKS` of what users do first."""


def dotted(path: Path) -> str:
    return ".".join(["laplace", *path.relative_to(PACKAGE).parent.parts])


def loaded(script: str) -> set[str]:
    """Modules that a script adds to those of `import torch`."""
    return set(printed(f"import sys, torch; before = set(sys.modules)\n{script}\nprint(*set(sys.modules) - before)"))


def first_to_load(uses: dict[str, str]) -> str:
    """A script that prints the first of some uses of `NETWORKS` after which a module of `COMPILER` is there."""
    return f"""{NETWORKS}
import sys
for name, use in {uses!r}.items():
    exec(use)
    if loaded := {COMPILER!r} & set(sys.modules):
        print(name, 'loads', *loaded)
        break
"""


def targets_of(path: Path) -> dict[str, str]:
    """Names of a package with their modules, as its table says."""
    return {name: module for module, names in table_of(path).items() for name in names.split()}


@pytest.mark.parametrize("path", LAZY, ids=dotted)
def test_names_of_a_package_are_those_of_their_modules(path: Path) -> None:
    package = importlib.import_module(dotted(path))
    for name, module in targets_of(path).items():
        value = getattr(package, name)
        assert value is getattr(importlib.import_module(module), name)
        assert vars(package)[name] is value
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("path", LAZY, ids=dotted)
def test_unknown_names_of_a_package_are_errors(path: Path) -> None:
    package = importlib.import_module(dotted(path))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {dotted(path)} import nothing")


def test_an_import_alone_loads_next_to_nothing() -> None:
    own = {module for module in loaded("import laplace") if module.startswith("laplace.")}
    real = {module for module in own if PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py").exists()}
    assert len(real) < 12, real


@pytest.mark.parametrize(
    "arguments", ["", ", 'all', 'full'", *nightly(", 'all', 'kron'", ", 'all', 'diag'", ", 'all', 'block'")]
)
def test_a_first_fit_loads_what_it_needs(arguments: str) -> None:
    assert not loaded(FIRST_FIT.replace('"classification"', f'"classification"{arguments}')).intersection(NOT_FOR_A_FIT)


def test_first_uses_load_no_compiler() -> None:
    """Nor SymPy: that is a third of a second, a compiler one more, in which nothing is computed."""
    assert not printed(first_to_load(USES))


def test_first_uses_of_other_packages_load_no_compiler() -> None:
    pytest.importorskip("backpack")
    use = "for la, _, x in fitted('kron', [(nn.Sequential(nn.Linear(4, 3)), (4,))], backend=BackPackGGN): la(x)"
    assert not printed(first_to_load({"BackPACK": f"from laplace.curvature import BackPackGGN\n{use}"}))


@newer_torch("`torch.func.vmap` imports the compiler")
def test_first_sampled_weights_load_no_compiler() -> None:
    use = "for la, _, x in fitted('kron', networks[:1]): la(x, pred_type='nn', link_approx='mc')"
    assert not printed(first_to_load({"samples": use}))


def test_submodules_are_attributes() -> None:
    """After a bare `import laplace`, as they were when everything was imported."""
    paths = [name_of(path) for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    names = [path.removesuffix(".py") for path in paths] + [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    deeper = "tuning.search structures.kron gp.subset curvature.asdl likelihoods.links weights.last_layer".split()
    deeper += "refinement.refine extensions.export predictive.sampled".split()
    legacy = ["utils", "utils.Kron", "baselaplace", "lllaplace.KronLLLaplace", "curvature.curvature", "laplace.Laplace"]
    script = f"import laplace\nfor path in {[*names, *deeper, *legacy]}: print(eval('laplace.' + path).__name__)"
    assert len(printed(script)) == len(names) + len(deeper) + len(legacy)
    assert printed("import laplace; print(callable(laplace.marglik_training))") == ["True"]
    script = """
import laplace.marglik_training
from importlib import import_module
print(callable(laplace.marglik_training), import_module('laplace.marglik_training').__name__)
"""
    assert printed(script) == ["True", "laplace.marglik_training"]


def test_registries_are_complete() -> None:
    script = """
from laplace.structures import STRUCTURES
from laplace.likelihoods import LIKELIHOODS
from laplace.function_space import FAMILIES
for registry in (STRUCTURES, LIKELIHOODS, FAMILIES):
    assert len(registry.items()) == len(registry) == len(list(registry))
    assert all(registry.name_of(part) == name and registry.get(name) is part for name, part in registry.items())
    assert registry.get('nothing') is None
assert all(structure.name == name for name, structure in STRUCTURES.items())
assert all(likelihood.name == name for name, likelihood in LIKELIHOODS.items())
print(len(STRUCTURES), len(LIKELIHOODS), len(FAMILIES))
"""
    assert printed(script) == ["8", "7", "3"]


@pytest.mark.parametrize("base", ["baselaplace.BaseLaplace", *nightly("BaseLaplace", "laplace.BaseLaplace")])
def test_subclasses_are_complete(base: str) -> None:
    """Scripts walk them by `_key`."""
    script = f"""
import laplace
from laplace.laplace import _all_subclasses
keys = {{cls._key for cls in _all_subclasses(laplace.{base}) if '_key' in vars(cls)}}
print(len(keys), ('all', 'gp') in keys, ('subnetwork', 'matrix_free') in keys)
"""
    count, *there = printed(script)
    assert (int(count) >= 28, there) == (True, ["True", "True"])


@pytest.mark.parametrize(
    "call",
    [
        "Laplace(m, 'regression', 'all', 'gp', n_subset=2)",
        *nightly("Laplace(m, 'regression', 'all', 'matrix_free')"),
    ],
)
def test_every_cell_is_found(call: str) -> None:
    """The class of its own name, and not one that is made of its parts."""
    script = f"import torch, laplace; from laplace import Laplace; m = torch.nn.Linear(2, 1); cls = type({call})"
    assert printed(f"{script}; print(cls is getattr(laplace, cls.__name__))") == ["True"]


def test_a_pickle_loads_in_a_process_that_imported_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "la.pickle")
    end = f"import pickle; pickle.dump(la, open({path!r}, 'wb')); print(la.log_marginal_likelihood().item())"
    (before,) = printed(f"{FIRST_FIT}\n{end}")
    (after,) = printed(f"import pickle; print(pickle.load(open({path!r}, 'rb')).log_marginal_likelihood().item())")
    assert before == after


def test_threads_import_at_once() -> None:
    """Each thread begins with another name, of which several share modules."""
    script = """
import threading
import torch
import laplace
names, errors = laplace.__all__[:], []
gate = threading.Barrier(len(names))
def read(name):
    gate.wait()
    try:
        assert getattr(laplace, name) is not None
    except BaseException as error:
        errors.append((name, error))
threads = [threading.Thread(target=read, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
print(all(getattr(laplace, name) is vars(laplace)[name] for name in names))
"""
    assert printed(script) == ["True"]


@pytest.mark.nightly
def test_a_spawned_process_reads_names() -> None:
    script = """
import multiprocessing
import laplace
with multiprocessing.get_context('spawn').Pool(1) as pool:
    print(*pool.map(laplace.utils.kron.__class__, []), pool.apply(str, (laplace.HessianStructure.KRON,)))
"""
    assert printed(script) == ["kron"]


def test_help_and_copies() -> None:
    script = "import pickle, laplace; print(laplace.__doc__); help(laplace)"
    same, *words = printed(f"{script}; print(pickle.loads(pickle.dumps(laplace.Laplace)) is laplace.Laplace)")[::-1]
    assert same == "True" and " ".join(reversed(words)).startswith("Laplace approximations")
    assert "KronLLLaplace" in words and set(laplace.__all__) <= set(dir(laplace))
