"""What the experiments share lies beside their scripts, which find it there when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "experiments"))
