"""Finding nsys, its version, and options that this version accepts."""

import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.measure.trace import nsys_command
from lmlab.measure.trace.nsys_command import NsysUnavailable, find_nsys
from tests.measure.trace.standin_nsys import SUFFIX, VERSIONS, install


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_accepts_its_options(version: str, folder: Path) -> None:
    install(folder, version)
    nsys = find_nsys()
    report = folder / "report"
    options = [*nsys.profile_options(), f"--output={report}"]
    program = [sys.executable, "-c", "exit(3)"]
    done = subprocess.run([nsys.path, "profile", *options, *program], check=False)
    assert done.returncode == 3, "the recorded program's own exit status"
    exporting = [*nsys.export_options(), f"--output={folder / 'out.sqlite'}"]
    recorded = f"{report}{nsys.report_suffix}"
    subprocess.run([nsys.path, "export", *exporting, recorded], check=True)
    assert (folder / "out.sqlite").exists()
    assert nsys.version.startswith(version)
    assert nsys.report_suffix == SUFFIX[version]


def write_program(folder: Path, text: str) -> None:
    (folder / "nsys").write_text(text)
    (folder / "nsys").chmod(0o755)


FAULTS = {
    "missing": lambda folder: None,
    "broken": lambda folder: install(folder, fault="broken"),
    "no version": lambda folder: install(folder, fault="no version"),
    "too old": lambda folder: install(folder, "2019.5.2"),
    "not executable": lambda folder: write_program(folder, "#!/nowhere/python\n"),
    "hangs": lambda folder: write_program(
        folder, f"#!{sys.executable}\nimport time\ntime.sleep(600)\n"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unusable_nsys(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](folder)
    if fault == "hangs":
        monkeypatch.setattr(nsys_command, "_TIMEOUT_S", 0.2)
    with pytest.raises(NsysUnavailable, match=r"^[^\n]*nsys[^\n]+$"):
        find_nsys()
