"""Lines of the attention figures: a variant looks the same in each, and a gap is seen as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from lmlab.writeup import style
from lmlab.writeup.frames import attention as frames


def look(arm: str) -> dict[str, Any]:
    """Colour, marker and line of a variant. Ours stands out, and the ninth would be the first."""
    index = [*frames.LABELS, arm].index(arm)
    if arm == frames.OURS:
        return {"color": "#B30000", "marker": "<", "linestyle": "-", "linewidth": 2.2, "zorder": 4}
    return style.series(index)


def draw(
    axis: Axes,
    rows: pd.DataFrame,
    columns: tuple[str, str],
    over: Sequence[int],
    label: str,
    **looks: Any,
) -> None:
    """A line through the rows, broken where one of the places has none."""
    x, y = columns
    values = rows.set_index(x)[y].reindex(list(over))
    axis.plot(list(over), list(values), label=label, **looks)
