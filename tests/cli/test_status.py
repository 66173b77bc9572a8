"""`lmlab status`: every point in a line, a summary last."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from lmlab.cli import main
from lmlab.jobs.registry import fingerprint
from lmlab.measure.identity import find_machine
from tests.jobs.points import precision_point

Lines = Callable[..., list[str]]

NANO = ["status", "--config", "study=nano"]
MACHINE = find_machine().id
ACCUMULATION = precision_point("accumulation", terms=1000, term=0.01)


@pytest.fixture
def lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Lines:
    """The lines that `lmlab status` prints for what lies in a folder of results."""
    monkeypatch.chdir(tmp_path)

    def lines(*more: str) -> list[str]:
        assert main([*NANO, *more]) == 0
        return capsys.readouterr().out.splitlines()

    return lines


def write(folder: Path, machine: str = MACHINE, **changes: object) -> Path:
    """A result of the accumulation point as the present would make it, changed as asked."""
    values = {
        "schema_version": 1,
        "chapter": "precision",
        "parameters": dict(ACCUMULATION.parameters),
        "settings": dict(ACCUMULATION.settings),
        "status": "ok",
        "reason": None,
        "measurements": {},
        "data": {},
        "flags": [],
        "machine": {"id": machine, "device": "cpu", "name": "Test"},
        "versions": {"python": "3.11.0", "torch": version("torch"), "lmlab": "0.1.0"},
        "commit": {"id": None, "dirty": False},
        "code_fingerprint": fingerprint(ACCUMULATION),
        "started_at": "2026-01-01T00:00:00Z",
        "elapsed_s": 0.1,
        **changes,
    }
    path = ACCUMULATION.path(folder / "results", machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def line_of(lines: list[str]) -> str:
    (line,) = [line for line in lines if "topic=accumulation" in line]
    return line


def test_an_empty_folder_misses_every_point(lines: Lines) -> None:
    found = lines()
    assert all(line.startswith("missing") for line in found[:-1])
    assert found[-1] == f"nano on {MACHINE}: {len(found) - 1} points, {len(found) - 1} missing"


def test_a_current_result_is_ok_and_nothing_more(lines: Lines, tmp_path: Path) -> None:
    write(tmp_path)
    found = lines()
    assert line_of(found) == "ok          precision topic=accumulation"
    assert found[-1].endswith("missing, 1 ok")


ARMS = {
    "naive": {"status": "ok", "reason": None},
    "mine": {"status": "failed", "reason": "NameError: name 'q' is not defined"},
    "sdpa_flash": {"status": "unsupported", "reason": "needs a GPU"},
    "flex": {"status": "capped", "reason": "would take about 51 s"},
    "math": {"status": "oom", "reason": "asked for 128 GiB"},
}

CASES = {
    "an arm that failed": (
        {"data": {"arms": ARMS}},
        "ok          precision topic=accumulation: "
        "mine: failed: NameError: name 'q' is not defined",
        "1 ok; 1 with arms that failed",
    ),
    "an arm of a list that failed": (
        {"data": {"arms": [{"name": "nested", "status": "failed", "reason": "off"}]}},
        "ok          precision topic=accumulation: nested: failed: off",
        "1 ok; 1 with arms that failed",
    ),
    "no arm is ok": (
        {"status": "failed", "reason": "mine: NameError", "data": {"arms": {"mine": ARMS["mine"]}}},
        "failed      precision topic=accumulation: mine: NameError",
        "1 failed",
    ),
    "out of memory": (
        {"status": "oom", "reason": "asked for 9 GiB"},
        "oom         precision topic=accumulation: asked for 9 GiB",
        "1 oom",
    ),
    "other code": (
        {"code_fingerprint": "0" * 16},
        "ok          precision topic=accumulation: made by other code",
        "1 ok; 1 made by other code",
    ),
    "other settings": (
        {"settings": {"terms": 5, "term": 0.01, "seed": 0}},
        "ok          precision topic=accumulation: other settings: terms 5 (now 1000)",
        "1 ok; 1 with other settings",
    ),
    "another torch": (
        {"versions": {"python": "3.11.0", "torch": "1.0.0", "lmlab": "0.1.0"}},
        "ok          precision topic=accumulation: made with torch 1.0.0",
        "1 ok; 1 with another torch",
    ),
}


@pytest.mark.parametrize(("change", "line", "summary"), CASES.values(), ids=CASES)
def test_what_is_to_know_of_a_result_stands_in_its_line_and_in_the_summary(
    lines: Lines, tmp_path: Path, change: dict[str, object], line: str, summary: str
) -> None:
    write(tmp_path, **change)  # type: ignore[arg-type]
    found = lines()
    assert line_of(found) == line
    assert found[-1].endswith(summary)


def test_a_damaged_file_is_listed_and_not_fatal(lines: Lines, tmp_path: Path) -> None:
    write(tmp_path).write_text("{")
    assert line_of(lines()).startswith("unreadable")


def test_results_of_another_machine_are_read_on_request(lines: Lines, tmp_path: Path) -> None:
    write(tmp_path, machine="cpu-elsewhere", versions={"python": "3", "torch": "1.0", "lmlab": "0"})
    assert line_of(lines()).startswith("missing")
    found = lines("--machine", "cpu-elsewhere")
    assert line_of(found) == "ok          precision topic=accumulation"
    assert found[-1].startswith("nano on cpu-elsewhere:")


def test_another_gpus_results_are_those_of_the_full_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "nvidia-z9000").mkdir(parents=True)
    assert main(["status", "--machine", "nvidia-z9000"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("full on nvidia-z9000: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--config", "study=huge"], 'study = "huge"', id="unknown study"),
        pytest.param(["--config", "study"], "'study' is not key=value", id="no value"),
        pytest.param(["--machine", "nosuch"], "machine = 'nosuch' has no results", id="no machine"),
        pytest.param(["--config", "model=no:Net"], "model = 'no:Net': module 'no'", id="no model"),
        pytest.param(["--machine", ""], 'machine = ""; allowed: auto', id="no name"),
        pytest.param(
            ["--configfile", "nowhere.yaml"], "nowhere.yaml: not a readable", id="no file"
        ),
    ],
)
def test_a_wrong_configuration_ends_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_folder_of_results_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--results", str(tmp_path / "nowhere")])
    assert "nowhere' is not a folder" in capsys.readouterr().err


def test_looking_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from lmlab.cli import main; "
        "main(['status', '--config', 'study=nano']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0
