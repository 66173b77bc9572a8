"""The attention figures: with units, told apart without colour, and only where there is data."""

from __future__ import annotations

import math

import pytest
from matplotlib import pyplot as plt

from lmlab.study.points import Point
from lmlab.writeup import style
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures.attention import figures
from lmlab.writeup.figures.attention_race import BEST, NEITHER, ratios, within_noise
from lmlab.writeup.frames import attention as frames
from tests.writeup import synthetic
from tests.writeup.small_attention import both, collected, noted, nothing, scaled, study, without

GPU = figures(collected())
NOWHERE = {"head_dims": [], "sequences": []}
CPU = figures(synthetic.collected("attention", "cpu"))
UNITS = {
    "naive_time": "Time (ms)",
    "naive_memory": "Memory (GiB)",
    "race_64": "TFLOP/s",
    "race_map": "Sequence (tokens)",
    "tiles": "Rows kept",
    "model_attention": "Peak memory (GiB)",
}


def test_what_is_drawn() -> None:
    assert list(GPU) == list(UNITS)
    assert set(CPU) == {"naive_time", "naive_memory", "race_64", "model_attention"}


@pytest.mark.parametrize(("drawing", "unit"), [(GPU[n], u) for n, u in UNITS.items()], ids=UNITS)
def test_axes_have_units_and_series_differ_without_colour(drawing: Drawing, unit: str) -> None:
    assert drawing.draw is not None
    with style.house_style():
        figure = drawing.draw()
    assert unit in {text for a in figure.axes for text in (a.get_xlabel(), a.get_ylabel())}
    for axis in figure.axes:
        looks = [
            (str(line.get_marker()), str(line.get_linestyle()), line.get_linewidth())
            for line in axis.get_lines()
            if not str(line.get_label()).startswith("_")
        ]
        assert len(set(looks)) == len(looks)
    plt.close(figure)


def test_without_results_nothing_is_drawn() -> None:
    for name, drawing in figures(collected(nothing)).items():
        assert drawing.draw is None, name


def test_a_single_sequence_or_context_of_several_is_not_drawn() -> None:
    def one(point: Point, values: object) -> bool | None:
        asked = point.parameters
        return None if asked.get("sequence") == 1024 or asked.get("context") == 128 else False

    assert {"naive_time", "naive_memory", "model_attention"}.isdisjoint(figures(collected(one)))


def test_without_our_kernels_there_is_no_map() -> None:
    assert "race_map" not in figures(collected(without({"flash": ("failed", "it broke")})))


def test_the_map_holds_ratios() -> None:
    rows = frames.of(frames.frame(collected()), topic="benchmark", pass_="both", precision="bf16")
    rows = frames.measured(rows)
    naive, best = ratios(rows, frames.NAIVE), ratios(rows, BEST)
    assert naive.loc[64, 128] == pytest.approx(4.0, rel=0.01)
    assert (best <= naive).all().all()


def test_a_cell_within_noise_is_marked_and_has_no_colour() -> None:
    alike = scaled({"flash": 1.47}, topic="benchmark", sequence=4096)
    drawing = figures(collected(alike))["race_map"]
    assert "≈ and without colour where the two are not told apart" in drawing.caption
    assert drawing.draw is not None
    figure = drawing.draw()
    naive, best = figure.axes
    assert [text.get_text() for text in naive.texts] == ["4.00", "4.02"]
    assert [text.get_text() for text in best.texts] == ["1.47", "≈ 1.00"]
    shades = best.images[0].get_array()
    assert shades is not None
    assert shades[0, 1] == NEITHER != shades[0, 0]
    plt.close(figure)


def test_without_the_base_no_cell_is_within_noise() -> None:
    rows = frames.of(frames.frame(collected()), topic="benchmark", pass_="both", arm="flash")
    assert not within_noise(rows, BEST).any().any()
    assert within_noise(rows, BEST).shape == ratios(rows, BEST).shape


def test_the_map_says_what_happened_to_ours() -> None:
    wrong = without({"flash": ("failed", "off by 1")}, topic="benchmark", sequence=4096)
    drawing = figures(collected(both(wrong, scaled({"flash": 0.1}, sequence=128))))["race_map"]
    assert drawing.draw is not None
    figure = drawing.draw()
    assert [text.get_text() for text in figure.axes[0].texts] == ["40.0", "failed"]
    plt.close(figure)


def test_a_variant_looks_the_same_in_every_figure_and_breaks_where_it_has_no_time() -> None:
    few = study(benchmark={"sequences": [128, 256, 512], "compile": {**NOWHERE}})
    gap = without({"naive": ("oom", "full")}, topic="benchmark", sequence=256)
    lines = {}
    for name, drawing in (
        ("all", GPU["race_64"]),
        ("few", figures(collected(gap, few))["race_64"]),
    ):
        assert drawing.draw is not None
        figure = drawing.draw()
        lines[name] = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
        plt.close(figure)
    assert "compiled naive" not in lines["few"]
    for label, line in lines["few"].items():
        assert line.get_color() == lines["all"][label].get_color(), label
    assert [math.isnan(y) for y in lines["few"]["naive"].get_ydata()] == [False, True, False]


def test_the_matmul_rate_is_drawn_and_named_where_it_is_known() -> None:
    made = collected()
    bare = type(made)(**{**vars(made), "card": None})
    for found, known in ((GPU["race_64"], True), (figures(bare)["race_64"], False)):
        assert ("measured matmul rate" in found.caption) == known
        assert found.draw is not None
        figure = found.draw()
        lines = [line for line in figure.axes[0].get_lines() if line.get_label() == "_limit"]
        assert len(lines) == known
        plt.close(figure)


@pytest.mark.parametrize(
    ("figure", "label", "gone"),
    [
        ("naive_time", "64", {"topic": "naive", "head_dim": 64, "sequence": 1024}),
        ("model_attention", "naive", {"topic": "model", "size": "small", "context": 512}),
    ],
)
def test_a_line_breaks_where_a_point_is_not_measured(
    figure: str, label: str, gone: dict[str, object]
) -> None:
    def left_out(point: Point, values: object) -> bool | None:
        return False if gone.items() <= point.parameters.items() else None

    more = study(
        naive={"sequences": [256, 1024, 4096], "beyond": []}, model={"contexts": [128, 512, 1024]}
    )
    drawing = figures(collected(left_out, more))[figure]
    assert drawing.draw is not None
    drawn = drawing.draw()
    lines = {str(line.get_label()): line for line in drawn.axes[0].get_lines()}
    assert [math.isnan(y) for y in lines[label].get_ydata()] == [False, True, False]
    plt.close(drawn)


def test_a_cell_of_the_tiles_says_what_happened() -> None:
    broke = both(
        without({"64x64": ("failed", "it broke")}, topic="tiles"),
        noted("64x64", kept=64, walked=64),
    )
    drawing = figures(collected(broke))["tiles"]
    assert drawing.draw is not None
    figure = drawing.draw()
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"does not fit\n256 KiB", "failed"} <= texts
    plt.close(figure)


def test_a_direction_that_was_not_measured_has_no_map() -> None:
    def forward_alone(point: Point, values: object) -> bool | None:
        return False if point.parameters.get("direction") == "backward" else None

    drawing = figures(collected(forward_alone))["tiles"]
    assert drawing.draw is not None
    figure = drawing.draw()
    assert [axis.get_title() for axis in figure.axes] == ["Forward, head dim 128"]
    plt.close(figure)
