"""A result is whole or not there, and a file that is none says why in one line."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from lmlab.study.results import LacksKey, Result, ResultError, read

MEASUREMENT = {
    "clock": "host",
    "cache": "warm",
    "stopped": "2 samples",
    "samples_ms": [1.0, 3.0],
    "n": 2,
    "median_ms": 2.0,
    "q1_ms": 1.5,
    "q3_ms": 2.5,
    "min_ms": 1.0,
    "max_ms": 3.0,
    "mean_ms": 2.0,
    "sd_ms": 1.41,
    "noisy": True,
}


def make(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "chapter": "end_to_end",
        "parameters": {"size": "small"},
        "settings": {"seed": 0},
        "status": "ok",
        "measurements": {"forward": MEASUREMENT},
        "machine": {"id": "cpu-test", "device": "cpu", "name": "Test"},
        "versions": {"python": "3.11", "torch": "2.13", "lmlab": "0", "triton": None},
        "commit": {"id": None, "dirty": False},
        "code_fingerprint": "0" * 16,
        "started_at": "2026-01-01T00:00:00Z",
        "elapsed_s": 1.0,
        "flags": ("noisy",),
    }
    return Result(**{**values, **changes})


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    make().write(tmp_path / "deep" / "result.json")
    assert read(tmp_path / "deep" / "result.json") == make()


def test_others_may_read_it_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    make().write(tmp_path / "result.json")
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_an_interrupted_write_leaves_the_old_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    make().write(path)
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(elapsed_s=2.0).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        pytest.param({"status": "fine"}, "status", id="unknown status"),
        pytest.param({"flags": ("odd",)}, "flags", id="unknown flag"),
        pytest.param(
            {"status": "oom", "reason": None, "measurements": {}}, "reason", id="no reason"
        ),
        pytest.param({"status": "oom", "reason": "x"}, "measurements", id="times without ok"),
        pytest.param(
            {"status": "failed", "reason": "a\nb", "measurements": {}}, "reason", id="lines"
        ),
        pytest.param({"data": {"big": "x" * 300_000}}, "200,000", id="too large"),
    ],
)
def test_a_result_against_the_schema_is_not_written(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ResultError, match=complaint):
        make(**changes).write(tmp_path / "result.json")
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_none_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        make(data={"x": float("nan")}).write(tmp_path / "result.json")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param('{"schema_version": 1', id="half written"),
        pytest.param("[]", id="a list"),
        pytest.param('{"schema_version": 2}', id="another version"),
        pytest.param("\x00\xff", id="binary"),
    ],
)
def test_a_file_that_is_no_result_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ResultError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_headline_is_the_times_or_the_reason() -> None:
    assert make().headline() == "forward 2 ms"
    many = make(measurements={f"arm{n}": make().measurements["forward"] for n in range(8)})
    assert many.headline().endswith("arm5 2 ms, 2 more")
    failed = make(status="oom", reason="needs 3 GiB", measurements={})
    assert failed.headline() == "oom: needs 3 GiB"


def test_json_is_one_line() -> None:
    assert "\n" not in make().to_json()
    assert json.loads(make().to_json())["chapter"] == "end_to_end"


def test_a_key_that_a_file_lacks_is_named_with_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    make(data={"peak": {"bytes": 3}}).write(path)
    data = read(path).data
    assert data["peak"] == {"bytes": 3}
    assert data.get("depth") is None
    for lacking in (data, data["peak"]):
        with pytest.raises(LacksKey, match=r"/result\.json: has no 'depth', which is read now;"):
            lacking["depth"]
