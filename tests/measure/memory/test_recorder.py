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

CPU = torch.device("cpu")
WIDTH, ROWS = 64, 96
STREAM = ROWS * WIDTH * 4


class Work:
    """Two layers, their input, and a step in phases."""

    def __init__(self, *, autocast: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
        )
        self.x = torch.randn(ROWS, WIDTH)
        self.autocast = autocast
        self.loss: Tensor | None = None

    def forward(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            self.loss = self.model(self.x).float().square().sum()

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

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
        names = {address_of(p): name for name, p in self.model.named_parameters()}
        return record(
            phases or (("forward", self.forward), ("backward", self.backward)),
            device=CPU,
            identify=self.known,
            observer=Observer(names),
            **more,
        )


def labels(recording: Recording, *, keeps_graph: bool = True) -> list[Labelled]:
    return label(recording, replay(recording.history), keeps_graph=keeps_graph)


def bytes_of(labelled: list[Labelled], category: str) -> int:
    return sum(each.allocation.size for each in labelled if each.category == category)


def test_categories_of_a_train_step() -> None:
    recording = Work().record()
    labelled = labels(recording)
    assert bytes_of(labelled, "parameters") == 2 * WIDTH * WIDTH * 4
    assert bytes_of(labelled, "gradients") == 2 * WIDTH * WIDTH * 4
    saved = [each for each in labelled if each.category == "activations"]
    # tanh's result, for tanh and the second layer; the second layer's result, for the square.
    large = [each.allocation.size for each in saved if each.allocation.size >= STREAM]
    assert large == [STREAM, STREAM]
    assert {each.phase for each in saved} == {"forward"}
    backward = [e for e in labelled if e.phase == "backward" and e.allocation.size > 64]
    assert {each.category for each in backward} == {"gradients", "workspace"}
    tanh = next(each for each in labelled if each.what.startswith("tanh"))
    assert tanh.source is not None
    assert (tanh.source.file, tanh.source.function) == ("memory/test_recorder.py", "forward")
    first, second = recording.phases
    assert (first.name, second.name) == ("forward", "backward")
    assert 0 <= first.start < first.end == second.start < second.end


def test_autocasts_weight_copies_differ_from_inputs_of_the_same_size() -> None:
    work = Work(autocast=True)
    work.x = torch.randn(WIDTH, WIDTH)
    labelled = labels(work.record())
    copies = [each for each in labelled if each.category == "weight_copies"]
    assert sorted(each.what for each in copies) == [
        "bf16 copy of 0.weight",
        "bf16 copy of 2.weight",
    ]
    same_size = [each for each in labelled if each.allocation.size == 2 * WIDTH * WIDTH]
    assert len(same_size) > len(copies)


def test_without_a_graph_operator_results_are_the_activations() -> None:
    work = Work()

    def infer() -> None:
        with torch.no_grad():
            work.model(work.x)

    labelled = labels(work.record(("forward", infer)), keeps_graph=False)
    assert bytes_of(labelled, "activations") == 3 * STREAM
    assert {each.what for each in labelled if each.category == "activations"} == {
        f"mm {ROWS}×{WIDTH} fp32",
        f"tanh {ROWS}×{WIDTH} fp32",
    }


def test_observing_does_not_change_the_peak() -> None:
    def peak(observed: frozenset[str]) -> int:
        recording = Work(autocast=True).record(observed=observed)
        summary = summarize(recording, keeps_graph=True, stream_bytes=STREAM)
        return int(summary["replayed_bytes"])

    assert peak(frozenset({"forward"})) == peak(frozenset())


def test_running_out_of_memory_ends_the_recording_with_what_was_live() -> None:
    work = Work()
    kept: list[Tensor] = []

    def fail() -> None:
        kept.append(torch.empty(3000))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    recording = work.record(("forward", work.forward), ("backward", fail))
    assert recording.out_of_memory == "CUDA out of memory. Tried to allocate 9 GiB"
    assert [span.name for span in recording.phases] == ["forward", "backward"]
    summary = summarize(recording, keeps_graph=True, stream_bytes=STREAM)
    assert summary["live_categories_bytes"]["workspace"] >= 12_000
    assert summary["live_categories_bytes"]["activations"] >= 2 * STREAM
    assert summary["live_categories_bytes"]["parameters"] == 2 * WIDTH * WIDTH * 4


def test_other_errors_and_lost_marks_are_raised() -> None:
    def fail() -> None:
        raise ValueError("wrong shape")

    with pytest.raises(ValueError, match="wrong shape"):
        Work().record(("forward", fail))
    with pytest.raises(RecordingError, match="lacks one of its marks"):
        recorder._position_of(torch.empty(1), [])


def test_a_gpu_recording_starts_and_stops_the_allocators_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    calls: list[Any] = []
    empty = {"segments": [], "device_traces": [[]]}
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *a, **k: calls.append((a, k))
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: empty)
    source = recorder._CachingAllocator(torch.device("cuda", 0))
    source.start()
    source.freeze()
    source.stop()
    (started, stopped) = calls
    assert started[0] == ("all",)
    assert set(started[1]) == {"context", "stacks", "max_entries"} < set(taken)
    assert stopped == ((None,), {})
    assert source.history({}).events == []
