"""Published figures of other GPUs, from CSV files with one row per figure.

A missing entry reads `NOT_STATED`.
"""

from pathlib import Path

import pandas as pd

from lmlab.report.frame import Rows, table_of
from lmlab.report.text import NOT_STATED

# Possible names of the column that holds the figure.
VALUES = ("mean_ms", "ms", "peak_gib", "time_percent", "value", "what")
LABELS = {"chapter": "published", "quantity": "published", "status": "ok"}


def load_published(folder: Path) -> Rows:
    """All published figures as rows of the chapter `published`, with the file name as `topic`."""
    frames = [table_of([])]
    for file in sorted(folder.glob("*.csv")):
        found = pd.read_csv(file, dtype={"source": str}).astype(object)
        number = next(name for name in VALUES if name in found)
        found = found.rename(columns={"source": "writeup", number: "value"}).fillna(NOT_STATED)
        # pandas reads an integer column with a gap as floats.
        found = found.map(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)
        frames.append(found.assign(topic=file.stem, **LABELS))
    return pd.concat(frames, ignore_index=True)
