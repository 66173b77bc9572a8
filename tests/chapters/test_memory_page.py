"""The memory chapter's page: what it computes from records, and that every answer renders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lmlab.chapters.memory import page
from lmlab.chapters.memory.measure.checkpointing import Variant, labels_of, variant_records
from lmlab.chapters.memory.measure.records import predicted_records
from lmlab.measure.records import Record, value, without_value
from lmlab.model.checkpointing import parse_strategy
from lmlab.model.peak import Parts, Stage
from lmlab.report.frame import MISSING, Results, rows_of, select, table_of
from lmlab.report.page import Chapter, Report, answers_in, build_chapter
from lmlab.study.files import ROOT
from lmlab.study.results import Result

GIB = 2**30
CATEGORIES = (
    *("parameters", "optimizer_state", "gradients"),
    *("weight_copies", "activations", "workspace", "other"),
)
WIDTHS = {"small": 64, "large": 128}


def result(topic: str, records: Iterable[Record], data: Any = None, **parameters: Any) -> Result:
    point = {"size": "large", "context": 256, "precision": "fp32", "attention": "naive"}
    point = {"topic": topic, **point, "batch": 4, **parameters}
    return Result(
        chapter="memory",
        parameters=point,
        settings={"d_model": WIDTHS[str(point["size"])], "num_layers": 4},
        status="ok",
        machine={"id": "m", "device": "cuda", "name": "M"},
        versions={"torch": "2"},
        commit={"id": "0" * 40, "dirty": False},
        code_fingerprint="0" * 16,
        started_at="2026-01-01T00:00:00Z",
        elapsed_s=1.0,
        measurements=tuple(records),
        data=data or {},
    )


def step(live: Mapping[str, float], phase: str = "backward", **parameters: Any) -> Result:
    """A training step whose peak has these GiB, attention weights by dtype among them."""
    counts = {category: int(live.get(category, 0) * GIB) for category in CATEGORIES}
    weights = {d: int(live[d] * GIB) for d in ("fp32", "bf16") if d in live}
    total = sum(counts.values())
    at = {"mode": "train_step", "stage": "peak"}
    records = [
        value("peak_memory", total, "B", mode="train_step"),
        value("allocator_peak", total, "B", mode="train_step"),
        value("replayed_peak", total, "B", mode="train_step"),
        value("peak_phase", phase, "", mode="train_step"),
        value("predicted_peak", 0.9 * total, "B", mode="train_step", phase="backward", stage="s"),
        *(value("live", count, "B", category=name, **at) for name, count in counts.items()),
        *(value("attention_weights", n, "B", dtype=dtype, **at) for dtype, n in weights.items()),
    ]
    ends = {"forward": (0, 10), "backward": (10, 12)}
    phases = [{"name": n, "first_event": a, "last_event": b} for n, (a, b) in ends.items()]
    curves = {"event": [0, 5, 11, 12], "bytes": {"parameters": [1, 2, 3, 4]}, "phases": phases}
    return result("timeline", records, {"train_step": curves}, **parameters)


def checkpointing(**times: float | None) -> Result:
    """Strategies with their times; None did not fit. Peaks grow with the length of a segment."""
    predicted = Stage(
        phase="backward", name="softmax", parts=Parts(gradients=9, parameters=10, activations=1)
    )
    records: list[Record] = []
    for name, ms in ((key.replace("_", "-"), ms) for key, ms in times.items()):
        strategy = parse_strategy(name)
        variant = Variant(name=name, strategy=strategy, status="oom", reason="no")
        if ms is not None:
            peak = (9 if name == "none" else 2 + strategy.blocks) * GIB
            variant = Variant(
                name=name, strategy=strategy, samples_ms=[ms, 1.001 * ms, ms], peak_bytes=peak
            )
        records += variant_records(variant)
        records += predicted_records(predicted, **labels_of(name, strategy))
    return result("checkpointing", records)


PUBLISHED = {
    **{"chapter": "published", "topic": "memory", "quantity": "published", "status": "ok"},
    **{"gpu": "A", "writeup": "001", "size": "large", "context": 256, "precision": "fp32"},
    **{"mode": "train_step", "value": 3.5},
}


def results_of(found: Iterable[Result], *more: Mapping[str, Any]) -> Results:
    results = {f"r/m/memory/{number}.json": each for number, each in enumerate(found)}
    rows = [row for path, each in results.items() for row in rows_of(each, Path(path))]
    return Results("m", table_of([*rows, *(dict(row) for row in more)]), results)


def chapter_of(*found: Result) -> Chapter:
    return build_chapter("memory", page, results_of(found, PUBLISHED))


FP32 = {"parameters": 1.0, "activations": 2.0, "workspace": 0.5, "other": 0.25, "fp32": 1.5}
BF16 = {**FP32, "weight_copies": 0.5, "activations": 2.5, "bf16": 0.75}


def test_attention_weights_are_apart_from_other_activations() -> None:
    chapter = chapter_of(step(FP32), step(BF16, precision="bf16"))
    parts = chapter.facts["parts"]
    assert {name: count / GIB for name, count in parts["bf16"].items() if count} == {
        "parameters": 1.0,
        "weight_copies": 0.5,
        "fp32_weights": 1.5,
        "half_weights": 0.75,
        "activations": 0.25,
        "workspace": 0.75,
        "peak": 4.75,
    }
    change = select(chapter.results.rows, quantity="bf16_change").set_index("part")["value"] / GIB
    assert change["attention weights, 16-bit"] == 0.75
    assert change["other activations"] == -0.25
    assert change["peak"] == 1.0


@pytest.mark.parametrize(
    ("bf16", "smaller", "greater"), [(1.0, 0, 0), (1.019, 0, 0), (1.03, 0, 1), (0.97, 1, 0)]
)
def test_a_peak_counts_as_changed_beyond_two_percent(
    bf16: float, smaller: int, greater: int
) -> None:
    pair = step({"parameters": 1.0}), step({"parameters": bf16}, precision="bf16")
    facts = chapter_of(*pair).facts
    assert (facts["ratios"], facts["smaller"], facts["greater"]) == (1, smaller, greater)


def test_the_largest_step_is_that_of_the_largest_size_and_context() -> None:
    # The order of the study is not the order of sizes.
    steps = [
        step({"parameters": 3.0}, size="large", context=512),
        step({"parameters": 2.0}, size="large", context=128, phase="optimizer"),
        step({"parameters": 1.0}, size="small", context=512),
    ]
    chapter = chapter_of(*steps)
    assert (chapter.facts["shown"]["size"], chapter.facts["shown"]["context"]) == ("large", 512)
    phases = chapter.facts["phases"]
    assert phases == {"forward": [], "backward": [512, 512], "optimizer": [128]}
    cells = select(chapter.results.rows, quantity="peak_with_phase")["value"]
    assert list(cells) == ["1.00 backward", "2.00 optimizer", "3.00 backward"]


def test_predictions_replays_and_published_peaks_are_compared_with_the_measured_ones() -> None:
    chapter = chapter_of(step(FP32), step(BF16, phase="optimizer", precision="bf16"))
    facts = chapter.facts
    assert facts["worst_error"]["value"] == pytest.approx(-0.1)
    assert (facts["same_phase"], facts["errors"]) == (1, 2)
    assert [bool(equal) for equal in facts["replay_equal"]] == [True, True]
    rows = chapter.results.rows
    assert list(select(rows, quantity="measured_here")["value"]) == [int(3.75 * GIB)]
    assert list(select(rows, quantity="published", chapter="memory")["value"]) == [3.5 * GIB]


def test_strategies_are_timed_against_no_checkpointing_or_else_every_block() -> None:
    (facts,) = chapter_of(checkpointing(none=100.0, every_1=130.0)).facts["checkpointing"]
    assert 1 / facts["slowdowns"]["every-1"].ratio == pytest.approx(1.3)
    assert facts["slowdowns"]["every-1"].verdict == "slower"
    (facts,) = chapter_of(
        checkpointing(none=None, every_2=99.0, every_1=100.0, nested=200.0)
    ).facts["checkpointing"]
    assert facts["slowdowns"]["nested"].baseline["variant"] == "every-1"
    assert 1 / facts["slowdowns"]["nested"].ratio == pytest.approx(2.0)
    assert facts["best"]["variant"] == "every-1"
    assert facts["none"]["status"] == "oom"
    assert facts["late"]


def test_the_front_page_shows_the_segments_with_the_lowest_peaks() -> None:
    times: dict[str, float | None] = {f"every_{k}": 100.0 for k in (1, 2, 3, 4, 6, 8)}
    chapter = chapter_of(checkpointing(none=None, **times, nested=200.0))
    rows = page.front_strategies(select(chapter.results.rows, chapter="memory"))
    shown = list(dict.fromkeys(rows["variant"]))
    assert shown == ["none", "every-1", "every-2", "every-3", "every-4", "nested"]


MORE = {"parameters": 1.0, "activations": 3.0}
LESS = {"parameters": 1.0, "activations": 1.0}
MISSING_ROW = {
    **{"chapter": "memory", "source": "r/m/memory/x.json", "flags": (), "status": MISSING},
    **{"topic": "timeline", "size": "large", "context": 256, "precision": "fp32", "batch": 4},
    **{"attention": "naive", "d_model": 128, "num_layers": 4, "reason": "not measured"},
}
CASES: dict[str, list[Result]] = {
    "both phases, bf16 larger, nothing fits without checkpointing": [
        step(FP32),
        step(LESS, phase="optimizer", context=128),
        step(BF16, precision="bf16"),
        checkpointing(none=None, every_1=100.0, nested=200.0),
    ],
    "backward, bf16 smaller, checkpointing slower": [
        step(MORE),
        step(LESS, precision="bf16"),
        checkpointing(none=100.0, every_1=130.0),
    ],
    "optimizer, bf16 sometimes smaller, checkpointing as fast": [
        *(step(MORE, phase="optimizer", context=context) for context in (128, 256)),
        step(MORE, phase="optimizer", precision="bf16"),
        step(LESS, phase="optimizer", precision="bf16", context=128),
        checkpointing(none=100.0, every_1=100.0),
    ],
    "forward, one precision": [step(MORE, phase="forward"), checkpointing(none=None, nested=9.0)],
    "a step that does not fit": [
        result("timeline", [without_value("peak_memory", "oom", "no", mode="train_step")])
    ],
    "nothing": [],
}


@pytest.mark.parametrize("case", [*CASES, "a missing point"])
def test_every_answer_renders(case: str, tmp_path: Path) -> None:
    missing = [MISSING_ROW] if case == "a missing point" else []
    results = results_of(CASES.get(case, []), PUBLISHED, *missing)
    chapter = build_chapter("memory", page, results)
    templates = ROOT / "report" / "templates"
    report = Report(results, {"memory": chapter}, tmp_path, templates, "test")
    assert report.write() == []
    answers = answers_in((tmp_path / "writeup.md").read_text(), "writeup.md")
    questions = ("where-is-the-memory-peak", "what-does-checkpointing-buy")
    assert {f"writeup.md#{question}" for question in questions} < set(answers)
    assert ({"timeline", "composition"} <= chapter.drawn) == (chapter.facts.get("steps", 0) > 0)


def test_figures_draw_the_bytes_of_a_step() -> None:
    chapter = chapter_of(*CASES["backward, bf16 smaller, checkpointing slower"])
    rows = page.FIGURES["timeline"].rows(chapter.own)
    assert list(rows["position"]) == [0.0, 0.5, 1.5, 2.0]  # each phase as wide as the others
    assert list(rows["value"] * GIB) == [1.0, 2.0, 3.0, 4.0]
    bars = page.FIGURES["composition"].rows(chapter.own)
    assert pd.to_numeric(bars.groupby("bar")["value"].sum()).to_dict() == {
        "large\nfp32": 4.0,
        "large\nbf16": 2.0,
    }
