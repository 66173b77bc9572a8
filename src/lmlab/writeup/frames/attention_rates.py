"""How a rate goes on from one sequence to the next longer one that was timed.

Two sequences have different work, so it is the time of an operation that is compared, with the
quartiles of both and the margin of any other pair.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.comparison import Timed, timed, verdict
from lmlab.writeup.frames.attention import margin

LINE = ["precision", "head_dim", "pass"]
COLUMNS = [*LINE, "sequence_a", "sequence_b", "rise", "verdict"]


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Every step of every line of one arm: by how much the rate rose, and whether beyond noise."""
    found = [step for _, line in rows.groupby(LINE, sort=False) for step in _steps(line)]
    return pd.DataFrame(found, columns=COLUMNS)


def _steps(line: pd.DataFrame) -> list[dict[str, object]]:
    line = line.sort_values("sequence")
    before, after = (part.reset_index(drop=True) for part in (line[:-1], line[1:]))
    pairs = pd.concat([before.add_suffix("_a"), after.add_suffix("_b")], axis=1)
    return [
        {
            **{column: row[f"{column}_a"] for column in LINE},
            "sequence_a": row["sequence_a"],
            "sequence_b": row["sequence_b"],
            "rise": row["tflops_b"] / row["tflops_a"] - 1,
            "verdict": verdict(
                _an_operation(row, "_b"), _an_operation(row, "_a"), margin=margin(row)
            ),
        }
        for _, row in pairs.iterrows()
    ]


def _an_operation(row: pd.Series, suffix: str) -> Timed:
    time = timed(row, suffix)
    work = row[f"tflops{suffix}"] * time.median
    return Timed(time.median / work, time.q1 / work, time.q3 / work)
