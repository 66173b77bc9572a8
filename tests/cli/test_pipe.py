"""A reader that has seen enough (`lmlab status | head -1`) ends a command quietly."""

import os
import subprocess
import sys
from pathlib import Path

from lmlab.study.results import read

PROGRAM = "import sys; from lmlab.cli import main; sys.exit(main())"
NANO = ["--config", "study=nano"]
BY_SIGPIPE = 141


def run_without_a_reader(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=folder,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)


def test_a_reader_that_left_ends_the_command_quietly(tmp_path: Path) -> None:
    done = run_without_a_reader(["status", *NANO], tmp_path)
    assert (done.returncode, done.stderr) == (BY_SIGPIPE, "")
    assert run_without_a_reader(["measure", "--help"], tmp_path).stderr == ""


def test_a_result_is_written_though_nobody_reads_it(tmp_path: Path) -> None:
    arguments = ["measure", "precision", "topic=accumulation", "--out", "mine.json", *NANO]
    done = run_without_a_reader(arguments, tmp_path)
    # Other tests measure too, and measurements wait for each other.
    said = [line for line in done.stderr.splitlines() if not line.startswith("waiting for another")]
    assert (done.returncode, said) == (BY_SIGPIPE, [])
    assert read(tmp_path / "mine.json").status == "ok"
