"""Two processes never have the same device, wherever their files and whoever they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlab.measure import exclusive as module
from lmlab.measure.exclusive import exclusive, lock_names
from tests.measure.fake_nvml import FakeGpu, FakeNvml

HOLDS_UNTIL_STDIN_CLOSES = """
import sys
from lmlab.measure.exclusive import exclusive
with exclusive("device"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLAB_LOCK_DOMAIN", tmp_path.name)


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process with another temporary folder that has the device until it is killed."""
    with monkeypatch.context() as context:
        context.setenv("TMPDIR", str(tmp_path))
        command = [sys.executable, "-c", HOLDS_UNTIL_STDIN_CLOSES]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_waits_and_says_for_whom_once(
    holder: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(*words: str, **_: object) -> None:
        """While it waits, the holder dies, and leaves no lock behind."""
        lines.append(" ".join(words))
        holder.kill()

    lines: list[str] = []
    monkeypatch.setattr(module, "_SILENT_WAIT_S", 0.001)
    monkeypatch.setattr(module, "print", said, raising=False)
    with exclusive("device"):
        assert len(lines) == 1
        assert f"process {holder.pid}" in lines[0]


def test_locks_are_per_device_and_released_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), exclusive("one"), exclusive("two"):
        raise RuntimeError("inside")
    with exclusive("one"):
        pass


def test_gpus_are_known_by_their_ids_under_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are given different GPUs of a node measure side by side."""
    gpus = FakeNvml(FakeGpu(uuid="GPU-b"), FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-c"))
    monkeypatch.setitem(sys.modules, "pynvml", gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert lock_names("cuda", 1) == ["GPU-a"]
    assert lock_names("cuda", 2) == ["GPU-a", "GPU-c"]
    assert lock_names("cpu", 2) == ["cpu"]
