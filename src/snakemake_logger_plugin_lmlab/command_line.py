"""What is repaired before Snakemake starts: its command line, and a home that cannot be written.

`--resources` and `--config` take every argument that follows, so a target after them is read as one
more NAME=VALUE and refused. An argument without `=` can never be one of theirs: it is moved to the
front, where targets are read as targets. Any other command line stays as it is.

Snakemake and Triton store copies of sources and kernels below the home folder, and end in a
traceback where they cannot, as in many batch jobs. They get a temporary folder instead, for as long
as this process runs.
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
    """Whether this process is Snakemake, and not another that imports its plugins."""
    return bool(argv) and PurePath(argv[0]).name in SNAKEMAKE


def repair(argv: list[str]) -> None:
    """Move swallowed targets to the front of a Snakemake command line, in place."""
    targets: list[str] = []
    rest: list[str] = []
    assignments: int | None = None  # None: not after such an option
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
    """Name a temporary cache folder in the environment if the usual one is of no use."""
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
