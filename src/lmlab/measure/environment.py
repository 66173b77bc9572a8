"""The software behind a number: versions that affect speed, and this project's commit.

The commit identifies this project's code, and `dirty` says whether tracked files were modified
(None if git could not tell). Files in results/ are ignored, or every measurement would mark the
code as modified. A copy without its repository (a container, a node that received an archive) takes
its commit from the environment variable LMLAB_COMMIT. Edits cannot be detected there, so such a
commit is `unverified`.
"""

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
    """Versions by name; None for anything this machine lacks."""
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    with nvml_session() as nvml:
        driver = None if nvml is None else driver_version(nvml)
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": next((each.version for each in metadata.distributions(name="triton")), None),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": driver,
        "lmlab": lmlab.__version__,
    }


def commit(root: Path | str) -> dict[str, Any]:
    """`{"id", "dirty"}` of the repository at `root`; `unverified` if only LMLAB_COMMIT names it."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        given = os.environ.get("LMLAB_COMMIT") or None
        if given and not re.fullmatch(r"[0-9a-f]{40}", given):
            raise ValueError(f"LMLAB_COMMIT = {given!r}; allowed: 40 hexadecimal digits")
        return {"id": given, "dirty": None, **({"unverified": True} if given else {})}
    changes = _git(
        root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude,top)results"
    )
    return {"id": head, "dirty": None if changes is None else bool(changes)}


def _git(root: Path | str, *arguments: str) -> str | None:
    """Output of a git command; None if git is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            # Without optional locks, which could block a concurrent commit.
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
