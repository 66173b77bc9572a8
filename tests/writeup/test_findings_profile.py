"""What the profiles say, in every branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.findings import (
    profile_timeline,
)
from lmlab.writeup.findings.profile import findings, recorded, summary
from tests.writeup import factory, synthetic
from tests.writeup.profile_told import all_alike, by_size
from tests.writeup.small_profile import (
    ADD,
    BACKWARD,
    FORWARD,
    SIMT,
    collected,
    nothing,
    recording,
)


class TestSummary:
    def test_products_and_softmax(self) -> None:
        assert summary(collected()) == (
            "Matrix products take 80 % of the GPU's time in a forward pass; in attention, softmax "
            "has 0.020 times the FLOPs of the two products and takes 0.50 times their time."
        )

    def test_a_range_says_where_its_ends_are(self) -> None:
        more = [(SIMT, 18.0, 85), (ADD, 2.0, 5)]
        text = summary(collected(by_size({}, {"forward": more})))
        assert "80 % (small at context 128) to 90 % (medium at context 128)" in text

    def test_an_attention_in_one_piece_is_left_out(self) -> None:
        text = summary(collected(all_alike(parts=None, attention_cost=None)))
        assert text == "Matrix products take 80 % of the GPU's time in a forward pass."

    def test_a_cpu_has_operators(self) -> None:
        text = summary(collected(device="cpu", sizes=["cpu-small"]))
        assert "of the operators' time" in text

    def test_nothing(self) -> None:
        assert summary(collected(nothing)) == "No profile was recorded."


class TestRecorded:
    def test_one_tool(self) -> None:
        assert recorded(collected()) == "The recordings are by torch profiler 2.13.0."

    def test_why_it_was_not_nsys(self) -> None:
        text = recorded(collected(all_alike(tool_note="nsys is not on the PATH")))
        assert text.endswith("Nsight Systems did not record because nsys is not on the PATH.")

    def test_two_tools(self) -> None:
        text = recorded(collected(by_size({"tool": "nsys 2025.3.1"}, {})))
        assert text == (
            "The recordings are by nsys 2025.3.1 (2 points) and torch profiler 2.13.0 (2 points)."
        )

    def test_nothing(self) -> None:
        assert recorded(collected(nothing)) == "No profile was recorded."


class TestClock:
    def test_the_two_agree(self) -> None:
        text = profile_timeline.clock(collected())
        assert "In all 4 points the timeline's forward takes as long as the host's clock" in text
        assert "GPU works for at least 95 % of the pass in all 4 points." in text
        assert "longer" not in text

    def test_the_profiler_makes_gaps_where_the_host_is_slow(self) -> None:
        slow = {"clock_ms": 20.0, "span_ms": 30.0}
        text = profile_timeline.clock(collected(by_size(slow, {})))
        assert "In 2 of 4 points (medium at every context) the timeline's forward takes as" in text
        assert "In 2 of 4 points (small at every context) it takes 1.50 times as long." in text
        assert (
            "kernels run for 33 % of the timeline there, and for 50 % of the clock's time" in text
        )
        assert "and for only 50 % in 2 of 4 points (small at every context), where the rest" in text

    def test_a_timeline_that_is_shorter(self) -> None:
        text = profile_timeline.clock(collected(all_alike(clock_ms=12.0)))
        assert text.startswith("In no point does the timeline's forward take as long")
        assert "In all 4 points it takes only 0.833 times as long" in text
        assert text.endswith("By the clock, the GPU works for 83 % of the pass.")

    def test_on_a_cpu(self) -> None:
        text = profile_timeline.clock(collected(device="cpu", sizes=["cpu-small"]))
        assert text.startswith("On a CPU the operators' own time under the profiler is 95 % of")

    def test_nothing(self) -> None:
        assert "cannot be compared" in profile_timeline.clock(collected(nothing))


class TestElsewhere:
    def test_a_ratio_across_points_is_called_one(self) -> None:
        text = profile_timeline.elsewhere(collected(end_to_end=synthetic.end_to_end))
        assert "timed the forward pass of 4 of 4 points in processes of its own" in text
        assert text.endswith("times its medians, a ratio across points.")

    def test_without_that_chapter(self) -> None:
        assert "has no forward pass of the same points" in profile_timeline.elsewhere(collected())

    def test_points_that_failed_there_do_not_count(self) -> None:
        def failing(point: Point) -> Result:
            return factory.failed(point, "oom", "no memory")

        text = profile_timeline.elsewhere(collected(end_to_end=failing))
        assert "has no forward pass of the same points" in text


class TestHost:
    def test_it_waits_at_the_end(self) -> None:
        step = {"wait": (20.0, "cudaDeviceSynchronize", "optimizer"), "late_ms": 0.1}
        text = profile_timeline.host(collected(all_alike(step=step)))
        assert "In 4 of 4 train steps the host is done before the GPU and waits in" in text
        assert "waits in cudaDeviceSynchronize after optimizer: for 59 % of the step" in text
        assert "make up less than 1 % of every step." in text

    def test_a_wait_before_any_range_closed(self) -> None:
        step = {"wait": (20.0, "cudaStreamSynchronize", None)}
        text = profile_timeline.host(collected(all_alike(step=step)))
        assert "and waits in cudaStreamSynchronize: for" in text

    @staticmethod
    def launching(*means_us: float, delay_ns: int = 10**8) -> Callable[[Point], Result]:
        """Launches of two kinds, of the first mean for the first size and the last for others."""

        def make(point: Point) -> Result:
            result = recording(point)
            mean = means_us[0 if point.parameters["size"] == "small" else -1]
            host = result.data["modes"]["train_step"]["host"]
            host["delay_median_ns"] = delay_ns
            host["calls"] = [
                {"name": "cudaLaunchKernel", "calls": 3, "total_ns": round(3e3 * mean)},
                {"name": "cuLaunchKernel", "calls": 1, "total_ns": round(1e3 * mean)},
                {"name": "cudaDeviceSynchronize", "calls": 1, "total_ns": 10**9},
            ]
            return result

        return make

    def test_a_host_far_ahead_waits_within_its_launches(self) -> None:
        text = profile_timeline.host(collected(self.launching(6.0, 240.0)))
        assert "one takes 6.0 µs on average in small at context 128 and 240 µs in medium" in text
        assert "where a kernel starts 100 ms after its launch in the median." in text
        alike = profile_timeline.host(collected(self.launching(6.0, 9.0)))
        assert "within its launches" not in alike
        slow_host = profile_timeline.host(collected(self.launching(6.0, 240.0, delay_ns=5_000)))
        assert "within its launches" not in slow_host

    def test_it_is_late(self) -> None:
        late = {"span_ms": 68.0, "late_ms": 34.0}
        text = profile_timeline.host(collected(by_size({"step": late}, {})))
        assert text.startswith("In no train step is the host done early enough to wait")
        assert "make up 50 % of the step of small at context 128 and 0 % of that of medium" in text

    GAP: ClassVar[dict[str, Any]] = {
        "gap_ns": 2_500_000,
        "host_late": True,
        "before": ADD,
        "ranges": ["mode train_step", "backward"],
    }

    @pytest.mark.parametrize("phase", ["backward", None])
    def test_the_longest_gap_is_named_with_what_follows_it(self, phase: str | None) -> None:
        def make(point: Point) -> Result:
            result = recording(point, step={"span_ms": 68.0, "late_ms": 34.0})
            gap = {**self.GAP, "ranges": [phase] if phase else []}
            result.data["modes"]["train_step"]["host"]["longest_gaps"] = [gap]
            return result

        where = f"in {phase} of small" if phase else "in small"
        assert profile_timeline.host(collected(make)).endswith(
            f"The longest gap of all, 2.50 ms, lies before {ADD} {where} at context 128."
        )

    def test_on_a_cpu_there_is_nobody_to_wait_for(self) -> None:
        assert "nobody" in profile_timeline.host(collected(device="cpu", sizes=["cpu-small"]))

    def test_nothing(self) -> None:
        assert profile_timeline.host(collected(nothing)) == "Nothing was recorded of the host."


class TestSlowRanges:
    ROW: ClassVar[dict[str, Any]] = {
        "range": "layers.0",
        "run": "mode forward",
        "duration_ns": 5_000_000,
        "median_ns": 500_000,
        "instances": 3,
        "kernel": SIMT,
        "call": "cudaMalloc",
    }

    def test_the_longest_and_what_ran_in_it(self) -> None:
        text = profile_timeline.slow_ranges(collected(all_alike(slow_ranges=[self.ROW])))
        assert text.startswith("4 ranges took more than five times the median of their name")
        assert (
            "The longest is layers.0 (forward, small at context 128): 5.00 ms, 10 times the median "
            f"of 3; in it on the device most time went to {SIMT} and on the host to cudaMalloc."
        ) in text

    def test_nothing_ran_in_it(self) -> None:
        row = {**self.ROW, "kernel": None, "call": None, "run": None}
        text = profile_timeline.slow_ranges(collected(all_alike(slow_ranges=[row])))
        assert "(outside the runs, small at context 128)" in text
        assert text.endswith("the median of 3; nothing was recorded in it.")

    def test_none(self) -> None:
        assert profile_timeline.slow_ranges(collected()).startswith("No range took more")

    def test_nothing(self) -> None:
        assert "no range can be called slow" in profile_timeline.slow_ranges(collected(nothing))


def test_every_finding_is_there_with_and_without_results() -> None:
    assert set(findings(collected())) == set(findings(collected(nothing)))
    assert all(findings(collected()).values())


def test_a_point_out_of_memory_takes_part_in_nothing() -> None:
    def make(point: Point) -> Result:
        if point.parameters["size"] == "medium":
            return factory.failed(point, "oom", "asked for 9 GiB")
        return recording(point, forward=FORWARD, backward=BACKWARD)

    text = " ".join(findings(collected(make)).values())
    assert "in both points" in text
    assert "medium" not in text
