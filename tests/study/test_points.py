"""A point's parameters give its path and survive the way through a command line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.study.points import Point, point_from_json

SCALARS = st.one_of(st.integers(0, 10**6), st.from_regex(r"[A-Za-z0-9_+-]+", fullmatch=True))
PARAMETERS = st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), SCALARS, min_size=1)


def test_a_path_reads_as_the_study_does() -> None:
    point = Point("end_to_end", {"size": "2.7b", "context": 128})
    assert point.path(Path("results"), "nvidia-h200") == Path(
        "results/nvidia-h200/end_to_end/size~2.7b/context~128.json"
    )


@given(parameters=PARAMETERS)
def test_a_point_survives_its_json(parameters: dict[str, str | int]) -> None:
    point = Point("chapter", parameters, {"seed": 0})
    assert point_from_json(point.to_json()) == point


@pytest.mark.slow
@given(first=PARAMETERS, second=PARAMETERS)
def test_paths_are_unique(first: dict[str, str | int], second: dict[str, str | int]) -> None:
    as_text = [[(k, str(v)) for k, v in items.items()] for items in (first, second)]
    paths = [Point("c", items).path(Path("r"), "m") for items in (first, second)]
    assert (paths[0] == paths[1]) == (as_text[0] == as_text[1])


@pytest.mark.parametrize("value", ["../up", "a/b", "", "two words", ".", ".."])
def test_a_value_that_could_leave_its_folder_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="size"):
        Point("c", {"size": value}).path(Path("results"), "m")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"chapter": "c"}'])
def test_what_is_not_a_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="chapter, parameters and settings"):
        point_from_json(text)
