"""The result of a point that nsys recorded: what the process measured and what the report adds.

nsys writes its report after the recorded process has ended, so the process could write only its own
half of the result. The records and data of the report's export are added here. A point without
numbers (out of memory, say) has no report and is complete as it is. No torch.
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
        records, data = of_export(export)
        result = replace(
            result,
            measurements=(*result.measurements, *records),
            data={**result.data, **data},
        )
    result.write(out)
    return result.headline()
