"""What software made a number: versions of what matters to speed, and the commit of this project.

A result that cannot say which PyTorch, CUDA and driver it ran on cannot be compared with another.
The commit says which state of this project made it, and `dirty` whether tracked files had been
edited since: results are no part of that, or measuring anew would make its own code look edited.
A copy without its repository (a container, a node that got an archive) is told its commit by the
variable LMLAB_COMMIT.
"""

from __future__ import annotations

import os
import platform
import re
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
    """`{"id", "dirty"}` of the repository at `root`; id None where nobody knows it."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return {"id": _commit_told(), "dirty": False}
    changes = _git(
        root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude,top)results"
    )
    return {"id": head, "dirty": bool(changes)}


def _commit_told() -> str | None:
    told = os.environ.get("LMLAB_COMMIT")
    if told and not re.fullmatch(r"[0-9a-f]{40}", told):
        raise ValueError(f"LMLAB_COMMIT = {told!r}; allowed: the 40 hexadecimal digits of a commit")
    return told or None


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
