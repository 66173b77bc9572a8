"""A copy of the project, measured once with the nano study, for tests to edit and run again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmlab.study.files import ROOT

PARTS = (
    *("Snakefile", "config.yaml", "profiles", "rules", "src", "workflow"),
    *("report/references", "report/templates"),
)
MADE = shutil.ignore_patterns("__pycache__", "*.egg-info")
# One warm helper serves all these tests, and none that a user may have running.
RUNTIME = tempfile.mkdtemp(prefix="lmlab-")
COMMAND = "snakemake --cores 1 --resources gpu=1 report/writeup.md"
# Two cores for what most of these tests need first: one measures, the other one draws.
NANO = "snakemake --cores 2 --resources gpu=1 --config study=nano"


@dataclass(frozen=True)
class Project:
    """A checkout in a temporary folder, run with its own sources."""

    folder: Path

    def run(
        self, command: str, check: bool = True, timeout_s: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line in the checkout to its end."""
        process = self.start(command, **environment)
        stdout, stderr = process.communicate(timeout=timeout_s)
        if check and process.returncode:
            raise AssertionError(f"{command}\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command line in the checkout, with its own sources and its own helper."""
        return subprocess.Popen(
            command.split(),
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(self.folder / "src"),
                "PYTHONDONTWRITEBYTECODE": "1",
                "LMLAB_RUNTIME_DIR": RUNTIME,
                **environment,
            },
            # A shell has its background jobs ignore this signal, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def would_run(self, options: str = "--config study=nano") -> dict[str, list[str]]:
        """Rule to outputs of what a run would do now."""
        done = self.run(f"snakemake -n {options}")
        jobs: dict[str, list[str]] = {}
        for rule, output in re.findall(
            r"^(?:local)?rule (\w+):\n(?:    input: .*\n)?(?:    output: (.*)\n)?",
            done.stderr,
            re.M,
        ):
            jobs.setdefault(rule, []).append(output)
        jobs.pop("all", None)
        return jobs

    def measures(self, options: str = "--config study=nano") -> list[str]:
        """The result files that a run would measure now."""
        jobs = self.would_run(options)
        return sorted(out for outputs in jobs.values() for out in outputs if "results/" in out)

    def results(self) -> dict[str, tuple[bytes, int]]:
        """Every result file with its bytes and its time."""
        return {
            str(path.relative_to(self.folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in sorted((self.folder / "results").rglob("*.json"))
        }

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace a text that must be there."""
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{file} does not hold {old!r}"
        path.write_text(text.replace(old, new, 1))

    def append(self, file: str, text: str) -> None:
        """Add lines to a file."""
        with (self.folder / file).open("a") as stream:
            stream.write(text)

    def configure(self, **nano: object) -> None:
        """Change keys of the nano study's end_to_end block."""
        config = self._config()
        config["studies"]["nano"]["end_to_end"].update(nano)
        self._configure(config)

    def only(self, *chapters: str) -> None:
        """Switch all other chapters of the nano study off: a test that runs some is shorter."""
        config = self._config()
        for name, block in config["studies"]["nano"].items():
            if "enabled" in block:
                block["enabled"] = name in chapters
        self._configure(config)

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text())
        return config

    def _configure(self, config: dict[str, Any]) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def copy_to(self, folder: Path) -> Project:
        """The same checkout, results and Snakemake's records elsewhere, file times kept."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder)


def checkout(folder: Path) -> Project:
    """A fresh checkout: no results, no records."""
    folder.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=MADE)
        else:
            shutil.copy2(source, folder / part)
    return Project(folder)


@pytest.fixture
def fresh(tmp_path: Path) -> Project:
    """A checkout in which nothing was measured yet."""
    return checkout(tmp_path / "fresh")


@dataclass(frozen=True)
class Run:
    """A project after its first run, and what that run was like."""

    project: Project
    seconds: float
    stderr: str


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The nano study from nothing, on two cores; once for all processes that test side by side."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    run = _measured_in(folder / "measured")
    yield run
    run.project.run(f"{sys.executable} -m lmlab.measure.warm_start --stop", check=False)


def _measured_in(folder: Path) -> Run:
    """The run that another process has left there, or else one of its own."""
    folder.mkdir(exist_ok=True)
    project, record = Project(folder / "project"), folder / "run.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            checkout(project.folder)
            start = time.monotonic()
            done = project.run(NANO)
            record.write_text(json.dumps([time.monotonic() - start, done.stderr]))
    seconds, stderr = json.loads(record.read_text())
    return Run(project, seconds, stderr)


@pytest.fixture(scope="session")
def measured_once(first_run: Run) -> Project:
    """The project after that run; never edited."""
    return first_run.project


@pytest.fixture
def measured(measured_once: Project, tmp_path: Path) -> Project:
    """A copy of the measured project, for one test to edit."""
    return measured_once.copy_to(tmp_path / "project")
