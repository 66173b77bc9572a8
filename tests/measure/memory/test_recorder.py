"""What recording itself adds or may break, and the caching allocator's own history on a GPU."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lmlab.chapters.memory.measure import timeline
from lmlab.measure.memory import recorder
from lmlab.measure.memory.history import History
from lmlab.measure.memory.observer import address_of, source_of
from lmlab.measure.memory.recorder import KnownTensor, Recording, record
from lmlab.measure.memory.summary import label, summarize
from tests.jobs.points import memory_point
from tests.measure.memory.test_snapshot import frame

WIDTH = 64


def recorded(first_phase: str) -> Recording:
    """A linear layer under autocast, whose input is as large as its weight."""
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(WIDTH, WIDTH)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kept.append(model(x).float().square().sum())

    weight = KnownTensor(category="parameters", name="weight", size=4 * WIDTH * WIDTH)
    return record(
        [(first_phase, forward), ("backward", lambda: kept.pop().backward())],
        device=torch.device("cpu"),
        identify=lambda: {address_of(model.weight): weight},
    )


def test_weight_copies_are_recognized_and_the_peak_is_unchanged() -> None:
    observed, unobserved = (recorded(name) for name in ("forward", "unobserved"))
    copies = label(observed, keeps_graph=True).query("category == 'weight_copies'")
    found = copies[["what", "size"]].to_numpy().tolist()
    assert found == [["bf16 copy of weight", 2 * WIDTH * WIDTH]]
    peaks = {
        summarize(each, keeps_graph=True, stream_bytes=1)["replayed_peak_bytes"]
        for each in (observed, unobserved)
    }
    assert len(peaks) == 1


def test_a_lost_mark_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = History(events=[], live_at_end=[], dropped=True)
    monkeypatch.setattr(recorder._Profiler, "history", lambda *_: empty)
    with pytest.raises(RuntimeError, match="lacks a mark"):
        recorded("forward")


def test_a_gpu_recording_starts_and_stops_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = inspect.signature(torch.cuda.memory._record_memory_history)
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda *a, **k: calls.append(taken.bind(*a, **k))
    )
    monkeypatch.setattr(memory, "_snapshot", lambda: {"segments": [], "device_traces": [[]]})
    source = recorder._CachingAllocator(torch.device("cuda", 0))
    with source:
        pass
    assert [call.arguments["enabled"] for call in calls] == ["all", None]
    assert source.history({}).events == []


OURS = "lmlab/model/layers.py"
LIBRARIES = "/env/lib/python3.12/site-packages"
SKIPPED = [f"{LIBRARIES}/torch/nn/functional.py", "torch/nn/modules/module.py", "<string>", ""]
SKIPPED += ["/home/me/lmlab/src/lmlab/measure/memory/observer.py"]
SKIPPED += ["lmlab/measure/memory/observer.py", "/usr/lib/python3.12/contextlib.py"]
SHOWN = {f"{LIBRARIES}/lmlab/attention/naive.py": "lmlab/attention/naive.py"}
SHOWN |= {"/home/me/project/net.py": "project/net.py"}


@pytest.mark.parametrize(("inner", "shown"), [*((i, OURS) for i in SKIPPED), *SHOWN.items()])
def test_frames_of_torch_and_of_the_recorder_are_skipped(inner: str, shown: str) -> None:
    found = source_of([frame(inner), frame("/home/me/lmlab/src/lmlab/model/layers.py")])
    assert found is not None
    assert found.file == shown
    assert (source_of([frame(inner)]) is None) == (inner in SKIPPED)


GPU = torch.device("cuda", 0)
MODEL = {"vocab_size": 10_000, "d_model": 512, "d_ff": 2048, "num_layers": 4, "num_heads": 8}


@pytest.fixture
def little_memory() -> Iterator[None]:
    total = torch.cuda.mem_get_info(GPU)[1]
    torch.cuda.set_per_process_memory_fraction(5e8 / total, GPU)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)


def modes_of(**changes: Any) -> dict[str, dict[str, Any]]:
    """Values by mode and quantity, of records that have no other label."""
    point = memory_point(**{**MODEL, "context": 256, "batch": 4, **changes})
    found: dict[str, dict[str, Any]] = {}
    for row in timeline.measure(point, GPU).measurements:
        labels = row["labels"]
        if "mode" in labels and labels.keys() <= {"mode", "phase", "stage"}:
            found.setdefault(labels["mode"], {})[row["quantity"]] = row["value"]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_replayed_peak_is_the_allocators_own_within_2_percent(precision: str) -> None:
    modes = modes_of(precision=precision)
    for mode in modes.values():
        assert mode["replayed_peak"] == pytest.approx(mode["allocator_peak"], rel=0.02)
        # Next to so small a model the workspaces of cuBLAS, tens of MiB, are large.
        off = abs(mode["predicted_peak"] - mode["replayed_peak"])
        assert off < 0.25 * mode["replayed_peak"] or off < 96 * 2**20
    for name in ("forward", "forward_graph"):
        peaks = modes[name]
        assert peaks["peak_memory"] == pytest.approx(peaks["unrecorded_peak"], rel=0.02)


@pytest.mark.gpu
@pytest.mark.usefixtures("little_memory")
def test_running_out_of_memory_is_recorded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = modes_of(context=512, batch=8)["train_step"]
    assert failed["peak_memory"] is None
    assert failed["asked"] > 0
    assert (tmp_path / failed["snapshot"]).exists()
