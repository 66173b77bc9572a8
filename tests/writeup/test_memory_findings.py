"""Every sentence of the memory chapter, in each of its branches."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pandas as pd
import pytest

from lmlab.study.config import Study, load
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.findings import memory, memory_checkpointing, memory_counts, memory_peaks
from lmlab.writeup.frames import memory as frames
from tests.writeup import factory, synthetic_memory

GIB = 2**30
Change = Callable[[Point, dict[str, Any]], None]


def study(device: str = "cuda", **block: Any) -> Study:
    values = factory.config()
    for blocks in values["studies"].values():
        blocks["memory"].update(block)
    return load(values, device)


SMALL = {"sizes": ["small", "medium"], "contexts": [128, 256]}


def collected(change: Change | None = None, device: str = "cuda", **block: Any) -> Collected:
    """Two sizes at two contexts; `change` edits the data of a point before it is a result."""

    def make(point: Point, device: str) -> Result | None:
        result = synthetic_memory.memory(point, device)
        data = deepcopy(dict(result.data))
        if change is not None:
            change(point, data)
        if data.get("missing"):
            return None
        kept = {n: m for n, m in result.measurements.items() if n in data.get("only", [n])}
        return factory.result(point, device, data=data, measurements=kept)

    return factory.collected("memory", make, device, what=study(device, **{**SMALL, **block}))


def nothing(point: Point, data: dict[str, Any]) -> None:
    data["missing"] = True


def peaks(heights: Callable[[Point, str], float]) -> Change:
    """Sets each mode's peak in GiB."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for name, mode in data.get("modes", {}).items():
            mode["max_memory_allocated_bytes"] = int(heights(point, name) * GIB)

    return change


def data_of(change: Change | None = None, device: str = "cuda", **block: Any) -> pd.DataFrame:
    return frames.frame(collected(change, device, **block))


def low(point: Point) -> bool:
    return point.parameters["precision"] == "bf16"


def context(point: Point) -> int:
    return int(point.parameters["context"])


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
        "The largest part of the peak of a training step of small is in bf16 optimizer state at "
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
        "autocast adds 16-bit copies of them: for small, at context 128 the copies are 1 GiB and "
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
    text = memory_counts.stream(data_of())
    assert text.startswith("One fp32 tensor of the residual stream of small at context 128 is 1.50")
    assert "found in all 8 training steps: in this one (fp32) 90, of which 40 are live" in text
    assert text.endswith("most often by lmlab/model/layers.py:109.")


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


def arms_with(**changes: dict[str, Any]) -> Collected:
    """The synthetic strategies with some arms changed."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for arm in data.get("arms", ()):
            arm.update(changes.get(arm["name"].replace("-", "_"), {}))
        if "arms" in data:
            data["only"] = [arm["name"] for arm in data["arms"] if arm["status"] == "ok"]

    return collected(change)


def test_a_model_that_does_not_fit_whole_runs_with_checkpoints() -> None:
    text = memory_checkpointing.fits(frames.arms(collected()))
    assert text.startswith("Keeping everything, which would need 179 GiB, does not fit here; with")
    assert "10 of 11 strategies ran; not: none (did not fit" in text


FITS = {"status": "ok", "reason": None, "peak_bytes": 100 * GIB, "kept_bytes": 70 * GIB}


def test_strategies_that_all_fit() -> None:
    assert memory_checkpointing.fits(frames.arms(arms_with(none=FITS))) == (
        "Every strategy fits here."
    )


def test_another_strategy_that_did_not_run_is_named() -> None:
    failed = {"status": "failed", "reason": "gradients differ", "peak_bytes": None}
    text = memory_checkpointing.fits(frames.arms(arms_with(none=FITS, every_24=failed)))
    assert text == "10 of 11 strategies ran; not: every-24 (gradients differ)."


def test_nothing_of_checkpointing() -> None:
    empty = collected(nothing)
    arms = frames.arms(empty)
    assert memory_checkpointing.fits(arms) == memory_checkpointing.NOT_MEASURED
    assert memory_checkpointing.best(empty, arms) == memory_checkpointing.NOT_MEASURED
    assert memory_checkpointing.price(arms) == memory_checkpointing.NOT_MEASURED
    assert "not measured" in memory_checkpointing.nesting(empty, arms)


def test_the_best_segment_by_measurement_and_by_the_model() -> None:
    found = collected()
    text = memory_checkpointing.best(found, frames.arms(found))
    assert "is that of 1 block, 35.1 GiB, as the cost model predicts (34.7 GiB)." in text
    assert "not near √48 = 6.9." in text


def test_a_best_segment_that_is_as_good_to_the_model_as_its_own() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "arms" in data:
            data["best_predicted"]["blocks"] = 2

    found = collected(change)
    assert "as the cost model predicts" in memory_checkpointing.best(found, frames.arms(found))


def test_a_best_segment_that_the_model_did_not_choose() -> None:
    found = arms_with(every_4={"peak_bytes": 20 * GIB})
    text = memory_checkpointing.best(found, frames.arms(found))
    assert "is that of 4 blocks, 20 GiB, while the cost model chooses 1 block" in text


def test_a_model_without_predictions_has_a_measured_best_only() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for arm in data.get("arms", ()):
            arm["predicted"] = None
        data["best_predicted"] = None

    found = collected(change)
    text = memory_checkpointing.best(found, frames.arms(found))
    assert text.endswith("the cost model does not describe this model.")


def times(**medians: float) -> Collected:
    """The synthetic strategies with some times changed; `none` fits."""

    def make(point: Point, device: str) -> Result | None:
        result = synthetic_memory.memory(point, device)
        if point.parameters["topic"] != "checkpointing":
            return result
        data = deepcopy(dict(result.data))
        data["arms"][0].update(FITS, median_ms=900.0)
        samples = {name: m["samples_ms"] for name, m in result.measurements.items()}
        samples["none"] = [900.0, 901.0]
        for name, median in medians.items():
            samples[name.replace("_", "-")] = [median, median + 1.0]
        measurements = {name: factory.measurement(s) for name, s in samples.items()}
        return factory.result(point, device, data=data, measurements=measurements)

    return factory.collected("memory", make, "cuda", what=study("cuda", **SMALL))


def test_the_price_of_the_lowest_peak() -> None:
    text = memory_checkpointing.price(frames.arms(times(every_1=1200.0)))
    assert text == (
        "Against none, which keeps everything, every-1 lowers the peak by 65 % and makes a step "
        "1.33× as long."
    )


def test_a_price_within_noise() -> None:
    text = memory_checkpointing.price(frames.arms(times(every_1=900.5)))
    assert text.endswith("the times of their steps are the same within noise.")


def test_checkpointing_that_lowers_nothing() -> None:
    found = times()
    arms = frames.arms(found)
    arms["peak_bytes"] = float(GIB)
    arms.loc[arms["name"] != "none", "median_ms"] = 2000.0
    assert memory_checkpointing.price(arms).startswith("Keeping everything has the lowest peak")


def test_where_everything_does_not_fit_the_others_are_compared() -> None:
    arms = frames.arms(collected())
    text = memory_checkpointing.price(arms)
    assert text.startswith("Against every-2, the fastest other one, every-1 lowers the peak by 8.1")
    alone = arms[arms["name"] == "every-1"]
    assert memory_checkpointing.price(alone).startswith("Only every-1 ran")


def test_nesting_leaves_less_and_peaks_as_high() -> None:
    found = collected()
    text = memory_checkpointing.nesting(found, frames.arms(found))
    assert text.startswith("Nested, 48 blocks are halved 6 times: forward leaves 100 MiB")
    assert "leaves 2.34 GiB, that is the same peak within 1 %, in a step 2.25× as long" in text


def test_nesting_that_lowers_the_peak() -> None:
    found = arms_with(nested={"peak_bytes": 20 * GIB})
    text = memory_checkpointing.nesting(found, frames.arms(found))
    assert "% below its peak" in text


def test_nesting_alone() -> None:
    failed = {"status": "oom", "reason": "x", "peak_bytes": None, "kept_bytes": None}
    found = arms_with(every_1=failed)
    assert memory_checkpointing.nesting(found, frames.arms(found)).endswith("35.1 GiB.")
