"""nsys is found, asked for its version and spoken to in its words, or said to be amiss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.measure.trace import nsys_command
from lmlab.measure.trace.nsys_command import NsysTrouble, find_nsys
from tests.measure.trace.standin_nsys import SUFFIX, VERSIONS, install


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_takes_the_words_that_are_said_to_it(version: str, folder: Path) -> None:
    install(folder, version)
    nsys = find_nsys()
    report = folder / "report"
    words = [*nsys.profile_options(), f"--output={report}", sys.executable, "-c", "pass"]
    subprocess.run([nsys.path, "profile", *words], check=True)
    exporting = [*nsys.export_options(), f"--output={folder / 'out.sqlite'}"]
    recorded = f"{report}{nsys.report_suffix}"
    subprocess.run([nsys.path, "export", *exporting, recorded], check=True)
    assert (folder / "out.sqlite").exists()
    assert nsys.version.startswith(version)
    assert nsys.report_suffix == SUFFIX[version]


def test_the_words_of_one_version_are_rejected_by_another(folder: Path) -> None:
    install(folder, VERSIONS[0])
    old = find_nsys()
    install(folder, VERSIONS[-1])
    done = subprocess.run(
        [old.path, "profile", *old.profile_options()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unrecognised option '--stop-on-range-end'" in done.stderr


def test_the_program_that_is_recorded_keeps_its_exit_status(folder: Path) -> None:
    install(folder)
    nsys = find_nsys()
    words = [*nsys.profile_options(), f"--output={folder / 'r'}", sys.executable, "-c", "exit(3)"]
    assert subprocess.run([nsys.path, "profile", *words], check=False).returncode == 3


def test_nothing_on_the_path_is_one_line() -> None:
    with pytest.raises(NsysTrouble, match=r"^nsys is not on the PATH$"):
        find_nsys()


FAULTS = {
    "broken": r"nsys --version ends with 1: error while loading shared libraries: libnsys\.so$",
    "silent": r"nsys does not tell its version: silence$",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_nsys_that_is_amiss_is_one_line(fault: str, folder: Path) -> None:
    install(folder, fault=fault)
    with pytest.raises(NsysTrouble, match=FAULTS[fault]):
        find_nsys()


def test_an_nsys_too_old_is_one_line(folder: Path) -> None:
    install(folder, "2019.5.2")
    with pytest.raises(NsysTrouble, match=r"is version 2019\.5\.2\.97, older than 2020\.3$"):
        find_nsys()


def test_an_nsys_that_cannot_be_run_is_one_line(folder: Path) -> None:
    (folder / "nsys").write_text("#!/nowhere/python\n")
    (folder / "nsys").chmod(0o755)
    with pytest.raises(NsysTrouble, match=r"nsys cannot be run: No such file or directory$"):
        find_nsys()


def test_an_nsys_that_hangs_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nsys").write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    (folder / "nsys").chmod(0o755)
    monkeypatch.setattr(nsys_command, "_PATIENCE_S", 0.2)
    with pytest.raises(NsysTrouble, match=r"nsys --version does not answer$"):
        find_nsys()
