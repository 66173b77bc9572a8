"""What the attention chapter claims, in every branch, and turned round with its data."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings.attention import findings
from lmlab.writeup.findings.attention_model import _pace
from lmlab.writeup.findings.attention_naive import _below
from tests.writeup import synthetic
from tests.writeup.attention_told import OOM, all_ok, only, told
from tests.writeup.small_attention import (
    both,
    collected,
    noisy,
    noted,
    nothing,
    sampled_once,
    scaled,
    without,
)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_finding_is_a_sentence(device: str) -> None:
    for name, text in findings(synthetic.collected("attention", device)).items():
        assert text.endswith("."), name
        assert "nan" not in text, name
        assert "None" not in text, name


def test_without_results_every_finding_says_so() -> None:
    for name, text in findings(collected(nothing)).items():
        assert any(word in text for word in ("not", "No ", "no ")), name


class TestSummary:
    def test_says_what_our_kernels_give(self) -> None:
        text = told("summary")
        assert text.startswith(
            "Forward and backward of one head of attention, our Triton kernels are 4.00× (head dim "
            "64, sequence 128, bf16) to 5.91× (head dim 64, sequence 4,096, bf16) as fast as the "
            "naive formula and, beside the best other variant, 1.47× in bf16. At 16 heads over "
            "16,384 tokens in bf16 our kernels take 4.11 ms at head dim 64 (the best other, SDPA "
            "cuDNN, 4.04 ms; ours is 0.983× as fast, within noise). With them"
        )
        assert "With them a train step is up to 1.67× as fast (small at context 1024)." in text

    def test_precisions_are_told_apart_and_whom_one_of_them_leaves_out(self) -> None:
        fast = scaled({"flash": 0.5}, topic="benchmark", precision="fp32")
        text = told("summary", fast, benchmark={"precisions": ["bf16", "fp32"]})
        assert (
            "beside the best other variant, 1.47× in bf16 and 2.94× to 3.89× in fp32 (where SDPA "
            "flash and SDPA cuDNN do not run). At 16 heads"
        ) in text

    def test_a_ratio_that_rests_on_one_sample_says_so(self) -> None:
        text = told("summary", sampled_once({"naive"}, topic="benchmark", sequence=4096))
        assert "5.91× (head dim 64, sequence 4,096, bf16; one sample) as fast" in text
        assert "sequence 128, bf16) to" in text
        assert "1.47× in bf16" in text, "the best other has its samples"
        others = {"sdpa_efficient", "sdpa_flash", "flex", "sdpa_cudnn"}
        text = told("summary", sampled_once(others, topic="benchmark", sequence=4096))
        assert "the best other variant, 1.47× (one sample) in bf16" in text

    def test_one_shape_and_noise(self) -> None:
        one = told("summary", only(topic="benchmark", sequence=4096))
        assert one.count("5.91×") == 1
        assert (
            "5.91× (head dim 64, sequence 4,096, bf16) as fast as the naive formula (within noise "
            "at 2 of 2 shapes) and, beside"
        ) in told("summary", noisy)

    def test_the_published_shape_a_head_dim_at_a_time(self) -> None:
        two = {"head_dims": [64, 128]}
        slow = scaled({"flash": 2.0}, topic="leaderboard", head_dim=128)
        text = told("summary", slow, leaderboard=two)
        assert "ours is 0.983× as fast, within noise) and 16.4 ms at head dim 128 (the" in text
        assert "ours is 0.491× as fast)." in text
        alone = told("summary", leaderboard={"arms": ["flash"]})
        assert "our kernels take 4.11 ms at head dim 64. With" in alone
        broke = without({"flash": ("failed", "it broke")}, topic="leaderboard")
        assert "heads over" not in told("summary", broke)

    def test_without_our_kernels_naive_speaks(self) -> None:
        text = told("summary", without({"flash": ("unsupported", "no such GPU")}))
        assert text == (
            "Naive attention over 4,096 tokens takes 0.183 ms forward and backward (head dim 64, "
            "bf16); our kernels were not timed beside it."
        )

    def test_failures_of_ours_are_counted(self) -> None:
        wrong = without({"flash": ("failed", "off by 1")}, topic="benchmark", sequence=128)
        assert "At 1 shape they failed and have no time." in told("summary", wrong)

    def test_a_model_that_gains_nothing_is_not_called_faster(self) -> None:
        text = told("summary", scaled({"flash": 1.9}, topic="model"))
        assert text.endswith("With them no train step is faster beyond noise, of 4 measured.")

    def test_nothing(self) -> None:
        assert told("summary", nothing) == "No attention was measured."


class TestNaive:
    def test_where_it_runs_out_and_why(self) -> None:
        text = told("out_of_memory")
        assert text.startswith(
            "Naive attention runs out of memory at head dim 64, sequence 65,536 (asked for 128.00"
        )
        assert "; the largest measured below it, head dim 64, sequence 8,192, fits. It" in text
        assert "It runs out because every score is written to memory" in text
        assert "not measured" not in text

    def test_where_all_fits(self) -> None:
        text = told("out_of_memory", all_ok)
        assert text.startswith("No measured shape runs out of memory: the largest, head dim 64,")
        assert (
            "6.08 GiB at its peak (1 of 7 shapes is not measured, head dim 64, sequence 65,536 "
            "among them). Every score is"
        ) in text

    def test_where_nothing_fits(self) -> None:
        text = told("out_of_memory", without({"naive": OOM}, topic="naive"))
        assert text.startswith("Naive attention runs out of memory at head dim 16, sequence 1,024")
        assert "fits" not in text

    def test_the_smallest_shape_that_does_not_fit_and_the_largest_that_does(self) -> None:
        assert told("account") == (
            "At head dim 64, sequence 65,536, which does not fit, 3 tensors the size of the "
            "scores, 128 GiB each, are 99.8 % of the 385 GiB that the formula asks for at the "
            "peak, and forward alone for 257 GiB. At head dim 64, sequence 8,192, the largest "
            "measured that fits, 3 tensors the size of the scores, 2 GiB each, are 98.7 % of the "
            "6.08 GiB that the formula asks for at the peak; the allocator counted 6.08 GiB, 100 % "
            "of it."
        )

    def test_only_the_largest_where_all_fit(self) -> None:
        assert told("account", all_ok).startswith("At head dim 64, sequence 8,192, the largest")

    @pytest.mark.parametrize(
        ("counted", "words"),
        [(2**40, "more by 509× such a tensor."), (2**20, "less by 3.04× such a tensor.")],
    )
    def test_what_the_formula_misses_is_told_in_tensors(self, counted: int, words: str) -> None:
        assert told("account", noted("naive", peak_memory_bytes=counted)).endswith(words)

    def test_on_a_cpu_nobody_counts(self) -> None:
        assert told("account", all_ok, device="cpu").endswith("nothing counted them here.")

    def test_growth_is_the_square(self) -> None:
        text = told("growth_sequence", naive={"sequences": [1024, 4096, 8192, 16384]})
        assert "to the power of 2.00 (the square)" in text
        assert "time, from sequence 4,096 on" in text

    def test_growth_that_is_not_the_square_is_called_so(self) -> None:
        def linear(point: Point, values: dict[str, Any]) -> None:
            arm = values["data"].get("arms", {}).get("naive", {})
            if "saved_bytes" in arm:
                arm["saved_bytes"] = point.parameters.get("sequence", 1)

        assert "to the power of 1.00 (not the square)" in told("growth_sequence", linear)

    def test_one_sequence_says_nothing_of_growth(self) -> None:
        one = {"sequences": [1024], "beyond": []}
        assert "is not known" in told("growth_sequence", naive=one)

    def test_a_wider_head_costs_less_than_its_arithmetic(self) -> None:
        text = told("growth_head_dim")
        assert text.startswith("At sequence 8,192, head dim 64 against 16, 4.0× the arithmetic")
        assert "less than the arithmetic" in text

    def test_or_as_much(self) -> None:
        wide = scaled({"naive": 4.0}, head_dim=64, topic="naive")
        assert "no less than the arithmetic" in told("growth_head_dim", wide)

    @pytest.mark.parametrize(("longer_ms", "flat"), [(0.5, True), (4.0, False)])
    def test_short_sequences_that_hardly_differ_are_told(
        self, longer_ms: float, flat: bool
    ) -> None:
        rows = [(16, "forward", 256, 0.4), (16, "forward", 1024, longer_ms)]
        short = pd.DataFrame(rows, columns=["head_dim", "pass", "sequence", "median_ms"])
        assert (_below(short) != "") is flat
        assert _below(short[:1]) == ""

    def test_short_passes_of_several_processes_are_not_called_alike(self) -> None:
        rows = [(d, "forward", s, 0.4) for d in (16, 64) for s in (256, 1024)]
        short = pd.DataFrame(rows, columns=["head_dim", "pass", "sequence", "median_ms"])
        assert _below(short) == (
            " Below that it hardly grows: such short passes are set not by arithmetic but by the "
            "pace of the host, which differs from process to process; each shape has a process of "
            "its own, and head dims do not compare there."
        )
        assert _below(short[:2]).endswith("which differs from process to process.")

    def test_one_head_dim_says_nothing(self) -> None:
        one = {"head_dims": [16], "beyond": []}
        assert "too few ran" in told("growth_head_dim", naive=one)


class TestModel:
    def test_faster_and_smaller(self) -> None:
        assert told("model_attention") == (
            "With flash (ours) a train step is faster beyond noise at 4 of 4 places (small at "
            "context 128 and 1,024; medium at context 128 and 1,024), up to 1.67× (small at "
            "context 1,024). The peak falls by up to 26.2 GiB, from 49.2 GiB to 22.9 GiB (medium "
            "at context 1,024)."
        )

    def test_slower(self) -> None:
        text = told("model_attention", scaled({"flash": 3.0}, topic="model"))
        assert text.startswith(
            "With flash (ours) a train step is faster beyond noise at 0 of 4 places, slower at 4, "
            "down to"
        )

    def test_neither_faster_nor_slower_at_the_only_place_measured(self) -> None:
        alike = both(only(size="small", context=1024), scaled({"flash": 1.67}, topic="model"))
        text = told("model_attention", alike)
        assert text.startswith(
            "With flash (ours) a train step takes as long as with naive, within noise, at the only "
            "place measured (0.998× as fast)."
        )
        assert text.endswith(" 3 of 4 places are not measured.")

    def test_a_step_that_hardly_grows_with_its_tokens_hides_a_faster_attention(self) -> None:
        flat = scaled({"naive": 1 / 16, "flash": 1 / 8}, topic="model", context=1024)
        text = told("model_attention", flat)
        assert text.endswith(
            " From context 128 to 1,024, 8 times the tokens, steps grow far less, whatever their "
            "attention: something other than arithmetic sets their pace there, each context in a "
            "process of its own, and the attention shows little."
        )

    def test_the_pace_is_that_of_the_slowest_on_the_way(self) -> None:
        times = {128: 10.0, 256: 12.2, 512: 11.0, 1024: 40.0}
        rows = [("small", "naive", context, ms) for context, ms in times.items()]
        text = _pace(pd.DataFrame(rows, columns=["size", "arm", "context", "median_ms"]))
        assert text.startswith(" From context 128 to 512, 4 times the tokens, steps grow far less")
        assert "×" not in text, "a factor between processes would say more than is known"

    def test_the_pace_is_told_once_however_many_attentions_there_are(self) -> None:
        flat = scaled({"naive": 1 / 16, "flash": 1 / 8, "tiled": 1 / 16}, context=1024)
        text = told("model_attention", flat, model={"arms": ["naive", "tiled", "flash"]})
        assert text.count("With ") == 2
        assert text.count("sets their pace") == 1

    def test_a_step_that_outgrows_its_pace_with_one_attention_is_not_called_flat(self) -> None:
        flat = scaled({"flash": 1 / 8}, topic="model", context=1024)
        assert "sets their pace" not in told("model_attention", flat)

    def test_no_memory_saved(self) -> None:
        text = told("model_attention", noted("flash", peak_memory_bytes=2**60))
        assert text.endswith("It saves no memory.")

    def test_runs_where_naive_does_not_fit(self) -> None:
        full = without({"naive": OOM}, topic="model", size="medium", context=1024)
        text = told("model_attention", full)
        assert text.endswith(
            "Where naive runs out of memory it still runs: medium at context 1,024 (30.2 ms)."
        )

    def test_naive_fits_nowhere(self) -> None:
        text = told("model_attention", without({"naive": OOM}, topic="model"))
        assert text.startswith("No train step was timed both naive and with flash (ours).")

    def test_not_here(self) -> None:
        gone = without({"flash": ("unsupported", "no such GPU")})
        assert told("model_attention", gone) == (
            "With flash (ours) no train step was timed (no such GPU)."
        )


@pytest.mark.parametrize(
    ("topic", "finding", "words"),
    [
        ("naive", "out_of_memory", "was not asked for"),
        ("tiles", "tiles", "were not asked for"),
        ("leaderboard", "leaderboard", "was not asked for"),
        ("model", "model_attention", "was not measured with another attention"),
    ],
)
def test_a_topic_that_the_study_leaves_out(topic: str, finding: str, words: str) -> None:
    made = collected()
    rest = [row for row in made.rows if row.point.parameters["topic"] != topic]
    bare = type(made)(**{**vars(made), "rows": rest})
    assert words in findings(bare)[finding]
