"""Attention on the page: derived quantities, comparisons, and every branch of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmlab.chapters.attention import page
from lmlab.measure.records import value, without_value
from lmlab.report.frame import select
from lmlab.study.points import Point
from lmlab.study.results import Result
from tests.chapters.pages import answer, built, rendered
from tests.report.study import result, time_record, written

JITTER = (1.0, 1.001, 0.999)
END, COMPILE, FAST = (
    "Where does naive attention end?",
    "Does torch.compile pay?",
    "How fast is our FlashAttention?",
)
SETTINGS = {"batch": 1, "heads": 16, "causal": True}
FLOPS = [value("flops", 1e9, "FLOP", phase=p) for p in ("forward", "backward", "both")]
ATTENTION: dict[str, Any] = {"head_dim": 64, "precision": "bf16"}


def times(variant: str, **ms: float) -> list[Any]:
    """Times of a variant by phase."""
    return [
        time_record([each * j for j in JITTER], variant=variant, phase=phase)
        for phase, each in ms.items()
    ]


def attention(parameters: dict[str, Any], *records: Any, **more: Any) -> Result:
    """A result of the chapter."""
    return result(parameters, records, chapter="attention", settings=SETTINGS, **more)


def naive(sequence: int, **more: Any) -> Result:
    """Naive attention with the memory that its formula predicts."""
    parameters = {"topic": "naive", "sequence": sequence, **ATTENTION, "precision": "fp32"}
    if more:
        return attention(parameters, **more)
    peak = 4 * sequence**2 * 4 + sequence**2 + 6 * sequence * 64 * 4
    return attention(
        parameters,
        *times("naive", forward=4, backward=8),
        *times("compiled", forward=2, backward=10),
        value("memory", peak, "B", variant="naive", stage="peak"),
    )


def kernels(topic: str, ours: float) -> Result:
    """Three variants, of which `tiled` contradicts itself and is otherwise the fastest."""
    return attention(
        {"topic": topic, "sequence": 16384, **ATTENTION},
        *FLOPS,
        *times("tiled", forward=0.1, backward=0.1, both=0.9),
        *times("sdpa_cudnn", forward=1, backward=2, both=3),
        *times("flash", forward=ours / 3, backward=ours / 3 * 2, both=ours),
        value("error", 1e-3, "", variant="flash", tensor="output"),
    )


def compiled(ms: float) -> Result:
    """A model whose eager step takes 100 ms."""
    phases = ("forward", "backward", "train_step")
    return attention(
        {"topic": "model_compile", "size": "small", "context": 512, "precision": "bf16"},
        *times("eager", **dict.fromkeys(phases, 100)),
        *times("compiled", **dict.fromkeys(phases, ms)),
        value("first_step_time", 9000, "ms", variant="compiled"),
    )


def model(ms: float) -> Result:
    """The same model with naive attention in another process, where a step takes 80 ms."""
    return attention(
        {"topic": "model", "size": "small", "context": 512, "precision": "bf16"},
        *times("naive", train_step=80),
        *times("flash", train_step=ms),
        value("peak_memory", 3 * 2**30, "B", variant="naive"),
        value("peak_memory", 2**30, "B", variant="flash"),
    )


def test_both_passes_may_not_take_far_longer_than_the_two_apart(tmp_path: Path) -> None:
    rows = built(written(tmp_path, [kernels("benchmark", 2)]), "attention")["attention"].own.rows
    flagged = select(rows, quantity="time", flags=lambda flags: not page.consistent(flags))
    assert list(zip(flagged["variant"], flagged["phase"], strict=True)) == [("tiled", "both")]
    best = page.ours_against_best(rows, "benchmark").where(phase="both")
    assert [pair.baseline["variant"] for pair in best.pairs] == ["sdpa_cudnn"]
    assert best.best.ratio == pytest.approx(1.5)


def test_rates_memory_and_eager_steps_elsewhere(tmp_path: Path) -> None:
    results = [kernels("benchmark", 2), compiled(50), model(40), naive(1024)]
    chapter = built(written(tmp_path, results), "attention")["attention"]
    assert chapter.value(quantity="rate", variant="flash", phase="both") == pytest.approx(0.5)
    assert chapter.value(quantity="eager_elsewhere") == 80
    assert chapter.value(quantity="speedup_elsewhere") == pytest.approx(1.6)
    assert chapter.value(quantity="peak_reduction") == 2 * 2**30
    assert chapter.facts["naive"]["agreement"] == pytest.approx(1)
    assert chapter.facts["naive"]["scores"] == 4
    assert [fact["count"] for fact in chapter.facts["checked"]] == [1]


OOM = naive(65536, status="oom", reason="naive: full")
REFUSED = attention(
    {"topic": "benchmark", "sequence": 64, **ATTENTION},
    *FLOPS,
    *times("naive", forward=1, backward=2, both=3),
    without_value("time", "unsupported", "needs a GPU", variant="flash"),
)
BRANCHES = {
    "naive attention does not fit": ([naive(16384), OOM], END, ["65,536", "16,384"]),
    "naive attention fits": ([naive(16384)], END, ["Not within", "16,384"]),
    "compiling pays": ([compiled(50)], COMPILE, ["Yes", "2.0x (small, bf16)", "9.00"]),
    "compiling does not pay": ([compiled(200)], COMPILE, ["No"]),
    "nothing is compiled": ([naive(1024)], COMPILE, ["Not measured"]),
    "ours is faster": ([kernels("leaderboard", 2)], FAST, ["2.00 ms", "1.50x as fast"]),
    "ours is slower": ([kernels("leaderboard", 4)], FAST, ["0.75x as fast"]),
    "ours is as fast": ([kernels("leaderboard", 3)], FAST, ["not distinguishable"]),
    "no leaderboard": ([kernels("benchmark", 2)], FAST, ["1 of 1", "not measured yet"]),
    "ours needs a GPU": ([REFUSED, model(40)], FAST, ["needs a GPU"]),
    "ours was not asked for": ([naive(1024)], FAST, ["Not measured yet"]),
}


@pytest.mark.parametrize(("results", "question", "parts"), BRANCHES.values(), ids=BRANCHES)
def test_answers_follow_from_the_data(
    tmp_path: Path, results: list[Result], question: str, parts: list[str]
) -> None:
    front, _ = rendered(tmp_path, written(tmp_path / "results", results), "attention")
    assert [part for part in parts if part not in answer(front, question)] == []


def test_a_chapter_without_results_says_so(tmp_path: Path) -> None:
    missing = [Point("attention", {"topic": "naive", **ATTENTION, "sequence": 64}, SETTINGS)]
    front, _ = rendered(tmp_path, written(tmp_path / "results", [], missing), "attention")
    assert all("Not measured" in answer(front, question) for question in (END, COMPILE, FAST))
