"""Every sentence of the precision and machine chapters in every branch."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.findings import layernorm, machine
from lmlab.writeup.findings.precision import findings
from tests.writeup import factory, synthetic

Change = Callable[[dict[str, Any]], None]


def told(topic: str, change: Change) -> dict[str, str]:
    """The findings after a change to one topic's data."""

    def make(point: Point, device: str) -> Result:
        result = synthetic.precision(point, device)
        if point.parameters["topic"] != topic:
            return result
        data = deepcopy(dict(result.data))
        change(data)
        return factory.result(point, device, data=data)

    return findings(factory.collected("precision", make))


def unchanged(data: dict[str, Any]) -> None:
    return None


def swap_loops(data: dict[str, Any]) -> None:
    first, second = data["loops"][:2]
    for key in ("result", "error"):
        first[key], second[key] = second[key], first[key]


class TestAccumulation:
    def test_fp32_is_closer(self) -> None:
        text = told("accumulation", unchanged)["accumulation"]
        assert text.endswith("the fp32 accumulator is closer, by a factor of 350.")

    def test_swapped_sums_turn_it_round(self) -> None:
        text = told("accumulation", swap_loops)["accumulation"]
        assert text.endswith("the fp16 accumulator is closer, by a factor of 350.")
        assert "ends at 10.0001 in fp16" in told("accumulation", swap_loops)["summary"]

    def test_equal_sums(self) -> None:
        def equal(data: dict[str, Any]) -> None:
            for loop in data["loops"]:
                loop.update(result=10.0, error=0.0)

        assert told("accumulation", equal)["accumulation"].endswith(
            "neither accumulator is closer."
        )

    def test_casting_makes_no_difference_and_the_term_explains_the_rest(self) -> None:
        text = told("accumulation", unchanged)["cast"]
        assert "gives the same result (10.0021)" in text
        assert "fp16 holds as 0.0100021: 1,000 times that is 10.0021." in text

    def test_casting_makes_a_difference_that_the_term_does_not_explain(self) -> None:
        def differ(data: dict[str, Any]) -> None:
            data["loops"][2].update(result=10.5, error=0.5)

        text = told("accumulation", differ)["cast"]
        assert "gives 10.0021 instead of 10.5000" in text
        assert "which is not what came out." in text


class TestDrift:
    def test_two_stretches_that_err_in_opposite_directions(self) -> None:
        text = told("accumulation", unchanged)["drift"]
        assert "they are 0.00391 apart and each addition adds 0.0117, too much" in text
        assert "they are 0.00781 apart and each addition adds 0.00781, too little" in text
        assert "largest at step 750, +0.50; the last stretch errs the other way" in text

    def test_the_error_may_be_largest_at_the_end(self) -> None:
        def one_way(data: dict[str, Any]) -> None:
            trace = data["fp16_trace"]
            trace["added"] = [0.009] * len(trace["step"])
            trace["sum"] = [0.009 * step for step in trace["step"]]

        text = told("accumulation", one_way)["drift"]
        assert text.endswith("It is largest at step 1,000, −1.0, the end of the sum.")

    def test_the_error_may_shrink_without_a_change_of_direction(self) -> None:
        def back(data: dict[str, Any]) -> None:
            trace = data["fp16_trace"]
            trace["added"] = [0.009] * len(trace["step"])
            trace["sum"] = [0.01 * step + 0.2 for step in trace["step"]]
            trace["sum"][10] += 1.0

        assert told("accumulation", back)["drift"].endswith("and +0.20 at the end.")

    def test_a_fine_spacing_explains_nothing(self) -> None:
        def fine(data: dict[str, Any]) -> None:
            data["fp16_trace"]["spacing"] = [1e-6] * len(data["fp16_trace"]["step"])

        assert "spacing does not explain an error here" in told("accumulation", fine)["drift"]


class TestAutocast:
    def test_types_that_choose_alike_share_a_sentence(self) -> None:
        assert told("accumulation", unchanged)["autocast"] == (
            "Under autocast to fp16 and bf16 these stay in fp32: parameters, output of LayerNorm, "
            "loss and gradients; in 16 bit: output of fc1 and logits."
        )

    def test_types_that_differ_have_their_own(self) -> None:
        def lower_norm(data: dict[str, Any]) -> None:
            if data["dtype"] == "bf16":
                data["components"][2]["dtype"] = "bfloat16"

        text = told("autocast", lower_norm)["autocast"]
        assert "Under autocast to fp16 these stay in fp32: parameters, output of LayerNorm," in text
        assert "in 16 bit: output of fc1, output of LayerNorm and logits." in text

    @pytest.mark.parametrize(
        ("dtype", "claim"), [("float32", "everything"), ("float16", "nothing")]
    )
    def test_all_or_nothing(self, dtype: str, claim: str) -> None:
        def all_alike(data: dict[str, Any]) -> None:
            for component in data["components"]:
                component["dtype"] = dtype

        assert told("autocast", all_alike)["autocast"] == (
            f"Under autocast to fp16 and bf16 {claim} stays in fp32."
        )

    def test_an_unsupported_type_is_said_with_its_reason(self) -> None:
        def make(point: Point, device: str) -> Result:
            if point.parameters.get("dtype") == "fp16":
                return factory.failed(point, "unsupported", "no fp16 on this CPU", device)
            return synthetic.precision(point, device)

        text = findings(factory.collected("precision", make))["autocast"]
        assert text.endswith("without an answer: fp16, unsupported (no fp16 on this CPU).")


class TestLayerNorm:
    def test_range(self) -> None:
        text = told("layernorm", unchanged)["variance_range"]
        assert (
            "In fp16 the variance overflows at every scale tested from 1,000 to 100,000 and "
            "vanishes at every scale tested from 1.00 × 10⁻⁵ to 0.000100. "
            "In bf16 the variance stays in range at every scale tested from 1.00 × 10⁻⁵ to 100,000."
        ) in text

    @pytest.mark.parametrize(
        ("lost", "where"),
        [
            ({1e-5}, "at a scale of 1.00 × 10⁻⁵ (the smallest tested)."),
            ({1e5}, "at a scale of 100,000 (the largest tested)."),
            ({1e3}, "at a scale of 1,000."),
            ({1e3, 1e4}, "at every scale tested from 1,000 to 10,000."),
            ({1e3, 1e5}, "at scales of 1,000 and 100,000."),
        ],
        ids=["smallest", "largest", "between", "neighbours", "with a gap"],
    )
    def test_nothing_is_claimed_beyond_the_scales_tested(
        self, lost: set[float], where: str
    ) -> None:
        def lose(data: dict[str, Any]) -> None:
            for row in data["rows"]:
                if row["dtype"] == "bf16":
                    row["overflow"] = any(math.isclose(row["scale"], scale) for scale in lost)

        text = told("layernorm", lose)["variance_range"]
        assert f"In bf16 the variance overflows {where} " in text

    @pytest.mark.parametrize(
        ("lost", "sentence"),
        [
            (
                {1e2},
                " At a scale of 100 the variance itself (10,000) would fit below 65,504, the "
                "largest number of fp16; single squares do not. In bf16",
            ),
            ({1e1, 1e2}, " At every scale tested from 10 to 100 the variance itself (10,000 at mo"),
        ],
        ids=["one scale", "two scales"],
    )
    def test_squares_that_overflow_where_the_variance_fits(
        self, lost: set[float], sentence: str
    ) -> None:
        def lose(data: dict[str, Any]) -> None:
            for row in data["rows"]:
                here = any(math.isclose(row["scale"], scale) for scale in lost)
                row["overflow"] |= row["dtype"] == "fp16" and here

        assert sentence in told("layernorm", lose)["variance_range"]

    def test_squares_are_not_blamed_where_the_variance_is_too_large_too(self) -> None:
        assert "single squares" not in told("layernorm", unchanged)["variance_range"]

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)],
    )
    def test_the_largest_number_of_a_type(self, name: str, dtype: torch.dtype) -> None:
        assert torch.finfo(dtype).max == layernorm.LARGEST_NUMBER[name]

    def test_squares_are_not_blamed_near_the_largest_number(self) -> None:
        def near(data: dict[str, Any]) -> None:
            for row in data["rows"]:
                if row["dtype"] == "fp16" and row["overflow"]:
                    row["true_variance"] = 65_000.0

        assert "single squares" not in told("layernorm", near)["variance_range"]

    def test_a_single_scale_is_called_the_only_one(self) -> None:
        def one(data: dict[str, Any]) -> None:
            data["rows"] = [row for row in data["rows"] if row["scale"] == 1.0]

        text = told("layernorm", one)["variance_range"]
        assert "In fp16 the variance stays in range at a scale of 1 (the only one tested)." in text

    def test_digits_from_the_most_exact_to_the_least(self) -> None:
        text = told("layernorm", unchanged)["variance_digits"]
        assert text.index("in fp32") < text.index("in fp16") < text.index("in bf16")
        assert "loses digits" not in text

    def test_swapping_two_types_turns_the_order_round(self) -> None:
        def swap(data: dict[str, Any]) -> None:
            names = {"fp16": "bf16", "bf16": "fp16"}
            for row in data["rows"]:
                row["dtype"] = names.get(row["dtype"], row["dtype"])

        swapped = told("layernorm", swap)
        text = swapped["variance_digits"]
        assert text.index("in bf16") < text.index("in fp16")
        assert "In bf16 the variance overflows" in swapped["variance_range"]
        assert swapped["bf16_enough"].startswith("bf16 has neither the range nor the precision")

    def test_fading_digits(self) -> None:
        def fade(data: dict[str, Any]) -> None:
            next(r for r in data["rows"] if r["dtype"] == "fp16" and r["scale"] > 5e-4)[
                "relative_error"
            ] = 0.1

        assert (
            "fp16 loses digits: the error reaches 0.10 at a scale of 0.00100"
            in (told("layernorm", fade)["variance_digits"])
        )

    @pytest.mark.parametrize(
        ("overflow", "error", "verdict"),
        [
            (False, 4e-3, "bf16 has the range but not the precision"),
            (False, 6e-8, "bf16 has the range and, on these inputs, the precision"),
            (True, 4e-3, "bf16 has neither the range nor the precision"),
            (True, 6e-8, "bf16 has the precision"),
        ],
    )
    def test_whether_bf16_is_enough(self, overflow: bool, error: float, verdict: str) -> None:
        def change(data: dict[str, Any]) -> None:
            rows = [row for row in data["rows"] if row["dtype"] == "bf16"]
            for row in rows:
                row["relative_error"] = error
            rows[-1].update(overflow=overflow, relative_error=None if overflow else error)

        assert told("layernorm", change)["bf16_enough"].startswith(verdict)

    def test_pytorchs_own_layernorm(self) -> None:
        assert "stays finite at every scale" in told("layernorm", unchanged)["layernorm_output"]

        def lose(data: dict[str, Any]) -> None:
            data["layernorm_rows"][-1]["largest_error"] = None

        text = told("layernorm", lose)["layernorm_output"]
        assert "does not survive: " in text
        assert "in fp32 it is not finite at 100,000" in text

        def drop(data: dict[str, Any]) -> None:
            del data["layernorm_rows"]

        assert "was not measured" in told("layernorm", drop)["layernorm_output"]


def test_without_results_every_sentence_says_so() -> None:
    sentences = findings(factory.collected("precision", lambda point, device: None))
    for name, text in sentences.items():
        assert "not " in text, name
        assert text.endswith("."), name


def without_peaks(collected: Collected) -> Collected:
    assert collected.card is not None
    data = {**collected.card.data, "peaks": None}
    card = factory.result(collected.rows[0].point, data=data)
    return factory.collected("machine", lambda point, device: card, card=card)


class TestMachine:
    def test_a_gpu_with_known_peaks(self) -> None:
        text = machine.findings(synthetic.collected("machine"))
        assert "48.0 TFLOP/s in fp32 (72 % of the stated peak)" in text["ceilings"]
        assert text["summary"] == "The machine is one NVIDIA H200."

    def test_a_gpu_without(self) -> None:
        text = machine.findings(without_peaks(synthetic.collected("machine")))["ceilings"]
        assert "48.0 TFLOP/s in fp32," in text
        assert text.endswith("hence no MFU.")

    def test_a_cpu_is_called_one(self) -> None:
        text = machine.findings(synthetic.collected("machine", "cpu"))["summary"]
        assert text.endswith("(CPU); its times say nothing about a GPU.")

    def test_no_card(self) -> None:
        text = machine.findings(factory.collected("machine", lambda point, device: None))
        assert text["ceilings"].startswith("No matmul ceiling was measured")
