"""Tables of kernels: which took the most time, all of them, which families, on which cores."""

from __future__ import annotations

import math

import pandas as pd

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import counted, percent, significant
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.profile_rows import (
    Key,
    at,
    by_point,
    kernel_word,
    place_columns,
    recorded,
)

OTHERS_SHOWN = 5
STATISTICS = ("avg", "med", "min", "max", "sd")


def top(collected: Collected) -> Table:
    """The kernel with the most time in forward, and what becomes of it in the other modes."""
    points, kernels = frames.points(collected), frames.kernels(collected)

    def cells(key: Key) -> list[str]:
        here = at(kernels, key)
        by_mode = {mode: frames.of(here, mode=mode) for mode in words.MODES}
        first = by_mode["forward"].iloc[0]
        last = by_mode["train_step"].iloc[0]
        return [
            first["short_name"],
            f"{first['instances']:,}",
            *(_share_of(first["name"], by_mode[mode]) for mode in words.MODES),
            last["short_name"],
            percent(last["share"]),
        ]

    word = kernel_word(collected).capitalize()
    titles = [
        Column(f"{word} with most time in forward", "left", code=True),
        Column("Calls a pass"),
        Column("Share, forward"),
        Column("Share, forward and backward"),
        Column("Share, train step"),
        Column("Most time in train step", "left", code=True),
        Column("Its share"),
    ]
    return Table(
        title=f"The {word.lower()} with the most cumulative time",
        columns=[*place_columns(points), *titles],
        rows=by_point(points, len(titles), cells),
        caption=f"{recorded(collected.results, collected)} Shares are of all {word.lower()}s of "
        "the run; names are shortened by rule and whole in the results.",
        sources=sources_of(collected.rows),
    )


def _share_of(name: str, kernels: pd.DataFrame) -> str:
    found = kernels["share"][kernels["name"] == name]
    return percent(found.iloc[0]) if len(found) else NOTHING


def full(collected: Collected) -> dict[str, Table]:
    """Every kernel of every mode, of each size at its largest context."""
    found = frames.results_at_largest_context(collected)
    kernels = frames.kernels(collected)
    tables = {}
    for size, result in found.items():
        rows = [row for row in collected.rows if row.result is result]
        key = tuple(result.parameters[name] for name in frames.PLACE)
        for mode in words.MODES:
            here = frames.of(at(kernels, key), mode=mode)
            rest = result.data["modes"][mode]["rest"]
            tables[f"kernels_{size}_{mode}"] = _full(collected, rows, here, rest, mode)
    return tables


def _full(
    collected: Collected, rows: list[Row], kernels: pd.DataFrame, rest: dict[str, int], mode: str
) -> Table:
    word = kernel_word(collected)
    place = rows[0].point.parameters
    body = [_kernel_row(row) for _, row in kernels.iterrows()]
    if rest["names"]:
        whole = kernels["total_ms"].sum() + rest["total_ns"] / 1e6
        more = f"{counted(rest['names'], f'more {word}')}, added up"
        cells = [significant(rest["total_ns"] / 1e6), f"{rest['instances']:,}"]
        share = f"{100 * rest['total_ns'] / 1e6 / whole:.1f}"
        body.append([share, *cells, *[NOTHING] * len(STATISTICS), more])
    return Table(
        title=f"All {word}s of {words.RUN_NAMES[mode]}: "
        f"{place['size']} at context {place['context']}",
        columns=[
            *(Column(title) for title in ("Time (%)", "Total (ms)", "Instances")),
            *(Column(f"{name.capitalize()} (µs)") for name in STATISTICS[:-1]),
            Column("SD (µs)"),
            Column("Name", "left", code=True),
        ],
        rows=body,
        caption=recorded([row.result for row in rows if row.result], collected),
        sources=sources_of(rows),
    )


def _kernel_row(row: pd.Series) -> list[str]:
    return [
        f"{100 * row['share']:.1f}",
        significant(row["total_ms"]),
        f"{row['instances']:,}",
        *(significant(row[f"{name}_us"]) for name in STATISTICS),
        row["short_name"],
    ]


def others(collected: Collected) -> Table:
    """What forward runs that is no matrix product, at the largest context of each size."""
    rest = frames.outside_products(collected)
    chosen = frames.first_kind(frames.largest_context(rest))
    shown = chosen.groupby("size", sort=False).head(OTHERS_SHOWN)
    word = kernel_word(collected).capitalize()
    return Table(
        title=f"What forward runs that is no matrix product, the {OTHERS_SHOWN} largest a size",
        columns=[
            Column("Size", "left"),
            Column("Context"),
            Column(word, "left", code=True),
            Column("Family", "left"),
            Column("Share of forward"),
            Column("Calls a pass"),
            Column("Median (µs)"),
        ],
        rows=[
            [
                str(row["size"]),
                str(row["context"]),
                row["short_name"],
                family_name(row["family"]),
                percent(row["share"]),
                f"{row['instances']:,}",
                NOTHING if math.isnan(row["med_us"]) else significant(row["med_us"]),
            ]
            for _, row in shown.iterrows()
        ],
        caption=f"{recorded(collected.results, collected)} Shares of the pass's work on the "
        "device.",
        sources=sources_of(_at_largest(collected)),
    )


def families(collected: Collected) -> Table:
    """Shares of products, elementwise kernels, reductions and the optimizer in every mode."""
    word = kernel_word(collected)
    points, shares = frames.points(collected), frames.families(collected)
    wanted = {
        "Matmul": (words.MATMULS, words.MODES),
        "Softmax": (("softmax",), ("forward",)),
        "Elementwise": (("elementwise",), ("forward", "train_step")),
        "Reduction": (("reduction",), ("forward", "train_step")),
        "Optimizer": (("optimizer",), ("train_step",)),
    }
    columns = [(title, names, mode) for title, (names, in_) in wanted.items() for mode in in_]

    def cells(key: Key) -> list[str]:
        here = at(shares, key)
        return [
            percent(frames.of(here, mode=mode, family=set(names))["share"].sum(), 2)
            for _, names, mode in columns
        ]

    return Table(
        title="What the device's time is spent on, from forward to train step",
        columns=[
            *place_columns(points),
            *(Column(f"{title}, {words.MODE_NAMES[mode]}") for title, _, mode in columns),
        ],
        rows=by_point(points, len(columns), cells),
        caption=f"{recorded(collected.results, collected)} Shares of the run's work on the device; "
        f"elementwise {word}s within the optimizer count as optimizer. The families that are left "
        "out (copies and others) make up the rest.",
        sources=sources_of(collected.rows),
    )


def cores(collected: Collected) -> dict[str, Table]:
    """On which cores the products of a train step ran; a CPU has no such cores."""
    if collected.device != "cuda":
        return {}
    points, shares = frames.points(collected), frames.families(collected)
    kernels = frames.of(frames.kernels(collected), mode="train_step")

    def cells(key: Key) -> list[str]:
        here = frames.of(at(shares, key), mode="train_step", family=set(words.MATMULS))
        products = at(kernels, key)
        products = products[products["family"].isin(words.MATMULS)]
        whole = here["total_ms"].sum()
        by_family = here.set_index("family")["total_ms"]
        first = products.iloc[0] if len(products) else None
        return [
            significant(whole),
            *(percent(by_family.get(family, 0.0) / whole, 3) if whole else NOTHING
              for family in words.MATMULS),
            NOTHING if first is None else first["short_name"],
            NOTHING if first is None else percent(first["total_ms"] / whole),
        ]  # fmt: skip

    titles = [
        Column("Matrix products (ms)"),
        Column("On tensor cores"),
        Column("On SIMT cores"),
        Column("Not told by the name"),
        Column("Longest of them", "left", code=True),
        Column("Its share of products"),
    ]
    table = Table(
        title="On which cores the matrix products of a train step ran",
        columns=[*place_columns(points), *titles],
        rows=by_point(points, len(titles), cells),
        caption=f"{recorded(collected.results, collected)} Told from the kernels' names, which "
        "carry the instruction that they multiply with.",
        sources=sources_of(collected.rows),
    )
    return {"cores": table}


def family_name(family: str) -> str:
    """A family for a reader."""
    return words.FAMILY_NAMES.get(family, family)


def _at_largest(collected: Collected) -> list[Row]:
    wanted = frames.results_at_largest_context(collected).values()
    return [row for row in collected.rows if any(row.result is result for result in wanted)]
