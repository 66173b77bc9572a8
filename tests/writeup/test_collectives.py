"""The collectives' page: bandwidths as nccl-tests has them, lines, every sentence's branches."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.checks.collectives import checks
from lmlab.writeup.collect import Collected
from lmlab.writeup.figures.collectives import figures
from lmlab.writeup.findings.collectives import findings
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.tables.collectives import tables
from tests.writeup import factory, synthetic
from tests.writeup.synthetic_ranks import collectives as make_result

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
        assert "“no time”" in table.caption

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
        assert told["cut"] == "No collective was measured."
        assert told["not_here"].endswith(" were not measured.")

    def test_the_summary_takes_the_smallest_world_of_every_place(self) -> None:
        text = findings(SOUND)["summary"]
        assert text.startswith("The largest all-reduce in fp32 takes ")
        assert "with 2 ranks on one GPU over gloo and " in text
        assert "with 2 CPU ranks over gloo." in text
        assert "8 CPU ranks" not in text

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
        assert "8 CPU ranks over gloo (1.75 times as long, in another process)" in text

        def only_small_on_eight(point: Point, data: dict[str, Any]) -> None:
            if point.parameters["world_size"] == 8:
                data["cases"] = [c for c in data["cases"] if c["size_bytes"] < 9 * frames.MIB]

        assert (
            "an all-reduce of 4 MiB takes" in findings(changed(only_small_on_eight))["more_ranks"]
        )

    def test_operations_are_held_against_an_all_reduce(self) -> None:
        text = findings(SOUND)["operations"]
        assert "all-gather takes 0.5" in text
        assert text.endswith("what is measured is that.")
        nccl = findings(only("own_gpu", worlds={2, 4}))["operations"]
        assert "Gloo has no reduce-scatter" not in nccl

    @pytest.mark.parametrize(
        ("factor", "words"),
        [
            (1.0, "slower with"),
            (0.5, "faster with"),
            (1 / 1.3, "neither faster nor slower with"),
        ],
    )
    def test_formats(self, factor: float, words: str) -> None:
        assert words in findings(changed(scaled(factor, dtype="bf16")))["formats"]

    def test_formats_of_ranks_whose_sizes_are_rounded(self) -> None:
        def rounded(point: Point, data: dict[str, Any]) -> None:
            for case in data["cases"]:
                if "samples_ms" in case and case["dtype"] == "bf16":
                    case["size_bytes"] -= 4 * (point.parameters["world_size"] == 6)

        text = findings(changed(rounded))["formats"]
        assert text.startswith("At the largest size of both (n = 5), an all-reduce of the same")
        assert "6 CPU ranks over gloo" in text

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
        assert findings(SOUND)["cut"].startswith("35 of 384 cases have no time, none of them below")
        whole = findings(only("own_gpu"))["cut"]
        assert whole == "All 320 cases were timed."

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

    def test_without_results_nothing_is_drawn(self) -> None:
        assert all(drawing.draw is None for drawing in figures(EMPTY).values())
