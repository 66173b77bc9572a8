"""Which line of the program asked for a piece of memory.

A call stack begins deep inside torch and ends in the job's runner. The line that explains an
allocation is the innermost one that belongs neither to torch nor to what watches it. Gradients are
made by autograd's own thread, where no line of Python is running: those have no source, and it is
their phase that says what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

# Parts of a path that make a file none of the program's own. The profiler cuts paths at the folder
# that they were imported from; "<" begins the name of code that comes from no file.
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


def source_of(frames: Iterable[Mapping[str, Any]]) -> Source | None:
    """The innermost line of the program's own; None where only torch was running."""
    for frame in frames:
        file = _own_file(str(frame["filename"]))
        if file is not None:
            return Source(file, int(frame["line"]), str(frame["name"]))
    return None


@cache  # a step has tens of thousands of frames and a few dozen files
def _own_file(name: str) -> str | None:
    """A file of the program as a reader knows it, from the package on; None for all others."""
    if not name or any(part in f"^{name}" for part in NOT_THE_PROGRAM):
        return None
    parts = PurePosixPath(name).parts
    if "lmlab" in parts:
        # The last one: a checkout may itself lie in a folder of that name.
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("lmlab") :])
    return "/".join(parts[-2:]).lstrip("/")
