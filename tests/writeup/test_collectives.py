"""The collectives' page: bandwidths as nccl-tests has them, lines, tables, checks, figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
from matplotlib import pyplot as plt

from lmlab.measure.statistics import NOISY_ABOVE
from lmlab.study.points import Point
from lmlab.writeup.checks.collectives import checks
from lmlab.writeup.comparison import margin_of
from lmlab.writeup.figures.collectives import figures
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.tables.collectives import tables
from tests.writeup import factory, synthetic
from tests.writeup.small_collectives import (
    EMPTY,
    JOB_TIME,
    SOUND,
    changed,
    cut_from,
    few,
    noisy,
    sampled,
    scaled,
    whole,
)


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
        assert frames.time_caps(data) == JOB_TIME

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
        assert margin_of(*counts) == margin


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
            "“no time”: the fewest repetitions did not fit into what was left of the job's "
            f"{JOB_TIME}."
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
        words = f"A line that ends before 1 GiB does so because its job's time ({JOB_TIME}) was up."
        captions = {name: drawing.caption for name, drawing in figures(SOUND).items()}
        assert all(caption.endswith(words) for caption in captions.values())
        assert not any(
            "ends before" in drawing.caption for drawing in figures(changed(whole)).values()
        )

    def test_without_results_nothing_is_drawn(self) -> None:
        assert all(drawing.draw is None for drawing in figures(EMPTY).values())
