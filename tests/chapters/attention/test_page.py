"""Attention on the page: derived quantities, comparisons, and every branch of the answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.chapters.attention import page
from lmlab.measure.records import value, without_value
from lmlab.report.frame import select
from lmlab.study.results import Result
from tests.chapters.pages import answer, built, rendered
from tests.report.study import result, time_record, written
from tests.report.test_table import cells

END, COMPILE, FAST = (
    "How long a sequence fits with naive attention?",
    "Does torch.compile pay?",
    "How fast is our FlashAttention?",
)
SETTINGS = {"batch": 1, "heads": 16, "causal": True, "stages": 3, "precision": "bf16"}
FLOPS = [value("flops", 1e9, "FLOP", phase=p) for p in ("forward", "backward", "both")]
ATTENTION: dict[str, Any] = {"head_dim": 64, "precision": "bf16"}


def times(variant: str, clock: str = "wall", **ms: float) -> list[Any]:
    return [
        time_record([each, 1.001 * each, 0.999 * each], clock, variant=variant, phase=phase)
        for phase, each in ms.items()
    ]


def attention(parameters: dict[str, Any], *records: Any, **more: Any) -> Result:
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
        *times("compiled", "device", **dict.fromkeys(phases, ms / 2)),
        value("first_step_time", 9000, "ms", variant="compiled"),
    )


def model(ms: float) -> Result:
    """The same model with naive attention in another process: a step of 80 ms, 30 on the GPU."""
    return attention(
        {"topic": "model", "size": "small", "context": 512, "precision": "bf16"},
        *times("naive", train_step=80),
        *times("naive", "device", train_step=30),
        *times("sdpa_cudnn", train_step=60),
        *times("sdpa_cudnn", "device", train_step=20),
        *times("flash", train_step=ms),
        *times("flash", "device", train_step=ms / 2),
        value("peak_memory", 3 * 2**30, "B", variant="naive"),
        value("peak_memory", 2**30, "B", variant="flash"),
    )


def test_both_passes_may_not_take_far_longer_than_the_two_apart(tmp_path: Path) -> None:
    rows = built(written(tmp_path, [kernels("benchmark", 2)]), "attention")["attention"].own.rows
    flagged = select(rows, quantity="time", flags=lambda flags: not page.consistent(flags))
    assert list(zip(flagged["variant"], flagged["phase"], strict=True)) == [("tiled", "both")]
    best = page.ours_against_best(rows, "benchmark").where(phase="both")
    assert [pair.baseline["variant"] for pair in best] == ["sdpa_cudnn"]
    assert best.best.ratio == pytest.approx(1.5)


def test_rates_and_memory(tmp_path: Path) -> None:
    results = [kernels("benchmark", 2), compiled(50), model(40), naive(1024)]
    chapter = built(written(tmp_path, results), "attention")["attention"]
    assert chapter.value(quantity="rate", variant="flash", phase="both") == pytest.approx(0.5)
    assert chapter.value(quantity="peak_reduction") == 2 * 2**30
    assert chapter.facts["naive"]["agreement"] == pytest.approx(1)
    assert chapter.facts["naive"]["scores"] == 4
    assert [fact["count"] for fact in chapter.facts["checked"]] == [1]


def test_a_variant_that_passed_the_check_but_did_not_fit_has_not_failed(tmp_path: Path) -> None:
    shape = {"topic": "shapes", "precision": "bf16", "batch": 4, "size": "small", "context": 512}
    errors = [value("error", 1e-3, "", variant=name) for name in ("flash", "naive", "flex")]
    ends = [without_value("time", "oom", "no room", variant="naive")]
    ends.append(without_value("time", "failed", "relative error 1.5", variant="flex"))
    # A tile is checked at every sequence of its result, and may fail at one of them.
    tile = [{"variant": "64x32", "sequence": sequence} for sequence in (1024, 4096)]
    records = [value("error", 1e-3, "", **at) for at in tile]
    records += [time_record([1.0], **tile[0]), without_value("time", "failed", "no", **tile[1])]
    tiled = attention({"topic": "tiles", "head_dim": 64, "direction": "forward"}, *records)
    results = [attention(shape, *errors, *times("flash", both=1), *ends), tiled]
    (found,) = built(written(tmp_path, results), "attention")["attention"].facts["checked"]
    assert (found["count"], found["failed"], found["untimed"]) == (3 + 2, 1 + 1, 1)


def softmax() -> Result:
    """Operations of 1 ms, and a fused softmax of half of that."""
    parts = ["scores", "max", "subtract", "exp", "sum", "divide", "output"]
    ms = {**dict.fromkeys(parts, 1.0), "softmax": 0.5}
    records = [time_record([each], variant=part, part=part) for part, each in ms.items()]
    return attention({"topic": "softmax", "size": "small", "context": 512}, *records)


def tiles() -> Result:
    """Of two tile sizes one is rejected."""
    plain = {"block_m": 64, "num_warps": 4, "specialized": False, "sequence": 4096}
    return attention(
        {"topic": "tiles", "head_dim": 64, "direction": "forward"},
        time_record([2.0], variant="64x32", block_n=32, **plain),
        without_value("time", "unsupported", "shared memory", variant="64x64", block_n=64, **plain),
        time_record([1.0], variant="chosen", block_n=64, **plain),
    )


def test_the_chapter_shows_every_topic(tmp_path: Path) -> None:
    capped = without_value("time", "unsupported", "would exceed the time cap", variant="tiled")
    shape = {"topic": "shapes", "precision": "bf16", "batch": 4, "size": "small", "context": 512}
    wrong = without_value("time", "failed", "relative error 1.5", variant="flash_attn_4")
    variants = [*times("sdpa_cudnn", both=2), *times("flash", both=1), capped, wrong]
    results = [softmax(), tiles(), compiled(50), model(40), attention(shape, *FLOPS, *variants)]
    results.append(attention({**shape, "context": 128}, *FLOPS, *times("tiled", both=9)))
    board = kernels("leaderboard", 2)
    slow = time_record([2.5], variant="flash", phase="both", quantity="sustained_time")
    results.append(replace(board, measurements=(*board.measurements, slow)))
    front, pages = rendered(tmp_path, written(tmp_path / "results", results), "attention")
    chapter = built(written(tmp_path / "again", results), "attention")["attention"]
    assert chapter.value(quantity="fused_to_matmuls") == 0.25
    assert chapter.value(quantity="written_to_matmuls") == 2.5
    assert [pair.ratio for pair in chapter.facts["shapes"]["both"]] == [pytest.approx(2)]
    failed = {"sizes": ["small"], "reason": "relative error 1.5"}
    assert chapter.facts["shapes_failed"] == {"FlashAttention-4": failed}
    cells = ("| small | 512 | 2.00 | 0.500 | 5.00 |", "| over-cap |", "| 64x32 | 2.00 | 1.00 |")
    cells += ("| 2.00x | 1.50x | 1.50x | same |",)
    assert [cell for cell in cells if cell not in pages["attention"]] == []
    claims = ("ours (Triton) 2.50 ms", "same device time as with", "(bf16, device time), 1 of 1")
    assert [claim for claim in claims if claim not in front] == []


def test_tables_of_variants_keep_points_that_did_not_fit_and_drop_what_was_never_timed(
    tmp_path: Path,
) -> None:
    timed, capped = kernels("benchmark", 2), without_value("time", "failed", "no", variant="flex")
    full = {**timed.parameters, "sequence": 65536}
    results = [
        replace(timed, measurements=(*timed.measurements, capped)),
        attention(full, status="oom", reason="full"),
    ]
    table = built(written(tmp_path, results), "attention")["attention"].table("both")
    lines = cells(table)
    assert lines[0][1:] == ["tiled (PyTorch)", "SDPA cuDNN", "ours (Triton)"]
    assert [line[:2] for line in lines[2:]] == [["16384", "0.900‡"], ["65536", "full"]]


@pytest.mark.parametrize("topic", ["benchmark", "shapes"])
def test_the_worst_contradiction_is_named_by_its_point(tmp_path: Path, topic: str) -> None:
    shape = {"batch": 4, "size": "small", "context": 1024}
    parameters = {"topic": topic, "sequence": 512, **ATTENTION}
    if topic == "shapes":
        parameters = {"topic": topic, "precision": "bf16", **shape}
    contradiction = times("tiled", forward=0.1, backward=0.1, both=0.9)
    results = [attention(parameters, *FLOPS, *contradiction, *times("flash", both=1))]
    _, pages = rendered(tmp_path, written(tmp_path / "r", results), "attention")
    named = {"benchmark": "head dim 64, sequence 512", "shapes": "small at context 1024"}
    assert f"4.5x (tiled (PyTorch), bf16, {named[topic]})" in pages["attention"]


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
