"""Every end of a point is recorded in its result; what is nobody's result leaves no file."""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from lmlab.jobs import run
from lmlab.jobs.outcome import LONGEST_REASON, Outcome, Unsupported
from lmlab.jobs.registry import fingerprint
from lmlab.measure.identity import find_machine
from lmlab.study.points import Point
from lmlab.study.results import read
from tests.jobs.points import precision_point
from tests.report.study import time_record

POINT = precision_point("layernorm")
Stand = Callable[[Point, torch.device], Outcome]
Measure = Callable[..., tuple[int, Path]]
CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.05 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 1.20 GiB is free. Process 7 has 138 GiB memory in use.\nSee documentation."
)
QUIET, NOISY = (10.0, 10.1, 10.2), (5.0, 10.0, 20.0)


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


ENDS: dict[str, tuple[Stand, str, str]] = {
    "GPU memory": (
        Mock(side_effect=torch.OutOfMemoryError(CUDA_MESSAGE)),
        *("oom", "needs 3.05 GiB more, 1.20 GiB of the GPU's 139.81 GiB free"),
    ),
    "memory of the host": (asking_for_too_much, "oom", "needs 134217728.00 GiB more, "),
    "Python's own memory error": (Mock(side_effect=MemoryError()), "oom", "MemoryError (cpu)"),
    "unsupported": (Mock(side_effect=Unsupported("no GPU")), "unsupported", "no GPU"),
    "a long error": (Mock(side_effect=ValueError("a\n" + "b" * 999)), "failed", "ValueError: a bb"),
    "not finite": (lambda point, device: Outcome(data={"value": float("nan")}), "failed", ""),
}


@pytest.mark.parametrize(("chapter", "status", "reason"), ENDS.values(), ids=ENDS)
def test_failures_have_a_reason(measure: Measure, chapter: Stand, status: str, reason: str) -> None:
    code, out = measure(chapter)
    result = read(out)
    assert (code, result.status, result.measurements, result.data) == (0, status, (), {})
    assert str(result.reason).startswith(reason)
    assert len(str(result.reason)) <= LONGEST_REASON


def test_a_result_carries_its_point_and_its_provenance(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.GpuWatch, "flags", ["throttled", "gpu_shared"])
    total = time_record(NOISY, phase="total")
    _, out = measure(lambda point, device: Outcome(measurements=[total], data={"a": 1}))
    result, machine = read(out), find_machine()
    assert Point(result.chapter, result.parameters, result.settings) == POINT
    assert result.machine == {"id": machine.id, "device": machine.device, "name": machine.name}
    assert result.versions["torch"] == torch.__version__
    assert result.code_fingerprint == fingerprint(POINT)
    assert (result.measurements, result.data) == ((total,), {"a": 1})
    assert result.flags == ("throttled", "gpu_shared", "noisy")
    assert capsys.readouterr().out.splitlines()[-1] == "total 10 ms"


@pytest.mark.parametrize(
    ("phases", "noisy"),
    [
        ({"total": QUIET}, False),
        ({"zero_grad": NOISY, "total": QUIET}, False),
        ({"a": QUIET, "b": NOISY}, True),
        ({}, False),
    ],
    ids=["quiet total", "quiet in all", "no total, one noisy", "nothing timed"],
)
def test_noise_is_judged_by_the_total(phases: dict[str, tuple[float, ...]], noisy: bool) -> None:
    times = [time_record(samples, phase=phase) for phase, samples in phases.items()]
    assert Outcome(measurements=times).noisy is noisy


def test_another_machine_is_refused(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    here = find_machine().id
    code, out = measure(Mock(side_effect=AssertionError("must not run")), "nvidia-z9000")
    [line] = capsys.readouterr().err.splitlines()
    assert (code, out.exists(), "'nvidia-z9000'" in line, here in line) == (2, False, True, True)
    code, out = measure(lambda point, device: Outcome(), f"{here}@repeat")
    assert (code, read(out).machine["id"]) == (0, here)


def test_the_working_folder_is_importable_while_measuring(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "found_in_the_working_folder.py").write_text("ANSWER = 42\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    def chapter(point: Point, device: torch.device) -> Outcome:
        import found_in_the_working_folder as found  # type: ignore[import-not-found]

        return Outcome(data={"answer": found.ANSWER})

    _, out = measure(chapter)
    assert read(out).data == {"answer": 42}
