"""The collectives' page: bandwidths as nccl-tests has them, lines, every sentence's branches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from lmlab.measure.statistics import NOISY_ABOVE
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.checks.collectives import checks
from lmlab.writeup.collect import Collected
from lmlab.writeup.figures.collectives import figures
from lmlab.writeup.findings.collectives import findings
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.numbers import span
from lmlab.writeup.tables.collectives import tables
from tests.writeup import factory, synthetic
from tests.writeup.synthetic_ranks import collectives as make_result
from tests.writeup.synthetic_ranks import milliseconds

Change = Callable[[Point, dict[str, Any]], None]
SOUND = synthetic.collected("collectives")
EMPTY = factory.collected("collectives", lambda point, device: None)


def changed(change: Change, *, gpus: int = 1, device: str = "cuda") -> Collected:
    """The synthetic study after a change to the data of each job."""

    def make(point: Point, device: str) -> Result:
        result = make_result(point, device, gpus=gpus)
        if result.status != "ok":
            return result
        data = deepcopy(dict(result.data))
        change(point, data)
        return factory.result(point, device, data=data)

    return synthetic.collected("collectives", device, make)


def only(*placements: str, worlds: set[int] | None = None) -> Collected:
    """The study with jobs of these placements alone."""

    def make(point: Point, device: str) -> Result | None:
        p = point.parameters
        if p["placement"] not in placements or (worlds and p["world_size"] not in worlds):
            return None
        return make_result(point, device, gpus=8)

    return synthetic.collected("collectives", make=make)


def scaled(factor: float, **where: Any) -> Change:
    """Cases with these values take so many times as long."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for case in data["cases"]:
            if "samples_ms" in case and where.items() <= case.items():
                case.update(factory.measurement([factor * ms for ms in case["samples_ms"]]))

    return change


Times = Callable[[float], list[float]]


def sampled(times: Times, **where: Any) -> Change:
    """Cases with these values have the samples that `times` makes of their median."""

    def change(point: Point, data: dict[str, Any]) -> None:
        for case in data["cases"]:
            if "samples_ms" in case and where.items() <= case.items():
                case.update(factory.measurement(times(case["median_ms"])))

    return change


def few(median: float) -> list[float]:
    """Three samples close together."""
    return [0.99 * median, median, 1.02 * median]


def noisy(median: float) -> list[float]:
    """Samples whose middle half is wide."""
    return [0.8 * median, 0.9 * median, median, 1.1 * median, 1.5 * median]


def cut_from(mib: int, reason: str = "the job's time was up") -> Change:
    """Every case from a size on was not begun, in every format and operation."""

    def change(point: Point, data: dict[str, Any]) -> None:
        data["cases"] = [
            {**{key: case[key] for key in ("operation", "dtype", "size_bytes")}, "reason": reason}
            if frames.nominal_mib(case["size_bytes"]) >= mib
            else case
            for case in data["cases"]
        ]

    return change


def whole(point: Point, data: dict[str, Any]) -> None:
    """A job that had time for every case."""
    placement, ranks = str(point.parameters["placement"]), int(point.parameters["world_size"])
    data["cases"] = [
        timed_case(placement, ranks, case["operation"], case["dtype"], case["size_bytes"])
        for case in data["cases"]
    ]


def timed_case(placement: str, ranks: int, operation: str, dtype: str, size: int) -> dict[str, Any]:
    """A case of the synthetic machine that no cap keeps from being timed."""
    samples = [milliseconds(placement, ranks, operation, size) * (1 + i / 100) for i in range(5)]
    return {
        "operation": operation,
        "dtype": dtype,
        "size_bytes": size,
        **factory.measurement(samples),
        "rank_median_ms": [samples[2]] * ranks,
    }


class TestFrames:
    @pytest.mark.parametrize(
        ("operation", "ranks", "factor"),
        [
            ("all_reduce", 2, 1.0),
            ("all_reduce", 8, 1.75),
            ("all_gather", 4, 0.75),
            ("reduce_scatter", 4, 0.75),
            ("broadcast", 8, 1.0),
        ],
    )
    def test_bus_bandwidth_counts_what_a_connection_carries(
        self, operation: str, ranks: int, factor: float
    ) -> None:
        assert frames.bus_factor(operation, ranks) == factor

    def test_one_rank_has_no_bus(self) -> None:
        assert math.isnan(frames.bus_factor("broadcast", 1))

    def test_algorithm_bandwidth_is_size_over_time(self) -> None:
        data = frames.measured(frames.frame(SOUND.rows))
        row = data[data["world_size"] > 1].iloc[0]
        assert data[data["world_size"] == 1]["algorithm_gb_per_s"].isna().all()
        expected = row["size_bytes"] / (row["median_ms"] / 1e3) / 1e9
        assert row["algorithm_gb_per_s"] == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("group", "words"),
        [
            ({"backend": "nccl", "device": "cuda", "gpus": 1, "world_size": 1}, "1 GPU over NCCL"),
            (
                {"backend": "gloo", "device": "cuda", "gpus": 1, "world_size": 2},
                "2 ranks on one GPU over gloo",
            ),
            (
                {"backend": "gloo", "device": "cpu", "gpus": 0, "world_size": 4},
                "4 CPU ranks over gloo",
            ),
        ],
    )
    def test_what_took_part_is_what_the_group_says(self, group: Any, words: str) -> None:
        assert frames.arm_of({**group, "nnodes": 1}) == words

    def test_several_nodes_are_told(self) -> None:
        group = {"backend": "nccl", "device": "cuda", "gpus": 16, "world_size": 16, "nnodes": 2}
        assert frames.arm_of(group) == "16 GPUs of 2 nodes over NCCL"

    def test_a_line_finds_latency_and_bandwidth(self) -> None:
        sizes = [1e6, 1e7, 1e8]
        latency, per_byte, worst = frames.fit_line(sizes, [1e-3 + size / 2e9 for size in sizes])
        assert (latency, per_byte) == (pytest.approx(1e-3), pytest.approx(0.5e-9))
        assert worst == pytest.approx(0, abs=1e-9)

    def test_a_latency_below_the_noise_is_zero(self) -> None:
        latency, per_byte, worst = frames.fit_line([1e6, 1e7, 1e8], [0.5e-3, 1e-2, 1e-1])
        assert latency == 0
        # b minimises sum (b s/t - 1)^2 for s/t = 2, 1, 1 (in 1e9): b = 4 / 6.
        assert per_byte == pytest.approx(4 / 6 * 1e-9)
        assert worst == pytest.approx(1 / 3)

    def test_the_fits_are_those_that_made_the_times(self) -> None:
        lines = frames.fits(frames.frame(SOUND.rows))
        cpu = frames.of(
            lines, arm="4 CPU ranks over gloo", operation="all_reduce", dtype="fp32"
        ).iloc[0]
        assert cpu["latency_ms"] == pytest.approx(2.0, rel=0.1)
        assert cpu["bus_gb_per_s"] == pytest.approx(1.6, rel=0.05)

    def test_two_sizes_are_no_line(self) -> None:
        def two_sizes(point: Point, data: dict[str, Any]) -> None:
            data["cases"] = [c for c in data["cases"] if c["size_bytes"] > 200 * frames.MIB]

        assert not len(frames.fits(frames.frame(changed(two_sizes).rows)))

    def test_a_case_carries_how_far_its_samples_scatter_and_what_time_its_job_had(self) -> None:
        data = frames.frame(changed(sampled(noisy, dtype="bf16")).rows)
        timed = frames.measured(data)
        assert timed["noisy"].equals(timed["dtype"] == "bf16")
        assert (timed["n"] == 5).all()
        assert (timed["min_ms"] < timed["max_ms"]).all()
        assert frames.time_caps(data) == "16 s"

    def test_only_what_was_not_begun_is_cut(self) -> None:
        data = frames.frame(changed(cut_from(1024)).rows)
        assert set(data[data["cut"]]["size_bytes"].map(frames.nominal_mib)) == {1024}
        refused = frames.frame(changed(cut_from(1024, "no such operation")).rows)
        assert not refused["cut"][refused["size_bytes"] == 1024 * frames.MIB].any()

    def test_nothing_measured_can_still_be_asked(self) -> None:
        nothing = frames.frame(EMPTY.rows)
        assert len(nothing[nothing["cut"]].columns) == len(frames.COLUMNS)

    def test_the_words_for_noisy_are_those_of_who_measured(self) -> None:
        assert f" {100 * NOISY_ABOVE:.0f} %" in frames.NOISY_MEANS

    def test_sizes_are_halved_by_their_number(self) -> None:
        data = frames.frame(SOUND.rows)
        assert frames.halves(data) == ([1, 4, 10, 16], [64, 100, 256, 1024])
        assert frames.halves(data[data["size_bytes"] == frames.MIB]) == ([], [1])

    @pytest.mark.parametrize(("counts", "margin"), [((3, 50), 0.05), ((4, 4), 0.0)])
    def test_few_samples_must_lie_further_apart(self, counts: Any, margin: float) -> None:
        assert frames.margin(*counts) == margin


class TestTables:
    def test_every_operation_and_format_has_its_table(self) -> None:
        made = tables(SOUND)
        assert len([name for name in made if name.startswith("times_")]) == 8
        assert all(len(row) == len(t.columns) for t in made.values() for row in t.rows)

    def test_backend_and_world_size_come_from_the_group(self) -> None:
        def pretend(point: Point, data: dict[str, Any]) -> None:
            data["ranks"].update(backend="mpi", world_size=3)

        rows = tables(changed(pretend))["ranks"].rows
        assert {(row[1], row[2]) for row in rows if row[1] != "–"} == {("mpi", "3")}

    def test_a_world_that_was_not_started_says_why(self) -> None:
        rows = tables(SOUND)["ranks"].rows
        assert rows[1][-1] == "unsupported: needs 2 GPUs, 1 found"
        assert tables(EMPTY)["ranks"].rows[0][-1] == "not measured"

    def test_a_cell_is_time_and_both_bandwidths(self) -> None:
        table = tables(SOUND)["times_all_reduce_fp32"]
        titles = [column.title for column in table.columns]
        sizes = {row[0]: row for row in table.rows}
        row = frames.of(
            frames.frame(SOUND.rows), arm="2 CPU ranks over gloo", dtype="fp32",
            operation="all_reduce", size_bytes=64 * frames.MIB,
        ).iloc[0]  # fmt: skip
        cell = sizes["64 MiB"][titles.index("2 CPU ranks over gloo")]
        assert cell.startswith(f"{row['median_ms']:.1f} (")
        alone = sizes["64 MiB"][titles.index("1 GPU over NCCL")]
        assert alone.endswith(" (– / –)"), "a rank that sends nothing has no bandwidth"

    def test_a_case_without_time_says_so_and_the_caption_explains(self) -> None:
        table = tables(SOUND)["times_all_reduce_bf16"]
        assert table.rows[-1][2] == "no time"
        assert table.caption.endswith(
            "“no time”: the fewest repetitions did not fit into what was left of the job's 16 s."
        )
        assert "no time" not in str(tables(changed(whole))["times_all_reduce_bf16"])

    def test_times_that_scatter_are_marked_and_the_caption_counts_them(self) -> None:
        table = tables(changed(sampled(noisy, operation="all_reduce", dtype="fp32")))
        cells = [cell for row in table["times_all_reduce_fp32"].rows for cell in row[1:]]
        assert all(cell.startswith("~") and "†" not in cell for cell in cells)
        assert (
            "~ noisy: the middle half of the samples spans more than 10 % of the median "
            f"({len(cells)} of {len(cells)} times)." in table["times_all_reduce_fp32"].caption
        )
        assert "~" not in table["times_broadcast_fp32"].caption

    def test_times_of_few_samples_are_marked_and_the_caption_says_of_how_many(self) -> None:
        table = tables(changed(sampled(few, size_bytes=64 * frames.MIB)))["times_broadcast_fp32"]
        cells = {row[0]: row[1:] for row in table.rows}
        # Six ranks share a little less than was asked for, and keep their samples here.
        assert sum("† (" in cell for cell in cells["64 MiB"]) == 5
        assert not any("†" in cell for cell in cells["16 MiB"])
        assert "† n = 3: too few samples to show how far they scatter (5 of 43 times)." in (
            table.caption
        )

    def test_sound_times_have_no_mark(self) -> None:
        table = tables(SOUND)["times_all_reduce_fp32"]
        assert not any(mark in str([table.rows, table.caption]) for mark in "~†")

    def test_a_refused_operation_says_so_and_the_caption_quotes_the_backend(self) -> None:
        def refuse(point: Point, data: dict[str, Any]) -> None:
            if point.parameters["placement"] == "shared_gpu":
                data["cases"] = [
                    {k: c[k] for k in ("operation", "dtype", "size_bytes")} | {"reason": "no CUDA"}
                    for c in data["cases"]
                ]

        table = tables(changed(refuse))["times_broadcast_fp32"]
        assert table.rows[0][2] == "unsupported"
        assert "“unsupported” on 2 ranks on one GPU over gloo: no CUDA" in table.caption

    def test_the_caption_tells_that_cpu_ranks_are_not_the_gpu(self) -> None:
        assert "CPU ranks run on its host" in tables(SOUND)["fits"].caption
        on_cpu = tables(synthetic.collected("collectives", "cpu"))
        assert "CPU ranks run on" not in on_cpu["fits"].caption


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
        assert "The others reach" not in alone

    def test_more_ranks_are_compared_at_a_size_that_both_have(self) -> None:
        text = findings(SOUND)["more_ranks"]
        assert "an all-reduce of 1 GiB takes" in text
        assert text.endswith("8 CPU ranks over gloo, 1.75 times as long in another process.")

        def only_small_on_eight(point: Point, data: dict[str, Any]) -> None:
            if point.parameters["world_size"] == 8:
                data["cases"] = [c for c in data["cases"] if c["size_bytes"] < 9 * frames.MIB]

        assert (
            "an all-reduce of 4 MiB takes" in findings(changed(only_small_on_eight))["more_ranks"]
        )

    def test_worlds_that_are_as_fast_are_not_told_apart(self) -> None:
        def alike(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case:
                    case.update(factory.measurement(few(case["size_bytes"] / 2**20)))

        text = findings(changed(alike))["more_ranks"]
        assert text.endswith("1.00 times as long in another process: not told apart.")

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

        assert "a latency below the noise and " in findings(changed(steep))["fit"]

    def test_what_was_cut(self) -> None:
        told = findings(SOUND)
        assert told["cut"] == (
            "A job has 16 s for all its cases, and one is begun only if its fewest repetitions fit "
            "into what is left: 35 of 320 cases between ranks were not begun, none below 1 GiB; "
            "their cells say “no time”. At the largest size (1 GiB) only all-reduce in fp32 was "
            "timed between ranks: it is let ahead of the others on purpose."
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
            "the samples spans more than 10 % of the median), 32 of 160 up to 16 MiB and 0 of 125 "
            "from 64 MiB on; 32 have n = 3 (†), 0 of 160 up to 16 MiB and 32 of 125 from 64 MiB on."
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


class TestChecks:
    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_sound_results_raise_no_warning(self, device: str) -> None:
        assert checks(synthetic.collected("collectives", device)) == []
        assert checks(EMPTY) == []

    def test_gloo_cannot_be_faster_than_the_host(self) -> None:
        warnings = checks(changed(scaled(1e-3, operation="broadcast", dtype="fp32")))
        assert any("its path carries at most 64.0" in warning for warning in warnings)

    def test_nccl_cannot_be_faster_than_the_gpus_memory(self) -> None:
        warnings = checks(changed(scaled(1e-2, dtype="fp32"), gpus=8))
        assert any("GPUs over NCCL has a bus bandwidth of" in warning for warning in warnings)

    def test_times_must_grow_with_the_size(self) -> None:
        def constant(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case:
                    case.update(factory.measurement([900.0]))

        warnings = checks(changed(constant))
        assert any("take only 1.00 times as long as 1 MiB" in warning for warning in warnings)

    def test_a_group_of_another_size(self) -> None:
        def pretend(point: Point, data: dict[str, Any]) -> None:
            data["ranks"]["world_size"] = 3

        warnings = checks(changed(pretend))
        assert "collectives placement=cpu world_size=2 was measured by 3 ranks." in warnings


class TestFigures:
    def test_only_what_sends_is_in_the_bandwidths_and_all_of_it_in_the_fit(self) -> None:
        drawings = figures(SOUND)
        assert list(drawings) == ["bandwidth_fp32", "bandwidth_bf16", "fit"]
        looks: list[dict[str, Any]] = []
        for name, arms in (("bandwidth_fp32", 5), ("fit", 6)):
            draw = drawings[name].draw
            assert draw is not None
            figure = draw()
            handles, labels = figure.axes[0].get_legend_handles_labels()
            assert len(labels) == arms
            looks.append(
                {k: (h.get_color(), h.get_marker()) for k, h in zip(labels, handles, strict=True)}
            )
            plt.close(figure)
        assert looks[0].items() <= looks[1].items(), "a set of ranks looks the same everywhere"

    def test_the_caption_says_why_a_line_ends_early_where_one_does(self) -> None:
        words = "A line that ends before 1 GiB does so because its job's time (16 s) was up."
        captions = {name: drawing.caption for name, drawing in figures(SOUND).items()}
        assert all(caption.endswith(words) for caption in captions.values())
        assert not any(
            "ends before" in drawing.caption for drawing in figures(changed(whole)).values()
        )

    def test_without_results_nothing_is_drawn(self) -> None:
        assert all(drawing.draw is None for drawing in figures(EMPTY).values())
