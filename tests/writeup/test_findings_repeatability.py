"""How well times repeat, within a process and between processes, in every branch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.findings.repeatability import between_processes, spread
from lmlab.writeup.frames.end_to_end import frame
from lmlab.writeup.frames.repeats import limit_of, margins, repeats, tolerances
from tests.writeup import factory
from tests.writeup.small_study import STEP, data_of, in_mode, nothing

MODES = ["forward_backward", "train_step"]
COLD = {"context": 128, "batch": 4, "precision": "fp32", "mode": "train_step", "warmups": [0]}
SIZES = ["small", "medium", "large", "xl", "2.7b"]


def busy(share: float, pace: float = 1.0) -> dict[str, Any]:
    """A step whose GPU works for this share of the time, at a host's pace."""
    times = {phase: ms * pace for phase, ms in STEP.items()}
    return {**times, "busy_ms": {phase: share * ms for phase, ms in STEP.items()}}


def two_modes(times: Callable[[Point], dict[str, Any]], device: str = "cuda") -> pd.DataFrame:
    """Both modes that repeat each other, four pairs a size; no cold start that does."""
    study = factory.study("cuda", sizes=SIZES, contexts=[128], modes=MODES, cold_start=COLD)

    def make(point: Point, device: str) -> Result:
        wanted = in_mode(times(point), str(point.parameters["mode"]))
        return factory.step(point, device, spread=0.0, **wanted)

    return frame(factory.collected("end_to_end", make, device, what=study))


class TestSpread:
    @pytest.mark.parametrize(
        ("usual", "worst", "verdict"),
        [
            (0.004, 0.01, "The spread is small:"),
            (0.004, 0.5, "The spread is small with exceptions:"),
            (0.2, 0.5, "The spread is not small:"),
        ],
    )
    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_verdict_and_worst_point(
        self, usual: float, worst: float, verdict: str, device: str
    ) -> None:
        def times(point: Point) -> dict[str, float]:
            where = (point.parameters["size"], point.parameters["context"])
            return {**STEP, "spread": worst if where == ("medium", 256) else usual}

        text = spread(data_of(times, device), device)
        assert text.startswith(verdict)
        assert "(medium at context 256, " in text
        assert ("On a CPU host and device are one" in text) is (device == "cpu")
        assert "waits" not in text, "no busy share was recorded"

    @staticmethod
    def by_size(small: tuple[float, float], medium: tuple[float, float]) -> str:
        """Busy share and spread of the two sizes."""

        def times(point: Point) -> dict[str, Any]:
            share, scatter = small if point.parameters["size"] == "small" else medium
            return {**busy(share), "spread": scatter}

        return spread(data_of(times), "cuda")

    def test_noise_where_the_host_is_the_limit(self) -> None:
        text = self.by_size((0.5, 0.3), (0.99, 0.004))
        assert text.startswith(
            "The spread is small where the GPU is the limit and not where the GPU waits for"
        )
        assert "busy for at least 95 % of it (8 points)" in text
        assert "8 of 16 points are beyond 10 %, and in all of these the GPU waits for" in text

    def test_swapping_the_spreads_turns_it_round(self) -> None:
        text = self.by_size((0.5, 0.004), (0.99, 0.3))
        assert text.startswith(
            "The spread is small where the GPU waits for the host and not where the GPU is the"
        )
        assert text.endswith(
            "but only in 0 of these the GPU waits for the host: it is not the whole reason."
        )

    def test_noise_everywhere_is_not_the_hosts(self) -> None:
        text = self.by_size((0.5, 0.3), (0.99, 0.3))
        assert text.startswith("The spread is not small:")
        assert "but only in 8 of these the GPU waits" in text

    def test_quiet_everywhere_needs_no_reason(self) -> None:
        assert "waits" not in self.by_size((0.5, 0.004), (0.99, 0.004))

    @pytest.mark.parametrize(
        ("share", "reason"),
        [(0.5, "the GPU waits for the host."), (0.9, "the host is not the limit.")],
    )
    def test_a_single_noisy_point(self, share: float, reason: str) -> None:
        def times(point: Point) -> dict[str, Any]:
            p = point.parameters
            alone = (p["size"], p["context"], p["precision"], p["mode"]) == (
                "small", 128, "fp32", "train_step",
            )  # fmt: skip
            return {**busy(share), "spread": 0.3 if alone else 0.004}

        assert spread(data_of(times), "cuda").endswith(
            f"1 of 16 points is beyond 10 %, and there {reason}"
        )

    def test_nearly_all_noisy_points_are_counted(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            p = point.parameters
            odd = (p["size"], p["context"], p["precision"], p["mode"]) == (
                "small", 128, "fp32", "train_step",
            )  # fmt: skip
            return {**busy(0.9 if odd else 0.5), "spread": 0.3}

        assert "16 of 16 points are beyond 10 %, and in 15 of these" in spread(
            data_of(times), "cuda"
        )

    def test_single_samples_have_none(self) -> None:
        study = factory.study("cuda", steps=1, sizes=["small"], contexts=[128])

        def make(point: Point, device: str) -> Result:
            return factory.step(point, device, **in_mode(STEP, str(point.parameters["mode"])))

        data = frame(factory.collected("end_to_end", make, what=study))
        assert "no point has more than one sample" in spread(data, "cuda")


class TestBetweenProcesses:
    @pytest.mark.parametrize(
        ("share", "limit"),
        [
            (0.95, "gpu"),
            (0.94, "partly"),
            (0.80, "partly"),
            (0.79, "host"),
            (math.nan, "unknown"),
        ],
    )
    def test_who_is_the_limit(self, share: float, limit: str) -> None:
        assert limit_of(share) == limit

    def test_the_lower_share_of_a_pair_counts(self) -> None:
        data = two_modes(lambda p: busy(0.98, 1.5 if p.parameters["mode"] == "train_step" else 1.0))
        assert set(repeats(data)["limit"]) == {"host"}

    def test_the_largest_of_the_pairs_is_the_tolerance(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            paces = {"small": 1.6, "medium": 1.2}
            here = point.parameters["mode"] == "train_step"
            return busy(0.5, paces.get(str(point.parameters["size"]), 1.1) if here else 1.0)

        data = two_modes(times)
        tolerance = tolerances(data)["host"]
        assert (tolerance.pairs, round(tolerance.margin, 6), tolerance.few) == (20, 0.6, False)
        assert between_processes(data) == (
            "From process to process the same pass differs by at most 60 % where the GPU is busy "
            "for under 80 % and waits for the host (20 pairs). The worst is forward of small at "
            "context 128, fp32: 10.0 ms in mode forward_backward and 16.0 ms in mode train_step."
        )

    def test_each_limit_has_its_own(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            p = point.parameters
            share = {"small": 0.4, "medium": 0.9}.get(str(p["size"]), 0.99)
            pace = {"small": 1.5, "medium": 1.05}.get(str(p["size"]), 1.001)
            return busy(share, pace if p["mode"] == "train_step" else 1.0)

        text = between_processes(two_modes(times))
        assert "at most 0.10 % where the GPU is busy for at least 95 % of it (12 pairs)" in text
        assert "50 % where the GPU is busy for under 80 % and waits for the host (4 pairs)." in text
        assert "Fewer than 10 pairs are no bound: where the GPU is busy for 80 to 95 %" in text

    def test_a_quiet_class_keeps_the_fixed_rule(self) -> None:
        tolerance = tolerances(two_modes(lambda p: busy(0.99)))["gpu"]
        assert (tolerance.largest, tolerance.margin) == (0.0, 0.02)

    def test_few_pairs_are_said_and_what_they_show_counts(self) -> None:
        def times(point: Point) -> dict[str, float]:
            slow = 1.3 if point.parameters["start"] == "cold" else 1.0
            return {**STEP, "forward": 10 * slow, "spread": 0.0}

        data = data_of(times)
        assert tolerances(data)["unknown"].margin == pytest.approx(0.3)
        assert between_processes(data) == (
            "From process to process the same pass differs by at most 30 % (6 pairs). The worst is "
            "forward of small at context 128, fp32: 13.0 ms in a cold start and 10.0 ms in a warm "
            "start. Fewer than 10 pairs are no bound: the largest difference seen counts, and 2 % "
            "at least."
        )

    def test_nothing_measured_twice_is_said(self) -> None:
        assert between_processes(data_of(nothing)) == (
            "How far the same pass differs between processes is not known: none was measured "
            "twice. Across points a difference must exceed 2 %."
        )

    def test_a_cpu_is_one_class(self) -> None:
        text = between_processes(two_modes(lambda p: dict(STEP), device="cpu"))
        assert "differs by at most 0 % (20 pairs)." in text

    def test_of_two_arms_the_wider_tolerance_counts(self) -> None:
        def times(point: Point) -> dict[str, Any]:
            waiting = point.parameters["precision"] == "bf16"
            pace = 1.4 if waiting and point.parameters["mode"] == "train_step" else 1.0
            return busy(0.5 if waiting else 0.99, pace)

        allowed = tolerances(two_modes(times))
        arms = pd.DataFrame({"busy_share_a": [0.99, 0.99], "busy_share_b": [0.5, 0.99]})
        assert margins(arms, allowed) == pytest.approx([0.4, 0.02])
