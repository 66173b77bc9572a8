"""What the chapter says of cases that were not begun and of times that scatter."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lmlab.study.points import Point
from lmlab.writeup.findings.collectives import findings
from lmlab.writeup.frames import collectives as frames
from tests.writeup.small_collectives import (
    JOB_TIME,
    SOUND,
    changed,
    cut_from,
    few,
    noisy,
    sampled,
    whole,
)


class TestDoubts:
    def test_what_was_cut(self) -> None:
        told = findings(SOUND)
        assert told["cut"] == (
            f"A job has {JOB_TIME} for all its cases, and one is begun only if its fewest "
            "repetitions fit into what is left: 35 of 320 cases between ranks were not begun, none "
            "below 1 GiB; their cells say “no time”. At the largest size (1 GiB) only all-reduce "
            "in fp32 was timed between ranks: it is let ahead of the others on purpose."
        )
        assert told["gap"] == ("35 of 320 exchanges between ranks were not begun for want of time")

    def test_where_every_case_had_its_time_nothing_is_said_of_it(self) -> None:
        told = findings(changed(whole))
        assert told["cut"] == told["gap"] == ""

    def test_what_a_backend_refused_was_not_cut(self) -> None:
        told = findings(changed(cut_from(256, "no such operation")))
        assert told["cut"] == told["gap"] == ""

    def test_nothing_of_the_largest_size_is_left(self) -> None:
        told = findings(changed(cut_from(1)))
        assert (
            "320 of 320 cases between ranks and 64 of 64 cases of one rank were not begun, none "
            "below 1 MiB" in told["cut"]
        )
        assert told["cut"].endswith("At the largest size (1 GiB) nothing was timed between ranks.")
        assert told["noise"] == "No case between ranks was timed."
        assert told["summary"] == "No collective was measured."

    def test_several_kinds_are_left_of_the_largest_size(self) -> None:
        def broadcast_of_two(point: Point, data: dict[str, Any]) -> None:
            if point.parameters["world_size"] == 2:
                before = deepcopy(data["cases"])
                whole(point, data)
                data["cases"] = [
                    after if after["operation"] == "broadcast" else case
                    for case, after in zip(before, data["cases"], strict=True)
                ]

        assert findings(changed(broadcast_of_two))["cut"].endswith(
            "only all-reduce in fp32, broadcast in fp32 (2 of 5 sets of ranks) and broadcast in "
            "bf16 (2 of 5 sets of ranks) were timed between ranks: all-reduce in fp32 is let ahead "
            "of the others on purpose."
        )

    def test_one_case_was_cut(self) -> None:
        def all_but_one(point: Point, data: dict[str, Any]) -> None:
            whole(point, data)
            if point.parameters == {"placement": "shared_gpu", "world_size": 2}:
                last = data["cases"][-1]
                kept = {key: last[key] for key in ("operation", "dtype", "size_bytes")}
                data["cases"][-1] = {**kept, "reason": "the job's time was up"}

        told = findings(changed(all_but_one))
        assert "1 of 320 cases between ranks was not begun" in told["cut"]
        assert told["gap"].startswith("1 of 320 exchanges between ranks was not begun")

    def test_how_many_times_scatter_and_at_which_sizes(self) -> None:
        def scatter(point: Point, data: dict[str, Any]) -> None:
            sampled(noisy, size_bytes=4 * frames.MIB)(point, data)
            sampled(few, size_bytes=64 * frames.MIB)(point, data)

        told = findings(changed(scatter))
        # Six ranks share a little less than was asked for, and keep their samples here.
        assert told["noise"] == (
            "Of 285 timed cases between ranks, 32 are noisy (~ in the tables: the middle half of "
            "the samples spans more than 10 % of the median), 32 of 160 up to 16 MiB and none of "
            "125 from 64 MiB on; 32 have n = 3 (†), none of 160 up to 16 MiB and 32 of 125 from 64 "
            "MiB on."
        )
        assert told["noisy_inside"] == (
            "A result of collectives raises the flag noisy for its largest all-reduce in fp32 "
            "alone; of 285 timed cases between ranks, 32 are."
        )

    def test_times_that_do_not_scatter_are_said_to(self) -> None:
        told = findings(SOUND)
        assert told["noise"] == (
            "None of the 285 timed cases between ranks is noisy or has fewer than 4 samples."
        )
        assert told["noisy_inside"] == ""
