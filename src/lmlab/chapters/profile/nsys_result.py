"""The result of a point that nsys recorded: what the process measured, and what the report holds.

nsys writes its report when the recorded process has ended, so that process could only write half of
its result. Here the other half is added: the report's export is read, reduced, and put beside the
host's clock. A point that ran out of memory, say, has no report; its result is complete as it is.
No torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lmlab.chapters.profile.trace_data import of_export
from lmlab.study.results import read


def complete(measured: Path, export: Path, out: Path) -> str:
    """Write the whole result; its headline, or a ResultError or TraceError of one line."""
    result = read(measured)
    if result.status == "ok":
        result = replace(result, data={**result.data, **of_export(export)})
    result.write(out)
    return result.headline()
