"""The chapter on paper: its numbers, this machine's rates in its formulas, every branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from matplotlib import pyplot as plt

from lmlab.study.chapters import points_of
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.checks.calculations import checks
from lmlab.writeup.collect import Collected
from lmlab.writeup.figures.calculations import figures
from lmlab.writeup.findings.calculations import findings
from lmlab.writeup.frames import calculations as frames
from lmlab.writeup.numbers import significant
from lmlab.writeup.tables.calculations import tables
from tests.writeup import factory, synthetic
from tests.writeup.synthetic_ranks import calculations, collectives

SOUND = synthetic.collected("calculations")
CPU = synthetic.collected("calculations", "cpu")
TOO_WIDE = {"fsdp": 2, "tp": 32, "fsdp_axes": 1, "tp_axes": 1}
EMPTY = factory.collected("calculations", lambda point, device: None)


def asked(**settings: Any) -> Collected:
    """The answer to another question."""

    def make(point: Point, device: str) -> Result:
        return calculations(replace(point, settings={**point.settings, **settings}), device)

    return synthetic.collected("calculations", make=make)


def found(change: Callable[[dict[str, Any]], None]) -> Collected:
    """The same question with another answer."""

    def make(point: Point, device: str) -> Result:
        data = deepcopy(dict(calculations(point, device).data))
        change(data)
        return factory.result(point, device, data=data)

    return synthetic.collected("calculations", make=make)


def beside(make: factory.Maker, device: str = "cuda") -> Collected:
    """The chapter beside other exchanges."""
    [card] = points_of(factory.study(device), "machine")
    return factory.collected(
        "calculations", calculations, device, card=synthetic.card(card, device),
        beside={"collectives": make},
    )  # fmt: skip


def eight_gpus(point: Point, device: str) -> Result:
    return collectives(point, device, gpus=8)


def lasting(
    milliseconds: Callable[[float], float],
    worlds: Sequence[int] = (2, 4, 6, 8),
    otherwise: Callable[[float], float] | None = None,
) -> factory.Maker:
    """Exchanges of these numbers of ranks take what a function of their MiB says."""

    def make(point: Point, device: str) -> Result:
        result = collectives(point, device)
        there = milliseconds if point.parameters["world_size"] in worlds else otherwise
        if result.status != "ok" or there is None:
            return result
        data = deepcopy(dict(result.data))
        for case in data["cases"]:
            if "samples_ms" in case:
                case.update(factory.measurement([there(case["size_bytes"] / 2**20)]))
        return factory.result(point, device, data=data)

    return make


class TestThisMachine:
    def test_only_ranks_on_the_device_count(self) -> None:
        link = frames.link(SOUND)
        assert link is not None
        assert link.arm == "2 ranks on one GPU over gloo", "CPU ranks are faster, but not GPUs"

    def test_ranks_that_share_a_gpu_share_its_rate(self) -> None:
        link = frames.link(SOUND)
        assert link is not None
        assert link.matmul_tflops == pytest.approx(620.0 / 2)
        assert link.gather["dtype"] == "bf16"
        assert link.network(link.gather).intensity == pytest.approx(
            310e12 / (1e9 * link.gather["bus_gb_per_s"])
        )

    def test_a_gpu_each_has_the_whole_rate(self) -> None:
        link = frames.link(beside(eight_gpus))
        assert link is not None
        assert link.arm.endswith("GPUs over NCCL")
        assert link.matmul_tflops == 620.0

    def test_the_ranks_of_a_cpu_share_its_cores(self) -> None:
        link = frames.link(CPU)
        assert link is not None
        assert link.arm == "2 CPU ranks over gloo"
        assert link.matmul_tflops == pytest.approx(0.03 / 2)

    @pytest.mark.parametrize(
        "collected",
        [
            replace(SOUND, card=None),
            beside(lambda point, device: None),
            replace(SOUND, beside={}),
        ],
        ids=["no matmul", "no exchange", "no chapter"],
    )
    def test_without_a_rate_there_is_no_value(self, collected: Collected) -> None:
        assert frames.link(collected) is None
        assert tables(collected)["here"].rows == [["No value", "–", "–"]]
        assert findings(collected)["here"].startswith("For this machine nothing can be said")

    def test_batches_by_hand(self) -> None:
        link = frames.link(beside(eight_gpus))
        result = frames.answer(SOUND)
        assert link is not None
        assert result is not None
        rows = frames.batches_here(link, frames.mesh_of(result), 53248).set_index("way")
        intensity = 620e12 / (1e9 * link.gather["bus_gb_per_s"])
        tokens = rows["tokens_a_device"]
        assert tokens["fsdp"] == pytest.approx(intensity)
        assert tokens["mesh"] == pytest.approx(intensity / 4)
        assert tokens["best"] == pytest.approx(intensity**2 / 53248)

    def test_rings_of_two_ranks_are_even_at_any_size(self) -> None:
        rows = frames.ring_times(SOUND).set_index("arm")
        assert rows.loc["2 CPU ranks over gloo", "even_bytes"] == float("inf")
        four = rows.loc["4 CPU ranks over gloo"]
        # 3 x 64 MiB instead of 1.5 at the same pace.
        assert four["gather_ms"] / four["ring_ms"] == pytest.approx(2, rel=0.05)


class TestTables:
    def test_memory_counts_gpus(self) -> None:
        rows = {row[0]: row for row in tables(SOUND)["memory"].rows}
        assert rows["training state"][1:] == ["16 P", "3,517,578,215,424", "3,518", "44.0"]

    def test_sharding_says_when_no_number_is_enough(self) -> None:
        rows = tables(asked(tokens=[4096, 20000]))["sharding"].rows
        assert [row[3] for row in rows] == ["61", "none"]
        assert rows[1][4] == "–"

    def test_a_mesh_that_no_batch_helps(self) -> None:
        made = tables(asked(**TOO_WIDE))
        assert [row[2] for row in made["mesh"].rows[2:]] == ["no batch"] * 4
        assert made["levers"].rows[0][-1] == "–"

    def test_this_machine_with_a_gpu_each(self) -> None:
        rows = {row[0]: row[2] for row in tables(beside(eight_gpus))["here"].rows}
        assert rows["FSDP 16 × TP 4"] != "no batch"
        assert not rows["tensor parallel: most devices"].startswith("none")
        assert tables(SOUND)["here"].rows[2][2] == "no batch"

    def test_this_machines_formulas_give_their_values_to_three_digits(self) -> None:
        table = tables(SOUND)["here"]
        link = frames.link(SOUND)
        assert link is not None
        intensity = link.network(link.gather).intensity
        needs, values = ({row[0]: row[at] for row in table.rows} for at in (1, 2))
        assert needs["best split of FSDP and TP"] == "B/N > C/W · min(1, (C/W)/F)"
        best = intensity * min(1, intensity / 53248)
        assert values["best split of FSDP and TP"] == significant(best)
        assert values["FSDP"] == significant(intensity)
        assert needs["FSDP 16 × TP 4"] == "B/N > C/(W Y) and Y < F/(C/W)"
        assert values["tensor parallel: most devices"].startswith("none (0.")
        assert table.caption.endswith("For many such ranks: (n − 1) / n is taken as 1.")

    def test_the_gpus_of_the_unsharded_column_are_named(self) -> None:
        titles = [column.title for column in tables(asked(gpu_memory_gb=40))["sharding"].columns]
        assert titles[2] == "40-GB GPUs, unsharded"

    def test_tokens_a_device_are_of_those_that_share_a_batch(self) -> None:
        rows = {row[0]: row for row in tables(SOUND)["levers"].rows}
        assert rows["none"][3] == "320"
        (pipeline,) = [row for name, row in rows.items() if name.startswith("two pipeline")]
        assert pipeline[1:4] == ["8 × 4", "10,223", "320"]

    def test_without_the_result_every_table_says_so(self) -> None:
        made = tables(EMPTY)
        assert made["memory"].rows[0][0] == "not measured"
        assert all(len(row) == len(t.columns) for t in made.values() for row in t.rows)


class TestFindings:
    def test_without_the_result(self) -> None:
        told = findings(EMPTY)
        said = "The calculations were not made."
        assert [told[name] for name in ("summary", "memory", "sharding", "mesh", "levers", "rings")
                ] == [said] * 6  # fmt: skip
        assert told["rings_here"].startswith("Without fitted all-reduces")

    def test_the_summary(self) -> None:
        assert findings(SOUND)["summary"] == (
            "On paper, 220 billion parameters keep 3.52 TB of training state, and FSDP 16 × TP 4 "
            "of TPU v5p computes longer than it talks from 320 tokens a device on."
        )
        too_wide = asked(**TOO_WIDE)
        assert findings(too_wide)["summary"].endswith("never computes longer than it talks.")

    def test_memory(self) -> None:
        assert "3,518 GB, the memory of 44 GPUs of 80 GB; each token" in findings(SOUND)["memory"]

    def test_sharding_with_and_without_room(self) -> None:
        some = findings(asked(tokens=[4096, 20000]))["sharding"]
        assert "are 61 for 4,096 tokens a device." in some
        assert "No number of devices is enough for 20,000 tokens." in some
        assert "From 10,828 tokens on" in some
        none = findings(asked(tokens=[20000]))["sharding"]
        assert none.startswith("No number of devices")

    def test_all_activations_sharded_have_no_limit(self) -> None:
        whole = found(lambda data: data.update(activation_share=1.0))
        assert "leave no room" not in findings(whole)["sharding"]

    def test_mesh(self) -> None:
        assert "it takes 320 tokens a device, 20,445 in all" in findings(SOUND)["mesh"]
        assert findings(SOUND)["mesh"].endswith("both: 396 tokens a device and 25,302 in all.")
        wide = asked(**TOO_WIDE)
        assert findings(wide)["mesh"].startswith("No batch makes this mesh compute-bound")
        never = found(lambda data: data["mesh"].update(tokens_exposed=None))
        assert findings(never)["mesh"].endswith("both: no batch is enough.")

    def test_levers(self) -> None:
        assert findings(SOUND)["levers"].startswith(
            "4 changes of 4 lower the batch; most of all the best split, to 3,925 tokens, "
            "5.21 times fewer."
        )

        def useless(data: dict[str, Any]) -> None:
            for row in data["levers"]:
                row["tokens"] = 1e9

        assert findings(found(useless))["levers"].startswith("None of the changes")

        def one(data: dict[str, Any]) -> None:
            useless(data)
            data["levers"][1]["tokens"] = 10.0

        assert findings(found(one))["levers"].startswith("1 change of 4 lowers the batch")

    def test_this_machine(self) -> None:
        assert findings(SOUND)["here"].endswith("not even on two devices.")
        assert "compute-bound from about 15 tokens a device on" in findings(CPU)["here"]
        assert (
            "With many such ranks FSDP alone is compute-bound from about "
            in (findings(SOUND)["here"])
        )
        assert "tensor parallelism hides up to" in findings(beside(eight_gpus))["here"]

    def test_rings(self) -> None:
        assert "1.75 times the size on 8 ranks" in findings(SOUND)["rings"]
        several = findings(SOUND)["rings_here"]
        assert several.startswith("With more than two ranks, passing whole tensors around is no")
        assert several.endswith("With two ranks it is no slower at any size.")
        assert ", by the latency fitted to one job of each set of ranks" in several

        def four_ranks(point: Point, device: str) -> Result | None:
            return collectives(point, device) if point.parameters["world_size"] == 4 else None

        four = findings(beside(four_ranks))["rings_here"]
        assert "two ranks it" not in four
        assert ", by the latency fitted to one job" in four
        assert "each set" not in four

        def two_ranks(point: Point, device: str) -> Result | None:
            return collectives(point, device) if point.parameters["world_size"] == 2 else None

        assert findings(beside(two_ranks))["rings_here"].startswith("With two ranks both ways")

    def test_a_latency_that_would_be_negative_leaves_no_size(self) -> None:
        def steep(mib: float) -> float:
            return mib**1.2

        assert findings(beside(lasting(steep)))["rings_here"] == (
            "With 4 CPU ranks over gloo, 6 CPU ranks over gloo and 8 CPU ranks over gloo, passing "
            "whole tensors around is slower at any size: the fitted latency is 0, which stands "
            "where the line would need a negative one. With two ranks it is no slower at any size."
        )
        only_four = findings(beside(lasting(steep, worlds=[4])))["rings_here"]
        assert "is no slower only for small ones: up to" in only_four
        assert "up to 0 B" not in only_four
        assert "With 4 CPU ranks over gloo, passing whole tensors around is slower" in only_four

    def test_sizes_smaller_than_any_that_was_exchanged(self) -> None:
        def quick(mib: float) -> float:
            return 0.01 + mib

        def slow(mib: float) -> float:
            return 100.0 + mib

        def told(**how: Any) -> str:
            return findings(beside(lasting(**how)))["rings_here"]

        below = "below 1 MiB, the smallest measured."
        assert f"; all 3 sizes lie {below}" in told(milliseconds=quick)
        assert "the smallest measured" not in told(milliseconds=slow)
        assert f"; 1 of these 3 sizes lies {below}" in told(
            milliseconds=quick, worlds=[6], otherwise=slow
        )
        assert f"; 2 of these 3 sizes lie {below}" in told(
            milliseconds=quick, worlds=[6, 8], otherwise=slow
        )


class TestChecks:
    def test_sound_answers_raise_no_warning(self) -> None:
        assert checks(SOUND) == checks(EMPTY) == []

    def test_another_formula_than_the_present(self) -> None:
        wrong = found(lambda data: data["state_bytes"].update(total=1))
        assert checks(wrong) == [
            "The result holds 1 bytes of training state; the formula gives 3,517,578,215,424."
        ]

    def test_a_device_with_more_than_it_has(self) -> None:
        wrong = found(lambda data: data["batches"][0].update(bytes_a_device=96e9))
        assert checks(wrong) == [
            "1,024 tokens on 41 devices need 96,000,000,000 bytes each, more than a device has."
        ]


class TestFigures:
    @pytest.mark.parametrize(
        ("collected", "panels"), [(SOUND, 2), (replace(SOUND, card=None), 1)],
        ids=["with this machine", "on paper alone"],
    )  # fmt: skip
    def test_the_machine_has_a_panel_where_it_was_measured(
        self, collected: Collected, panels: int
    ) -> None:
        draw = figures(collected)["batch"].draw
        assert draw is not None
        figure = draw()
        assert len(figure.axes) == panels
        assert [axes.get_title().split("\n")[0] for axes in figure.axes] == [
            "TPU v5p", "64 ranks as fast as this machine's",
        ][:panels]  # fmt: skip
        # Scales differ by decades, so every panel says what it shows.
        assert {axes.get_ylabel() for axes in figure.axes} == {"Forward of one block (ms)"}
        plt.close(figure)

    def test_memory_has_a_line_for_every_batch(self) -> None:
        draw = figures(SOUND)["memory"].draw
        assert draw is not None
        figure = draw()
        labels = figure.axes[0].get_legend_handles_labels()[1]
        assert [label.partition(" ")[2] for label in labels] == ["tokens a device"] * 4
        plt.close(figure)

    def test_without_the_result_nothing_is_drawn(self) -> None:
        assert all(drawing.draw is None for drawing in figures(EMPTY).values())
