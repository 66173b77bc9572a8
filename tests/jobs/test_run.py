"""However a point ends, its result says so; what is nobody's result leaves no file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.jobs import budget, run
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.registry import fingerprint
from lmlab.measure import records
from lmlab.measure.identity import find_machine
from lmlab.measure.statistics import Measurement
from lmlab.study.points import Point
from lmlab.study.results import read
from tests.jobs.points import precision_point

POINT = precision_point("layernorm")
Stand = Callable[[Point, torch.device], Outcome]
Measure = Callable[..., tuple[int, Path]]

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.05 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 1.20 GiB is free. Process 7 has 138 GiB memory in use.\nSee documentation."
)


def raising(error: BaseException) -> Stand:
    def chapter(point: Point, device: torch.device) -> Outcome:
        raise error

    return chapter


def asking_for_too_much(point: Point, device: torch.device) -> Outcome:
    torch.empty(1 << 55, device=device)
    return Outcome()


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Run the program with a stand-in for the chapter; its status, and the result's place."""

    def measure(chapter: Stand, machine: str | None = None) -> tuple[int, Path]:
        monkeypatch.setattr(run, "load", lambda name: chapter)
        monkeypatch.setattr(run, "torch_device", lambda name: torch.device("cpu"))
        out = tmp_path / "results" / "point.json"
        machine = machine or find_machine().id
        arguments = ["--point", POINT.to_json(), "--machine", machine, "--out", str(out)]
        return run.main(arguments), out

    return measure


@pytest.mark.parametrize(
    ("chapter", "status", "reason"),
    [
        pytest.param(
            raising(torch.OutOfMemoryError(CUDA_MESSAGE)),
            "oom",
            "needs 3.05 GiB more, 1.20 GiB of the GPU's 139.81 GiB free",
            id="GPU memory",
        ),
        pytest.param(
            asking_for_too_much, "oom", "needs 134217728.00 GiB more, ", id="memory of the host"
        ),
        pytest.param(
            raising(MemoryError()), "oom", "MemoryError (cpu)", id="Python's own memory error"
        ),
        pytest.param(
            raising(Unsupported("needs 2 GPUs")), "unsupported", "needs 2 GPUs", id="unsupported"
        ),
        pytest.param(raising(ValueError("bad")), "failed", "ValueError: bad", id="ValueError"),
        pytest.param(
            raising(RuntimeError("CUDA error: unspecified launch failure\nCompile with ...")),
            "failed",
            "RuntimeError: CUDA error: unspecified launch failure",
            id="a GPU that is lost",
        ),
    ],
)
def test_a_point_that_cannot_be_measured_is_a_result_with_a_reason(
    measure: Measure, chapter: Stand, status: str, reason: str
) -> None:
    code, out = measure(chapter)
    result = read(out)
    assert code == 0
    assert result.status == status
    assert str(result.reason).startswith(reason)
    assert result.measurements == ()


def test_a_result_carries_its_point_and_its_provenance(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    times = Measurement(samples_ms=(1.0, 2.0, 4.0), clock="wall", cache="warm", stopped="3 samples")
    total = records.timed(times, phase="total")
    _, out = measure(lambda point, device: Outcome(measurements=[total], data={"a": 1}))
    result, machine = read(out), find_machine()
    assert (result.chapter, result.parameters, result.settings) == (
        POINT.chapter,
        POINT.parameters,
        POINT.settings,
    )
    assert result.machine == {"id": machine.id, "device": machine.device, "name": machine.name}
    assert result.versions["torch"] == torch.__version__
    assert result.code_fingerprint == fingerprint(POINT)
    assert result.measurements == (total,)
    assert result.data == {"a": 1}
    assert result.flags == ("noisy",)
    assert capsys.readouterr().out.splitlines()[-1] == "total 2 ms"


def test_flags_of_the_gpu_join_the_result(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.GpuWatch, "flags", ["throttled", "gpu_shared"])
    _, out = measure(lambda point, device: Outcome())
    assert read(out).flags == ("throttled", "gpu_shared")


def test_another_machine_is_refused_in_one_line(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = measure(raising(AssertionError("must not run")), machine="nvidia-z9000")
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert not out.exists()
    assert len(lines) == 1
    assert "'nvidia-z9000'" in lines[0]
    assert find_machine().id in lines[0]


def test_a_result_that_cannot_be_written_is_a_failure(
    measure: Measure,
) -> None:
    code, out = measure(lambda point, device: Outcome(data={"value": float("nan")}))
    assert (code, read(out).status, read(out).data) == (0, "failed", {})


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "No")]
)
def test_a_disk_that_takes_no_result_is_one_line(
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: OSError,
) -> None:
    def write(*_: object) -> None:
        raise error

    monkeypatch.setattr("lmlab.study.results.write_atomically", write)
    code, out = measure(lambda point, device: Outcome())
    assert (code, out.exists(), len(capsys.readouterr().err.splitlines())) == (2, False, 1)


def test_a_point_that_begins_after_the_budget_is_skipped(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(budget.VARIABLE, "1 240")
    code, out = measure(raising(AssertionError("must not run")))
    assert (code, read(out).status) == (0, "unsupported")
    assert read(out).reason == "skipped: the study's time budget of 240 s was used up"
    assert budget.was_skipped(out)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit], ids=["ctrl-c", "exit"])
def test_an_interrupt_goes_through_and_writes_nothing(
    measure: Measure, tmp_path: Path, interrupt: type[BaseException]
) -> None:
    with pytest.raises(interrupt):
        measure(raising(interrupt()))
    assert not (tmp_path / "results").exists()


def test_the_working_folder_is_importable_while_measuring(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "found_in_the_working_folder.py").write_text("ANSWER = 42\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    def chapter(point: Point, device: torch.device) -> Outcome:
        import found_in_the_working_folder as found  # type: ignore[import-not-found]

        data: dict[str, Any] = {"answer": found.ANSWER}
        return Outcome(data=data)

    _, out = measure(chapter)
    assert read(out).data == {"answer": 42}
