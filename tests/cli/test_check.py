"""`lmlab check`: every machine in the repository passes, and every seeded fault is one line."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli import check, main
from lmlab.study.files import ROOT
from tests.processes import files_in_git
from tests.project import GOLDEN_RESULTS, H200_RESULTS, STEP, config, report
from tests.report.study import rewrite, scale

Check = Callable[..., tuple[int, list[str]]]


def committed() -> list[Path]:
    """Folders of machines in git, of which a pull request may add one."""
    results = H200_RESULTS.parent
    names = {file.relative_to(results).parts[0] for file in files_in_git("results")}
    return [results / name for name in sorted(names or {H200_RESULTS.name})]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Check:
    def run(folder: object, *options: str) -> tuple[int, list[str]]:
        status = main(["check", str(folder), *options])
        return status, capsys.readouterr().out.splitlines()[:-1]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("folder", [GOLDEN_RESULTS, *committed()], ids=lambda folder: folder.name)
def test_every_machine_in_the_repository_passes(run: Check, folder: Path) -> None:
    assert run(folder, "--ignore", "missing,mixed") == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", [f for f in committed() if f != H200_RESULTS], ids=lambda folder: folder.name
)
def test_contributed_pages_render(folder: Path, tmp_path: Path) -> None:
    """Those of the H200 and the golden results are compared with committed pages elsewhere."""
    device = "cpu" if folder.name.startswith("cpu-") else "cuda"
    assert report(config(), folder.name, device, folder.parent, tmp_path / "report") == []


def edited(change: Callable[[dict[str, Any]], None], name: str = STEP) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / name, change)


def first(quantity: str, result: dict[str, Any], **labels: str) -> dict[str, Any]:
    found = (r for r in result["measurements"] if labels.items() <= r["labels"].items())
    return next(record for record in found if record["quantity"] == quantity)


def first_time(**values: Any) -> Callable[[Path], None]:
    return edited(lambda result: first("time", result).update(values))


def card(quantity: str, value: float) -> Callable[[Path], None]:
    """A CPU has no stated peak, so the card becomes that of a GPU with one."""

    def change(result: dict[str, Any]) -> None:
        result["machine"]["name"] = "NVIDIA L4"
        first(quantity, result)["value"] = value

    return edited(change, "machine.json")


FAULTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "not finite": ("unreadable", first_time(value=float("nan"))),
    "schema": ("unreadable", edited(lambda result: result.pop("versions"))),
    "negative sample": ("unreadable", first_time(samples=[-1.0])),
    "zero": ("impossible", first_time(value=0.0, samples=[0.0], n=1, min=0, max=0, q1=0, q3=0)),
    "negative time": ("impossible", first_time(value=-1.0, min=-2.0, samples=[1.0], n=1)),
    "median outside": ("impossible", first_time(value=1e9)),
    "not the median": ("impossible", first_time(samples=[1.0, 2.0, 3.0], value=2.5, min=1, max=3)),
    "rate above peak": ("impossible", card("matmul_rate", 40.0)),
    "bandwidth above peak": ("impossible", card("copy_bandwidth", 400.0)),
    "rate of zero": ("impossible", card("copy_bandwidth", 0.0)),
    "versions": ("mixed", edited(lambda result: result["versions"].update(torch="9.9.9"))),
    "machines": ("mixed", edited(lambda result: result["machine"].update(id="cpu-other"))),
    "missing": ("missing", lambda f: (f / STEP).unlink()),
    "moved": ("misplaced", lambda f: (f / STEP).rename(f / "moved.json")),
    "copied": ("duplicate", lambda f: shutil.copy(f / STEP, f / "zz.json")),
    "foreign file": ("misplaced", lambda f: (f / "notes.txt").write_text("hello")),
    "link": ("misplaced", lambda f: (f / "passwords").symlink_to("/etc/passwd")),
    "folder": ("misplaced", lambda f: f.rename(f.with_name("cpu-mine"))),
    "large file": ("size", edited(lambda result: result["data"].update(kernels="x" * 900_000))),
}


NANO = ("--config", "study=nano")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_named(run: Check, tmp_path: Path, fault: str) -> None:
    kind, seed = FAULTS[fault]
    folder = tmp_path / "cpu-golden"
    shutil.copytree(GOLDEN_RESULTS, folder)
    # Golden results may lack the newest points, and a file that cannot be read is missing, too.
    options = NANO if kind == "missing" else ("--ignore", "missing", *NANO)
    before = run(folder, *options)[1] if kind == "missing" else []
    seed(folder)
    folder = next(path for path in (folder, tmp_path / "cpu-mine") if path.exists())
    status, after = run(folder, *options)
    found = [line.partition(":")[0] for line in after if line not in before]
    assert status == 1
    assert kind in found
    assert len(found) <= 2


def test_every_kind_of_fault_can_be_ignored(run: Check, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN_RESULTS, folder := tmp_path / "cpu-mine")
    (folder / STEP).write_text("{")
    assert run(folder, *NANO)[0] == 1
    assert run(folder, "--ignore", ",".join(check.KINDS), *NANO) == (0, [])


def test_a_step_faster_than_the_peak_is_impossible(run: Check, tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200"
    name = next(H200_RESULTS.glob("end_to_end/size~xl/context~1024/**/mode~train_step/**/*.json"))
    target = folder / name.relative_to(H200_RESULTS)
    target.parent.mkdir(parents=True)
    shutil.copy(name, target)
    rewrite(target, lambda result: scale([first("time", result, phase="forward")], 0.01))
    status, lines = run(folder, "--ignore", "missing")
    assert status == 1
    assert {line.partition(":")[0] for line in lines} == {"impossible"}


def test_machines_are_limited(run: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MACHINE_LIMIT_BYTES", 100_000)
    folder = tmp_path / "cpu-golden"
    shutil.copytree(GOLDEN_RESULTS, folder)
    noise = os.urandom(90_000).hex()
    edited(lambda result: result["data"].update(kernels=noise))(folder)
    status, lines = run(folder, "--ignore", "missing")
    assert (status, [line.partition(":")[0] for line in lines]) == (1, ["size"])


def test_contributed_machines_are_not_ignored_by_git() -> None:
    def ignored(path: str) -> bool:
        done = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False)
        if done.returncode > 1:
            pytest.skip("not a git checkout")
        return done.returncode == 0

    assert not ignored("results/nvidia-a100/machine.json")
    assert not ignored("results/nvidia-h200@repeat/machine.json")
    assert ignored("results/cpu-mine/machine.json")
