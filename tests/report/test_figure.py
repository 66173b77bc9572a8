"""Figures from declarations: the same data as an image and as a Vega-Lite specification."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from matplotlib import image

from lmlab.report.figure import DPI, WIDTH_INCHES, Axis, Figure, Mark
from lmlab.report.frame import Results
from tests.report.study import small_study

STEPS = Figure(
    title="Steps",
    mark="line",
    x=Axis(field="size", title="size", categorical=True),
    y=Axis("ms", log=10),
    color="precision",
    where={"quantity": "time", "phase": "total"},
)


def spans(results: Results) -> pd.DataFrame:
    return pd.DataFrame(
        {"lane": ["a", "a", "b"], "start": [0, 2, 1], "end": [1, 3, 2], "kind": ["x", "y", "x"]}
    )


FIGURES = {
    "line": STEPS,
    "line in panels": replace(STEPS, facet="precision"),
    "bar": replace(STEPS, mark="bar", names={"fp32": "single", "bf16": "half"}),
    "stack": replace(STEPS, mark="stack", y=Axis("ms")),
    "heatmap": replace(
        STEPS, mark="heatmap", y=Axis(field="precision", title="precision", categorical=True)
    ),
    "timeline": Figure(
        title="Spans",
        mark="timeline",
        x=Axis(field="start", title="ms"),
        x2="end",
        y=Axis(field="lane", title="", categorical=True),
        color="kind",
        data=spans,
    ),
    "area": Figure(
        title="Area",
        mark="area",
        x=Axis(field="start", title="ms"),
        y=Axis(field="end", title="GiB", scale=0.5),
        color="lane",
        data=lambda results: spans(results).head(2),
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_declaration_draws_an_image_and_a_specification(tmp_path: Path, name: str) -> None:
    results = small_study(tmp_path)
    figure = FIGURES[name]
    path = tmp_path / "figures" / "figure.png"
    assert figure.draw(results, path)
    assert image.imread(path).shape[1] == pytest.approx(WIDTH_INCHES * DPI, abs=2)
    spec = figure.vega(results)
    assert len(spec["data"]["values"]) == len(figure.rows(results)) > 0
    fields = {channel["field"] for channel in spec["encoding"].values() if "field" in channel}
    assert fields <= set(spec["data"]["values"][0])
    labels = {figure.label(value) for value in figure.rows(results)[figure.color]}
    assert {row[figure.color] for row in spec["data"]["values"]} == labels


def test_the_same_data_gives_the_same_bytes(tmp_path: Path) -> None:
    results = small_study(tmp_path)
    paths = [tmp_path / name for name in ("one.png", "two.png")]
    for path in paths:
        STEPS.draw(results, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_without_data_there_is_no_file(tmp_path: Path) -> None:
    results = small_study(tmp_path)
    nothing = replace(STEPS, where={"quantity": "absent"})
    assert not nothing.draw(results, tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()


def test_every_mark_is_tested() -> None:
    assert {figure.mark for figure in FIGURES.values()} == set(Mark.__args__)  # type: ignore[attr-defined]
