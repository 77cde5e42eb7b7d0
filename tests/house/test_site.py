"""The site shows what its tutorials draw, built as `make docs` does, also where the package is not installed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = """---
file_format: mystnb
kernelspec:
  name: python3
---

# A page

```{code-cell} ipython3
from matplotlib import pyplot as plt

import laplace

print("imported from", laplace.__file__)
figure, ax = plt.subplots(figsize=(1, 1))
ax.plot([1, 2]);
```

```{code-cell} ipython3
figure, axes = plt.subplots(1, 2, figsize=(2, 1))
"""
DRAWN = "axes[0].plot([1, 2]);\n```\n"
CLOSED = "plt.close(figure)\n```\n"


def built(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    """A site of one page, under the configuration of docs/ and the variables that the Makefile exports."""
    for package in ("furo", "ipykernel", "myst_nb", "sphinx_copybutton", "sphinx_design"):
        pytest.importorskip(package)
    (folder / "pages").mkdir()
    (folder / "pages" / "index.md").write_text(page, "utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MPLBACKEND": "Agg"}
    arguments = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs")]
    arguments += ["-D", f"nb_execution_cache_path={folder / 'cache'}", str(folder / "pages"), str(folder / "site")]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments], env=environment, cwd=folder, capture_output=True, text=True
    )


@pytest.mark.nightly  # `make docs` builds the whole site
def test_every_figure_of_a_page_is_a_picture_of_the_site(tmp_path: Path) -> None:
    run = built(tmp_path, PAGE + DRAWN)
    assert run.returncode == 0, run.stderr
    html = (tmp_path / "site" / "index.html").read_text("utf-8")
    pictures = re.findall(r'<img[^>]*src="(_images/[^"]+\.png)"', html)
    assert len(set(pictures)) == 2
    assert all((tmp_path / "site" / picture).stat().st_size > 100 for picture in pictures)
    assert f"imported from {ROOT / 'laplace'}" in re.sub(r"<[^>]+>", "", html)


@pytest.mark.nightly
def test_a_figure_that_is_not_shown_stops_the_build(tmp_path: Path) -> None:
    run = built(tmp_path, PAGE + CLOSED)
    assert run.returncode != 0
    assert "index draws 2 figures and shows 1" in run.stderr


WARNS = """
import warnings
for n in range(3):
    warnings.warn(f"of {n}", UserWarning)
```
"""


@pytest.mark.nightly
def test_a_warning_that_the_text_does_not_announce_stops_the_build(tmp_path: Path) -> None:
    page = PAGE.split("figure, ax", maxsplit=1)[0] + WARNS
    run = built(tmp_path, page)
    assert run.returncode != 0
    assert "index shows UserWarning (3), of which its text says nothing" in run.stderr
    (tmp_path / "said").mkdir()
    assert built(tmp_path / "said", page + "\nThree times a `UserWarning`.\n").returncode == 0


def configuration() -> dict[str, Any]:
    pytest.importorskip("docutils.nodes")
    pytest.importorskip("sphinx.pycode")
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


TUTORIALS = sorted(set((ROOT / "docs" / "tutorials").glob("*.md")) - {ROOT / "docs" / "tutorials" / "index.md"})


def test_a_tutorial_is_a_notebook_that_installs_and_has_all_cells_and_no_output() -> None:
    notebook = configuration()["notebook"]
    assert len(TUTORIALS) > 12
    for page in TUTORIALS:
        text = page.read_text("utf-8")
        cells = notebook(text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert (
            len(code) == 1 + len(re.findall(r"^```(?:\{code-cell\}|python)", text, re.MULTILINE))
            and "%pip install" in code[0]
        )
        assert not any(cell.get("outputs") for cell in cells) and len({cell["id"] for cell in cells}) == len(cells)
        for each in code[1:]:
            compile(each, page.name, "exec")
        prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert prose.startswith("# ") and "```{code-cell}" not in prose and ".md)" not in prose


def test_tags_of_equations_are_links_to_their_rows() -> None:
    shown = configuration()["_escaped"](["the evidence [Redux,", "    eq. 6], of |f| and `[Redux, eq. 9]`."])
    link = "`[Redux, eq. 6] <../equations.html#redux-eq-6>`__"
    assert shown == [f"the evidence {link}, of \\|f\\| and `[Redux, eq. 9]`."]
    assert '<a id="redux-eq-6"></a>' in (ROOT / "docs" / "equations.md").read_text("utf-8")


def test_old_names_of_pages_lead_to_pages(tmp_path: Path) -> None:
    module = configuration()
    module["_write_moved"](SimpleNamespace(outdir=tmp_path), None)
    for name, target in module["MOVED"].items():
        page, _, anchor = target.partition(".html")
        text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
        assert not (ROOT / "docs" / f"{name}.md").exists() and target in (tmp_path / f"{name}.html").read_text("utf-8")
        assert f"\n## {anchor[1:].replace('-', ' ').capitalize()}\n" in text or not anchor


def test_announced_warnings() -> None:
    unannounced = configuration()["unannounced"]
    shown = ["cell.py:3: TuningWarning: of 2", "cell.py:4: TuningWarning: of 3\ncell.py:4: DataWarning: none", "a bar"]
    cell = "```{code-cell} ipython3\nTuningWarning\n```\n"
    assert unannounced(cell, shown) == ["DataWarning (1)", "TuningWarning (2)", "other output (1)"]
    assert unannounced("A `TuningWarning` says so, and a DataWarning.\n" + cell, shown[:2]) == []


def test_tutorials_and_gallery_draw_as_the_build_counts() -> None:
    """Figures are counted by their call: one that is made by another would go unseen."""
    pages = [*(ROOT / "docs" / "tutorials").glob("*.md"), ROOT / "docs" / "gallery.md"]
    texts = {page.stem: page.read_text("utf-8") for page in pages}
    drawn = {name: text.count("plt.subplots(") for name, text in texts.items()}
    assert not [name for name, text in texts.items() if "pyplot" in text and not drawn[name]]
    assert not [name for name, text in texts.items() if re.search(r"plt\.(figure|plot|show|imshow|hist)\(", text)]
    assert drawn["gallery"] >= 8 and sum(drawn.values()) >= 21
