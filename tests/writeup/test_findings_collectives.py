"""What the collectives' chapter claims, in every branch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.writeup.findings.collectives import findings
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.numbers import span
from tests.writeup import factory
from tests.writeup.small_collectives import (
    EMPTY,
    SOUND,
    Change,
    Times,
    changed,
    cut_from,
    few,
    noisy,
    only,
    sampled,
    scaled,
)


class TestFindings:
    def test_nothing_measured_is_said(self) -> None:
        told = findings(EMPTY)
        assert told["summary"] == "No collective was measured."
        assert told["bandwidth"].startswith("No bus bandwidth can be given")
        assert told["one_rank"] == "A world of one rank was not measured."
        assert told["more_ranks"].endswith("no two worlds compare.")
        assert told["operations"].startswith("No other operation")
        assert told["formats"].startswith("Number formats cannot be compared")
        assert told["fit"].startswith("No line could be fitted")
        assert told["cut"] == told["gap"] == told["noisy_inside"] == ""
        assert told["noise"] == "No case between ranks was timed."
        assert told["not_here"].endswith(" were not measured.")

    def test_the_summary_takes_the_smallest_world_of_every_place(self) -> None:
        text = findings(SOUND)["summary"]
        assert text.startswith("The largest all-reduce in fp32 takes ")
        assert "with 2 ranks on one GPU over gloo and " in text
        assert "with 2 CPU ranks over gloo." in text
        assert "8 CPU ranks" not in text
        assert "n = " not in text, "samples that lie close together need no range"

    @pytest.mark.parametrize(
        ("times", "words"), [(few, "; n = 3, "), (noisy, "; n = 5, ")], ids=["few", "noisy"]
    )
    def test_a_headline_that_scatters_has_its_samples_beside_it(
        self, times: Times, words: str
    ) -> None:
        told = findings(changed(sampled(times)))
        data = frames.measured(frames.frame(changed(sampled(times)).rows))
        largest = frames.of(
            data, arm="2 CPU ranks over gloo", operation="all_reduce", dtype="fp32",
            size_bytes=1024 * frames.MIB,
        ).iloc[0]  # fmt: skip
        ends = span([largest["min_ms"], largest["max_ms"]])
        assert f"(1 GiB{words}{ends} ms) with 2 CPU ranks over gloo" in told["summary"]
        assert words in told["bandwidth"]
        assert told["bandwidth"].count(" GB/s)") == 5, "each set of ranks with its own range"
        assert words[2:] in told["more_ranks"]

    def test_one_sample_has_no_range(self) -> None:
        text = findings(changed(sampled(lambda median: [median])))["summary"]
        assert "(1 GiB; n = 1) with 2 CPU ranks over gloo" in text

    def test_one_rank_alone_is_no_exchange(self) -> None:
        text = findings(only("own_gpu", worlds={1}))["summary"]
        assert text == "No all-reduce between ranks was measured."

    def test_worlds_that_are_not_here(self) -> None:
        assert findings(SOUND)["not_here"].endswith("by their ranks: 2, 4, 6 and 8 (own GPU).")
        everywhere = changed(lambda point, data: None, gpus=8)
        assert findings(everywhere)["not_here"].startswith("No world")

    def test_the_highest_bandwidth_leads(self) -> None:
        assert findings(changed(lambda p, d: None, gpus=8))["bandwidth"].startswith(
            "The highest bus bandwidth of an all-reduce is 18"
        )
        alone = findings(only("shared_gpu"))["bandwidth"]
        assert "The others" not in alone

    def test_more_ranks_are_compared_at_a_size_that_both_have(self) -> None:
        text = findings(SOUND)["more_ranks"]
        assert "an all-reduce of 1 GiB takes" in text
        assert text.endswith("8 CPU ranks over gloo, 1.75 times as long in another job.")

        def only_small_on_eight(point: Point, data: dict[str, Any]) -> None:
            if point.parameters["world_size"] == 8:
                data["cases"] = [c for c in data["cases"] if c["size_bytes"] < 9 * frames.MIB]

        assert (
            "an all-reduce of 4 MiB takes" in findings(changed(only_small_on_eight))["more_ranks"]
        )

    def test_the_largest_world_that_shares_a_size_is_taken(self) -> None:
        def eight_on_its_own(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                case["size_bytes"] *= 3 if point.parameters["world_size"] == 8 else 1

        text = findings(changed(eight_on_its_own))["more_ranks"]
        assert "6 CPU ranks over gloo" in text
        assert "8 CPU ranks over gloo" not in text

    def test_a_larger_world_that_is_faster_is_told(self) -> None:
        def slow_fours(point: Point, data: dict[str, Any]) -> None:
            if point.parameters["world_size"] == 4:
                scaled(10.0, operation="all_reduce", size_bytes=frames.MIB)(point, data)
                scaled(2.0, operation="all_reduce", size_bytes=4 * frames.MIB)(point, data)

        assert "Not every step up" not in findings(SOUND)["more_ranks"]
        text = findings(changed(slow_fours))["more_ranks"]
        assert re.search(
            r" Not every step up costs time: 6 CPU ranks over gloo take less than 4 CPU ranks over "
            r"gloo at 2 of 8 sizes \(most so at 1 MiB: [\d.]+ against [\d.]+ ms\)\.$",
            text,
        )

    def test_worlds_that_are_as_fast_are_not_told_apart(self) -> None:
        def alike(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case:
                    case.update(factory.measurement(few(case["size_bytes"] / 2**20)))

        text = findings(changed(alike))["more_ranks"]
        assert text.endswith("1.00 times as long in another job: not told apart.")

    def test_operations_are_held_against_an_all_reduce(self) -> None:
        text = findings(SOUND)["operations"]
        assert "all-gather takes 0.634 times as long up to 16 MiB and 0.510 times from" in text
        assert text.endswith("what is measured is that.")
        nccl = findings(only("own_gpu", worlds={2, 4}))["operations"]
        assert "Gloo has no reduce-scatter" not in nccl

    def test_small_and_large_sizes_are_told_apart_where_they_differ(self) -> None:
        def slow_when_large(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case and case["operation"] == "all_gather":
                    factor = 4 if case["size_bytes"] > 60 * frames.MIB else 1
                    case.update(factory.measurement([factor * ms for ms in case["samples_ms"]]))

        text = findings(changed(slow_when_large))["operations"]
        assert re.search(
            r"all-gather takes 0\.\d+ times as long up to 16 MiB and 2\.\d+ times from 64 MiB on",
            text,
        )

    def test_ratios_of_one_size_are_not_split(self) -> None:
        def one_size(point: Point, data: dict[str, Any]) -> None:
            data["cases"] = [c for c in data["cases"] if c["size_bytes"] == 4 * frames.MIB]

        assert "all-gather takes 0.6" in findings(changed(one_size))["operations"]
        assert "up to" not in findings(changed(one_size))["operations"]

    def test_ratios_that_do_not_differ_are_not_split(self) -> None:
        def alike(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case:
                    factor = 2 if case["operation"] == "broadcast" else 1
                    case.update(factory.measurement([factor * case["size_bytes"]]))

        text = findings(changed(alike))["operations"]
        assert "broadcast takes 2.00 times as long (2.0): the median case" in text
        assert "up to" not in text

    @pytest.mark.parametrize(
        ("factor", "words"),
        [
            (1.0, "1.30 times as long with 2 CPU ranks over gloo (256 MiB, n = 5: slower)"),
            (0.5, "0.650 times as long with 2 CPU ranks over gloo (256 MiB, n = 5: faster)"),
            (
                1 / 1.3,
                "1.00 times as long with 2 CPU ranks over gloo (256 MiB, n = 5: not told apart)",
            ),
        ],
    )
    def test_formats(self, factor: float, words: str) -> None:
        text = findings(changed(scaled(factor, dtype="bf16")))["formats"]
        assert words in text
        assert "must lie more than" not in text

    def test_each_set_of_ranks_says_at_which_size_its_formats_are_compared(self) -> None:
        def short_of_time(point: Point, data: dict[str, Any]) -> None:
            if point.parameters["world_size"] == 8:
                cut_from(100)(point, data)

        text = findings(changed(short_of_time))["formats"]
        assert "with 4 CPU ranks over gloo (256 MiB, n = 5: slower)" in text
        assert "with 8 CPU ranks over gloo (64 MiB, n = 5: slower)." in text

    def test_formats_of_few_samples_must_lie_further_apart(self) -> None:
        # 1.3 / 1.25 is 4 % more: beyond samples that hardly scatter, within what few may hide.
        def close(median: float) -> list[float]:
            return [0.999 * median, median, 1.001 * median]

        def nearly_alike(times: Times) -> Change:
            def change(point: Point, data: dict[str, Any]) -> None:
                scaled(1 / 1.25, dtype="bf16")(point, data)
                sampled(times)(point, data)

            return change

        three = findings(changed(nearly_alike(close)))["formats"]
        assert "slower" not in three
        assert "(256 MiB, n = 3: not told apart)" in three
        assert three.endswith(
            "With fewer than 4 samples, middle halves must lie more than 5 % apart to be told "
            "apart."
        )
        many = findings(changed(nearly_alike(lambda median: 3 * close(median))))["formats"]
        assert "(256 MiB, n = 9: slower)" in many

    def test_formats_of_ranks_whose_sizes_are_rounded(self) -> None:
        def rounded(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case and case["dtype"] == "bf16":
                    case["size_bytes"] -= 4 * (point.parameters["world_size"] == 6)

        text = findings(changed(rounded))["formats"]
        assert "6 CPU ranks over gloo (256 MiB, n = 5: slower)" in text

    def test_formats_without_a_common_size(self) -> None:
        def apart(point: Point, data: dict[str, Any]) -> None:
            large = 20 * frames.MIB
            data["cases"] = [
                c for c in data["cases"] if (c["dtype"] == "fp32") == (c["size_bytes"] > large)
            ]

        assert findings(changed(apart))["formats"].endswith("exchanged one size in both.")

    def test_the_fit_names_its_worst_size(self) -> None:
        text = findings(SOUND)["fit"]
        assert "with 8 CPU ranks over gloo. These lines are off by at most" in text
        assert ", those of other operations and formats by up to" in text

        def reduce_alone(point: Point, data: dict[str, Any]) -> None:
            data["cases"] = [
                c for c in data["cases"] if (c["operation"], c["dtype"]) == ("all_reduce", "fp32")
            ]

        assert "those of other" not in findings(changed(reduce_alone))["fit"]

        def steep(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case:
                    case.update(factory.measurement([(case["size_bytes"] / 2**20) ** 1.2]))

        text = findings(changed(steep))["fit"]
        assert "no latency and " in text
        assert re.search(
            r": [\d. to]+ GB/s up to 16 MiB and [\d. to]+ from 64 MiB on, which no", text
        )
        assert "which no one line fits" not in findings(SOUND)["fit"]

    def test_latencies_of_noisy_times_are_not_compared(self) -> None:
        words = (
            " Each line is of one job, and 4 of 20 times up to 16 MiB, which decide a latency, "
            "are noisy: do not compare the latencies of different sets of ranks."
        )
        one_size = changed(sampled(noisy, operation="all_reduce", dtype="fp32", size_bytes=2**20))
        assert findings(one_size)["fit"].endswith(words)
        large = changed(sampled(noisy, operation="all_reduce", dtype="fp32", size_bytes=2**26))
        assert "do not compare" not in findings(large)["fit"]
        assert "do not compare" not in findings(SOUND)["fit"]

    def test_one_rank_costs_a_call(self) -> None:
        assert "(1 GPU over NCCL) sends nothing; its calls take 0.02" in findings(SOUND)["one_rank"]

    def test_published_times(self, tmp_path: Path) -> None:
        assert "differ by no more than 1.2 times" in findings(SOUND)["published"]
        nothing = findings(replace(SOUND, references=tmp_path))["published"]
        assert nothing == "No publication in report/references has all-reduce times."
        (tmp_path / "distributed.csv").write_text(
            "source,gpu,topic,parameter,value\n"
            "009,A,all_reduce,1 MiB,1\n009,A,all_reduce,64 MiB,9\n"
        )
        grown = findings(replace(SOUND, references=tmp_path))["published"]
        assert grown.endswith("so they are not put beside these.")
