"""What recording itself adds or may break; recorded steps are tested with the memory chapter."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from lmlab.measure.memory import recorder
from lmlab.measure.memory.categories import label
from lmlab.measure.memory.observer import Observer, address_of
from lmlab.measure.memory.recorder import Recording, RecordingError, record
from lmlab.measure.memory.replay import replay
from lmlab.measure.memory.summary import summarize

WIDTH = 64


def recorded(observed: frozenset[str]) -> Recording:
    """A linear layer under autocast, whose input is as large as its weight."""
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(WIDTH, WIDTH)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kept.append(model(x).float().square().sum())

    return record(
        [("forward", forward), ("backward", lambda: kept.pop().backward())],
        device=torch.device("cpu"),
        identify=dict,
        observer=Observer({address_of(p): n for n, p in model.named_parameters()}),
        observed=observed,
    )


def test_observing_tells_weight_copies_from_inputs_and_does_not_change_the_peak() -> None:
    observed, unobserved = (recorded(frozenset(names)) for names in (["forward"], []))
    labelled = label(observed, replay(observed.history), keeps_graph=True)
    copies = [each for each in labelled if each.category == "weight_copies"]
    assert [(each.what, each.allocation.size) for each in copies] == [
        ("bf16 copy of weight", 2 * WIDTH * WIDTH)
    ]
    peaks = {
        summarize(each, keeps_graph=True, stream_bytes=1)["replayed_peak_bytes"]
        for each in (observed, unobserved)
    }
    assert len(peaks) == 1


def test_a_lost_mark_is_an_error() -> None:
    with pytest.raises(RecordingError, match="lacks one of its marks"):
        recorder._position_of(torch.empty(1), [])


def test_a_gpu_recording_starts_and_stops_the_allocators_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = inspect.signature(torch.cuda.memory._record_memory_history)
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda *a, **k: calls.append(taken.bind(*a, **k))
    )
    monkeypatch.setattr(memory, "_snapshot", lambda: {"segments": [], "device_traces": [[]]})
    source = recorder._CachingAllocator(torch.device("cuda", 0))
    source.start()
    source.freeze()
    source.stop()
    assert [call.arguments["enabled"] for call in calls] == ["all", None]
    assert source.history({}).events == []
