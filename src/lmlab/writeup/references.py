"""Figures that others published for the same study on other GPUs.

They stand beside ours to give a scale, not to be beaten: models, batch and clocks are as their
authors state them, and what an author does not state is printed as such. A publication is named by
its number in `report/references/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.writeup.published_file import (
    COUNT,
    COUNT_IF_STATED,
    MEBIBYTES,
    NUMBER,
    checked,
    read_columns,
)

NOT_STATED = "not stated"
UNSTATED = {"", "unstated"}

# What a reader must know before comparing with a publication.
NOTES = {
    "000": "publication 000 takes backward as the difference of two runs",
    "002": "the size large of publication 002 has 32 layers instead of 36",
}


def published_times(folder: Path, *, precision: str, warmup: int) -> pd.DataFrame:
    """Eager forward and backward times at one precision and warm-up; empty cells are empty text."""
    file = folder / "end_to_end.csv"
    kinds = {
        "context": COUNT_IF_STATED,
        "batch": COUNT_IF_STATED,
        "warmup": COUNT_IF_STATED,
        "mean_ms": NUMBER,
    }
    names = ("source", "gpu", "size", "precision", "compile", "phase")
    rows = checked(read_columns(file, [*names, *kinds]), file, kinds)
    return rows[
        rows["precision"].eq(precision)
        & rows["warmup"].eq(str(warmup))
        & rows["compile"].eq("no")
        & rows["phase"].isin(["forward", "backward"])
    ]


def published_peaks(folder: Path) -> pd.DataFrame:
    """Peak memory of forward passes and train steps; empty cells are empty text."""
    file = folder / "memory.csv"
    kinds = {"context": COUNT_IF_STATED, "peak_gib": NUMBER}
    names = ("source", "gpu", "size", "precision", "mode")
    return checked(read_columns(file, [*names, *kinds]), file, kinds)


def published_steps(folder: Path, topic: str) -> pd.DataFrame:
    """Train steps of several ranks in seconds, each variant with its slowest rank."""
    file = folder / "distributed.csv"
    names = ("gpu", "topic", "size", "variant", "parameter", "metric", "value")
    rows = read_columns(file, names)
    rows = rows[rows["topic"].eq(topic) & rows["metric"].eq("train_step")]
    rows = checked(rows, file, {"value": NUMBER})
    slowest_last = rows.assign(seconds=rows["value"].astype(float)).sort_values(
        "seconds", kind="stable"
    )
    kept = slowest_last.drop_duplicates(["gpu", "size", "variant", "parameter"], keep="last")
    return kept.sort_index()


def published_all_reduce(folder: Path) -> pd.DataFrame:
    """All-reduce times as they were published, whatever their unit."""
    file = folder / "distributed.csv"
    rows = read_columns(file, ("source", "gpu", "topic", "parameter", "value"))
    rows = checked(
        rows[rows["topic"].eq("all_reduce")], file, {"parameter": MEBIBYTES, "value": NUMBER}
    )
    return rows.astype({"value": float})


def published_failures(folder: Path) -> pd.DataFrame:
    """Configurations that an author says did not fit; empty cells are empty text."""
    file = folder / "out_of_memory.csv"
    rows = read_columns(file, ("source", "gpu", "what", "size", "context"))
    return checked(rows, file, {"context": COUNT_IF_STATED})


def published_attention(folder: Path, head_dim: int) -> pd.DataFrame:
    """Attention times of all implementations at one head dimension."""
    file = folder / "attention.csv"
    kinds = {"batch": COUNT_IF_STATED, "head_dim": COUNT, "sequence": COUNT}
    names = ("source", "gpu", "implementation", "causal", "phase", "ms")
    rows = checked(read_columns(file, [*names, *kinds]), file, kinds)
    times = checked(rows[rows["phase"].ne("memory")], file, {"ms": NUMBER})
    return times[times["head_dim"].eq(str(head_dim))]


def published_entries(folder: Path, head_dim: int, asked: Mapping[str, Any]) -> pd.DataFrame:
    """Entries of the leaderboard at the shape that was asked for."""
    file = folder / "leaderboard.csv"
    kinds = {"heads": COUNT, "head_dim": COUNT, "sequence": COUNT, "ms": NUMBER}
    rows = checked(read_columns(file, ["gpu", "entry", "precision", *kinds]), file, kinds)
    shape = {"head_dim": head_dim, "heads": asked["heads"], "sequence": asked["sequence"]}
    for column, value in shape.items():
        rows = rows[rows[column] == str(value)]
    return rows[rows["precision"] == asked["precision"]]


def stated(value: str) -> str:
    """A cell as its author gives it, or that he does not."""
    return NOT_STATED if value in UNSTATED else value
