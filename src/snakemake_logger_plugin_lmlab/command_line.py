"""Repairs before Snakemake starts: its command line, and a home folder that is not writable.

`--resources` and `--config` consume every argument that follows, so a target after them is parsed
as another NAME=VALUE and rejected. An argument without `=` cannot belong to them, so it is moved to
the front, where it is parsed as a target. Any other command line is left unchanged.

Snakemake and Triton cache sources and kernels below the home folder, and end in a traceback if it
is not writable, as in many batch jobs. They get a temporary folder instead, which is removed when
this process exits.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path, PurePath

TAKES_ASSIGNMENTS = {"--resources", "--res", "--config", "-C"}
SNAKEMAKE = {"snakemake", "__main__.py"}


def is_snakemake(argv: list[str]) -> bool:
    """Whether this process is Snakemake, not another program that imports its plugins."""
    return bool(argv) and PurePath(argv[0]).name in SNAKEMAKE


def repair(argv: list[str]) -> None:
    """Move swallowed targets to the front of a Snakemake command line, in place."""
    targets: list[str] = []
    rest: list[str] = []
    assignments: int | None = None  # seen since such an option; None elsewhere
    for index, argument in enumerate(argv):
        if argument == "--":
            rest += argv[index:]
            break
        if argument.startswith("-"):
            assignments = 0 if argument in TAKES_ASSIGNMENTS else None
        elif assignments is not None and "=" in argument:
            assignments += 1
        (targets if assignments and "=" not in argument else rest).append(argument)
    argv[:] = [rest[0], *targets, *rest[1:]]


def ensure_writable(environment: MutableMapping[str, str]) -> None:
    """Set a temporary cache folder in the environment if the usual one is not writable."""
    home = environment.get("HOME") or os.path.expanduser("~")
    folder = Path(environment.get("XDG_CACHE_HOME") or f"{home}/.cache") / "snakemake"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        temporary = tempfile.mkdtemp(prefix="lmlab-cache-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        environment["XDG_CACHE_HOME"] = temporary
        environment.setdefault("TRITON_HOME", temporary)
