"""A run measures on its own machine, reads another's, and plans for a cluster when told to."""

from __future__ import annotations

import pytest

from lmlab.study.selection import Selection, select

CASES = {
    "this machine": ({}, Selection("cpu-here", "cpu", True)),
    "this machine by name": ({"machine": "cpu-here"}, Selection("cpu-here", "cpu", True)),
    "another machine": ({"machine": "nvidia-h200"}, Selection("nvidia-h200", "cuda", False)),
    "another CPU": ({"machine": "cpu-there"}, Selection("cpu-there", "cpu", False)),
    "a cluster's machine": (
        {"machine": "nvidia-h200", "measure": "always"},
        Selection("nvidia-h200", "cuda", True),
    ),
    "reading only": ({"measure": "never"}, Selection("cpu-here", "cpu", False)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_is_about(case: str) -> None:
    config, selection = CASES[case]
    assert select(config, "cpu-here", "cpu") == selection
