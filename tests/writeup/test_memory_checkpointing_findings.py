"""What the memory chapter claims of checkpointing, in every branch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.findings import memory_checkpointing
from lmlab.writeup.frames import memory as frames
from tests.writeup import factory, synthetic_memory
from tests.writeup.memory_told import GIB, SMALL, collected, nothing, study


def arms_with(**changes: dict[str, Any]) -> Collected:
    """The synthetic strategies with some arms changed."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for arm in data.get("arms", ()):
            arm.update(changes.get(arm["name"].replace("-", "_"), {}))

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
    assert text.endswith(
        "The cost model puts this peak into the last segment of backward, when 99 % of the "
        "gradients are there: the inputs of the other segments are gone and one segment's "
        "activations remain, so the shortest segment is best, not one near √48 = 6.9."
    )


def predicted(phase: str, gradient_share: float) -> dict[str, Any]:
    """What the cost model says of an arm's peak: with all gradients there, no activation is."""
    parts = {
        **dict.fromkeys(frames.CATEGORIES, 0),
        "parameters": GIB,
        "gradients": int(gradient_share * GIB),
        "activations": 0 if gradient_share == 1 else GIB,
    }
    moment = {"bytes": 30 * GIB, "phase": phase, "moment": "", "categories_bytes": parts}
    return {"predicted": moment}


@pytest.mark.parametrize(
    ("phase", "share", "told"),
    [
        ("backward", 0.97, "into the last segment of backward, when 97 % of the gradients"),
        ("backward", 0.02, "about 64 times its input, so the sum of 48 / k inputs and k blocks'"),
        ("optimizer", 1.0, "into the optimizer phase, when no activation is left: no other"),
        ("backward", 1.0, "into the backward phase, when no activation is left: no other"),
    ],
    ids=["last segment", "first segment", "optimizer", "end of backward"],
)
def test_the_reason_for_the_best_segment_is_where_its_peak_is(
    phase: str, share: float, told: str
) -> None:
    found = arms_with(every_1=predicted(phase, share))
    assert told in memory_checkpointing.best(found, frames.arms(found))


def test_a_peak_in_forward_has_no_rule() -> None:
    found = arms_with(every_1=predicted("forward", 0.0))
    assert memory_checkpointing.best(found, frames.arms(found)).endswith(" GiB).")


def test_half_of_the_model_as_a_segment_has_no_rule() -> None:
    # Then few gradients are there in the last segment too: first and last cannot be told apart.
    half = {"peak_bytes": 20 * GIB, **predicted("backward", 0.3)}
    found = arms_with(every_24=half)
    assert memory_checkpointing.best(found, frames.arms(found)).endswith(" GiB).")


def test_a_longer_segment_that_is_best_is_not_called_the_shortest() -> None:
    late = {"peak_bytes": 20 * GIB, **predicted("backward", 0.9)}
    found = arms_with(every_4=late)
    text = memory_checkpointing.best(found, frames.arms(found))
    assert text.endswith("one segment's activations remain.")


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
    assert text.endswith(
        "The cost model puts both peaks into the last block of backward, when 99 % of the "
        "gradients are there: the 2.25 GiB that nesting keeps less would be freed by then anyway."
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"every_1": predicted("backward", 0.02)},
        {"nested": predicted("optimizer", 1.0)},
        {"nested": predicted("backward", 1.0)},
        {"nested": {"predicted": None}},
        {"nested": {"kept_bytes": 5 * GIB}},
        {"nested": {"peak_bytes": 20 * GIB}},
    ],
    ids=["early", "optimizer", "no activation", "not predicted", "keeps more", "lower"],
)
def test_no_reason_for_the_same_peak_where_the_data_have_none(changes: Any) -> None:
    found = arms_with(**changes)
    assert "freed by then" not in memory_checkpointing.nesting(found, frames.arms(found))


def test_nesting_that_lowers_the_peak() -> None:
    found = arms_with(nested={"peak_bytes": 20 * GIB})
    text = memory_checkpointing.nesting(found, frames.arms(found))
    assert "% below its peak" in text


def test_nesting_alone() -> None:
    failed = {"status": "oom", "reason": "x", "peak_bytes": None, "kept_bytes": None}
    found = arms_with(every_1=failed)
    assert memory_checkpointing.nesting(found, frames.arms(found)).endswith("35.1 GiB.")
