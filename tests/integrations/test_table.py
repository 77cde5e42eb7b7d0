"""The table of docs/integrations.md tells of every package of the extra, which the page or a script shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.versions import PAGE, stated

ROOT = Path(__file__).parents[2]

# Packages of the extra without a row of their own.
WITHOUT_A_ROW = {"pandas", "onnxruntime", "onnxscript"}


def extra() -> set[str]:
    """Packages of the extra `integrations`."""
    (listed,) = re.findall(r"^integrations = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S)
    return {re.split(r"[^\w-]", name)[0] for name in re.findall(r'"(.+?)"', listed)}


def test_every_package_has_a_row() -> None:
    assert stated().keys() == extra() - WITHOUT_A_ROW
    assert extra() >= WITHOUT_A_ROW


@pytest.mark.parametrize("package", stated())
def test_the_page_or_a_script_of_the_row_imports_it(package: str) -> None:
    page = PAGE.read_text("utf-8")
    (row,) = re.findall(rf"^\| {package} \|.*$", page, re.MULTILINE | re.IGNORECASE)
    scripts = re.findall(r"`(examples/\w+\.py)`", row)
    module = {"scikit-learn": "sklearn", "onnx": "onnxruntime"}.get(package, package)
    shown = [page, *((ROOT / name).read_text("utf-8") for name in scripts)]
    assert any(re.search(rf"^from {module}\b", text, re.M) for text in shown)
