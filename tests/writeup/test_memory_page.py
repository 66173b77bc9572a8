"""Tables, figures and checks of the memory chapter."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup import style
from lmlab.writeup.checks import memory as checks
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures import end_to_end
from lmlab.writeup.figures import memory as figures
from lmlab.writeup.figures.memory_overlay import stretched
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.table import Table
from lmlab.writeup.tables import memory as tables
from lmlab.writeup.tables import memory_checkpointing
from tests.writeup import factory, synthetic
from tests.writeup.memory_told import collected, nothing

GIB = 2**30


def cell(table: Table, start: tuple[str, ...], title: str) -> str:
    index = [column.title for column in table.columns].index(title)
    (row,) = [row for row in table.rows if tuple(row[: len(start)]) == start]
    return row[index]


@pytest.fixture(scope="module")
def gpu() -> dict[str, Table]:
    return tables.tables(synthetic.collected("memory"))


@pytest.fixture(scope="module")
def cpu() -> dict[str, Table]:
    return tables.tables(synthetic.collected("memory", "cpu"))


def test_tables_of_a_gpu_and_of_a_cpu(gpu: dict[str, Table], cpu: dict[str, Table]) -> None:
    assert list(gpu) == [
        "peaks", "shares", "largest_fp32", "largest_bf16", "lines_fp32", "lines_bf16", "stream",
        "layers", "unused", "replay", "prediction", "published", "too_large",
        "checkpointing",
    ]  # fmt: skip
    assert set(gpu) - set(cpu) == {"unused", "replay", "published", "too_large"}
    for table in [*gpu.values(), *cpu.values()]:
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert table.rows
        assert table.sources


def test_peaks_stand_by_size_context_mode_and_precision(gpu: dict[str, Table]) -> None:
    assert len(gpu["peaks"].rows) == 20
    sizes = list(dict.fromkeys(row[0] for row in gpu["peaks"].rows))
    assert sizes == ["small", "medium", "large", "xl", "2.7b"]
    assert gpu["peaks"].title == "Peak memory (GiB)"
    assert cell(gpu["peaks"], ("2.7b", "1024"), "Training step, bf16") == "90.36"


def test_small_numbers_get_a_smaller_unit(cpu: dict[str, Table]) -> None:
    assert cpu["peaks"].title == "Peak memory (MiB)"


def test_shares_add_up(gpu: dict[str, Table]) -> None:
    for row in gpu["shares"].rows:
        shares = [float(c.removesuffix(" %")) for c in row[3:] if c not in {"0", "< 0.1 %"}]
        assert sum(shares) == pytest.approx(100, abs=0.3)


def test_the_layers_add_up_from_the_driver_to_tensors(gpu: dict[str, Table]) -> None:
    names = [row[0].strip() for row in gpu["layers"].rows]
    assert names[0].startswith("nvidia-smi")
    assert names[-1] == "= requested"
    assert all(row[-1] for row in gpu["layers"].rows), "every row has its explanation"
    assert cell(gpu["layers"], ("− outside PyTorch",), "fp32") == "520 MiB"


def test_a_driver_that_does_not_tell_leaves_the_rest() -> None:
    def silent(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            mode["accounting"]["nvidia_smi_used_bytes"] = None

    layers = tables.tables(collected(silent))["layers"]
    assert layers.rows[0][1] == "not told"
    assert layers.rows[1][1] != "not told"


def test_publications_stand_below_ours_at_the_same_place(gpu: dict[str, Table]) -> None:
    rows = gpu["published"].rows
    assert rows[0][:5] == ["NVIDIA H200", "this page", "2.7b", "128", "fp32"]
    assert rows[1] == [
        "H800 PCIe", "001", "2.7b", "128", "fp32", "–", "18.08", "51.44", "–",
    ]  # fmt: skip
    unstated = [row for row in rows if row[1] == "002"]
    assert [row[5:] for row in unstated] == [
        ["–", "not stated", "not stated", "12.3"],
        ["–", "not stated", "not stated", "17.3"],
    ]
    without_context = next(row for row in rows if row[1] == "003")
    assert without_context[3] == "not stated"


def test_a_mode_without_a_number_says_why() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data and point.parameters["context"] == 256:
            data["modes"]["train_step"].update(status="oom", reason="asked for 9 GiB")

    made = tables.tables(collected(change))
    assert cell(made["peaks"], ("small", "256"), "Training step, fp32") == "OOM"
    assert cell(made["peaks"], ("small", "256"), "Forward with its graph, fp32") != "OOM"
    assert cell(made["unused"], ("small", "256"), "peak reserved, fp32") == "OOM"
    assert cell(made["prediction"], ("small", "256"), "Training step, bf16") == "OOM"
    assert made["largest_fp32"].title.endswith("medium at context 128, fp32")


def test_where_memory_ran_out_the_live_parts_are_told() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data and point.parameters["context"] == 256:
            mode = data["modes"]["train_step"]
            mode.update(status="oom", reason="x", asked_bytes=2 * GIB)
            mode["live_categories_bytes"] = {**dict.fromkeys(frames.CATEGORIES, 0),
                                             "parameters": GIB, "activations": GIB}  # fmt: skip

    made = tables.tables(collected(change, precisions=["fp32"]))["out_of_memory"]
    assert [column.title for column in made.columns][4:] == [
        "Asked for", "Live", "Parameters", "Activations",
    ]  # fmt: skip
    assert made.rows[0] == [
        "training step", "small", "256", "fp32", "2 GiB", "2 GiB", "1 GiB", "1 GiB",
    ]  # fmt: skip


def test_what_others_could_not_fit_stands_beside_what_it_takes_here(gpu: dict[str, Table]) -> None:
    rows = {(row[1], row[3]): row for row in gpu["too_large"].rows}
    assert rows["002", "xl"][-1] == "31.6 GiB"
    assert rows["000", "2.7b"][4] == "not stated"
    assert rows["000", "2.7b"][-1] == "51.3 to 88.1 GiB"


def test_counts_of_the_stream_have_their_thousands_separated() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data:
            data["modes"]["train_step"]["stream"].update(allocated=1965, live_at_peak=1001)

    assert tables.tables(collected(change))["stream"].rows[0][3] == "1,965 / 1,001"


def test_a_study_without_results_has_tables_that_say_so() -> None:
    made = tables.tables(collected(nothing))
    assert set(made) == {"peaks", "stream", "replay", "prediction"}
    assert set(made["peaks"].rows[0][2:]) == {"not measured"}
    assert set(made["replay"].rows[0][2:]) == {"not measured"}


def test_a_point_that_failed_is_failed_in_every_mode() -> None:
    def failed(point: Point, device: str) -> Result:
        return factory.failed(point, "failed", "broken", device)

    made = tables.tables(factory.collected("memory", failed))
    assert set(made["peaks"].rows[0][2:]) == {"failed"}
    assert "checkpointing" not in made
    for drawing in figures.figures(factory.collected("memory", failed)).values():
        assert drawing.draw is None


def test_a_model_that_is_not_described_has_no_prediction() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for part in [*data.get("modes", {}).values(), *data.get("arms", ())]:
            part["predicted"] = None
        data["best_predicted"] = None

    made = tables.tables(collected(change))
    assert set(made["prediction"].rows[0][2:]) == {"no prediction"}
    assert {row[2] for row in made["checkpointing"].rows} == {"–"}


def test_strategies_are_compared_with_the_first_that_ran(gpu: dict[str, Table]) -> None:
    table = gpu["checkpointing"]
    assert table.columns[-1].title == "Time : every-1"
    assert table.rows[0][:3] == ["everything", "OOM", "179.4"]
    assert table.rows[1][0] == "the input of every block"
    assert table.rows[1][-1] == "1.00×"


def test_a_median_has_the_decimals_of_its_mean() -> None:
    arm = pd.Series({"name": "every-1", "kind": "every", "blocks": 1, "status": "ok",
                     "peak_bytes": GIB, "kept_bytes": GIB, "predicted_bytes": math.nan,
                     "mean_ms": 1266.84, "sd_ms": 7.81, "median_ms": 1266.93})  # fmt: skip
    assert memory_checkpointing._row(arm, GIB, arm)[4] == "1,266.8 ± 7.8 (1,266.9)"


# Figures


def drawn(name: str, change: Any = None) -> plt.Figure:
    draw = figures.figures(collected(change))[name].draw
    assert draw is not None
    with style.house_style():
        return draw()


def test_a_timeline_names_its_phases_and_marks_its_peak() -> None:
    figure = drawn("timeline_train_step")
    assert [axis.get_title() for axis in figure.axes] == [
        "Training step, fp32",
        "Training step, bf16",
    ]
    for axis in figure.axes:
        texts = [text.get_text() for text in axis.texts]
        assert texts[:3] == ["forward", "backward", "optimizer"]
        assert texts[3].startswith("peak ")
    plt.close(figure)


def short_optimizer(point: Point, data: dict[str, Any]) -> None:
    """An optimizer phase much narrower than its name."""
    for mode in data.get("modes", {}).values():
        last = mode["phases"][-1]
        if last["name"] == "optimizer":
            last["last_event"] = last["first_event"] + 30


@pytest.mark.parametrize("change", [None, short_optimizer], ids=["wide phases", "a narrow one"])
def test_names_of_phases_cross_no_border_and_leave_no_panel(change: Any) -> None:
    figure = drawn("timeline_train_step", change)
    figure.draw_without_rendering()
    for axis in figure.axes:
        borders = [
            line.get_window_extent() for line in axis.lines if len(set(line.get_xdata())) == 1
        ]
        panel = axis.get_window_extent()
        for name in axis.texts[:3]:
            box = name.get_window_extent()
            assert panel.x0 <= box.x0
            assert box.x1 <= panel.x1 + 1
            assert not any(box.overlaps(border) for border in borders)
            assert not box.overlaps(axis.title.get_window_extent())
    plt.close(figure)


def test_a_narrow_first_phase_has_its_name_above_it() -> None:
    def short_forward(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            if len(mode["phases"]) == 3:
                mode["phases"][0]["last_event"] = mode["phases"][1]["first_event"] = 10

    figure = drawn("timeline_train_step", short_forward)
    name = figure.axes[0].texts[0]
    assert (name.get_text(), name.get_ha(), name.get_position()) == (
        "forward", "left", (0, figures.ABOVE),
    )  # fmt: skip
    plt.close(figure)


def test_the_stack_reaches_exactly_the_peak() -> None:
    found = collected()
    place = frames.shown_places(frames.frame(found))[0]
    recorded = frames.recorded(found, place, "train_step")
    assert recorded is not None
    figure = drawn("timeline_train_step")
    tops = [c.get_datalim(figure.axes[0].transData).y1 for c in figure.axes[0].collections]
    assert max(tops) == pytest.approx(recorded["replayed_bytes"] / GIB)
    plt.close(figure)


def test_overlaid_steps_share_their_phases() -> None:
    found = collected()
    for place in frames.shown_places(frames.frame(found)):
        recorded = frames.recorded(found, place, "train_step")
        assert recorded is not None
        x, totals = stretched(recorded)
        assert (x[0], x[-1]) == (0.0, 6.0)
        assert np.all(np.diff(x) >= 0)
        assert totals.max() == recorded["replayed_bytes"]
    figure = drawn("overlay")
    assert [axis.get_title() for axis in figure.axes] == ["Two precisions", "Two contexts"]
    plt.close(figure)


def test_one_context_and_one_precision_have_nothing_to_lay_over() -> None:
    lonely = collected(contexts=[128], precisions=["fp32"])
    assert figures.figures(lonely)["overlay"].draw is None
    assert figures.figures(lonely)["timeline_train_step"].draw is not None


def test_the_gpus_memory_is_drawn_where_it_is_known() -> None:
    figure = drawn("peak_by_context")
    assert "the GPU's memory" in [text.get_text() for text in figure.axes[0].texts]
    plt.close(figure)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_size_looks_the_same_in_every_chapter(device: str) -> None:
    memory = looks(figures.figures(synthetic.collected("memory", device))["peak_by_context"])
    times = looks(end_to_end.figures(synthetic.collected("end_to_end", device))["time_by_context"])
    assert len(memory) > 1
    assert memory == {size: times[size] for size in memory}
    assert list(memory) == [size for size in times if size in memory]


def looks(drawing: Drawing) -> dict[str, tuple[Any, Any]]:
    """Colour and marker of the first panel's lines, by label, as a legend lists them."""
    assert drawing.draw is not None
    with style.house_style():
        figure = drawing.draw()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    plt.close(figure)
    return {
        label: (handle.get_color(), handle.get_marker())
        for label, handle in zip(labels, handles, strict=True)
    }


# Checks


def test_a_sound_study_has_no_warning() -> None:
    assert checks.checks(collected()) == []
    assert checks.checks(synthetic.collected("memory", "cpu")) == []
    assert checks.checks(collected(nothing)) == []


def first_train_step(**changes: Any) -> list[str]:
    """Warnings after changing one mode of one point."""

    def change(point: Point, data: dict[str, Any]) -> None:
        p = point.parameters
        if "modes" in data and (p["size"], p["context"], p["precision"]) == ("small", 128, "fp32"):
            mode = data["modes"]["train_step"]
            accounting = changes.pop("accounting", {})
            mode["accounting"] = {**deepcopy(mode["accounting"]), **accounting}
            mode.update(changes)

    return checks.checks(collected(change))


def test_a_replay_beyond_2_percent_is_a_warning() -> None:
    (warning,) = first_train_step(max_memory_allocated_bytes=3 * GIB)
    assert warning.startswith("The replayed peak of training step, small at context 128, fp32 is")
    assert warning.endswith("max_memory_allocated 3 GiB: more than 2 % apart.")


def test_events_that_are_missing_are_a_warning() -> None:
    (warning,) = first_train_step(accounting={"peak_requested_bytes": 3 * GIB})
    assert warning.endswith("the allocator 3 GiB: events are missing.")


def test_parts_that_do_not_add_up_are_a_warning() -> None:
    (warning,) = first_train_step(live_categories_bytes=dict.fromkeys(frames.CATEGORIES, 1))
    assert "add up to 7 B of" in warning


def test_a_history_that_was_cut_is_a_warning() -> None:
    (warning,) = first_train_step(history_was_cut=True)
    assert "outgrew its buffer" in warning


def test_a_recording_that_changes_the_peak_is_a_warning() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for mode in data.get("modes", {}).values():
            mode["unrecorded_peak_bytes"] = int(0.9 * mode["max_memory_allocated_bytes"])

    warnings = checks.checks(collected(change, sizes=["small"], contexts=[128]))
    assert len(warnings) == 4, "two modes at two precisions; a first train step differs by itself"
    assert "recording changes what it records" in warnings[0]


def test_a_forward_pass_above_a_training_step_is_a_warning() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        if "modes" in data:
            data["modes"]["train_step"] = deepcopy(data["modes"]["forward"])

    warnings = checks.checks(collected(change, sizes=["small"], contexts=[128]))
    assert len(warnings) == 2
    assert "forward with its graph peaks higher than training step" in warnings[0]


def test_a_strategy_above_keeping_everything_is_a_warning() -> None:
    def change(point: Point, data: dict[str, Any]) -> None:
        for arm in data.get("arms", ()):
            if arm["name"] == "none":
                arm.update(status="ok", peak_bytes=36 * GIB, kept_bytes=GIB)
            if arm["name"] == "every-24":
                arm.update(peak_bytes=40 * GIB)
            elif arm["status"] == "ok":
                arm["peak_bytes"] = min(arm["peak_bytes"], 36 * GIB)

    (warning,) = checks.checks(collected(change))
    assert warning == (
        "Checkpointing with every-24 peaks at 40 GiB, above the 36 GiB of keeping everything."
    )
