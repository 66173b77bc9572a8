"""Points of a study in words: `small at context 128`, `small from 512 on, xl at every context`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.numbers import listed, percent


def place(row: pd.Series) -> str:
    """One size and context."""
    return f"{row['size']} at context {row['context']}"


def extreme(rows: pd.DataFrame, column: str, *, largest: bool) -> pd.Series:
    """The row with the smallest or largest value."""
    position = rows[column].argmax() if largest else rows[column].argmin()
    return rows.iloc[int(position)]


def shares(rows: pd.DataFrame, column: str, digits: int = 2) -> str:
    """From the smallest to the largest share and where they are; the one where all print alike."""
    low, high = (extreme(rows, column, largest=largest) for largest in (False, True))
    ends = [percent(row[column], digits) for row in (low, high)]
    if ends[0] == ends[1]:
        return ends[0]
    return f"{ends[0]} ({place(low)}) to {ends[1]} ({place(high)})"


def where(rows: pd.DataFrame, every: pd.DataFrame) -> str:
    """The sizes and contexts of some rows, told as short as their pattern among all rows allows."""
    phrases: dict[str, list[str]] = {}
    for size in dict.fromkeys(rows["size"]):
        contexts = _contexts(rows, size)
        phrase = _pattern(contexts, _contexts(every, size))
        phrases.setdefault(phrase, []).append(str(size))
    return "; ".join(f"{listed(sizes)} {phrase}" for phrase, sizes in phrases.items())


def _contexts(rows: pd.DataFrame, size: Any) -> list[int]:
    return sorted({int(context) for context in rows["context"][rows["size"] == size]})


def _pattern(some: Sequence[int], every: Sequence[int]) -> str:
    if len(every) > 1 and len(some) == len(every):
        return "at every context"
    if len(some) > 1 and list(some) == list(every[-len(some) :]):
        return f"from context {some[0]} on"
    if len(some) > 1 and list(some) == list(every[: len(some)]):
        return f"up to context {some[-1]}"
    return f"at context {listed(map(str, some))}"


def named(sizes: Iterable[Any], every: Sequence[Any]) -> str:
    """`every size`, or which."""
    chosen = list(sizes)
    if len(chosen) == len(every) and len(every) > 1:
        return "every size"
    return listed(map(str, chosen))
