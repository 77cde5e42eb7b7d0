"""The table of docs/integrations.md tells of every package of the extra, and of the script that shows it."""

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
def test_every_row_has_a_script_that_imports_it(package: str) -> None:
    (row,) = re.findall(rf"^\| {package} \|.*$", PAGE.read_text("utf-8"), re.MULTILINE | re.IGNORECASE)
    scripts = re.findall(r"`(examples/\w+\.py)`", row)
    module = {"scikit-learn": "sklearn", "onnx": "onnxruntime"}.get(package, package)
    assert any(re.search(rf"^from {module}\b", (ROOT / name).read_text("utf-8"), re.M) for name in scripts)
