"""Who is the limit, in every branch."""

from __future__ import annotations

from typing import Any

from lmlab.study.points import Point
from lmlab.writeup.findings.host_limit import host_limit
from tests.writeup.small_study import STEP, data_of, nothing


class TestHostLimit:
    @staticmethod
    def text(ratio: float, forward_busy: float, backward_busy: float) -> str:
        busy = {"forward": 10 * forward_busy, "backward": 10 * ratio * backward_busy}
        return host_limit(
            data_of(lambda p: {**STEP, "backward": 10 * ratio, "busy_ms": busy}), "cuda"
        )

    def test_alike_and_idle_is_the_host(self) -> None:
        text = self.text(1.1, 0.3, 0.4)
        assert "about the same time (backward at most 1.25 times as long) in 8 of 8" in text
        assert (
            "In all of these the GPU runs something for only 30 to 40 % of the time: the host"
            in text
        )
        assert "No step keeps the GPU busy for 95 % of both passes." in text

    def test_alike_and_busy_is_not_the_host(self) -> None:
        text = self.text(1.1, 0.99, 0.98)
        assert "is busy for 98 to 99 % of both passes: the host is not the reason." in text
        assert "is the limit" not in text

    def test_idle_in_one_pass_is_the_host_in_part(self) -> None:
        text = self.text(1.1, 0.3, 0.99)
        assert "waits in one of the two passes (busy for 30 to 99 %)" in text
        assert "is the limit" not in text
        assert "No step leaves the GPU busy for under 80 % of both passes." in text

    def test_one_step_is_not_all_of_these(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            p = point.parameters
            alone = (p["size"], p["context"], p["precision"]) == ("small", 128, "fp32")
            backward = 11.0 if alone else 20.0
            return {**STEP, "backward": backward, "busy_ms": {"forward": 3.0, "backward": 3.0}}

        text = host_limit(data_of(times), "cuda")
        assert "in 1 of 8 training steps: fp32 (small at context 128). There the GPU runs" in text
        assert "of both passes (8 steps) and the host sets the pace, backward takes 1.10 to" in text

    def test_some_of_each(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            share = 0.3 if point.parameters["size"] == "small" else 0.99
            busy = {"forward": 10 * share, "backward": 11 * share}
            return {**STEP, "backward": 11.0, "busy_ms": busy}

        text = host_limit(data_of(times), "cuda")
        assert (
            "In 4 of these, fp32 (small at every context), bf16 (small at every context), the GPU "
            "runs something for only 30 % of the time"
        ) in text
        assert "In 4 of these, fp32 (medium at every context), bf16 (medium at every" in text

    def test_contexts_are_told_among_all_that_were_measured(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            ratio = 1.0 if point.parameters["context"] == 128 else 2.0
            share = 0.3 if point.parameters["size"] == "small" else 0.99
            busy = {"forward": 10 * share, "backward": 10 * ratio * share}
            return {**STEP, "backward": 10 * ratio, "busy_ms": busy}

        text = host_limit(data_of(times), "cuda")
        assert "In 2 of these, fp32 (small at context 128), bf16 (small at context 128)" in text

    def test_nowhere_alike(self) -> None:
        text = self.text(2.0, 0.99, 0.99)
        assert text.startswith("Nowhere do forward and backward take about the same time")
        assert text.endswith("(8 steps), backward takes 2.00 times as long as forward.")

    def test_without_busy_times_nothing_is_claimed(self) -> None:
        assert "no GPU-busy time was recorded" in host_limit(data_of(lambda p: STEP), "cuda")

    def test_on_a_cpu_the_question_does_not_arise(self) -> None:
        text = host_limit(data_of(lambda p: STEP, "cpu"), "cpu")
        assert text.startswith("On a CPU the host is the device")
        assert "backward takes 2.00 times as long as forward" in text

    def test_no_data_is_said(self) -> None:
        assert "no training step was measured" in host_limit(data_of(nothing), "cuda")
