"""A folder belongs to one living run; what dead ones left is removed."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from lmlab.study.run_lock import acquire


def _hold_and_wait(records: Path, ready: int) -> None:
    acquire(records)
    (records / "locks").mkdir()
    (records / "locks" / "0.output.lock").touch()
    os.write(ready, b"x")
    signal.pause()


def test_a_living_run_is_named_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    run = multiprocessing.get_context("fork").Process(
        target=_hold_and_wait, args=(tmp_path, writer), daemon=True
    )
    run.start()
    os.read(reader, 1)
    with pytest.raises(ValueError, match=rf"\A[^\n]*process {run.pid} on [^\n]*\Z"):
        acquire(tmp_path)
    run.kill()
    run.join()
    os.close(acquire(tmp_path))
    assert not list((tmp_path / "locks").iterdir())


def test_marks_of_another_host_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "0.output.lock").touch()
    (tmp_path / "lmlab.lock").write_text("process 1 on elsewhere\n")
    os.close(acquire(tmp_path))
    assert list((tmp_path / "locks").iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        acquire(tmp_path / "file" / "records")
