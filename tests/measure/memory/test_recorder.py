"""A step recorded on the CPU: phases, categories, and running out of memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmlab.measure.memory import recorder
from lmlab.measure.memory.categories import Labelled, label
from lmlab.measure.memory.observer import Observer, address_of
from lmlab.measure.memory.recorder import KnownTensor, Recording, RecordingError, record
from lmlab.measure.memory.replay import replay
from lmlab.measure.memory.summary import summarize

WIDTH, ROWS = 64, 96
STREAM = ROWS * WIDTH * 4
WEIGHTS = 2 * WIDTH * WIDTH * 4


class Work:
    """Two layers, their input, and a step in phases."""

    def __init__(self, *, rows: int = ROWS, autocast: bool = False) -> None:
        torch.manual_seed(0)
        first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.model = nn.Sequential(first, nn.Tanh(), last)
        self.x = torch.randn(rows, WIDTH)
        self.autocast = autocast
        self.loss = torch.empty(0)

    def forward(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            self.loss = self.model(self.x).float().square().sum()

    def backward(self) -> None:
        self.loss.backward()
        self.loss = torch.empty(0)

    def known(self) -> dict[int, KnownTensor]:
        return {
            address_of(tensor): KnownTensor(
                category=category, name=name, size=tensor.untyped_storage().nbytes()
            )
            for category, name, tensor in self._tensors()
        }

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        yield "other", "x", self.x
        for name, parameter in self.model.named_parameters():
            yield "parameters", name, parameter
            if parameter.grad is not None:
                yield "gradients", f"gradient of {name}", parameter.grad

    def record(self, *phases: tuple[str, Callable[[], None]], **more: Any) -> Recording:
        return record(
            phases or (("forward", self.forward), ("backward", self.backward)),
            device=torch.device("cpu"),
            identify=self.known,
            observer=Observer({address_of(p): n for n, p in self.model.named_parameters()}),
            **more,
        )


def labels(recording: Recording) -> dict[str, list[Labelled]]:
    """Allocations by category."""
    found: dict[str, list[Labelled]] = {}
    for each in label(recording, replay(recording.history), keeps_graph=True):
        found.setdefault(each.category, []).append(each)
    return found


def sizes(labelled: list[Labelled]) -> list[int]:
    return [each.allocation.size for each in labelled]


def test_categories_and_phases_of_a_train_step() -> None:
    recording = Work().record()
    found = labels(recording)
    assert sum(sizes(found["parameters"])) == sum(sizes(found["gradients"])) == WEIGHTS
    # tanh's result, for tanh and the second layer; the second layer's result, for the square.
    assert [size for size in sizes(found["activations"]) if size >= STREAM] == [STREAM, STREAM]
    assert {each.phase for each in found["activations"]} == {"forward"}
    (tanh,) = (each for each in found["activations"] if each.what.startswith("tanh"))
    assert tanh.source is not None
    assert (tanh.source.file, tanh.source.function) == ("memory/test_recorder.py", "forward")
    first, second = recording.phases
    assert (first.name, second.name) == ("forward", "backward")
    assert 0 <= first.start < first.end == second.start < second.end


def test_autocasts_weight_copies_differ_from_inputs_of_the_same_size() -> None:
    found = labels(Work(rows=WIDTH, autocast=True).record())
    copies = found["weight_copies"]
    assert sorted(each.what for each in copies) == [f"bf16 copy of {n}.weight" for n in (0, 2)]
    assert 2 * WIDTH * WIDTH in sizes(found["activations"])


def test_observing_does_not_change_the_peak() -> None:
    peaks = [
        summarize(
            Work(autocast=True).record(observed=frozenset(observed)),
            keeps_graph=True,
            stream_bytes=STREAM,
        )["replayed_peak_bytes"]
        for observed in ([], ["forward"])
    ]
    assert peaks[0] == peaks[1]


def test_other_errors_and_lost_marks_are_raised() -> None:
    with pytest.raises(ValueError, match="wrong"):
        Work().record(("forward", lambda: int("wrong")))  # type: ignore[arg-type,return-value]
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
