"""Ranges are no-ops unless recorded, stay out of compiled code, and reach both profilers."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock, call

import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as session

from lmlab.measure.trace.ranges import in_range, named, recording


def recorded_ranges(function: Callable[[], object]) -> list[str]:
    """Names of the ranges that the PyTorch profiler sees while the function runs."""
    with session(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        function()
    return [event.name for event in profiler.events() if event.is_user_annotation]


def test_ranges_are_recorded_only_inside_recording() -> None:
    def run() -> None:
        for outer in (recording(), named("not recorded")):
            with outer, named("mine"):
                torch.ones(2)

    assert recorded_ranges(run) == ["mine"]
    with pytest.raises(ZeroDivisionError), recording():
        _ = 1 / 0
    assert named("a") is named("b"), "one shared no-op"


def test_a_function_in_a_range_keeps_its_name_and_result() -> None:
    def double(x: int) -> int:
        return 2 * x

    with_range = in_range("doubling", double)
    assert (with_range.__name__, with_range(x=3)) == ("double", 6)
    with recording():
        assert recorded_ranges(lambda: with_range(1)) == ["doubling"]


def test_nvtx_ranges_are_of_the_process_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = Mock(range_start=Mock(side_effect=[1, 2]))  # a machine without a GPU has no NVTX
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    with recording(), named("forward"), named("layers.0"):
        pass
    expected = [call.range_start("forward"), call.range_start("layers.0")]
    assert nvtx.mock_calls == [*expected, call.range_end(2), call.range_end(1)]
