"""Both packages in one environment: laplace-torch, which is imported as `laplace` too, is noticed at import."""

from __future__ import annotations

import subprocess
import sys
import warnings
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from laplace import stand_in
from laplace.compat.paths import check_installation
from laplace.errors import InstallationWarning, LaplaceWarning
from tests import fresh


def install(folder: Path, name: str = "laplace_torch-0.3.dist-info", *, record: bool = True) -> None:
    """Leaves what an installer leaves of a distribution that has a module `laplace`; without a record of its files."""
    (folder / name).mkdir()
    (folder / name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.partition('-')[0]}\n", "utf-8")
    (folder / "laplace").mkdir(exist_ok=True)
    (folder / "laplace" / "baselaplace.py").touch()
    if record:
        (folder / name / "RECORD").write_text("laplace/baselaplace.py,,\n", "utf-8")


def import_beside(folder: Path) -> fresh.Done:
    """Imports this library by the second line of a script, with a further folder of packages on the path."""
    script = folder / "script.py"
    script.write_text("import sys\nimport laplace\nprint(laplace.Laplace.__name__)\n", "utf-8")
    (done,) = fresh.run(f"import runpy, sys; sys.path.append({str(folder)!r}); runpy.run_path({str(script)!r})")
    assert done.status == 0, done.errors
    return done


def test_an_import_beside_laplace_torch_is_told_at_the_line_of_the_import(tmp_path: Path) -> None:
    install(tmp_path)
    done = import_beside(tmp_path)
    assert done.output == "Laplace\n"
    assert done.errors.count("InstallationWarning") == 1
    assert f"{tmp_path / 'script.py'}:2:" in done.errors
    assert "pip uninstall laplace-bayes laplace-torch" in done.errors


def test_an_import_alone_says_nothing(tmp_path: Path) -> None:
    install(tmp_path, "laplace-0.1.0.dist-info")  # the name of this library's own distribution
    assert import_beside(tmp_path).errors == ""


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("name", ["laplace_torch-0.2.2.2.dist-info", "laplace_torch-0.1a2.egg-info"])
def test_every_release_is_noticed(name: str, record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, name, record=record)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(LaplaceWarning, match="overwrites files of the earlier") as told:
        check_installation()
    assert [warning.category for warning in told] == [InstallationWarning]


def test_a_search_in_vain_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: metadata.PathDistribution, filename: str) -> str:
        raise AssertionError(f"{filename} was read")

    for other in ("torch_laplace-1.0.dist-info", "laplace-0.1.0.dist-info", "laplace_torch_extras-1.0.dist-info"):
        install(tmp_path, other)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metadata.PathDistribution, "read_text", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_installation()


# A package that requires laplace-torch, beside this library.


@pytest.mark.parametrize("record", [True, False])
def test_a_stand_in_without_files_is_not_warned_of(
    record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(stand_in.write(tmp_path)) as wheel:
        wheel.extractall(tmp_path)
    (tmp_path / "laplace").mkdir()
    (tmp_path / "laplace" / "__init__.py").touch()  # this library, in the same folder
    if not record:
        (tmp_path / "laplace_torch-0.3.dist-info" / "RECORD").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    found = metadata.distribution("laplace-torch")
    assert (found.version, found.requires) == ("0.3", ["laplace-bayes"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_installation()


def test_pip_takes_the_stand_in_for_laplace_torch(tmp_path: Path) -> None:
    """As a wrapper's requirement that it meets; the command writes it where it is told to."""
    done = subprocess.run(
        [sys.executable, "-m", "laplace.stand_in", str(tmp_path), "--version", "0.2.2.2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    wheel = tmp_path / "laplace_torch-0.2.2.2-py3-none-any.whl"
    assert done.stdout == f"pip install {wheel}\n" and wheel.exists()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    target = tmp_path / "installed"
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    assert {path.name for path in target.iterdir()} == {"laplace_torch-0.2.2.2.dist-info"}
