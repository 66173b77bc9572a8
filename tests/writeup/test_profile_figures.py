"""Figures of the profile chapter: one timeline a size, every family with its look."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from lmlab.writeup import profile_words as words
from lmlab.writeup import style
from lmlab.writeup.figure import save
from lmlab.writeup.figures.profile import LOOKS, figures
from lmlab.writeup.figures.profile_timeline import _runs
from lmlab.writeup.frames import profile as frames
from tests.writeup import synthetic
from tests.writeup.small_profile import collected, nothing
from tests.writeup.synthetic_profile import corners


def test_every_family_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == set(words.FAMILIES)
    assert len(set(LOOKS.values())) == len(LOOKS)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_there_is_a_timeline_for_every_size(device: str) -> None:
    profiles = synthetic.collected("profile", device, corners)
    drawn = [name for name in figures(profiles) if name.startswith("timeline_")]
    sizes = frames.order(frames.of(frames.points(profiles), status="ok"), "size")
    assert len(sizes) == 2
    assert drawn == [f"timeline_{size}" for size in sizes]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_figures_are_drawn_with_units_and_names(device: str, tmp_path: Path) -> None:
    profiles = synthetic.collected("profile", device, corners)
    made = figures(profiles)
    for name in ("families", "attention", next(reversed(made))):
        draw = made[name].draw
        assert draw is not None
        with style.house_style():
            figure = draw()
        for axis in figure.axes:
            label = axis.get_xlabel()
            assert not label or "(" in label, f"{name}: {label} has no unit"
            assert axis.get_title(), name
        plt.close(figure)
    assert len(save(made["families"], tmp_path, "families")) == 2


def test_a_cpus_phases_have_one_lane() -> None:
    made = figures(synthetic.collected("profile", "cpu", corners))
    draw = made["timeline_cpu-small"].draw
    assert draw is not None
    with style.house_style():
        figure = draw()
    lanes = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    plt.close(figure)
    assert lanes[-1] == "phase"
    assert "phase on the host" not in lanes


def test_a_gpus_phases_have_a_lane_for_host_and_device() -> None:
    draw = figures(synthetic.collected("profile", "cuda", corners))["timeline_small"].draw
    assert draw is not None
    with style.house_style():
        figure = draw()
    lanes = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    texts = {text.get_text() for text in figure.axes[1].texts}
    plt.close(figure)
    assert lanes[-2:] == ["phase on the GPU", "phase on the host"]
    assert texts == {"scores", "scale, mask, softmax", "output"}


def test_a_model_without_marked_layers_has_the_step_alone() -> None:
    profiles = synthetic.collected(
        "profile",
        "cuda",
        lambda point, device: corners(point) and synthetic.profile(point, device, layer=None),
    )
    draw = figures(profiles)["timeline_small"].draw
    assert draw is not None
    with style.house_style():
        figure = draw()
    assert len(figure.axes) == 1
    plt.close(figure)


def test_a_bar_is_of_one_batch_and_one_precision() -> None:
    draw = figures(collected(batches=[1, 4], precisions=["fp32", "tf32"]))["families"].draw
    assert draw is not None
    with style.house_style():
        figure = draw()
    tops = [bar.get_y() + bar.get_height() for axis in figure.axes for bar in axis.patches]
    plt.close(figure)
    assert max(tops) == pytest.approx(100)


def test_bins_that_look_the_same_are_drawn_as_one() -> None:
    starts, shares = _runs([0, 0, 1000, 1000, 996, 500, 0])
    assert starts.tolist() == [0, 2, 5, 6]
    assert shares.tolist() == [0.0, 1.0, 0.5, 0.0]


def test_nothing_recorded_draws_nothing() -> None:
    assert all(drawing.draw is None for drawing in figures(collected(nothing)).values())


def test_the_caption_names_the_tool() -> None:
    for drawing in figures(synthetic.collected("profile", "cuda", corners)).values():
        assert "recorded by torch profiler 2.13.0" in drawing.caption
