"""What the attention chapter claims, in every branch, and turned round with its data."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings.attention import findings
from tests.writeup import synthetic
from tests.writeup.small_attention import (
    STUDY,
    Change,
    both,
    collected,
    noted,
    nothing,
    scaled,
    study,
    without,
)

TOPICS = {
    **dict.fromkeys(("out_of_memory", "account", "compiled_attention"), "naive"),
    **dict.fromkeys(("growth_sequence", "growth_head_dim"), "naive"),
    **dict.fromkeys(("compiled_model", "compiling_cost"), "model_compile"),
    **dict.fromkeys(("flash_wins", "not_slower", "growth_flash", "limit"), "benchmark"),
    **{"tiles": "tiles", "leaderboard": "leaderboard", "model_attention": "model"},
}
"""What a finding is made from: the rest of the chapter need not be made for it."""
OOM = ("oom", "asked for 128 GiB, 9 GiB free")


@cache
def plain() -> dict[str, str]:
    """Of the small study as it is, which most tests ask for."""
    return findings(collected())


def told(name: str, change: Change | None = None, device: str = "cuda", **topics: Any) -> str:
    if change is None and device == "cuda" and not topics:
        return plain()[name]
    made = collected(change, study(**topics) if topics else STUDY, device)
    topic = TOPICS.get(name)
    rows = [row for row in made.rows if topic in {None, row.point.parameters["topic"]}]
    return findings(type(made)(**{**vars(made), "rows": rows}))[name]


def all_ok(point: Point, values: dict[str, Any]) -> bool | None:
    """Leaves out the shape that is there to not fit."""
    return False if values["status"] == "oom" else None


def only(**where: Any) -> Change:
    """Leaves out every point with other parameters."""

    def change(point: Point, values: dict[str, Any]) -> bool | None:
        return None if where.items() <= point.parameters.items() else False

    return change


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
            "Forward and backward of attention, our Triton kernels are 4.00× (head dim 64, "
            "sequence 128, bf16) to 5.91× (head dim 64, sequence 4,096, bf16) as fast as the naive "
            "formula. With them"
        )
        assert "With them a train step is up to 1.67× as fast (small at context 1024)." in text

    def test_without_our_kernels_naive_speaks(self) -> None:
        text = told("summary", without({"flash": ("unsupported", "no such GPU")}))
        assert text == (
            "Naive attention over 4,096 tokens takes 0.183 ms forward and backward (head dim 64, "
            "bf16); our kernels were not timed."
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
        assert "head dim 64, sequence 8,192 still fits" in text
        assert "It does so because every score is written to memory" in text
        assert "not measured" not in text

    def test_where_all_fits(self) -> None:
        text = told("out_of_memory", all_ok)
        assert text.startswith("No measured shape runs out of memory: the largest, head dim 64,")
        assert "6.08 GiB at its peak (1 of 7 shapes is not measured). Every score is" in text

    def test_where_nothing_fits(self) -> None:
        text = told("out_of_memory", without({"naive": OOM}, topic="naive"))
        assert text.startswith("Naive attention runs out of memory at head dim 16, sequence 1,024")
        assert "still fits" not in text

    def test_the_smallest_shape_that_does_not_fit_and_the_largest_that_does(self) -> None:
        assert told("account") == (
            "At head dim 64, sequence 65,536, which does not fit, 3 tensors of scores, 128 GiB "
            "each, are 99.8 % of the 385 GiB that the formula asks for at the peak. At head dim "
            "64, sequence 8,192, the largest that fits, 3 tensors of scores, 2 GiB each, are 98.7 "
            "% of the 6.08 GiB that the formula asks for at the peak; the allocator counted 6.08 "
            "GiB, 100 % of it."
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
        assert text.startswith("At sequence 8,192, head dim 64 against 16, 4.0× the products")
        assert "less than the arithmetic" in text

    def test_or_as_much(self) -> None:
        wide = scaled({"naive": 4.0}, head_dim=64, topic="naive")
        assert "as much as the arithmetic" in told("growth_head_dim", wide)

    def test_one_head_dim_says_nothing(self) -> None:
        one = {"head_dims": [16], "beyond": []}
        assert "too few ran" in told("growth_head_dim", naive=one)


class TestCompiling:
    def test_the_formula_is_faster(self) -> None:
        text = told("compiled_attention")
        assert text.startswith("Compiled, 12 of 12 passes are faster, up to")
        assert "slower" not in text
        assert "from sequence" not in text
        assert text.endswith("The first pass takes 4.20 s, compilation included.")

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
            "Compiled, forward is 1.36× as fast (every size); forward with backward is 1.36× as "
            "fast (every size); a train step is 1.36× as fast (every size)."
        )

    def test_the_model_is_faster_at_some(self) -> None:
        slow = scaled({"compiled": 2.0}, size="small", topic="model_compile")
        text = told("compiled_model", slow)
        assert "a train step is 1.36× as fast (medium), slower at small (0.682×)" in text

    def test_sizes_that_are_not_measured_are_not_every_size(self) -> None:
        text = told("compiled_model", only(size="small"))
        assert "a train step is 1.36× as fast (small). 1 of 2 sizes is not measured." in text

    def test_the_model_is_faster_nowhere(self) -> None:
        slow = scaled({"compiled": 2.0}, topic="model_compile")
        assert "forward is faster at no size, slower at every size (0.682×)" in told(
            "compiled_model", slow
        )
        assert told("compiling_cost", slow).endswith("which no later step makes good.")

    def test_the_models_attention_was_replaced(self) -> None:
        text = told("compiled_model", noted("compiled", attention_replaced=12))
        assert text.endswith("put PyTorch's fused attention in place of the model's own.")

    def test_what_compiling_costs_in_steps(self) -> None:
        assert told("compiling_cost") == (
            "The first compiled step takes 30.0 s; that is made good after 5,960 to 15,895 steps, "
            "by size."
        )


class TestRace:
    def test_all_arms_are_right(self) -> None:
        assert told("correctness").endswith("output and gradients; all are right.")

    def test_arms_that_are_off_are_named(self) -> None:
        errors = {"output": 0.5}
        wrong = both(
            without({"flex": ("failed", "output off by 5.0e-01; allowed is 3e-02")}),
            noted("flex", errors=errors),
        )
        assert told("correctness", wrong).endswith(
            "; 3 of them were off and got no time: FlexAttention in bf16 at head dim 64, sequence "
            "128 and 4,096; in bf16 at head dim 64, sequence 16,384 (leaderboard), by up to "
            "5.0e-01 where 3e-02 is allowed."
        )

    def test_arms_that_broke_are_named(self) -> None:
        broke = both(
            without({"flex": ("failed", "it broke")}, topic="benchmark", sequence=128),
            without({"flash": ("failed", "no loss")}, topic="model", context=128),
        )
        assert told("correctness", broke).endswith(
            "all are right. 3 arms broke: FlexAttention in bf16 at head dim 64, sequence 128 (it "
            "broke); flash (ours) in small at context 128 and medium at context 128 (no loss)."
        )

    def test_head_dims_that_fail_alike_are_told_together(self) -> None:
        wrong = without({"flash": ("failed", "it broke")}, topic="benchmark")
        text = told("correctness", wrong, benchmark={"head_dims": [32, 64]})
        assert "flash (ours) in bf16 at head dim 32 and 64, sequence 128 and 4,096 (it" in text

    def test_ours_wins_everywhere(self) -> None:
        assert told("flash_wins") == (
            "In bf16, forward and backward together, our kernels are faster than naive at every "
            "sequence timed, and than every other variant at every sequence timed."
        )

    def test_ours_wins_from_a_sequence_on(self) -> None:
        slow = scaled({"flash": 5.0}, topic="benchmark", sequence=128)
        text = told("flash_wins", slow)
        assert "faster than naive from sequence 4,096 on, and than every other variant from" in text
        assert "SDPA flash is ahead at 1 shape, there ours is 0.333× as fast (head dim 64," in text

    def test_ours_wins_up_to_a_sequence(self) -> None:
        slow = scaled({"flash": 50.0}, topic="benchmark", sequence=4096)
        assert "than every other variant up to sequence 128." in told("flash_wins", slow)

    def test_ours_wins_all_but_some_and_head_dims_differ(self) -> None:
        slow = scaled({"flash": 50.0}, topic="benchmark", sequence=256, head_dim=64)
        shapes = {"head_dims": [32, 64], "sequences": [128, 256, 512]}
        assert (
            "at every sequence timed (head dim 32); at all sequences but 256 (head dim 64)"
        ) in told("flash_wins", slow, benchmark=shapes)

    def test_shapes_without_a_time_of_ours_are_counted(self) -> None:
        wrong = without({"flash": ("failed", "off by 1")}, topic="benchmark", sequence=128)
        assert told("flash_wins", wrong).endswith(" Of 2 shapes, ours is failed at 1.")

    def test_ours_wins_nowhere(self) -> None:
        slow = scaled({"flash": 50.0}, topic="benchmark")
        text = told("flash_wins", slow)
        assert "than every other variant nowhere beyond noise." in text
        assert "SDPA flash is ahead at 2 shapes, there ours is down to" in text

    def test_ours_alone_beats_nobody(self) -> None:
        alone = {"arms": ["flash"]}
        assert told("flash_wins", benchmark=alone) == (
            "In bf16 our kernels were timed beside no other variant."
        )

    def test_ours_was_not_timed(self) -> None:
        gone = without({"flash": ("unsupported", "no such GPU")})
        assert told("flash_wins", gone).endswith("they were not timed: no such GPU.")
        assert "is not known" in told("limit", gone)
        assert "is not known" in told("growth_flash", gone)
        assert told("not_slower", gone) == "Our kernels were timed beside no other variant."

    def test_nowhere_slower(self) -> None:
        assert told("not_slower") == (
            "Nowhere are they slower than naive, compiled naive or SDPA flash beyond noise, in 18 "
            "comparisons."
        )

    def test_somewhere_slower(self) -> None:
        slow = scaled({"flash.forward": 1.8}, topic="benchmark", sequence=128)
        assert told("not_slower", slow) == (
            "In 1 of 18 comparisons, pass by pass, they are slower than naive, compiled naive or "
            "SDPA flash beyond noise: 0.926× against SDPA flash (forward, head dim 64, sequence "
            "128, bf16)."
        )

    def test_slower_in_many_places_names_the_worst_first(self) -> None:
        text = told("not_slower", scaled({"flash": 50.0}, topic="benchmark"))
        assert text.startswith("In 18 of 18 comparisons")
        assert "beyond noise: 0.0313× against SDPA flash" in text
        assert text.endswith("and 12 more.")

    def test_growth_of_ours(self) -> None:
        shapes = {"sequences": [4096, 8192, 16384], "head_dims": [32, 64]}
        text = told("growth_flash", benchmark=shapes)
        assert text.startswith("From sequence 4,096 on their time grows with the sequence to the")
        assert (
            "to the power of 1.32 to 1.56, over the last two sequences alone 1.61 to 1.78;" in text
        )
        assert "one head alone fills the GPU only when it is long" in text
        assert text.endswith(
            "In bf16, head dim 64 takes 1.90× as long as 32 (sequence 16,384), with 2.0× the "
            "arithmetic."
        )

    def test_growth_with_the_square(self) -> None:
        text = told("growth_flash", benchmark={"sequences": [65536, 131072, 262144]})
        assert text.endswith("the arithmetic grows with its square.")

    def test_the_limit_with_a_ceiling(self) -> None:
        assert told("limit").endswith("of the measured matmul rate.")
        fp32 = told("limit", benchmark={"precisions": ["fp32"]})
        assert "of the measured matmul rate, and " in fp32
        assert fp32.endswith("put together from three of TF32.")

    def test_the_limit_without_one(self) -> None:
        made = collected()
        bare = type(made)(**{**vars(made), "card": None})
        assert "no measured matmul rate" in findings(bare)["limit"]


class TestTilesAndBoard:
    def test_the_fastest_cut_and_what_does_not_fit(self) -> None:
        text = told("tiles")
        assert "Forward, head dim 128: the fastest plain cut keeps 64 rows and walks 64" in text
        assert "The launch table takes 128 × 64, specialised warps: 2.39 ms, 1.63× as fast" in text
        assert text.endswith(
            "2 cuts did not fit the GPU: 256 × 128 forward (needs 256 KiB of shared memory) and "
            "256 × 128 backward (needs 256 KiB of shared memory); a program may have 227 KiB."
        )

    def test_another_reason_is_told_in_its_own_words(self) -> None:
        why = ("unsupported", "tiles 256 x 128: too many registers")
        assert "256 × 128 forward (too many registers)" in told("tiles", without({"256x128": why}))

    def test_where_every_cut_fits(self) -> None:
        text = told("tiles", tiles={"kept": [64], "walked": [64]})
        assert text.endswith("Every cut that was tried fits.")

    def test_without_the_chosen_one(self) -> None:
        text = told("tiles", without({"chosen": ("failed", "it hangs")}))
        assert "launch table" not in text

    def test_a_cpu_has_no_tiles(self) -> None:
        assert told("tiles", device="cpu") == "No cut was timed: a shape for GPUs."
        assert told("leaderboard", device="cpu").endswith("published shape: a shape for GPUs.")

    @pytest.mark.parametrize(
        ("factor", "words"),
        [(0.5, "faster than"), (2.0, "slower than"), (0.983, "within noise of")],
    )
    def test_our_place_beside_the_best_other(self, factor: float, words: str) -> None:
        text = told("leaderboard", scaled({"flash": factor}, topic="leaderboard"))
        assert f"{words} the best other variant (SDPA cuDNN, 4.04 ms" in text
        assert "; the best published entry, on another GPU (H100), 5.364 ms. Forward," in text

    def test_pass_by_pass_against_each_variant(self) -> None:
        assert told("leaderboard").endswith(
            "Forward, backward and together they are faster than SDPA flash (1.47 times), SDPA "
            "efficient (2.61 times), SDPA math (10.1 times) and FlexAttention (1.24 times); "
            "against SDPA cuDNN they are forward 0.983×, backward 0.983× and together 0.983× as "
            "fast."
        )

    def test_alone_at_the_published_shape(self) -> None:
        text = told("leaderboard", leaderboard={"arms": ["flash"], "head_dims": [128]})
        assert text == "At head dim 128 our kernels take 8.20 ms."


class TestModel:
    def test_faster_and_smaller(self) -> None:
        assert told("model_attention") == (
            "With flash (ours) a train step is faster beyond noise at 4 of 4 places, up to 1.67× "
            "(small at context 1024). The peak falls by up to 26.2 GiB, from 49.2 GiB to 22.9 GiB "
            "(medium at context 1024)."
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

    def test_no_memory_saved(self) -> None:
        text = told("model_attention", noted("flash", peak_memory_bytes=2**60))
        assert text.endswith("It saves no memory.")

    def test_runs_where_naive_does_not_fit(self) -> None:
        full = without({"naive": OOM}, topic="model", size="medium", context=1024)
        text = told("model_attention", full)
        assert text.endswith(
            "Where naive runs out of memory it still runs: medium at context 1024 (30.2 ms)."
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
