"""Both packages in one environment: laplace-torch, which is imported as `laplace` too, is noticed at import."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path

import pytest

from laplace.compat.paths import check_installation
from laplace.errors import InstallationWarning, LaplaceWarning
from tests import fresh


def install(folder: Path, name: str = "laplace_torch-0.3.dist-info") -> None:
    """Leaves what an installer leaves of a distribution."""
    (folder / name).mkdir()
    (folder / name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.partition('-')[0]}\n", "utf-8")


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


@pytest.mark.parametrize("name", ["laplace_torch-0.2.2.2.dist-info", "laplace_torch-0.1a2.egg-info"])
def test_every_release_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, name)
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
