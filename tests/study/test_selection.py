"""A run measures on its own machine, reads another's, and plans for a cluster when asked to."""

from pathlib import Path

import pytest

from lmlab.study.selection import Selection, check_results_exist, select

H200 = "nvidia-h200"
CASES: dict[str, tuple[dict[str, str], tuple[str, str, bool]]] = {
    "this machine": ({}, ("cpu-here", "cpu", True)),
    "this machine by name": ({"machine": "cpu-here"}, ("cpu-here", "cpu", True)),
    "another machine": ({"machine": H200}, (H200, "cuda", False)),
    "another CPU": ({"machine": "cpu-there"}, ("cpu-there", "cpu", False)),
    "a cluster's machine": ({"machine": H200, "measure": "always"}, (H200, "cuda", True)),
    "a second set of its own": ({"machine": "cpu-here@repeat"}, ("cpu-here@repeat", "cpu", True)),
    "reading only": ({"measure": "never"}, ("cpu-here", "cpu", False)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_is_about(case: str) -> None:
    config, expected = CASES[case]
    assert select(config, "cpu-here", "cpu") == Selection(*expected)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        pytest.param("machine", "nvidia-h20", r"cpu-here \(this one\), nvidia-h200", id="misspelt"),
        pytest.param("measure", "never", "auto, machine = nvidia-h200", id="not to be measured"),
    ],
)
def test_a_run_without_device_or_results_names_what_exists(
    key: str, value: str, allowed: str, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "a-file").touch()
    with pytest.raises(ValueError, match=rf"\Aconfig: {key} = '{value}'[^\n]*allowed: {allowed}\Z"):
        check_results_exist(select({key: value}, "cpu-here", "cpu"), tmp_path, "cpu-here")


@pytest.mark.parametrize("case", ["this machine", "a cluster's machine", "another machine"])
def test_a_run_that_measures_needs_no_results_yet(case: str, tmp_path: Path) -> None:
    if case == "another machine":
        (tmp_path / "nvidia-h200").mkdir()
    check_results_exist(Selection(*CASES[case][1]), tmp_path, "cpu-here")
