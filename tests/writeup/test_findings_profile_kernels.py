"""What the profile chapter claims of kernels, families, cores and attention, in every branch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.findings import (
    profile_attention,
    profile_cores,
    profile_kernels,
)
from lmlab.writeup.tables.profile import tables
from tests.writeup import factory, small_profile
from tests.writeup.profile_told import all_alike, by_size
from tests.writeup.small_profile import (
    ADD,
    NORM,
    SIMT,
    SOFTMAX,
    TENSOR,
    UNTOLD,
    collected,
    nothing,
    recording,
)


class TestTop:
    def test_one_kernel_everywhere(self) -> None:
        assert profile_kernels.top(collected()) == (
            f"In forward the kernel with the most cumulative time is {SIMT} in all 4 points "
            "(80.0 % of the kernels' time, 85 calls a pass)."
        )

    def test_other_kernels_in_other_points(self) -> None:
        other = [(ADD, 9.0, 1), (SIMT, 1.0, 1)]
        text = profile_kernels.top(collected(by_size({}, {"forward": other})))
        assert (
            f"{SIMT} in 2 points (80.0 % of the kernels' time, 85 calls a pass) and {ADD}" in text
        )
        assert "in 2 points (90.0 % of the kernels' time, 1 call a pass)" in text

    def test_only_the_first_few_of_many_are_named(self) -> None:
        def make(point: Point) -> Result:
            name = f"sgemm_{point.parameters['size']}_{point.parameters['context']}"
            return recording(point, forward=[(name, 9.0, 1)])

        text = profile_kernels.top(collected(make, contexts=[128, 256, 512]))
        assert text.count("sgemm") == 4
        assert text.endswith("a pass) and 2 more.")

    def test_calls_that_differ(self) -> None:
        text = profile_kernels.top(collected(by_size({}, {"forward": [(SIMT, 9.0, 1000)]})))
        assert "85 to 1,000 calls a pass" in text

    def test_nothing(self) -> None:
        assert "no kernel to name" in profile_kernels.top(collected(nothing))

    def test_the_same_leads_in_the_other_modes(self) -> None:
        assert profile_kernels.top_in_other_modes(collected()) == (
            "In a forward and backward pass the same one leads in all 4 points. In a train step "
            "the same one leads in all 4 points."
        )

    def test_another_leads_in_the_other_modes(self) -> None:
        text = profile_kernels.top_in_other_modes(
            collected(all_alike(backward=[(ADD, 70.0, 8), (NORM, 9.3, 1)]))
        )
        assert (
            f"In a forward and backward pass another one leads in all 4 points: {ADD} (79" in text
        )

    def test_another_leads_in_some(self) -> None:
        text = profile_kernels.top_in_other_modes(
            collected(by_size({"backward": [(ADD, 70.0, 8)]}, {}))
        )
        assert "the same one leads in 2 of 4 points, in the others elementwise add" in text

    def test_nothing_of_the_other_modes(self) -> None:
        assert "Nothing was recorded" in profile_kernels.top_in_other_modes(collected(nothing))


class TestOthers:
    def test_those_that_matter_are_named(self) -> None:
        assert profile_kernels.others(collected()) == (
            "Outside its matrix products forward spends 20.0 % of its time. Of small at context "
            f"128 those that matter are {SOFTMAX} (10 %), {ADD} (7.0 %) and {NORM} (3.0 %)."
        )

    def test_copies_are_no_kernels_and_yet_no_products(self) -> None:
        def make(point: Point) -> Result:
            result = recording(point)
            run = result.data["modes"]["forward"]
            copied = {"instances": 24, "total_ns": run["total_ns"] // 4}
            run["copies"], run["families"]["copy"] = copied, copied
            run["total_ns"] += copied["total_ns"]
            return result

        assert profile_kernels.others(collected(make)) == (
            "Outside its matrix products forward spends 36.0 % of its time. Of small at context "
            f"128 those that matter are copies and fills (20 %), {SOFTMAX} (8.0 %), {ADD} (5.6 %) "
            f"and {NORM} (2.4 %)."
        )
        rows = tables(collected(make))["others"].rows
        assert rows[0][2:] == ["copies and fills", "copy", "20.0 %", "24", "–"]
        assert len({row[0] for row in rows}) == 2, "each size has its own"

    def test_names_are_those_of_the_place_that_is_named(self) -> None:
        def make(point: Point) -> Result:
            if point.parameters["precision"] == "fp32":
                return recording(point)
            return recording(point, forward=[(SIMT, 5.0, 1), (NORM, 5.0, 1)])

        text = profile_kernels.others(collected(make, precisions=["fp32", "bf16"]))
        assert text.endswith(f"those that matter are {NORM} (50 %).")

    def test_none_of_them_matters(self) -> None:
        little = [(SIMT, 98.5, 1), (ADD, 0.8, 1), (NORM, 0.7, 1)]
        text = profile_kernels.others(collected(all_alike(forward=little)))
        assert text.endswith("No single one of what else runs reaches 2 %.")

    def test_products_alone(self) -> None:
        text = profile_kernels.others(collected(all_alike(forward=[(SIMT, 1.0, 1)])))
        assert text == "Forward consists of matrix products alone."

    def test_nothing(self) -> None:
        assert "no kernel to name" in profile_kernels.others(collected(nothing))


class TestFamilies:
    def test_the_share_falls(self) -> None:
        assert profile_kernels.families(collected()) == (
            "Matrix products take 80 % of forward and 71 % of the train step: in every point less "
            "of the train step than of forward. The optimizer, whose work depends on the "
            "parameters and not on the tokens, takes 15 % of the train step."
        )

    def test_the_share_rises(self) -> None:
        text = profile_kernels.families(collected(all_alike(backward=[(SIMT, 99.0, 9)])))
        assert "in every point more of the train step than of forward" in text

    def test_now_one_and_now_the_other(self) -> None:
        text = profile_kernels.families(collected(by_size({}, {"backward": [(SIMT, 99.0, 9)]})))
        assert "less of the train step than of forward in 2 of 4 points" in text
        assert "takes 4.4 % (medium at context 128) to 15 % (small at context 128)" in text

    def test_no_optimizer(self) -> None:
        text = profile_kernels.families(collected(all_alike(optimizer=[])))
        assert text.endswith("No kernel of the optimizer was found.")

    def test_nothing(self) -> None:
        assert "no shares" in profile_kernels.families(collected(nothing))


class TestCores:
    @staticmethod
    def text(*kernels: tuple[str, float], precision: str = "fp32", **changes: Any) -> str:
        forward = [(name, ms, 1) for name, ms in kernels]
        make = all_alike(forward=forward, backward=[], **changes)
        return profile_cores.cores(collected(make, precisions=[precision]))

    def test_fp32_cannot_use_tensor_cores(self) -> None:
        text = self.text((SIMT, 10.0))
        assert text.startswith(
            "In fp32 none of the products' time is on tensor cores: they multiply 16-bit numbers "
            "and TF32, and with TF32 off fp32 is neither."
        )
        assert text.endswith("Their names tell nothing of alignment, which fp32 on SIMT cores does "
                             "not ask for.")  # fmt: skip

    def test_fp32_on_tensor_cores_alone_is_said_with_surprise(self) -> None:
        text = self.text((TENSOR, 10.0))
        assert "none of the products' time is on SIMT cores: TF32 is off, and yet the names" in text

    def test_fp32_on_both(self) -> None:
        text = self.text((SIMT, 7.5), (TENSOR, 2.5))
        assert "75.0 % of the products' time is on SIMT cores and 25.0 % on tensor cores" in text
        assert "TF32 is off, so those on tensor cores emulate fp32" in text

    def test_names_that_ask_for_no_alignment(self) -> None:
        text = self.text(("cutlass_80_simt_sgemm_128x128_8x4_nn_align1", 6.0), (SIMT, 4.0))
        assert "60 % of their time is in kernels that ask for no alignment (align1)" in text

    def test_names_that_ask_for_alignment(self) -> None:
        text = self.text(("xmma_gemm_f32f32_ffma_aligna4_alignc4", 6.0))
        assert "every operand has it" in text

    def test_sixteen_bit_on_tensor_cores(self) -> None:
        text = self.text((TENSOR, 10.0), precision="bf16")
        assert text == (
            "In bf16 none of the products' time is on SIMT cores: every product that could use "
            "them did."
        )

    def test_sixteen_bit_falls_back_where_a_side_is_uneven(self) -> None:
        def make(point: Point) -> Result:
            result = recording(point, forward=[(TENSOR, 5.0, 1), (SIMT, 5.0, 1)], backward=[])
            settings = {**result.settings, "vocab_size": 10_001}
            return factory.result(
                Point(point.chapter, point.parameters, settings),
                measurements=result.measurements,
                data=result.data,
            )

        text = profile_cores.cores(collected(make, precisions=["bf16"]))
        assert "a side that is no multiple of 8 leaves operands unaligned, and here" in text
        assert "vocab_size 10001 are none." in text

    def test_sixteen_bit_falls_back_without_such_a_reason(self) -> None:
        text = self.text((TENSOR, 5.0), (SIMT, 5.0), precision="bf16")
        assert "every side is a multiple of 8, so alignment is not the reason" in text

    def test_tf32_needs_multiples_of_four(self) -> None:
        text = self.text((TENSOR, 5.0), (SIMT, 5.0), precision="tf32", tf32=True)
        assert "every side is a multiple of 4" in text

    def test_names_that_do_not_tell(self) -> None:
        assert "do not tell on which cores they ran" in self.text((UNTOLD, 10.0))

    def test_some_names_that_do_not_tell(self) -> None:
        text = self.text((SIMT, 9.0), (UNTOLD, 1.0))
        assert "none of the products' time is on tensor cores (10 % do not tell)" in text

    def test_a_cpu_has_none(self) -> None:
        text = profile_cores.cores(collected(device="cpu", sizes=["cpu-small"]))
        assert text == "A CPU has no tensor cores to choose; its products are one family."

    def test_nothing(self) -> None:
        assert profile_cores.cores(collected(nothing)) == "No matrix product was recorded."


class TestAttention:
    @staticmethod
    def with_softmax(ms: float, **more: float) -> Any:
        parts = {**small_profile.PARTS, "softmax": ms, **more}
        return all_alike(parts=parts)

    def test_more_time_than_arithmetic(self) -> None:
        text = profile_attention.attention(collected())
        assert text.startswith(
            "Against the two products softmax has 0.0195 times their FLOPs (5 a score against 4 "
            "times the head dimension) and takes 0.500 times their time: 26 times the time that "
            "its arithmetic would take at their rate. It runs at 0.156 TFLOP/s, the products at "
            "4.00."
        )

    VERDICTS: ClassVar[dict[float, str]] = {
        0.03: "less time than its arithmetic would take",
        2 * 5 / 256: "about as much time as its arithmetic",
    }

    @pytest.mark.parametrize("ms", VERDICTS)
    def test_as_much_time_as_arithmetic_or_less(self, ms: float) -> None:
        text = profile_attention.attention(collected(self.with_softmax(ms)))
        assert self.VERDICTS[ms] in text

    def test_now_more_and_now_less(self) -> None:
        parts = {**small_profile.PARTS, "softmax": 0.03}
        text = profile_attention.attention(collected(by_size({}, {"parts": parts})))
        assert "in some points more time than its arithmetic would take" in text

    def test_flops_that_are_not_counted(self) -> None:
        text = profile_attention.attention(collected(all_alike(attention_cost=None)))
        assert text == (
            "Against the two products softmax takes 0.500 times their time; FLOPs are not counted "
            "for this model or precision."
        )

    def test_copies_of_operands_are_told_from_products(self) -> None:
        def make(point: Point) -> Result:
            result = recording(point)
            for row in result.data["attention_parts"]:
                row["product_ns"] = row["total_ns"] * 9 // 10
            return result

        text = profile_attention.attention(collected(make))
        assert "Of the products' time 10 % goes into copying operands into shape." in text
        assert "copying" not in profile_attention.attention(collected())

    def test_no_parts(self) -> None:
        assert "were not recorded" in profile_attention.attention(collected(nothing))
        assert profile_attention.consequence(collected(nothing)) == ""

    BANDWIDTHS: ClassVar[dict[float, str]] = {
        25.0: "80 % of the measured copy rate: memory is its limit.",
        100.0: "20 % of the measured copy rate: memory is not its limit.",
        10.0: "200 % of the measured copy rate: part of it stays in a cache.",
    }

    def test_in_how_many_points_memory_is_the_limit(self) -> None:
        rate = {"copy_gb_per_s": {"gb_per_s": 25.0}, "matmul_tflops": {}}
        card = factory.result(Point("machine"), data={"ceilings": rate})
        slower = {"parts": {**small_profile.PARTS, "softmax": 4 * small_profile.PARTS["softmax"]}}
        text = profile_attention.attention(collected(by_size({}, slower), card=card))
        assert (
            "80 % of the measured copy rate, and at 50 % of it or more in 2 of 4 points: there "
            "memory is its limit." in text
        )

    @pytest.mark.parametrize("copy", BANDWIDTHS)
    def test_what_it_moves_is_held_against_a_copy(self, copy: float) -> None:
        rate = {"copy_gb_per_s": {"gb_per_s": copy}, "matmul_tflops": {}}
        card = factory.result(Point("machine"), data={"ceilings": rate})
        assert self.BANDWIDTHS[copy] in profile_attention.attention(collected(card=card))

    def test_without_a_copy_rate(self) -> None:
        assert "no copy rate was measured" in profile_attention.attention(collected())

    def test_the_products_take_more(self) -> None:
        text = profile_attention.consequence(collected(self.with_softmax(0.1)))
        assert "so a faster product helps attention more" in text

    def test_what_is_no_product_takes_more(self) -> None:
        text = profile_attention.consequence(collected(self.with_softmax(3.0)))
        assert text.startswith("Scaling, masking and softmax together take 67 % of attention's")
        assert "In 4 of 4 points that is more than the products take" in text
