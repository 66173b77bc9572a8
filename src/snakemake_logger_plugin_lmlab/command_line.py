"""Accept a target after `--resources gpu=1`, where everybody writes it.

`--resources` and `--config` take every argument that follows, so a target after them is read as one
more NAME=VALUE and refused. An argument without `=` can never be one of theirs: it is moved to the
front, where targets are read as targets. Any other command line stays as it is.
"""

from __future__ import annotations

from pathlib import PurePath

TAKES_ASSIGNMENTS = {"--resources", "--res", "--config", "-C"}
SNAKEMAKE = {"snakemake", "__main__.py"}


def is_snakemake(argv: list[str]) -> bool:
    """Whether this process is Snakemake, and not another that imports its plugins."""
    return bool(argv) and PurePath(argv[0]).name in SNAKEMAKE


def repair(argv: list[str]) -> None:
    """Move swallowed targets to the front of a Snakemake command line, in place."""
    if not is_snakemake(argv):
        return
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
