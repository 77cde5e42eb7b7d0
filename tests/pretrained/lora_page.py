"""The program of docs/tutorials/lora.md, which the site does not run: whole, to print what the page shows, or small.

python -m tests.pretrained.lora_page
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SMALL = {
    "order.split([400, 92, 150])": "order[:64].split([24, 20, 20])",
    "range(14)": "range(1)",
}


def run(*, small: bool) -> None:
    """Runs the page's examples in order; small, with few molecules and one epoch."""
    page = (ROOT / "docs" / "tutorials" / "lora.md").read_text("utf-8")
    namespace: dict[str, object] = {"__name__": "lora_page"}
    for number, example in enumerate(_PYTHON.findall(page)):
        for whole, part in SMALL.items() if small else ():
            example = example.replace(whole, part)
        exec(compile(example, f"lora.md, example {number}", "exec", dont_inherit=True), namespace)
        print(flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")  # of transformers, which peft causes
    run(small=False)
