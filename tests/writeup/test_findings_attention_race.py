"""What the attention chapter claims of its races, in every branch, turned round with its data."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.study.files import TEMPLATES
from lmlab.study.points import Point
from lmlab.writeup.findings.attention import findings
from tests.writeup.attention_told import told
from tests.writeup.small_attention import (
    both,
    collected,
    noisy,
    noted,
    sampled_once,
    scaled,
    without,
)


class TestRace:
    def test_all_arms_are_right(self) -> None:
        text = told("correctness")
        assert "in fp32, some rows at a time; all are right, their relative error at most " in text
        assert text.endswith(" in fp32, that of ours 1.0e-03 in bf16.")

    def test_arms_that_are_off_are_named(self) -> None:
        errors = {"output": 0.5}
        wrong = both(
            without({"flex": ("failed", "output off by 5.0e-01; allowed is 3e-02")}),
            noted("flex", errors=errors),
        )
        assert told("correctness", wrong).endswith(
            "; 3 arms were off and got no time: FlexAttention in bf16 at head dim 64, sequence "
            "128 and 4,096; in bf16 at head dim 64, sequence 16,384 (leaderboard), by up to "
            "5.0e-01 where 3e-02 is allowed."
        )

    def test_what_is_not_a_number_is_off(self) -> None:
        none = both(
            without({"flex": ("failed", "output off by nan; allowed is 3e-02")}, sequence=128),
            noted("flex", {"sequence": 128}, errors={"output": None, "grad_q": 0.5}),
        )
        assert told("correctness", none).endswith(
            "; 1 arm was off and got no time: FlexAttention in bf16 at head dim 64, sequence "
            "128, with results that are not numbers."
        )

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_a_cut_that_is_off_in_one_direction_is_named(self, direction: str) -> None:
        where = {"topic": "tiles", "direction": direction}
        wrong = both(
            without({"64x64": ("failed", "output off by 5.0e-01; allowed is 3e-02")}, **where),
            noted("64x64", where, errors={"output": 0.5}),
        )
        assert told("correctness", wrong).endswith(
            "; 1 arm was off and got no time: 64x64 in bf16 at head dim 128, sequence 16,384 "
            "(tiles), by up to 5.0e-01 where 3e-02 is allowed."
        )

    def test_an_arm_that_broke_after_its_first_pass_is_named(self) -> None:
        def late(point: Point, values: dict[str, Any]) -> None:
            if point.parameters.get("sequence") == 128:
                values["data"]["arms"]["flex"].update(status="failed", reason="it broke")
                del values["measurements"]["flex.both"]

        assert told("correctness", late).endswith(
            " in bf16. 1 arm broke: FlexAttention in bf16 at head dim 64, sequence 128 (it broke)."
        )

    def test_arms_that_broke_are_named(self) -> None:
        broke = both(
            without({"flex": ("failed", "it broke")}, topic="benchmark", sequence=128),
            without({"flash": ("failed", "no loss")}, topic="model", context=128),
        )
        assert told("correctness", broke).endswith(
            " in bf16. 3 arms broke: FlexAttention in bf16 at head dim 64, sequence 128 (it "
            "broke); flash (ours) in small at context 128 and medium at context 128 (no loss)."
        )

    def test_an_arm_that_broke_by_itself_and_inside_a_model_is_named_in_both_places(self) -> None:
        broke = both(
            without({"flash": ("failed", "it broke")}, topic="benchmark", sequence=128),
            without({"flash": ("failed", "it broke")}, topic="model", context=128),
        )
        assert told("correctness", broke).endswith(
            " 3 arms broke: flash (ours) in bf16 at head dim 64, sequence 128; in small at context "
            "128 and medium at context 128 (it broke)."
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

    def test_what_is_not_won_need_not_be_lost(self) -> None:
        alike = scaled({"flash": 1.47}, topic="benchmark", sequence=4096)
        once = sampled_once({"flash"}, topic="benchmark", sequence=4096)
        assert told("flash_wins", both(alike, once)).endswith(
            "than every other variant up to sequence 128. Not told apart from ours: SDPA cuDNN at "
            "head dim 64, sequence 4,096 (ours 1.00× as fast; one sample)."
        )
        assert told("flash_wins", alike).endswith("sequence 4,096 (ours 1.00× as fast).")
        pair = {"arms": ["sdpa_cudnn", "flash"], "sequences": [65536, 131072]}
        tie = sampled_once({"flash"}, sequence=131072)
        assert told("flash_wins", tie, benchmark=pair).endswith("; 1 of 2 from one sample).")

    def test_ours_wins_all_but_some_and_head_dims_differ(self) -> None:
        slow = scaled({"flash": 50.0}, topic="benchmark", sequence=256, head_dim=64)
        shapes = {"head_dims": [32, 64], "sequences": [128, 256, 512]}
        assert (
            "at every sequence timed (head dim 32); at all sequences but 256 (head dim 64)"
        ) in told("flash_wins", slow, benchmark=shapes)

    def test_where_sequences_are_missing_those_timed_are_named_one_by_one(self) -> None:
        slow = scaled({"flash": 50.0}, topic="benchmark", sequence=128)
        missing = without({"flash": ("failed", "it broke")}, topic="benchmark", sequence=256)
        text = told("flash_wins", both(slow, missing), benchmark={"sequences": [128, 256, 512]})
        assert "than every other variant at sequence 512, not at 128." in text

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
            "comparisons. Against all other variants, pass by pass, they lose none of 48 "
            "comparisons beyond noise."
        )

    def test_losses_to_variants_that_are_no_rivals_are_told_too(self) -> None:
        slow = scaled({"flash.backward": 1.7, "flex.backward": 0.3}, sequence=128)
        assert told("not_slower", slow).endswith(
            "in 18 comparisons. Against all other variants, pass by pass, they lose 2 of 48 "
            "comparisons beyond noise: 2 backward in bf16 (to SDPA efficient and FlexAttention, "
            "down to 0.412× against FlexAttention, head dim 64, sequence 128). The first folded "
            "table of this section lists them."
        )

    def test_that_folded_table_is_the_first(self) -> None:
        template = (TEMPLATES / "attention.md.j2").read_text()
        assert 'tables_named("lost") + chapter.tables_named("race_")' in template
        assert template.count("<details>") == 1

    def test_beside_rivals_alone_there_is_no_more_to_tell(self) -> None:
        few = {"arms": ["naive", "sdpa_flash", "flash"]}
        assert told("not_slower", benchmark=few).endswith(
            "SDPA flash beyond noise, in 12 comparisons."
        )
        others = {"arms": ["flex", "flash"]}
        assert told("not_slower", benchmark=others) == (
            "They were not timed beside naive, compiled naive or SDPA flash. Against all other "
            "variants, pass by pass, they lose none of 6 comparisons beyond noise."
        )

    def test_somewhere_slower(self) -> None:
        slow = scaled({"flash.forward": 1.8}, topic="benchmark", sequence=128)
        assert told("not_slower", slow).startswith(
            "In 1 of 18 comparisons, pass by pass, they are slower than naive, compiled naive or "
            "SDPA flash beyond noise: 0.926× against SDPA flash (forward, head dim 64, sequence "
            "128, bf16). Against all other variants, pass by pass, they lose 2 of 48 comparisons"
        )

    def test_slower_in_many_places_names_the_worst_first(self) -> None:
        text = told("not_slower", scaled({"flash": 50.0}, topic="benchmark"))
        assert text.startswith("In 18 of 18 comparisons")
        assert "beyond noise: 0.0313× against SDPA flash" in text
        assert "and 12 more. Against all other variants, pass by pass, they lose 42 of " in text

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

    def test_a_rate_that_fell_on_the_way_is_not_called_filling(self) -> None:
        shapes = {"sequences": [4096, 8192, 16384, 32768], "head_dims": [16, 32]}
        rising = told("growth_flash", benchmark=shapes)
        assert " In all cases their rate rises at every step from there on, in each pass" in rising
        assert "falls" not in rising
        dip = scaled({"flash.forward": 3.0}, topic="benchmark", sequence=16384, head_dim=32)
        text = told("growth_flash", dip, benchmark=shapes)
        assert " In 1 of 2 cases their rate rises at every step from there on, in each" in text
        assert (
            " Their rate falls beyond noise: forward by 56 % (bf16, head dim 32, sequence 8,192 to "
            "16,384). In bf16, head dim 32"
        ) in text

    def test_in_noise_nothing_rises_or_falls_and_few_ties_are_named(self) -> None:
        shapes = {"sequences": [4096, 8192, 16384], "head_dims": [16]}
        text = told("growth_flash", noisy, benchmark=shapes)
        assert "rate" not in text
        assert told("flash_wins", noisy).endswith("as fast); 4 more.")

    def test_a_fall_within_noise_is_neither_told_nor_a_rise(self) -> None:
        shapes = {"sequences": [4096, 8192, 16384], "head_dims": [16]}
        dip = scaled({"flash.forward": 2.475}, topic="benchmark", sequence=8192)
        text = told("growth_flash", dip, benchmark=shapes)
        assert "rises" not in text
        assert "falls" not in text

    def test_growth_with_the_square(self) -> None:
        text = told("growth_flash", benchmark={"sequences": [65536, 131072, 262144]})
        assert text.endswith("the arithmetic grows with its square.")

    def test_the_limit_with_a_ceiling(self) -> None:
        assert told("limit").endswith("of the measured matmul rate.")
        fp32 = told("limit", benchmark={"precisions": ["fp32"]})
        assert "of the measured matmul rate, which is that of products outside the" in fp32
        assert "fp32 products run at 1" in fp32
        assert fp32.endswith(" % of it.")

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
            "Forward, backward and together they are faster than SDPA flash (1.47 times as fast), "
            "SDPA efficient (2.61 times as fast), SDPA math (10.1 times as fast) and FlexAttention "
            "(1.24 times as fast); against SDPA cuDNN they are forward 0.983×, backward 0.983× and "
            "together 0.983× as fast. Of the measured matmul rate they reach forward 75.5 %, "
            "backward 75.5 % and together 75.5 %."
        )

    def test_without_ours_the_board_says_what_happened_to_ours(self) -> None:
        broke = without({"flash": ("failed", "it broke")}, topic="leaderboard")
        assert told("leaderboard", broke) == (
            "Our kernels were not timed at the published shape: it broke."
        )

    def test_alone_at_the_published_shape(self) -> None:
        text = told("leaderboard", leaderboard={"arms": ["flash"], "head_dims": [128]})
        assert text.startswith(
            "Forward and backward of 16 heads over 16,384 tokens in bf16, where the race above has "
            "one head. At head dim 128 our kernels take 8.20 ms. Of the measured matmul"
        )
