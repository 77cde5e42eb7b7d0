"""How Sphinx builds the site: `make docs`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

# Kernels of tutorials inherit the environment. They find the package where it is not installed, whatever directory they
# run in, and draw with the notebook's own backend: any other that is named leaves no picture on the page.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.pop("MPLBACKEND", None)

from docutils import nodes  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402
from sphinx.util import logging  # noqa: E402
from sphinx.util.inspect import TypeAliasForwardRef  # noqa: E402

import laplace  # noqa: E402
from tests.house import equations  # noqa: E402

project = "laplace"
author = "The laplace authors"
copyright = author
version = release = laplace.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_static"]
source_suffix = {".md": "myst-nb"}
default_role = "code"
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "tutorials")
nb_execution_timeout = 600  # seconds of wall time per cell: a busy machine is slow
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
TypeAliasForwardRef.__repr__ = lambda self: self.name  # type: ignore[method-assign]  # shown in `ArrayLike | None`
autodoc_inherit_docstrings = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "laplace"
html_static_path = ["_static"]
html_css_files = ["laplace.css"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

suppress_warnings = ["ref.python"]  # `Likelihood` in a signature: the class of objects, or the enumeration of names

_CODE = re.compile(r"(``.*?``|`[^`]*`)", re.DOTALL)


def _as_text(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with code in backticks: formulas and examples, which are indented, stay as they are."""
    done: list[str] = []
    text: list[str] = []
    # Members by task are the sections of a page of their own.
    waiting = lines[: lines.index("Members by task:")] if "Members by task:" in lines else lines.copy()
    while waiting:
        line = waiting.pop(0)
        text.append(line)
        block = _block_after(line, waiting)
        if block:
            text[-1] += ":"
            done += [*_escaped(text), "", *block, ""]
            text, waiting = [], waiting[len(block) :]
    head = ["..", ""] if what in ("attribute", "property") else []  # or "a: b" at the head would be read as a type
    lines[:] = [*head, *done, *_escaped(text)]


def _block_after(line: str, following: list[str]) -> list[str]:
    """The formula or example that a line announces: what is indented below a line that ends in a colon."""
    is_example = line.strip() == "Example:"
    if not line.rstrip().endswith(":") or not following or not (is_example or not following[0].strip()):
        return []
    depth = len(line) - len(line.lstrip())
    end = next((i for i, each in enumerate(following) if each.strip() and not each.startswith(" " * (depth + 1))), None)
    block = following[:end]
    return block if any(each.strip() for each in block) else []


def _escaped(lines: list[str]) -> list[str]:
    """Lines whose bars, stars and closing underscores mean themselves outside of code: |f|, θ*, *args.

    Tags of equations are links.
    """
    parts = _CODE.split("\n".join(lines))
    plain = [re.sub(r"[|*]|(?<=\w)_(?=\W|$)", r"\\\g<0>", part) for part in parts[::2]]
    parts[::2] = [equations.linked(part, "../equations.html") for part in plain]
    return "".join(parts).split("\n")


def _one_signature(app: object, what: str, name: str, obj: object, *_: object) -> None:
    """Readers see one signature with all arguments: overloads are for type checkers."""
    if what in ("function", "method"):
        analyzer = ModuleAnalyzer.for_module(str(obj.__module__))
        analyzer.analyze()
        analyzer.overloads.clear()


_CELL = re.compile(r"^```\{code-cell\}.*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _require_pictures(app: object, doctree: nodes.document, docname: str) -> None:
    """A page shows a picture for every cell that draws a figure."""
    text = Path(app.env.doc2path(docname)).read_text("utf-8")  # type: ignore[attr-defined]
    drawn = sum("plt.subplots(" in cell for cell in _CELL.findall(text))
    cells = doctree.findall(lambda node: "cell_output" in getattr(node, "attributes", {}).get("classes", ()))
    shown = sum(len(list(cell.findall(nodes.image))) for cell in cells)
    if shown < drawn:
        logging.getLogger(__name__).warning(
            f"{docname} draws {drawn} figures and shows {shown}. Where {nb_execution_cache_path} holds outputs of an "
            "older build, remove it."
        )


_WARNED = re.compile(r"\b(\w+Warning): ")


def unannounced(text: str, outputs: list[str]) -> list[str]:
    """What cells write to the error stream, by kind, of which the text of their page says nothing."""
    said = _CELL.sub("", text)
    kinds = [kind for output in outputs for kind in _WARNED.findall(output) or ["other output"]]
    return sorted({f"{kind} ({kinds.count(kind)})" for kind in kinds if kind not in said})


def _require_announced(app: object, doctree: nodes.document, docname: str) -> None:
    """A page shows no warning that its text does not name."""
    text = Path(app.env.doc2path(docname)).read_text("utf-8")  # type: ignore[attr-defined]
    shown = [
        node.astext()
        for node in doctree.findall(lambda node: "stderr" in getattr(node, "attributes", {}).get("classes", ()))
    ]
    if found := unannounced(text, shown):
        logging.getLogger(__name__).warning(
            f"{docname} shows {', '.join(found)}, of which its text says nothing: name the warning there, or mend its "
            "cause."
        )


# Tutorials as notebooks, without outputs: pages have them.

_CODE_OF_TUTORIAL = re.compile(r"^```(?:python|\{code-cell\}[^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def notebook(page: str) -> dict[str, object]:
    """A tutorial as a Jupyter notebook, whose first cell installs what the page says."""
    extras = re.search(r'pip install "\.(\[.*?\])"', page)
    install = f'"{{}}{extras[1]}"' if extras else '"{}"'
    first = f"# In a clone of the repository:\n%pip install --quiet {install.format('.')}\n"
    cells = [_cell("code", f"{first}# From the first release on: %pip install {install.format('laplace-bayes')}")]
    *texts, last = _CODE_OF_TUTORIAL.split(re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL))
    for text, code in zip(texts[::2], texts[1::2], strict=True):
        cells += [_cell("markdown", text), _cell("code", re.sub(r"^:.*\n+", "", code, flags=re.MULTILINE))]
    cells = [cell for cell in [*cells, _cell("markdown", last)] if cell["source"]]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def _cell(kind: str, source: str) -> dict[str, object]:
    text = re.sub(r"(\]\([^):]+)\.md", r"\1.html", source) if kind == "markdown" else source
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    outputs = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": text.strip().splitlines(keepends=True)} | outputs


def _is_tutorial(docname: str) -> bool:
    return docname.startswith("tutorials/") and not docname.endswith("/index")


def _link_notebook(app: object, docname: str, source: list[str]) -> None:
    """A tutorial links to its notebook below its title."""
    if _is_tutorial(docname):
        link = f'<a href="{Path(docname).name}.ipynb" download>Download this page as a notebook.</a>'
        source[0] = re.sub(r"^# .*\n", lambda title: f"{title[0]}\n{link}\n", source[0], count=1, flags=re.MULTILINE)


def _write_notebooks(app: object, exception: Exception | None) -> None:
    """Beside the pages of the site."""
    if exception is None:
        for docname in filter(_is_tutorial, app.env.found_docs):  # type: ignore[attr-defined]
            page = Path(app.env.doc2path(docname)).read_text("utf-8")  # type: ignore[attr-defined]
            target = Path(app.outdir) / f"{docname}.ipynb"  # type: ignore[attr-defined]
            target.write_text(json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n", "utf-8")


MOVED = {
    "which_method": "quality.html",
    "why_calibrate": "quality.html#a-case-with-a-known-answer",
    "what_a_posterior_knows": "questions.html",
}
"""Pages that had another name, and what they lead to."""


def _write_moved(app: object, exception: Exception | None) -> None:
    """Links and bookmarks of old names arrive."""
    for name, target in MOVED.items() if exception is None else ():
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}"><a href="{target}">{target}</a>\n'
        (Path(app.outdir) / f"{name}.html").write_text(page, "utf-8")  # type: ignore[attr-defined]


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _link_notebook)  # type: ignore[attr-defined]
    app.connect("build-finished", _write_notebooks)  # type: ignore[attr-defined]
    app.connect("build-finished", _write_moved)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", _as_text, priority=400)  # type: ignore[attr-defined]
    app.connect("autodoc-process-signature", _one_signature)  # type: ignore[attr-defined]
    app.connect("doctree-resolved", _require_pictures)  # type: ignore[attr-defined]
    app.connect("doctree-resolved", _require_announced)  # type: ignore[attr-defined]
