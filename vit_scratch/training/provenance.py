"""What a result was made with."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of this package, its foundations and Python, and the commit where the package lies in a git checkout."""
    here = str(Path(__file__).parent)
    try:
        git = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip()
    except OSError:  # no git
        commit = ""
    packages = {}
    for name in ("vit-scratch", "torch", "torchvision"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            packages[name] = "not installed"
    return {"commit": commit or "unknown", **packages, "python": platform.python_version()}
