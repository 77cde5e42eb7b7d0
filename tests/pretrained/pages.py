"""Programs of tutorials that the site does not run: whole, to print what the page shows, or small.

python -m tests.pretrained.pages lora
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SMALL = {
    "lora": {"order.split([400, 92, 150])": "order[:64].split([24, 20, 20])", "range(14)": "range(1)"},
    "sixty_labels": {"tweets[60:560]": "tweets[60:360]", "[:400]": "[:40]"},
}
"""What a page says, and what stands for it in the small program: few data, one epoch."""


def text_of(name: str) -> str:
    """A page."""
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text("utf-8")


def run(name: str, *, small: bool) -> None:
    """Runs a page's examples in order."""
    namespace: dict[str, object] = {"__name__": name}
    for number, example in enumerate(_PYTHON.findall(text_of(name))):
        for whole, part in SMALL[name].items() if small else ():
            example = example.replace(whole, part)
        exec(compile(example, f"{name}.md, example {number}", "exec", dont_inherit=True), namespace)
        print(flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")  # of transformers, which peft causes
    run(sys.argv[1], small=False)
