"""Every sentence of the memory chapter, in each of its branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings import memory, memory_counts, memory_peaks
from lmlab.writeup.frames import memory as frames
from tests.writeup.memory_told import GIB, Change, collected, context, data_of, low, nothing, peaks


def test_every_finding_of_the_template_is_there_even_without_a_result() -> None:
    for device in ("cuda", "cpu"):
        measured, empty = (set(memory.findings(collected(c, device))) for c in (None, nothing))
        assert measured == empty
        assert all(memory.findings(collected(None, device)).values())


# Summary


def test_the_summary_names_the_largest_step_and_what_16_bit_did() -> None:
    found = collected(peaks(lambda point, mode: 8 - context(point) / 256 - 2 * low(point)))
    text = memory.summary(found, frames.frame(found))
    assert text.startswith("The largest training step (small at context 128, fp32) peaks at 7.5")
    assert text.endswith("bf16 autocast lowers the peak of 4 of 4 training steps and raises none.")


def test_without_a_second_precision_the_summary_compares_none() -> None:
    found = collected(precisions=["fp32"])
    assert "autocast" not in memory.summary(found, frames.frame(found))


def test_without_results_the_summary_says_so() -> None:
    found = collected(nothing)
    assert memory.summary(found, frames.frame(found)) == "No training step's memory was measured."


# Stage and composition


def test_one_stage_for_all_is_one_clause() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        data.get("modes", {"train_step": {}})["train_step"]["peak_phase"] = "backward"

    text = memory_peaks.stage(data_of(change, precisions=["fp32"]))
    assert text == "In fp32 the peak of all 4 training steps lies in the backward phase."


def test_several_stages_are_told_by_place() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data:
            phase = "optimizer" if context(point) == 128 else "backward"
            data["modes"]["train_step"]["peak_phase"] = phase

    assert memory_peaks.stage(data_of(change, precisions=["fp32"])) == (
        "In fp32 the peak lies in the optimizer phase for small and medium at context 128 and in "
        "the backward phase for small and medium at context 256."
    )


def test_the_largest_part_is_named_at_both_ends() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data:
            live = dict.fromkeys(frames.CATEGORIES, 0)
            live["activations" if context(point) == 256 else "optimizer_state"] = 3 * GIB
            live["parameters"] = GIB
            data["modes"]["train_step"]["live_categories_bytes"] = live

    assert memory_peaks.composition(data_of(change, precisions=["bf16"])) == (
        "The largest part of the peak of a training step of medium is in bf16 optimizer state at "
        "context 128 (75 %) and activations at context 256 (75 %)."
    )


@pytest.mark.parametrize(
    "sentence",
    [
        memory_peaks.stage,
        memory_peaks.composition,
        memory_counts.stream,
        lambda data: memory_peaks.low_precision(data, "train_step"),
        memory_counts.predictions,
        memory_counts.replayed,
        lambda data: memory_counts.unused(data, "cuda"),
    ],
)
def test_a_sentence_without_data_says_so(sentence: Callable[[pd.DataFrame], str]) -> None:
    text = sentence(data_of(nothing))
    assert any(word in text for word in ("not ", "no ", "No ", "Nothing"))
    assert not any(
        character.isdigit() for character in text.replace("fp32", "").replace("bf16", "")
    )


# Precision


def ratios(by_context: dict[int, float]) -> str:
    change = peaks(lambda point, mode: by_context[context(point)] if low(point) else 1.0)
    return memory_peaks.low_precision(
        data_of(change, sizes=["small"], contexts=sorted(by_context)), "train_step"
    )


def test_saving_everywhere() -> None:
    text = ratios({128: 0.9, 256: 0.7})
    assert text.startswith(
        "Training step: bf16 takes less at 2 of 2 places (small at every context), by up to 30 % "
        "(small at context 256). For small it saves at every context. Weights stay in fp32"
    )


def test_costing_at_short_contexts_and_saving_from_one_on() -> None:
    text = ratios({128: 1.2, 256: 1.0, 512: 0.8})
    assert "takes less at 1 of 3 places (small at context 512), by up to 20 %" in text
    assert "takes more at 1 of 3 places (small at context 128), by up to 20 %" in text
    assert "the same within 1 % at 1 place" in text
    assert "For small it starts to save at context 512." in text


def test_never_saving() -> None:
    assert "For small it never saves up to context 256." in ratios({128: 1.2, 256: 1.1})


def test_saving_here_and_there() -> None:
    assert "it saves at context 128 only" in ratios({128: 0.8, 256: 1.1})


def test_no_difference() -> None:
    text = ratios({128: 1.0, 256: 1.0})
    assert "bf16 and fp32 peak at the same height within 1 %" in text


def test_why_it_can_cost_more_are_the_copies() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            live = dict.fromkeys(frames.CATEGORIES, 0)
            live["weight_copies"] = GIB if low(point) else 0
            live["activations"] = (3 if low(point) == (context(point) == 256) else 2) * GIB
            mode["live_categories_bytes"] = live

    text = memory_peaks.low_precision(data_of(change), "forward_graph")
    assert text.endswith(
        "autocast adds 16-bit copies of them: for medium, at context 128 the copies are 1 GiB and "
        "activations and workspace fall by 1 GiB and at context 256 the copies are 1 GiB and "
        "activations and workspace grow by 1 GiB."
    )


def test_a_peak_of_the_optimizer_has_no_copies() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data:
            data["modes"]["train_step"]["peak_phase"] = "optimizer"

    text = memory_peaks.low_precision(data_of(change), "train_step")
    assert "at context 128 the peak is the optimizer's, when the copies are gone and at" in text


def test_activations_that_stay_are_said_to_stay() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            mode["live_categories_bytes"] = dict.fromkeys(frames.CATEGORIES, 0)

    text = memory_peaks.low_precision(data_of(change, contexts=[128]), "forward")
    assert "activations and workspace stay as they are" in text


# Counts


def test_the_stream_is_found_with_its_line() -> None:
    text = memory_counts.stream(data_of(precisions=["fp32"]))
    assert text.startswith("One fp32 tensor of the residual stream of medium at context 256 is 4 M")
    assert text.endswith(
        "found in all 4 training steps. In this one (fp32) there are 90: 60 without a line of the "
        "program (autograd makes them in backward), of the program's own lines most by "
        "lmlab/model/layers.py:109 (30); at its peak 40 tensors of this size are live."
    )


def streams(**changes: Any) -> Change:
    """What is found of the stream at context 128, in fp32."""

    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data and context(point) == 128 and not low(point):
            data["modes"]["train_step"]["stream"].update(changes)

    return change


def test_the_stream_is_told_where_most_of_it_is_live() -> None:
    text = memory_counts.stream(data_of(streams(allocated=1965, live_at_peak=1234)))
    assert "of medium at context 128 is" in text
    assert "In this one (fp32) there are 1,965: " in text
    assert text.endswith("at its peak 1,234 tensors of this size are live.")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ({"a.py:1": 1100, "b.py:2": 3}, ": of the program's own lines most by a.py:1 (1,100);"),
        ({"no line": 1200}, ": 1,200 without a line of the program (autograd makes them in backw"),
        ({}, "there are 90; at its peak"),
    ],
    ids=["only lines", "only autograd", "nobody knows"],
)
def test_who_made_the_stream(lines: dict[str, int], told: str) -> None:
    text = memory_counts.stream(data_of(streams(live_at_peak=41, lines=lines)))
    assert told in text
    assert ("of the program's own lines" in text) == ("a.py:1" in lines)


def test_a_stream_that_is_not_found_is_admitted() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data and context(point) == 256:
            data["modes"]["train_step"]["stream"]["allocated"] = 0

    text = memory_counts.stream(data_of(change))
    assert "at 4 of 8 points no allocation has exactly the derived size" in text


def test_what_lies_outside_pytorch_has_a_reason() -> None:
    text = memory_counts.outside(collected())
    assert text.startswith("Outside PyTorch's allocator lie 520 MiB (CUDA context")
    assert "no NCCL is running" in text


def test_nccl_is_named_where_it_runs() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            mode["accounting"]["nccl_is_running"] = True

    assert "NCCL is part of it" in memory_counts.outside(collected(change))
    assert "not known" in memory_counts.outside(collected(nothing))


def test_a_cpu_has_no_layers() -> None:
    found = collected(device="cpu", sizes=["cpu-small"], contexts=[16])
    data = frames.frame(found)
    assert memory_counts.outside(found).startswith("On a CPU there are no layers")
    assert memory_counts.unused(data, "cpu") == "A CPU's allocator reserves nothing ahead."
    assert memory_counts.replayed(data).startswith("There is no allocator's counter")


def test_reserved_memory_is_told_as_a_range() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data:
            mode = data["modes"]["train_step"]
            share = 0.5 if context(point) == 256 else 0.9
            reserved = mode["max_memory_allocated_bytes"] / share
            mode["accounting"]["peak_reserved_bytes"] = int(reserved)

    text = memory_counts.unused(data_of(change), "cuda")
    assert "at its peak, 10 % (small at context 128, fp32) to 50 % (small at context 256" in text


def test_nothing_ran_out_of_memory() -> None:
    assert memory_counts.out_of_memory(data_of()) == (
        "Nothing ran out of memory: all 24 recordings fit."
    )
    partly = memory_counts.out_of_memory(data_of(nothing))
    assert partly == "Of what was measured, nothing ran out of memory."


def test_what_ran_out_of_memory_says_what_it_asked_for() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data and point.parameters["size"] == "medium" and context(point) == 256:
            mode = data["modes"]["train_step"]
            mode.update(status="oom", reason="asked for 2.00 GiB in backward with 9.00 GiB live")

    text = memory_counts.out_of_memory(data_of(change, precisions=["fp32"]))
    assert text == (
        "1 recording ran out of memory: training step of medium at context 256 in fp32 (asked for "
        "2.00 GiB in backward with 9.00 GiB live)."
    )


def replay_off(share: float) -> Change:
    def change(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            mode["max_memory_allocated_bytes"] = int(mode["replayed_bytes"] / (1 - share))

    return change


def test_a_replay_that_meets_the_counter() -> None:
    text = memory_counts.replayed(data_of(replay_off(0.01)))
    assert "within 2 % for all 24 recordings; the largest difference is 1.0 %" in text


def test_a_replay_that_is_the_counter() -> None:
    text = memory_counts.replayed(data_of(replay_off(0.0)))
    assert text == "The replayed peak is max_memory_allocated to the byte for all 24 recordings."


def test_a_replay_that_does_not() -> None:
    text = memory_counts.replayed(data_of(replay_off(0.05)))
    assert "off by more than 2 % for 24 of 24 recordings" in text


def predicted(share: float, category: str) -> Change:
    """Predictions that miss by a share of the peak, all of it in one category."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            live = mode["live_categories_bytes"]
            peak = sum(live.values())
            missed = int(share * peak)
            parts = {**live, category: live[category] + missed}
            mode["max_memory_allocated_bytes"] = peak
            mode["predicted"] = {**mode["predicted"], "bytes": peak + missed,
                                 "categories_bytes": parts}  # fmt: skip

    return change


def test_predictions_that_are_near() -> None:
    text = memory_counts.predictions(data_of(predicted(-0.05, "activations")))
    assert text == (
        "The cost model's peak is off by −5.0 % to −5.0 % over 24 recordings: nowhere by more than "
        "10 %. It puts every peak into the phase in which it is measured."
    )


def test_a_peak_in_another_phase_than_predicted_is_counted() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data and context(point) == 256:
            data["modes"]["forward"]["peak_phase"] = "elsewhere"

    text = memory_counts.predictions(data_of(change))
    assert "It puts 20 of 24 peaks into the phase in which they are measured" in text


@pytest.mark.parametrize(("share", "sign"), [(-0.15, "−15.0 %"), (0.2, "+20.0 %")])
def test_predictions_that_are_far_name_the_category(share: float, sign: str) -> None:
    one = {"sizes": ["small"], "contexts": [1024], "precisions": ["fp32"]}
    text = memory_counts.predictions(data_of(predicted(share, "activations"), **one))
    assert "By more than 10 % for forward without gradient of small at context 1024, fp32" in text
    assert f"{sign}, most of it activations (predicted " in text


def test_what_the_model_does_not_describe_has_no_error() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            mode["predicted"] = None

    text = memory_counts.predictions(data_of(change))
    assert text == "The cost model makes no prediction for what was measured."


# Checkpointing
