"""A distribution of the name laplace-torch that asks for this library: `python -m laplace.stand_in`.

Packages that require laplace-torch import `laplace`, which both packages are. Installed by pip, they would bring
laplace-torch, whose files go over those of this library. A stand-in, of metadata alone, meets the requirement instead:

    python -m laplace.stand_in dist && pip install dist/laplace_torch-0.3-py3-none-any.whl
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import zipfile
from pathlib import Path

from laplace.compat.paths import OTHER, OWN

_VERSION = "0.3"
"""The release that it stands for."""


def write(folder: Path, version: str = _VERSION) -> Path:
    """Writes the wheel, four lines of metadata without any module, and returns its path."""
    stem = f"{OTHER.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {OTHER}\nVersion: {version}\nRequires-Dist: {OWN}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: {__name__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},sha256={_digest(text)},{len(text)}\n" for name, text in files.items()]
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m laplace.stand_in", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", default=".", type=Path, help="where the wheel is written (default: here)")
    parser.add_argument("--version", default=_VERSION, help="the version of laplace-torch that it stands for")
    arguments = parser.parse_args()
    path = write(arguments.folder, arguments.version)
    print(f"pip install {path}")  # noqa: T201  (what to do next)


if __name__ == "__main__":
    main()
