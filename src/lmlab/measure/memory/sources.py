"""Which line of the program made an allocation.

A call stack starts deep inside torch and ends in the job's runner. The line that explains an
allocation is the innermost one that belongs neither to torch nor to the recorder. Gradients are
made on autograd's own thread, where no Python is running: those have no source, and their phase
says what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

# Path parts of files that are not the program's own. The profiler cuts paths at the folder that
# they were imported from; "<" starts the name of code that comes from no file.
NOT_THE_PROGRAM = (
    *("-packages/torch/", "^torch/"),
    *("/lmlab/measure/", "^lmlab/measure/"),
    *("/contextlib.py", "^contextlib.py"),
    "^<",
)


@dataclass(frozen=True, order=True)
class Source:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def source_of(frames: Iterable[Mapping[str, Any]]) -> Source | None:
    """The innermost line of the program itself; None if only torch was running."""
    for frame in frames:
        file = _program_file(str(frame["filename"]))
        if file is not None:
            return Source(file, int(frame["line"]), str(frame["name"]))
    return None


@cache  # a step has tens of thousands of frames and a few dozen files
def _program_file(name: str) -> str | None:
    """A file of the program, relative to its package; None for all others."""
    if not name or any(part in f"^{name}" for part in NOT_THE_PROGRAM):
        return None
    parts = PurePosixPath(name).parts
    if "lmlab" in parts:
        # The last one: a checkout may itself be in a folder of that name.
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("lmlab") :])
    return "/".join(parts[-2:]).lstrip("/")
