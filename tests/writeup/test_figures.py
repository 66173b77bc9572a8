"""Figures: readable without colour, with units, and only where there is data."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.figure import Drawing, save
from lmlab.writeup.figures import (
    calculations,
    collectives,
    end_to_end,
    machine,
    memory,
    precision,
)
from lmlab.writeup.frames.cold_start import early_median, settled_median, settling_step
from tests.writeup import factory, synthetic

MODULES = {
    "end_to_end": end_to_end,
    "machine": machine,
    "precision": precision,
    "collectives": collectives,
    "calculations": calculations,
    "memory": memory,
}


def drawings(device: str) -> dict[str, Drawing]:
    return {
        f"{chapter}/{name}": drawing
        for chapter, module in MODULES.items()
        for name, drawing in module.figures(synthetic.collected(chapter, device)).items()
    }


GPU = drawings("cuda")
CPU = drawings("cpu")


def test_a_gpu_has_one_figure_more_than_a_cpu() -> None:
    assert set(GPU) - set(CPU) == {"end_to_end/host_limit"}


@pytest.mark.parametrize("name", GPU)
def test_axes_are_named_and_series_told_apart_without_colour(name: str) -> None:
    draw = GPU[name].draw
    assert draw is not None
    with style.house_style():
        figure = draw()
    labels = {axis.get_xlabel() for axis in figure.axes} | {a.get_ylabel() for a in figure.axes}
    assert labels - {""}, "units stand on the axes"
    for axis in figure.axes:
        looks = [
            (str(line.get_marker()), str(line.get_linestyle()), line.get_drawstyle())
            for line in axis.get_lines()
            if not line.get_label().startswith("_")
        ]
        assert len(set(looks)) == len(looks)
    plt.close(figure)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("end_to_end/time_by_context", "Time (ms)"),
        ("end_to_end/host_limit", "GPU busy during forward (%)"),
        ("end_to_end/speedup_bf16", "Speed-up of bf16 (×)"),
        ("machine/ceilings", "Matrix products (TFLOP/s)"),
    ],
)
def test_units(name: str, unit: str) -> None:
    draw = GPU[name].draw
    assert draw is not None
    figure = draw()
    assert unit in {text for a in figure.axes for text in (a.get_xlabel(), a.get_ylabel())}
    plt.close(figure)


def test_ratios_within_noise_have_open_markers() -> None:
    draw = GPU["end_to_end/speedup_bf16"].draw
    assert draw is not None
    figure = draw()
    hollow = {
        axis.get_title(): sum(
            len(line.get_xdata())
            for line in axis.get_lines()
            if line.get_markerfacecolor() == "white"
        )
        for axis in figure.axes
    }
    plt.close(figure)
    assert hollow["Optimizer"] == 20, "the same work in every precision"
    assert 0 < hollow["Backward"] < 20


def test_neighbouring_series_differ_in_grey() -> None:
    def lightness(colour: str) -> float:
        red, green, blue = to_rgb(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    greys = [lightness(colour) for colour in style.COLOURS[:5]]
    assert all(abs(a - b) > 0.08 for a, b in pairwise(greys))
    assert len({str(style.series(i)) for i in range(8)}) == 8


@pytest.mark.parametrize("chapter", MODULES)
def test_without_results_nothing_is_drawn(chapter: str, tmp_path: Path) -> None:
    empty = MODULES[chapter].figures(factory.collected(chapter, lambda point, device: None))
    assert empty
    for name, drawing in empty.items():
        assert save(drawing, tmp_path, name) == []


def test_a_saved_figure_carries_neither_date_nor_version_nor_font(tmp_path: Path) -> None:
    png, svg = save(GPU["machine/ceilings"], tmp_path, "ceilings")
    text = svg.read_text()
    assert "<dc:date>" not in text
    assert "matplotlib.org" not in text
    assert "font-family" not in text, "letters are outlines"
    assert b"Software" not in png.read_bytes()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([40.0, 12.0, 10.0, 10.0, 10.0, 10.0], 3),
        ([10.0] * 6, 1),
        ([40.0, 10.0, 10.0, 10.0, 10.0, 40.0], None),
        ([40.0, 10.0, 40.0, 10.0, 10.0, 10.0, 10.0, 10.0], 4),
        ([40.0, 8.0, 8.0, 8.0, 10.0, 10.0, 10.0, 10.0], 2),
        ([40.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 5.0], 2),
    ],
    ids=[
        "third step",
        "at once",
        "a late outlier",
        "a relapse",
        "fast, then slower",
        "fast at last",
    ],
)
def test_settling_step(steps: list[float], expected: int | None) -> None:
    assert settled_median(steps) == 10.0
    assert settling_step(steps) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([40.0, 8.0, 9.0, 7.0, 10.0, 10.0, 10.0, 10.0], 8.0),
        ([40.0, 20.0, 8.0, 8.0, 10.0, 10.0, 10.0, 10.0], math.nan),
        ([40.0, 8.0, 8.0, 8.0, 10.0, 10.0, 10.0, 20.0], math.nan),
    ],
    ids=["settled steps of the first half", "too few of them", "never settled"],
)
def test_the_pace_before_the_final_one(steps: list[float], expected: float) -> None:
    assert early_median(steps) == pytest.approx(expected, nan_ok=True)


def test_thousands_are_separated_on_linear_axes_as_on_logarithmic_ones(tmp_path: Path) -> None:
    written: dict[str, list[str]] = {}

    def draw() -> Figure:
        figure, (small, large) = style.panels(1, 2, height=2.0)
        small.plot([0, 1], [0, 0.5])
        large.plot([-2000, 1500], [0, 5e6])
        large.set_xticks([-2000, 0, 1500])
        written["ticks"] = []
        figure.canvas.mpl_connect(
            "draw_event",
            lambda event: written.update(
                ticks=[tick.get_text() for tick in large.get_xticklabels()],
                small=[tick.get_text() for tick in small.get_yticklabels()],
                offset=[large.yaxis.get_offset_text().get_text()],
            ),
        )
        return figure

    save(Drawing(alt="", caption="", draw=draw), tmp_path, "thousands")
    assert written["ticks"] == ["−2,000", "0", "1,500"]
    assert "0.1" in written["small"]
    assert written["offset"] == ["1e6"], "millions keep the factor beside the axis"
