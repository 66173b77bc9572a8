"""Only what is stale runs again, on the real Snakefile with its records of a real run."""

import os
from pathlib import Path

import pytest

from tests.workflow.conftest import Project

pytestmark = pytest.mark.slow

# Chapters of the nano study that run the model, and the others.
RUN_THE_MODEL = {"end_to_end", "profile", "memory", "attention", "data_parallel", "fastest_step"}
MEASURE = {"machine", "precision", "collectives", "calculations", "principles", *RUN_THE_MODEL}
CODE = "\nCHANGED = 1\n"


def test_what_changes_no_number_reruns_nothing(measured: Project, tmp_path: Path) -> None:
    """Comments, docstrings, file times, another place."""
    measured.append("config.yaml", "\n# why\n")
    measured.append("src/lmlab/model/transformer.py", "\n# why\n")
    measured.replace("src/lmlab/model/adamw.py", '"""', '"""Changed. ')
    for path in measured.folder.rglob("*"):
        if path.is_file() and ".snakemake" not in path.parts:
            os.utime(path)
    assert measured.copy_to(tmp_path / "moved").plan() == {}


EDITS = {
    "the model": ("src/lmlab/model/transformer.py", CODE, RUN_THE_MODEL),
    "the stated peaks": ("src/lmlab/measure/peaks.yaml", "\n- names: [Test GPU]\n", {"machine"}),
    "a template": ("report/templates/machine.md.j2", "\nOne more sentence.\n", set()),
}


@pytest.mark.parametrize(("file", "text", "stale"), EDITS.values(), ids=EDITS)
def test_an_edit_reruns_the_points_that_run_it(
    measured: Project, file: str, text: str, stale: set[str]
) -> None:
    path = measured.folder / file
    before = path.stat()
    measured.append(file, text)
    if stale:  # as rsync or tar leave it
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert set(measured.plan()) == {*stale, "report"}


def test_an_attention_variant_reruns_only_the_points_that_name_it(measured: Project) -> None:
    measured.append("src/lmlab/attention/tiled.py", CODE)
    jobs = measured.plan()
    assert set(jobs) == {"attention", "report"}
    topics = sorted(Path(path).parts[3] for path in jobs["attention"])
    assert topics == ["topic~benchmark", "topic~model"]


def test_another_torch_version_makes_measurements_stale(measured: Project) -> None:
    """A distribution found first on the path stands in for an installed version."""
    info = measured.folder / "src" / "torch-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    assert set(measured.plan()) == {*MEASURE, "report"}


def test_a_new_value_measures_only_its_own_points(measured: Project) -> None:
    measured.configure(end_to_end={"contexts": [16, 24]})
    jobs = measured.plan()
    assert set(jobs) == {"end_to_end", "report"}
    assert len(jobs["end_to_end"]) == 4
    assert all("context~24" in output for output in jobs["end_to_end"])
