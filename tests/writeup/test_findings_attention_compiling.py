"""What the attention chapter claims of compiling: the formula, and the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.findings.attention import findings
from tests.writeup import factory
from tests.writeup.attention_told import only, told
from tests.writeup.small_attention import (
    STUDY,
    both,
    collected,
    noted,
    scaled,
    without,
)


class TestCompiling:
    def test_the_formula_is_faster(self) -> None:
        text = told("compiled_attention")
        assert text.startswith("Compiled, 12 of 12 passes are faster, up to")
        assert "slower" not in text
        assert "from sequence" not in text
        assert text.endswith("The first pass takes 4.20 s, compilation included.")

    def test_a_lower_peak_is_told(self) -> None:
        low = noted("compiled", {"topic": "naive"}, peak_memory_bytes=2**20)
        assert " The peak of memory is 0." in told("compiled_attention", low)
        assert "peak of memory" not in told("compiled_attention")

    def test_the_formula_is_faster_from_a_sequence_on(self) -> None:
        slow = scaled({"compiled": 3.0}, topic="naive", sequence=1024)
        assert told("compiled_attention", slow).startswith(
            "Compiled, 8 of 12 passes are faster, all from sequence 4,096 on, up to"
        )

    def test_what_a_race_says_of_its_first_calls_is_no_compile_time(self) -> None:
        def warm(point: Point, values: dict[str, Any]) -> None:
            for arm in values["data"].get("arms", {}).values():
                if point.parameters["topic"] in {"benchmark", "leaderboard"}:
                    arm["first_call_s"] = 0.77777

        texts = " ".join(findings(collected(warm)).values())
        assert "0.778" not in texts
        assert "The first pass takes 4.20 s" in texts

    def test_the_formula_is_slower(self) -> None:
        text = told("compiled_attention", scaled({"compiled": 3.0}, topic="naive"))
        assert text.startswith("Compiled, 0 of 12 passes are faster; 12 slower, down to")

    def test_where_only_the_host_is_slower_the_race_says_so(self) -> None:
        slow = scaled({"compiled": 3.0}, topic="naive", sequence=1024)
        assert (
            " Then it is the host that is slower: in the race below (causal, batch 1), whose clock "
            "leaves the host out, compiled naive is faster in all 4 comparisons (1."
        ) in told("compiled_attention", slow)
        lost = both(slow, scaled({"compiled": 3.0}, topic="benchmark", sequence=128))
        assert "the host" not in told("compiled_attention", lost)

    def test_fused_attention_in_its_place_is_told(self) -> None:
        text = told("compiled_attention", noted("compiled", attention_replaced=2))
        assert "put PyTorch's fused attention in place of the formula" in text

    def test_without_compiled_arms(self) -> None:
        gone = without({"compiled": ("unsupported", "no compiler")})
        assert told("compiled_attention", gone) == (
            "No shape was measured both eager and compiled."
        )
        assert told("compiled_model", gone) == "The whole model was not compiled (no compiler)."
        assert "is not known" in told("compiling_cost", gone)

    def test_the_model_is_faster_at_every_size(self) -> None:
        assert told("compiled_model") == (
            "Compiled, forward is 1.36× as fast; forward with backward is 1.36× as fast; a train "
            "step is 1.36× as fast. Its peak of memory is 0.600× the eager one."
        )

    def test_the_model_is_faster_at_some(self) -> None:
        slow = scaled({"compiled": 2.0}, size="small", topic="model_compile")
        text = told("compiled_model", slow)
        assert "a train step is 1.36× as fast (medium), slower at small (0.682×)" in text

    def test_sizes_that_are_not_measured_are_not_every_size(self) -> None:
        text = told("compiled_model", only(size="small"))
        assert "a train step is 1.36× as fast. Its peak of memory is " in text
        assert text.endswith(" medium is not measured.")

    def test_an_eager_step_that_does_not_repeat_is_told(self) -> None:
        same = {"model": {"contexts": [512]}}
        slow = scaled({"eager": 2.0}, topic="model_compile", size="small")
        assert "took another time" not in told("compiling_cost", **same)
        text = told("compiling_cost", slow, **same)
        elsewhere = text.partition("the eager step, which took other processes another time: ")[2]
        assert elsewhere == (
            "small 14.2 ms here (2.73×, 3,300 steps), 7.08 ms beside another attention (1.36×, "
            "16,000 steps)."
        )

    @pytest.mark.parametrize(
        ("factor", "words"),
        [
            (3.0, "21.2 ms end to end (4.09×, 1,900 steps)."),
            (0.5, "3.54 ms end to end (0.682×, not made good)."),
            (1.1, ""),
        ],
    )
    def test_the_eager_step_of_the_end_to_end_chapter_counts_too(
        self, factor: float, words: str
    ) -> None:
        def step(point: Point, device: str) -> Result:
            third = 7.08 / 3 * (factor if point.parameters["size"] == "small" else 2.85)
            return factory.step(point, device, forward=third, backward=third, optimizer=third)

        other = factory.collected("end_to_end", step, what=STUDY).rows
        made = replace(collected(), beside={"end_to_end": other})
        text = findings(made)["compiling_cost"]
        assert "medium" not in text
        assert text.endswith(words or "steps, by size.")
        assert "beside another" not in text, "no such step at this context"
        rest = [row for row in made.rows if row.point.parameters["topic"] != "model"]
        assert findings(replace(made, rows=rest))["compiling_cost"] == text

    def test_what_another_process_took_counts_where_compiling_gave_nothing_too(self) -> None:
        alike = scaled({"compiled": 1.36}, topic="model_compile")
        slow = scaled({"naive": 2.0}, topic="model", size="small")
        text = told("compiling_cost", both(alike, slow), model={"contexts": [512]})
        assert "makes good beyond noise. Speed-ups and numbers of steps are known no" in text
        assert "small 7.08 ms here (1.00×, not made good), 14.2 ms beside another" in text

    def test_the_model_is_faster_nowhere(self) -> None:
        slow = scaled({"compiled": 2.0}, topic="model_compile")
        assert "forward is faster at no size, slower at every size (0.682×)" in told(
            "compiled_model", slow
        )
        assert told("compiling_cost", slow).endswith("which no later step makes good beyond noise.")

    def test_the_models_attention_was_replaced(self) -> None:
        text = told("compiled_model", noted("compiled", attention_replaced=12))
        assert text.endswith("put PyTorch's fused attention in place of the model's own.")

    def test_what_compiling_costs_in_steps(self) -> None:
        assert told("compiling_cost") == (
            "The first compiled step takes 30.0 s; that is made good after about 6,000 to 16,000 "
            "steps, by size."
        )

    def test_steps_that_are_not_faster_beyond_noise_make_nothing_good(self) -> None:
        alike = scaled({"compiled": 1.36}, topic="model_compile")
        assert "makes good beyond noise" in told("compiling_cost", alike)
        some = scaled({"compiled": 1.36}, topic="model_compile", size="small")
        assert told("compiling_cost", some).endswith("made good after about 6,000 steps (medium).")
