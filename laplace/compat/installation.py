"""The other package of this import name: laplace-torch in the same environment."""

from __future__ import annotations

from importlib import metadata

from laplace.errors import InstallationWarning, warn

_OWN, _OTHER = "laplace-bayes", "laplace-torch"


def check_installation() -> None:
    """Warns if laplace-torch, which is imported as `laplace` too, is installed in this environment.

    One look at the names of the installed distributions; no file of them is read.
    """
    try:
        metadata.distribution(_OTHER)
    except metadata.PackageNotFoundError:
        return
    warn(
        f"{_OTHER} is installed in this environment too, and both packages are imported as `laplace`: in one folder "
        "the later install overwrites files of the earlier, which leaves a mixture of both; of two folders, the first "
        f"on sys.path is imported. Run `pip uninstall {_OWN} {_OTHER}`, then install this library again.",
        InstallationWarning,
    )
