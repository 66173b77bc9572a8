"""Finding nsys, its version, and options that it accepts."""

import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.measure.trace import nsys_command
from lmlab.measure.trace.nsys_command import NsysUnavailable, find_nsys, profile_options
from tests.measure.trace.standin_nsys import install


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_nsys_accepts_its_options(folder: Path) -> None:
    install(folder, "2026.3.1")
    nsys = find_nsys()
    report = folder / "report"
    options = [*profile_options(), f"--output={report}"]
    program = [sys.executable, "-c", "exit(3)"]
    done = subprocess.run([nsys.path, "profile", *options, *program], check=False)
    assert done.returncode == 3, "the recorded program's own exit status"
    assert (folder / "report.nsys-rep").exists()
    assert nsys.version.startswith("2026.3.1")


def write(folder: Path, text: str) -> None:
    (folder / "nsys").write_text(text)
    (folder / "nsys").chmod(0o755)


FAULTS = {
    "missing": lambda folder: None,
    "broken": lambda folder: install(folder, fault="broken"),
    "no version": lambda folder: install(folder, fault="no version"),
    "too old": lambda folder: install(folder, "2021.3.2"),
    "not executable": lambda folder: write(folder, "#!/nowhere/python\n"),
    "hangs": lambda folder: write(folder, f"#!{sys.executable}\nimport time\ntime.sleep(600)\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unusable_nsys(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](folder)
    if fault == "hangs":
        monkeypatch.setattr(nsys_command, "_TIMEOUT_S", 0.2)
    with pytest.raises(NsysUnavailable, match=r"^[^\n]*nsys[^\n]+$"):
        find_nsys()
