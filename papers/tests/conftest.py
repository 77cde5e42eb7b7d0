"""What the experiments share lies beside their scripts, which find it there when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import _same_start  # noqa: F401

sys.path.append(str(Path(__file__).parents[1]))
