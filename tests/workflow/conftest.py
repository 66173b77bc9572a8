"""A copy of the project, measured once with the nano study, for tests to edit and run again."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from lmlab.measure.identity import find_machine
from lmlab.measure.warm_start.processes import kill_family
from lmlab.study.files import ROOT
from tests.processes import start, warm_helpers

PARTS = (
    *("Snakefile", "config.yaml", "profiles", "rules", "src", "workflow"),
    *("report/references", "report/templates"),
)
BUILD_ARTIFACTS = shutil.ignore_patterns("__pycache__", "*.egg-info")
WATCH = Path(__file__).with_name("network_watch") / "sitecustomize.py"
NETWORK_LOG = "network.log"
MACHINE = find_machine().id
COMMAND = "snakemake --cores 1 --resources gpu=1 report/writeup.md"
NANO = "--config study=nano"
# The `cold_start` block of a grid; without warmups there are no cold starts.
COLD = {"sizes": ["cpu-small"], "context": 16, "batch": 2, "precision": "fp32", "warmups": {}}


@dataclass(frozen=True)
class Project:
    """A checkout in a temporary folder, run with its own sources."""

    folder: Path
    runtime: ClassVar[str]

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        own = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.folder / 'src'}{os.pathsep}{WATCH.parent}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LMLAB_RUNTIME_DIR": self.runtime,
            "LMLAB_NETWORK_LOG": str(self.folder / NETWORK_LOG),
        }
        return start(command.split(), cwd=self.folder, env={**own, **environment})

    def run(
        self, command: str, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        with self.start(command, **environment) as process:
            try:
                stdout, stderr = process.communicate(timeout=1200)
            except BaseException:
                kill_family(process.pid)
                raise
        if check and process.returncode:
            raise AssertionError(f"{command}\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def plan(self, options: str = NANO, **environment: str) -> dict[str, list[str]]:
        """By rule, the first output of each job that a run would start now."""
        done = self.run(f"snakemake -n {options}", **environment)
        jobs: dict[str, list[str]] = {}
        for rule, output in re.findall(
            r"^(?:local)?rule (\w+):\n(?:    input: .*\n)?(?:    output: ([^,\n]*).*\n)?",
            done.stdout + done.stderr,
            re.M,
        ):
            jobs.setdefault(rule, []).append(output)
        jobs.pop("all", None)
        return jobs

    def results(self) -> dict[str, tuple[bytes, int]]:
        """Content and modification time of every result file."""
        return {
            str(path.relative_to(self.folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in sorted((self.folder / "results").rglob("*.json"))
        }

    def append(self, file: str, text: str) -> None:
        with (self.folder / file).open("a") as stream:
            stream.write(text)

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace the first occurrence of a text that must be there."""
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new, 1))

    def configure(self, *only: str, **blocks: dict[str, Any]) -> None:
        """Change or add blocks of the nano study; with chapters named, switch all others off."""
        path = self.folder / "config.yaml"
        config = yaml.safe_load(path.read_text())
        nano = config["studies"]["nano"]
        for name, block in blocks.items():
            nano.setdefault(name, {}).update(block)
        for name, block in nano.items():
            if only and "enabled" in block:
                block["enabled"] = name in only
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    def copy_to(self, folder: Path) -> Project:
        """Copy the checkout, its results and Snakemake's metadata, preserving file times."""
        subprocess.run(["cp", "-rp", str(self.folder), str(folder)], check=True)
        return Project(folder)


def checkout(folder: Path) -> Project:
    """A fresh checkout: no results or metadata, and no time budget that a busy machine exceeds."""
    folder.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=BUILD_ARTIFACTS)
        else:
            shutil.copy2(ROOT / part, folder / part)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"budget_s: \d+", "budget_s: 1000000", config))
    return Project(folder)


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[None]:
    """One warm helper per pytest worker, separate from any that a user may be running."""
    with warm_helpers() as Project.runtime:
        yield


@pytest.fixture
def fresh(tmp_path: Path) -> Project:
    return checkout(tmp_path / "fresh")


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory, runtime: None) -> Project:
    """The nano study run from scratch, once for all pytest workers; tests must not edit it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    project = Project(folder / "measured" / "project")
    (folder / "measured").mkdir(exist_ok=True)
    with (folder / "measured" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (log := folder / "measured" / "run.log").exists():
            done = checkout(project.folder).run(f"{COMMAND} {NANO}")
            log.write_text(done.stderr)
    return project


@pytest.fixture
def measured(first_run: Project, tmp_path: Path) -> Project:
    return first_run.copy_to(tmp_path / "project")
