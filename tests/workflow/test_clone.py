"""Deleted results, results in a fresh clone without Snakemake's metadata, and the compare page."""

import shutil
from pathlib import Path

import pytest

from tests.project import GOLDEN_RESULTS
from tests.workflow.conftest import MACHINE, NANO, Project, checkout

pytestmark = pytest.mark.slow

LAYERNORM = f"results/{MACHINE}/precision/topic~layernorm.json"


def test_deleted_results_pages_and_figures_are_made_again(measured: Project) -> None:
    figure = next((measured.folder / "report/figures").rglob("*.png"))
    figure.unlink()
    (measured.folder / "report/chapters/machine.md").unlink()
    (measured.folder / LAYERNORM).unlink()
    before = measured.results()
    assert measured.plan()["precision"] == [LAYERNORM]
    measured.run(f"snakemake {NANO}")
    assert figure.exists()
    assert (measured.folder / "report/chapters/machine.md").exists()
    after = measured.results()
    assert set(after) - set(before) == {LAYERNORM}
    assert before.items() <= after.items()
    assert measured.plan() == {}


def test_a_clone_renders_another_machines_results(first_run: Project, tmp_path: Path) -> None:
    """File times are checkout times, Snakemake has no metadata, a point is missing."""
    clone = checkout(tmp_path / "clone")
    clone.configure("precision")
    for path, (text, _) in first_run.results().items():
        target = clone.folder / path.replace(MACHINE, "cpu-other")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.replace(f'"{MACHINE}"'.encode(), b'"cpu-other"'))
    (clone.folder / LAYERNORM.replace(MACHINE, "cpu-other")).unlink()
    before = clone.results()
    options = f"{NANO} machine=cpu-other"
    assert set(clone.plan(options)) == {"report"}
    clone.run(f"snakemake {options}")
    assert clone.results() == before
    assert (clone.folder / "report/writeup.md").exists()


def test_a_clone_measures_its_stale_results_again(first_run: Project, tmp_path: Path) -> None:
    """Snakemake has no metadata: staleness is decided by the fingerprints in the results."""
    clone = checkout(tmp_path / "clone")
    clone.configure("precision")
    shutil.copytree(first_run.folder / "results", clone.folder / "results")
    before = clone.results()
    assert set(clone.plan()) == {"report"}
    clone.append("src/lmlab/chapters/precision/measure.py", "\nCHANGED = 1\n")
    status = clone.run(f"lmlab status {NANO}").stdout.splitlines()
    assert sum("stale: code changed" in line for line in status) == 4
    assert "4 stale (code changed)" in status[-1]
    assert len(clone.plan()["precision"]) == 4
    clone.run(f"snakemake {NANO}")
    after = clone.results()
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {path for path in before if "/precision/" in path}
    assert clone.plan() == {}


NEVER = "--config study=nano machine=cpu-golden measure=never"


def test_the_page_of_machines_is_a_target(fresh: Project) -> None:
    shutil.copytree(GOLDEN_RESULTS, fresh.folder / "results" / "cpu-golden")
    fresh.append("src/lmlab/chapters/precision/page.py", "\n\ndef facts(chapter):\n    1 / 0\n")
    old = fresh.folder / "logs" / "report" / "report.log"
    old.parent.mkdir(parents=True)
    old.write_text("not rendered: of an earlier run\n")
    done = fresh.run(f"snakemake --cores 1 report/compare.md {NEVER} compare=cpu-golden")
    [line] = [line for line in done.stderr.splitlines() if line.startswith("not rendered: ")]
    assert "precision: ZeroDivisionError" in line
    page = fresh.folder / "report" / "compare.md"
    assert "## How long is a step?" in page.read_text()
    assert list((fresh.folder / "report" / "compare").glob("*.png"))
    assert fresh.plan(f"report/compare.md {NEVER} compare=cpu-golden") == {}
