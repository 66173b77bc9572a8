"""A result is whole or not there, and a file that is none is one line."""

import errno
import os
import re
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lmlab.study.results import Result, ResultError, parse, read
from tests.report.study import result, time_record

TIME = time_record([1.0, 3.0], phase="forward")


def make(measurements: Any = (TIME,), **changes: Any) -> Result:
    own = {"chapter": "end_to_end", "settings": {"seed": 0}, "flags": ("noisy",)}
    parameters = changes.pop("parameters", {"size": "small"})
    return result(parameters, measurements, **{**own, **changes})


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    make().write(tmp_path / "deep" / "result.json")
    assert read(tmp_path / "deep" / "result.json") == make()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        make().write(tmp_path / "result.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == mode
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


FAULTS: dict[str, tuple[str, BaseException]] = {
    "a full disk": ("fsync", OSError(errno.ENOSPC, "No space left on device")),
    "a read-only folder": ("fsync", OSError(errno.EROFS, "Read-only file system")),
    "an interrupt": ("replace", KeyboardInterrupt()),
}


@pytest.mark.parametrize(("function", "error"), FAULTS.values(), ids=FAULTS)
def test_failed_writes_change_nothing(
    function: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    make().write(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, function, Mock(side_effect=error))
    expected = ValueError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        make(elapsed_s=2.0).write(path)
    if expected is ValueError:
        assert re.search(rf"^[^\n]*{path}[^\n]*{error.strerror}[^\n]*$", str(caught.value))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown status": ({"status": "fine"}, "status"),
    "unknown flag": ({"flags": ("odd",)}, "flags"),
    "no reason": ({"status": "oom", "measurements": ()}, "reason"),
    "times without ok": ({"status": "oom", "reason": "x"}, "measurements"),
    "lines": ({"status": "failed", "reason": "a\nb", "measurements": ()}, "reason"),
    "a payload of another shape": ({"data": {"ranks": 3}}, "data.ranks"),
    "too large": ({"data": {"big": "x" * 300_000}}, "200,000"),
}


@pytest.mark.parametrize(("changes", "complaint"), WRONG.values(), ids=WRONG)
def test_wrong_results_stay_out(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ResultError, match=complaint):
        make(**changes).write(tmp_path / "result.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", '{"schema_version": 3}', "\x00\xff"])
def test_a_file_that_is_no_result_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ResultError, match=rf"\A[^\n]*{path}[^\n]*\Z"):
        read(path)


INCONSISTENT = {
    "occurs twice": (TIME, TIME),
    "a quantity with a unit is a number": ({**TIME, "value": "fast"},),
    "n is not the number of samples": ({**TIME, "n": 3},),
}


@pytest.mark.parametrize(("complaint", "records"), INCONSISTENT.items())
def test_records_are_consistent(complaint: str, records: Any) -> None:
    with pytest.raises(ResultError, match=f"^here: .*{complaint}"):
        parse(make(records).to_json(), "here")


def test_the_headline_is_the_times_or_the_reason() -> None:
    assert make().headline() == "forward 2 ms"
    assert make(measurements=(TIME,) * 8).headline().endswith("forward 2 ms, 2 more")
    failed = make(status="oom", reason="needs 3 GiB", measurements=())
    assert failed.headline() == "oom: needs 3 GiB"
