"""Figures that others published for the same study on other GPUs.

They stand beside ours to give a scale, not to be beaten: models, batch and clocks are as their
authors state them, and what an author does not state is printed as such. A publication is named by
its number in `report/references/README.md`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

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
    if not file.exists():
        return pd.DataFrame(columns=["source", "gpu", "size", "context", "batch", "phase"])
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    return rows[
        rows["precision"].eq(precision)
        & rows["warmup"].eq(str(warmup))
        & rows["compile"].eq("no")
        & rows["phase"].isin(["forward", "backward"])
    ]


def published_peaks(folder: Path) -> pd.DataFrame:
    """Peak memory of forward passes and train steps; empty cells are empty text."""
    file = folder / "memory.csv"
    if not file.exists():
        columns = ["source", "gpu", "size", "context", "precision", "mode", "peak_gib"]
        return pd.DataFrame(columns=columns)
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def published_steps(folder: Path, topic: str) -> pd.DataFrame:
    """Train steps of several ranks in seconds, each variant with its slowest rank."""
    file = folder / "distributed.csv"
    if not file.exists():
        return pd.DataFrame(columns=["gpu", "size", "variant", "parameter", "value"])
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    rows = rows[rows["topic"].eq(topic) & rows["metric"].eq("train_step")]
    slowest_last = rows.assign(seconds=rows["value"].astype(float)).sort_values(
        "seconds", kind="stable"
    )
    kept = slowest_last.drop_duplicates(["gpu", "size", "variant", "parameter"], keep="last")
    return kept.sort_index()


def published_all_reduce(folder: Path) -> pd.DataFrame:
    """All-reduce times as they were published, whatever their unit."""
    file = folder / "distributed.csv"
    if not file.exists():
        return pd.DataFrame(columns=["source", "gpu", "value"])
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    return rows[rows["topic"].eq("all_reduce")].astype({"value": float})


def published_failures(folder: Path) -> pd.DataFrame:
    """Configurations that an author says did not fit; empty cells are empty text."""
    file = folder / "out_of_memory.csv"
    if not file.exists():
        return pd.DataFrame(columns=["source", "gpu", "what", "size", "context"])
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def stated(value: str) -> str:
    """A cell as its author gives it, or that he does not."""
    return NOT_STATED if value in UNSTATED else value
