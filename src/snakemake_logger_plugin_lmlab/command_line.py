"""Let a target stand behind `--resources gpu=1`, where everybody writes it.

`--resources` and `--config` take every word that follows, so a target behind them is read as one
more NAME=VALUE and refused. A word without `=` can never be one of theirs: it is moved to the
front, where targets are read as targets. Any other command line stays as it is.
"""

from __future__ import annotations

from pathlib import PurePath

TAKES_ASSIGNMENTS = {"--resources", "--res", "--config", "-C"}
SNAKEMAKE = {"snakemake", "__main__.py"}


def repair(argv: list[str]) -> None:
    """Move swallowed targets to the front of a Snakemake command line, in place."""
    if not argv or PurePath(argv[0]).name not in SNAKEMAKE:
        return
    swallowed = _swallowed(argv)
    targets = [argv[index] for index in swallowed]
    rest = [word for index, word in enumerate(argv) if index not in swallowed]
    argv[:] = [rest[0], *targets, *rest[1:]]


def _swallowed(argv: list[str]) -> list[int]:
    """Where words without `=` follow at least one assignment of such an option."""
    found: list[int] = []
    assignments: int | None = None  # None: not behind such an option
    for index, word in enumerate(argv):
        if word == "--":
            break
        if word.startswith("-"):
            assignments = 0 if word in TAKES_ASSIGNMENTS else None
        elif assignments is not None:
            if "=" in word:
                assignments += 1
            elif assignments:
                found.append(index)
    return found
