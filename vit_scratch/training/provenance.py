"""What a result was made with."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of this package, its foundations and Python, and the commit of the checkout it lies in."""
    packages = {}
    for name in ("vit-scratch", "torch", "torchvision"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            packages[name] = "not installed"
    return {"commit": commit(), **packages, "python": platform.python_version()}


def commit() -> str:
    """The commit of the checkout, with "-dirty" where files differ from it; "unknown" outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Installed into an environment that lies in another project's checkout, this file is not that project's.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
