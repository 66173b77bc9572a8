"""What software made a number: versions of what matters to speed, and the commit of this project.

A result that cannot say which PyTorch, CUDA and driver it ran on cannot be compared with another.
The commit says which state of this project made it, and `dirty` whether tracked files had been
edited since: untracked files (results, figures) are no part of that.
"""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lmlab
from lmlab.measure.nvml import driver_version, nvml_session

_GIT_TIMEOUT_S = 20


def versions() -> dict[str, str | None]:
    """Versions by name; None for what this machine does not have."""
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _installed("triton"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": _driver(),
        "lmlab": lmlab.__version__,
    }


def commit(root: Path | str) -> dict[str, Any]:
    """`{"id", "dirty"}` of the repository at `root`; id None where there is no git or no commit."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return {"id": None, "dirty": False}
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"id": head, "dirty": bool(changes)}


def _git(root: Path | str, *arguments: str) -> str | None:
    """What git prints, or None when it is missing, refuses or takes too long."""
    try:
        done = subprocess.run(
            # Without optional locks: asking must not get in the way of somebody's commit.
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _driver() -> str | None:
    with nvml_session() as nvml:
        return None if nvml is None else driver_version(nvml)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
