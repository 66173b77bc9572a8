"""`lmlab ab`: revisions take turns in folders of their own, and nothing of them is left behind.

Most tests measure a stand-in whose speed is written in its code; one runs the real project.
"""

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli import main
from lmlab.study.files import ROOT
from tests.processes import LMLAB, git, is_gone, wait_until
from tests.project import GOLDEN_RESULTS, STEP

STAND_IN = f"""
import json, os, signal, sys
FACTOR, STATUS, SCHEMA = %s, %r, %s
LOST = {{"phase": "forward"}}

def main():
    log = os.environ["AB_LOG"]
    with open(log, "a") as stream:
        stream.write(json.dumps([os.getpid(), os.getcwd(), FACTOR, sys.argv[1:]]) + "\\n")
    rounds = len(open(log).read().splitlines())
    if STATUS == "hang":
        signal.pause()
    if STATUS == "wrong":
        print("lmlab: size = 'x'; allowed: y", file=sys.stderr)
        return 2
    result = json.load(open({str(GOLDEN_RESULTS / STEP)!r}))
    result["schema_version"] = SCHEMA
    for record in result["measurements"]:
        if "samples" in record:
            # A drift of a tenth per round, and a little noise.
            scale = FACTOR * 1.1 ** ((rounds + 1) // 2) * (1 + 0.001 * (rounds %% 3))
            record["value"] *= scale
    if STATUS == "partly":
        result["measurements"] = [r for r in result["measurements"] if r["labels"] != LOST]
    if STATUS == "failed":
        result.update(status="failed", reason="it broke", measurements=[])
    print("a table")
    print(json.dumps(result))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with revisions of different speed, and some that cannot be measured."""
    root = tmp_path / "project"
    package = root / "src" / "lmlab" / "cli"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    git(root, "init", "-q")
    for name in ("base", "slow", "hang", "wrong", "failed", "old", "partly"):
        values = (1.25 if name == "slow" else 1.0, name, 1 if name == "old" else 2)
        (package / "__init__.py").write_text(STAND_IN % values)
        git(root, "add", "src")
        git(root, "commit", "-qm", name)
        git(root, "tag", name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("AB_LOG", str(tmp_path / "log"))
    monkeypatch.chdir(root)
    return root


def processes(tmp_path: Path) -> list[Any]:
    log = tmp_path / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def is_clean(project: Path) -> bool:
    """No temporary folder is left."""
    return not list(project.parent.glob("lmlab-ab-*"))


@pytest.mark.parametrize(
    ("revisions", "ratio", "verdict"),
    [("base slow", 0.8, "slower"), ("slow base", 1.25, "faster"), ("base base", 1.0, "same")],
)
def test_revisions_take_turns(
    project: Path, capsys: pytest.CaptureFixture[str], revisions: str, ratio: float, verdict: str
) -> None:
    command = f"ab --rounds 6 --json --fail-if-slower 5% {revisions} -- end_to_end size=a"
    assert main(command.split()) == (1 if verdict == "slower" else 0)
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert {pair["verdict"] for pair in found["pairs"]} == {verdict}
    ratios = [pair["ratio"] for pair in found["pairs"]]
    assert ratios == pytest.approx([ratio] * len(ratios), rel=0.01)
    started = processes(project.parent)
    assert "".join(Path(folder).name for _, folder, _, _ in started) == "ABBA" * 3
    assert len({pid for pid, *_ in started}) == 12
    assert {tuple(words) for *_, words in started} == {("measure", "end_to_end", "size=a")}
    assert is_clean(project)


@pytest.mark.parametrize("revision", ["wrong", "failed", "old", "no-such-revision"])
def test_what_cannot_be_measured_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], revision: str
) -> None:
    assert main(["ab", "base", revision, "--rounds", "2", "--", "end_to_end"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert is_clean(project)


@pytest.mark.parametrize(
    ("words", "status", "lost"),
    [
        ("base partly --fail-if-slower 5%", 1, ["forward (wall)"]),
        ("base partly", 0, ["forward (wall)"]),
        ("partly base --fail-if-slower 5%", 0, []),
    ],
)
def test_a_time_that_the_second_revision_lost_is_named(
    project: Path, capsys: pytest.CaptureFixture[str], words: str, status: int, lost: list[str]
) -> None:
    assert main(["ab", *words.split(), "--rounds", "2", "--", "end_to_end"]) == status
    said = capsys.readouterr()
    named = [line.split(": ")[1] for line in said.err.splitlines() if ": " in line]
    assert named == lost
    assert "total: " in said.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cleans_up(project: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = subprocess.Popen(
        [*LMLAB, "ab", "base", "hang", "--", "end_to_end"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(processes(tmp_path)) == 2)
    run.send_signal(number)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 130
    assert len(errors.splitlines()) == 1
    assert is_gone(processes(tmp_path)[-1][0])
    assert is_clean(project)


def test_the_project_itself_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "clone"
    cloned = subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(root)], check=False)
    if cloned.returncode:
        pytest.skip("not a git checkout")
    monkeypatch.chdir(root)
    point = ["end_to_end", "size=cpu-small", "context=16", "mode=forward", "--config", "study=nano"]
    assert main(["ab", "HEAD", "HEAD", "--rounds", "2", "--json", "--", *point]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(len(pair["a"]) == len(pair["b"]) == 2 for pair in found["pairs"])
