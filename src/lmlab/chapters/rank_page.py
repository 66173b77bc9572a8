"""Shared by the pages of multi-rank chapters: the process group, memory by stage, overlap.

Figures and prose describe one process group, the lead: one GPU per rank if the machine has them.
Memory categories are from the rank with the most allocated memory; peaks are maxima over ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.report.compare import Compare, Comparison
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, distinct, highest, records, select
from lmlab.report.page import Chapter
from lmlab.report.table import Column, Table, quantity
from lmlab.report.text import GIB

BACKENDS = {"nccl": "NCCL", "gloo": "gloo"}
PLACEMENTS = {"own_gpu": "{} GPUs", "shared_gpu": "{} ranks on one GPU", "cpu": "{} CPU ranks"}
STAGES = {
    "initialized": "after initialization",
    "after_forward": "after forward",
    "before_step": "before the optimizer step",
    "after_step": "after the optimizer step",
}
CATEGORIES = ("parameters", "optimizer_state", "gradients", "activations", "other")
# The stage at which each category is complete.
COMPLETE = {
    "parameters": "initialized",
    "gradients": "before_step",
    "optimizer_state": "after_step",
    "activations": "after_forward",
}
PHASES = {"forward_backward": "forward and backward", "optimizer": "the optimizer step"}
STEP = {"quantity": "time", "clock": "wall", "phase": "total"}
LABELS = ["variant", "phase", "stage", "category", "rank", "scope", "purpose", "candidate"]
LABELS += ["activity", "torch_bucket_mb"]


def with_ranks(rows: Rows, results: Results, labels: Sequence[str] = LABELS) -> Rows:
    """Add a column `ranks`: the process group as it described itself ("2 CPU ranks over gloo"), or
    as requested if it never ran. Missing columns of `labels` are added too."""
    reported = {
        source: describe(result.data["ranks"])
        for source, result in results.results.items()
        if "ranks" in result.data
    }
    keys = rows[["source", "placement", "world_size"]].itertuples(index=False, name=None)
    asked = [reported.get(source) or PLACEMENTS[place].format(n) for source, place, n in keys]
    missing = [label for label in labels if label not in rows]
    return rows.assign(ranks=asked, **dict.fromkeys(missing))


def describe(group: Mapping[str, Any]) -> str:
    count, gpus = group["world_size"], group["gpus"]
    if group["device"] == "cpu":
        who = f"{count} CPU rank" + "s" * (count > 1)
    elif gpus == count:
        who = f"{count} GPU" + "s" * (count > 1)
    else:
        who = f"{count} ranks on one GPU" + " per node" * (group["nnodes"] > 1)
    nodes = f" on {group['nnodes']} nodes" if group["nnodes"] > 1 else ""
    return f"{who}{nodes} over {BACKENDS[group['backend']]}"


def measured(rows: Rows) -> Rows:
    """Rows of the points that ran, so that a group that could not start gets no column."""
    return rows[rows["quantity"].notna()]


def not_started(rows: Rows) -> list[dict[str, Any]]:
    """Groups that could not start or did not finish, with the reason; one entry per point."""
    found = select(rows[rows["quantity"].isna()], status=["unsupported", "failed", "oom"])
    keys = ["ranks", "placement", "world_size", "status", "reason"]
    return records(found[keys].drop_duplicates())


def lead(rows: Rows) -> str | None:
    """The group on the front page: by placement, one GPU per rank first, then fewest ranks."""
    order = list(PLACEMENTS)
    found = distinct(select(measured(rows), status="ok"), ["placement", "world_size", "ranks"])
    return min(found, key=lambda key: (order.index(key[0]), key[1]))[2] if found else None


def lead_rows(rows: Rows) -> Rows:
    return select(rows, ranks=lead(rows))


def lead_payload(results: Results, key: str) -> Any:
    """What the lead's result stores in `data[key]`, or an empty dict."""
    sources = lead_rows(results.rows)["source"].unique()
    return next((d[key] for s in sources if key in (d := results.results[s].data)), {})


def first_value(rows: Rows, **where: Any) -> Any:
    """The first matching value, or None."""
    return next(iter(select(rows, status="ok", **where)["value"]), None)


def compare_with(rows: Rows, baseline: str) -> Comparison:
    """Compare every other variant with the baseline, in the same rounds of the same job."""
    others, one = {"variant": lambda name: name != baseline}, {"variant": baseline}
    return Compare(variant=others, baseline=one, on=["ranks"], by=["variant"], where=STEP).run(rows)


def group_facts(chapter: Chapter, variants: Iterable[str] = ()) -> dict[str, Any]:
    """Facts about the lead, with the memory of variants; `ranks` is None if no group ran."""
    everything = chapter.own.rows
    rows = lead_rows(everything)
    facts: dict[str, Any] = memory_facts(rows, variants)
    facts |= {"ranks": lead(everything), "not_started": not_started(everything)}
    if rows.empty:
        return facts
    first = rows.iloc[0]
    times = select(rows, status="ok", **STEP)
    names = "world_size", "context", "batch", "precision", "step_limit_s"
    return {
        **facts,
        **{name: first[name] for name in names},
        "own_gpu": first["placement"] == "own_gpu",
        "sizes": _sizes(rows),
        "rounds": None if times.empty else times.iloc[0]["n"],
        "requested_rounds": first["rounds"],
    }


def _sizes(rows: Rows) -> dict[str, dict[str, Any]]:
    """By purpose: the size that was measured, and why larger ones were left out."""
    found = select(rows, quantity="size").assign(size=lambda sizes: sizes["candidate"])
    return {
        str(purpose): {
            "size": first_value(mine),
            "left_out": records(select(mine, status="unsupported")[["size", "reason"]]),
        }
        for purpose, mine in found.groupby("purpose", sort=False)
    }


def with_variants(
    rows: Rows, results: Results, names: Mapping[str, str], short: Mapping[str, str]
) -> Rows:
    """Add the process group, variant names, and maxima over ranks."""
    rows = with_ranks(rows, results)
    rows = rows.assign(variant_name=rows.variant.map(names), short=rows.variant.map(short))
    return with_rank_maxima(rows)


def with_rank_maxima(rows: Rows) -> Rows:
    """Append the maximum over ranks of allocated memory per stage and of peak memory per phase."""
    rows = rows.assign(when=rows["stage"].map(STAGES))
    parts = [rows]
    for name, key in (("allocated", "stage"), ("peak_memory", "phase")):
        found = select(rows, quantity=name, status="ok")
        most = pd.to_numeric(found["value"]).groupby([found.source, found.variant, found[key]])
        parts.append(found.loc[most.idxmax()].assign(quantity=f"max_{name}"))
    return pd.concat(parts, ignore_index=True)


def memory_facts(rows: Rows, variants: Iterable[str]) -> dict[str, Any]:
    """By variant: the most memory that any rank has allocated after a step, and the highest peak
    of a step with its phase (None on a CPU, which has no peak counter)."""
    found: dict[str, dict[str, Any]] = {"allocated": {}, "peak": {}}
    for name in variants:
        after = {"quantity": "max_allocated", "variant": name, "stage": "after_step"}
        found["allocated"][name] = first_value(rows, **after)
        top = highest(select(rows, quantity="max_peak_memory", variant=name))
        found["peak"][name] = top and {"bytes": top["value"], "phase": PHASES[top["phase"]]}
    return found


def category_of(rows: Rows, variant: str, category: str) -> Any:
    """Memory of a category at the stage where it is complete."""
    where = {"stage": COMPLETE[category], "category": category}
    return first_value(rows, quantity="memory", variant=variant, **where)


def expected_error(rows: Rows, variant: str, share: Mapping[str, float]) -> float | None:
    """The cost model's largest relative error if a rank stores `share` of each category."""
    expected = select(rows, quantity="expected_memory")
    errors = [
        abs(found / (want * share.get(category, 1.0)) - 1)
        for category, want in zip(expected["category"], expected["value"], strict=True)
        if (found := category_of(rows, variant, category)) is not None
    ]
    return max(errors, default=None)


def after_step(rows: Rows) -> Rows:
    """Rows of the lead, without earlier stages."""
    return select(lead_rows(rows), stage=lambda stage: stage == "after_step" or stage != stage)


def variant_table(title: str, columns: Mapping[str, Column], **more: Any) -> Table:
    """One row per variant; one table per process group if the title names {ranks}."""
    usual = {"rows": ["variant_name"], "headers": {"variant_name": "variant", "when": "stage"}}
    return Table(title=title, columns=columns, **{**usual, "data": measured, **more})


MEMORY_TABLES = {
    "stages": variant_table(
        "Memory of the rank with the most allocated memory, in its first step, MiB, {ranks}. "
        "Reserved: kept by the allocator; device: as the device reports it",
        {
            **{n.replace("_", " "): quantity("memory", "MiB", category=n) for n in CATEGORIES},
            "allocated": quantity("max_allocated", "MiB"),
            "reserved": quantity("reserved", "MiB"),
            "device": quantity("device_memory", "MiB"),
        },
        rows=["variant_name", "when"],
    ),
    "peaks": variant_table(
        "Peak memory of a second step, with optimizer state, MiB, {ranks}",
        {
            "forward and backward": quantity("max_peak_memory", "MiB", phase="forward_backward"),
            "optimizer step": quantity("max_peak_memory", "MiB", phase="optimizer"),
        },
    ),
}
MEMORY_FIGURE = Figure(
    title="Memory of the rank with the most allocated memory, by stage of its first step",
    mark="stack",
    facet="when",
    color="category",
    names={name: name.replace("_", " ") for name in CATEGORIES},
    wrap=2,
    x=Axis(field="short", title="", categorical=True),
    y=Axis("GiB allocated", scale=1 / GIB),
    data=lambda results: select(lead_rows(results.rows), quantity="memory", status="ok"),
    height=2.6,
)


def overlap_timeline(panels: Callable[[Rows], Mapping[str, str]]) -> Figure:
    """Timeline of compute, communication and copies on rank 0; `panels` maps variants to titles."""

    def data(results: Results) -> Rows:
        profiled = lead_payload(results, "intervals_ms")
        return pd.DataFrame(
            {"panel": title, "activity": activity, "start": start, "end": end}
            for variant, title in panels(lead_rows(results.rows)).items()
            for activity, intervals in profiled.get(variant, {}).items()
            for start, end in intervals
        )

    return Figure(
        title="One step of rank 0 under the profiler",
        mark="timeline",
        facet="panel",
        color="activity",
        x=Axis(field="start", title="ms"),
        x2="end",
        y=Axis(field="activity", title="", categorical=True),
        data=data,
        share_x=True,  # so that step lengths can be compared
        height=2.6,
    )
