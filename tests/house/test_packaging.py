"""The wheel and the source archive: what is inside, and that the wheel is enough."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import laplace

ROOT = Path(__file__).parents[2]
NEEDED = ("torch", "numpy", "tqdm")

pytest.importorskip("build")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both archives, built of a copy of the sources."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    shutil.copytree(ROOT / "laplace", source / "laplace", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "house", source / "tests" / "house", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    return folder / "dist"


def test_the_wheel_holds_the_package_alone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"laplace_bayes-{laplace.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {"laplace/py.typed", "laplace/grid.pyi"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"laplace", f"laplace_bayes-{laplace.__version__}.dist-info"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "laplace").rglob("*.py")}
    assert sources <= set(names)


def test_the_source_archive_builds_the_same(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"laplace/py.typed", "laplace/grid.pyi", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not any(name.startswith(("examples", "papers")) for name in names)


def test_the_wheel_works_beside_torch_numpy_and_tqdm_alone(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    for module in sorted(_modules_of(NEEDED)):
        _link(module, tmp_path / "site")
    script = (
        f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(tmp_path / 'site')!r}]\n"
        "import torch; from laplace import Laplace; import laplace\n"
        f"assert laplace.__file__.startswith({str(tmp_path)!r}), laplace.__file__\n"
        "net = torch.nn.Linear(2, 3)\n"
        "la = Laplace(net, 'classification')\n"
        "la.fit([(torch.randn(6, 2), torch.arange(6) % 3)])\n"
        "assert la(torch.randn(4, 2)).shape == (4, 3)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _modules_of(names: tuple[str, ...]) -> set[str]:
    """Modules of these distributions and of what they require, as installed."""
    provided: dict[str, set[str]] = {}
    for module, owners in metadata.packages_distributions().items():
        for owner in owners:
            provided.setdefault(_canonical(owner), set()).add(module)
    seen: set[str] = set()
    left = [*names]
    while left:
        name = _canonical(left.pop())
        if name in seen or name not in provided:
            continue
        seen.add(name)
        requirements = metadata.requires(name) or []
        left += [_name(requirement) for requirement in requirements if "extra ==" not in requirement]
    return {module for name in seen for module in provided[name]}


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").strip()


def _link(module: str, site: Path) -> None:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not found.has_location:
        return
    path = Path(found.origin)
    path = path.parent if path.name == "__init__.py" else path
    if not (site / path.name).exists():
        (site / path.name).symlink_to(path)
