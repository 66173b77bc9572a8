"""The memory chapter's page: what it computes from records, and that every answer renders."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lmlab.chapters.memory import checkpointing_page, page
from lmlab.chapters.memory.measure.shared import predicted_records
from lmlab.measure.records import Record, by_label, value, values, without_value
from lmlab.model.checkpointing import parse_strategy
from lmlab.model.peak import Parts, Stage
from lmlab.report.frame import Results, rows_of, select, table_of
from lmlab.report.page import Chapter, answers_in
from lmlab.study.results import Result, Status
from tests.chapters.pages import built, rendered
from tests.report.study import result, time_record

GIB = 2**30
CATEGORIES = (
    *("parameters", "optimizer_state", "gradients"),
    *("weight_copies", "activations", "workspace", "other"),
)
WIDTHS = {"small": 64, "large": 128}
POINT = {"size": "large", "context": 256, "precision": "fp32", "attention": "naive", "batch": 4}


def of_topic(topic: str, records: Iterable[Record], data: Any = None, **parameters: Any) -> Result:
    """A result of a topic; a timeline of one sequence is one of the long contexts."""
    topic = "long_context" if parameters.get("batch") == 1 else topic
    point = {"topic": topic, **POINT, **parameters}
    settings = {"d_model": WIDTHS[point["size"]], "num_layers": 4}
    return result(point, records, chapter="memory", settings=settings, data=data or {})


def step(live: Mapping[str, float], phase: str = "backward", **parameters: Any) -> Result:
    """A training step whose peak has these GiB, attention weights by dtype among them."""
    counts = {category: int(live.get(category, 0) * GIB) for category in CATEGORIES}
    weights = {d: int(live[d] * GIB) for d in ("fp32", "bf16") if d in live}
    total, mode = sum(counts.values()), {"mode": "train_step"}
    peaks = dict.fromkeys(("peak_memory", "allocator_peak", "replayed_peak"), total)
    records = [
        *values({f"{name}_bytes": count for name, count in peaks.items()}, **mode),
        value("peak_phase", phase, "", **mode),
        value("predicted_peak", 0.9 * total, "B", **mode, phase="backward", stage="s"),
        *by_label("live", "category", counts, stage="peak", **mode),
        *by_label("attention_weights", "dtype", weights, stage="peak", **mode),
    ]
    ends = {"forward": (0, 10), "backward": (10, 12)}
    phases = [{"name": n, "first_event": a, "last_event": b} for n, (a, b) in ends.items()]
    curves = {"event": [0, 5, 11, 12], "bytes": {"parameters": [1, 2, 3, 4]}, "phases": phases}
    return of_topic("timeline", records, {"train_step": curves}, **parameters)


def too_large(status: Status = "oom", *, whole: bool = False, **parameters: Any) -> Result:
    """A step that runs out of memory, or is not tried, and would need 9 GiB; no mode may fit."""
    moment = Stage(phase="backward", name="loss", parts=Parts(activations=9 * GIB))
    records = [
        without_value("peak_memory", status, "no", mode="train_step"),
        value("peak_phase", "forward", "", mode="train_step"),
        *predicted_records(moment, mode="train_step"),
    ]
    if whole:
        empty = of_topic("timeline", (), {"records": records}, **parameters)
        return replace(empty, status=status, reason="no")
    return of_topic("timeline", records, **parameters)


def checkpointing(device: float | None = None, **times: float | None) -> Result:
    """Strategies with their times; None did not fit. Peaks grow with the length of a segment. The
    GPU is busy for `device` ms with each block of a segment, if given."""
    parts = Parts(gradients=9, parameters=10, activations=1)
    predicted = Stage(phase="backward", name="softmax", parts=parts)
    records: list[Record] = []
    for name, ms in ((key.replace("_", "-"), ms) for key, ms in times.items()):
        strategy = parse_strategy(name)
        labels = {"variant": name, **asdict(strategy)}
        if ms is None:
            records += [without_value(q, "oom", "no", **labels) for q in ("time", "peak_memory")]
        else:
            peak = (9 if name == "none" else 2 + strategy.blocks) * GIB
            records += [time_record([ms, 1.001 * ms, ms], **labels)]
            records += [value("peak_memory", peak, "B", **labels)]
            if device is not None:
                busy = device * (1 + strategy.blocks)
                records += [time_record([busy, 1.001 * busy, busy], clock="device", **labels)]
        records += predicted_records(predicted, **labels)
    return of_topic("checkpointing", records)


def block(saved: Mapping[str, int], compiled: float = 0.5, **parameters: Any) -> Result:
    """A block whose operations save these bytes; compiled, it saves that share."""
    whole = sum(saved.values())
    variants = {"eager": whole, "compiled": int(compiled * whole)}
    records = by_label("saved_for_backward", "variant", variants)
    for name, count in saved.items():
        labels: Any = {"operation": name, "origin": "a:1", "count": 1, "share": count / whole}
        records.append(value("saved_by_operation", count, "B", **labels))
    return of_topic("block", records, **parameters)


PUBLISHED = {
    **{"chapter": "published", "topic": "memory", "quantity": "published", "status": "ok"},
    **{"gpu": "A", "writeup": "001", "size": "large", "context": 256, "precision": "fp32"},
    **{"mode": "train_step", "value": 3.5},
}


def results_of(found: Iterable[Result]) -> Results:
    results = {f"r/test-gpu/memory/{number}.json": each for number, each in enumerate(found)}
    rows = [row for path, each in results.items() for row in rows_of(each, Path(path))]
    return Results("test-gpu", table_of([*rows, PUBLISHED]), results)


def chapter_of(*found: Result) -> Chapter:
    return built(results_of(found), "memory")["memory"]


FP32 = {"parameters": 1.0, "activations": 2.0, "workspace": 0.5, "other": 0.25, "fp32": 1.5}
BF16 = {**FP32, "weight_copies": 0.5, "activations": 2.5, "bf16": 0.75}


def test_attention_weights_are_apart_from_other_activations() -> None:
    parts = chapter_of(step(FP32), step(BF16, precision="bf16")).facts["parts"]["bf16"]
    assert {name: count / GIB for name, count in parts.items() if count} == {
        **{"parameters": 1.0, "weight_copies": 0.5, "fp32_weights": 1.5, "half_weights": 0.75},
        **{"activations": 0.25, "workspace": 0.75, "peak": 4.75},
    }


@pytest.mark.parametrize(
    ("bf16", "smaller", "greater"), [(1.0, 0, 0), (1.019, 0, 0), (1.03, 0, 1), (0.97, 1, 0)]
)
def test_a_peak_has_changed_beyond_two_percent(bf16: float, smaller: int, greater: int) -> None:
    steps = step({"parameters": 1.0}), step({"parameters": bf16}, precision="bf16")
    facts = chapter_of(*steps).facts
    assert (facts["ratios"], facts["smaller"], facts["greater"]) == (1, smaller, greater)


def test_the_largest_step_is_that_of_the_largest_size_and_context() -> None:
    # The order of the study is not the order of sizes.
    chapter = chapter_of(
        step({"parameters": 3.0}, size="large", context=512),
        step({"parameters": 2.0}, size="large", context=128, phase="optimizer"),
        step({"parameters": 1.0}, size="small", context=512),
    )
    assert (chapter.facts["shown"]["size"], chapter.facts["shown"]["context"]) == ("large", 512)
    phases = chapter.facts["phases"]
    assert phases == {"forward": [], "backward": [512, 512], "optimizer": [128]}
    cells = select(chapter.own.rows, quantity="peak_with_phase")["value"]
    assert list(cells) == ["1.00 backward", "2.00 optimizer", "3.00 backward"]


@pytest.mark.parametrize("status", ["oom", "unsupported"])
@pytest.mark.parametrize("whole", [False, True])
def test_the_longest_context_that_fits_is_found_per_batch(status: Status, whole: bool) -> None:
    chapter = chapter_of(
        *(step({"parameters": 2.0}, context=context) for context in (128, 256)),
        *(too_large(status, whole=whole, context=context) for context in (512, 1024)),
        step({"parameters": 3.0}, context=512, batch=1),
        too_large(status, whole=whole, context=1024, batch=1),
        step(FP32, size="small"),
    )
    rows = select(chapter.own.rows, topic="longest")
    all_fit = select(rows, size="small")
    assert set(all_fit["quantity"]) == {"longest_context", "longest_peak"}
    rows = rows[rows["size"] != "small"]
    found = rows.pivot_table("value", "batch", "quantity", aggfunc="first")
    names = ["longest_context", "longest_peak", "next_context", "next_peak"]
    assert found[names].to_dict("index") == {
        1: dict(zip(names, (512, 3 * GIB, 1024, 9 * GIB), strict=True)),
        4: dict(zip(names, (256, 2 * GIB, 512, 9 * GIB), strict=True)),
    }


def test_a_step_that_does_not_fit_has_no_phase_that_holds_its_peak() -> None:
    table = chapter_of(step(FP32), too_large(context=1024)).table("phases")
    assert "| backward | OOM |" in table


def test_the_five_largest_operations_of_a_block_are_shown() -> None:
    chapter = chapter_of(block({f"operation {n}": n for n in range(1, 8)}))
    rows = page.operations(chapter.own.rows)
    assert list(rows["value"]) == [3, 4, 5, 6, 7]
    assert list(rows["share"]) == pytest.approx([n / 28 for n in (3, 4, 5, 6, 7)])
    assert list(select(chapter.own.rows, quantity="compiled_to_eager")["value"]) == [0.5]


def test_predictions_replays_and_published_peaks_are_compared_with_the_measured_ones() -> None:
    chapter = chapter_of(step(FP32), step(BF16, phase="optimizer", precision="bf16"))
    facts, rows = chapter.facts, chapter.own.rows
    assert facts["worst_error"]["value"] == pytest.approx(-0.1)
    assert (facts["same_phase"], facts["errors"]) == (1, 2)
    assert [bool(equal) for equal in facts["replay_equal"]] == [True, True]
    assert list(select(rows, quantity="measured_here")["value"]) == [int(3.75 * GIB)]
    assert list(select(rows, quantity="published", chapter="memory")["value"]) == [3.5 * GIB]


@pytest.mark.parametrize(
    ("times", "variant", "baseline", "slowdown"),
    [
        ({"none": 100.0, "every_1": 130.0}, "every-1", "none", 1.3),
        ({"none": None, "every_2": 99.0, "every_1": 100.0, "nested": 200}, "nested", "every-1", 2),
    ],
)
def test_strategies_are_timed_against_no_checkpointing_or_else_every_block(
    times: dict[str, float | None], variant: str, baseline: str, slowdown: float
) -> None:
    (facts,) = chapter_of(checkpointing(**times)).facts["checkpointing"]
    pair = facts["slowdowns"][variant]
    assert (pair.baseline["variant"], pair.verdict) == (baseline, "slower")
    assert 1 / pair.ratio == pytest.approx(slowdown)
    assert facts["best"]["variant"] == "every-1"
    assert facts["none"]["status"] == ("oom" if times["none"] is None else "ok")
    assert facts["late"]


def test_device_time_decides_what_a_strategy_costs() -> None:
    chapter = chapter_of(checkpointing(device=10.0, none=100.0, every_1=150.0))
    (facts,) = chapter.facts["checkpointing"]
    pair = facts["slowdowns"]["every-1"]
    assert (pair.variant["clock"], 1 / pair.ratio) == ("device", pytest.approx(2.0))
    table = chapter.table("strategies")
    assert "| every-1 | 3.00 | 150 | 20.0 | 2.0x | 1.50x |" in table
    assert "| none | 9.00 | 100 | 10.0 | 1.00x | 1.00x |" in table


def test_the_front_page_shows_the_segments_with_the_lowest_peaks() -> None:
    times: dict[str, float | None] = {f"every_{k}": 100.0 for k in (1, 2, 3, 4, 6, 8)}
    chapter = chapter_of(checkpointing(none=None, **times, nested=200.0))
    rows = checkpointing_page.front_strategies(chapter.own.rows)
    assert list(dict.fromkeys(rows["variant"])) == ["none", "every-1", "every-2", "nested"]


MORE = {"parameters": 1.0, "activations": 3.0}
LESS = {"parameters": 1.0, "activations": 1.0}
CASES: dict[str, list[Result]] = {
    "both phases, bf16 larger, nothing fits without checkpointing": [
        step(FP32),
        step(LESS, phase="optimizer", context=128),
        step(BF16, precision="bf16"),
        checkpointing(none=None, every_1=100.0, nested=200.0),
    ],
    "backward, bf16 smaller, checkpointing slower, one block": [
        step(MORE),
        step(LESS, precision="bf16"),
        checkpointing(none=100.0, every_1=130.0),
        block({"softmax": 4}),
        block({"softmax": 4}, precision="bf16"),
    ],
    "optimizer, bf16 sometimes smaller, checkpointing as fast, one sequence": [
        *(step(MORE, phase="optimizer", context=context) for context in (128, 256)),
        step(MORE, phase="optimizer", precision="bf16"),
        step(LESS, phase="optimizer", precision="bf16", context=128),
        checkpointing(none=100.0, every_1=100.0),
        step(MORE, batch=1),
        too_large(batch=1, context=512),
    ],
    "forward, one precision, compiled one block": [
        step(MORE, phase="forward"),
        checkpointing(none=None, nested=9.0),
        block({"softmax": 4}, compiled=1.25),
    ],
    "a step that does not fit": [too_large()],
}


@pytest.mark.parametrize("case", CASES)
def test_every_answer_renders(case: str, tmp_path: Path) -> None:
    once = case.startswith("both")  # drawing takes longer than the rest
    front, pages = rendered(tmp_path, results_of(CASES[case]), "memory", draw=once)
    questions = ("where-is-the-memory-peak", "what-does-checkpointing-buy")
    assert {f"writeup.md#{one}" for one in questions} < set(answers_in(front, "writeup.md"))
    measured = any(each.data for each in CASES[case])
    assert ("figures/memory/timeline.png" in pages["memory"]) == measured
    assert ("| operation |" in pages["memory"]) == case.endswith("one block")
    assert ("One sequence" in pages["memory"]) == case.endswith("one sequence")


def test_figures_draw_the_bytes_of_a_step() -> None:
    longer = step(MORE, context=4096)  # not in both precisions, so it has no bar
    chapter = chapter_of(step(MORE), step(LESS, precision="bf16"))
    for name in ("timeline", "modes"):
        rows = page.FIGURES[name].rows(chapter.own)
        assert list(rows["position"]) == [0.0, 0.5, 1.5, 2.0]  # each phase as wide as the others
        assert list(rows["value"] * GIB) == [1.0, 2.0, 3.0, 4.0]
    own = chapter_of(step(MORE), step(LESS, precision="bf16"), longer).own
    bars = page.FIGURES["composition"].rows(own)
    drawn = pd.to_numeric(bars.groupby("bar")["value"].sum()).to_dict()
    assert drawn == {"large\nfp32": 4.0, "large\nbf16": 2.0}
