"""Only stale points run again, tested with the real Snakefile and its metadata of a real run; node
settings reach the torchrun command of multi-rank chapters and make their results stale."""

import os
import shlex
from pathlib import Path

import pytest

from tests.workflow.conftest import MACHINE, NANO, Project
from tests.workflow.test_command import CHAPTERS

pytestmark = pytest.mark.slow


def test_what_changes_no_number_reruns_nothing(measured: Project, tmp_path: Path) -> None:
    """Comments, docstrings, file times, another folder."""
    measured.append("config.yaml", "\n# why\n")
    measured.append("src/lmlab/model/transformer.py", "\n# why\n")
    measured.replace("src/lmlab/model/adamw.py", '"""', '"""Changed. ')
    for path in measured.folder.rglob("*"):
        if path.is_file() and ".snakemake" not in path.parts:
            os.utime(path)
    assert measured.copy_to(tmp_path / "moved").plan() == {}


def test_an_edited_template_rerenders_the_report(measured: Project) -> None:
    measured.append("report/templates/machine.md.j2", "\nMore.\n")
    assert set(measured.plan()) == {"report"}


def test_edits_and_new_values_rerun_only_their_own_points(measured: Project) -> None:
    measured.append("src/lmlab/measure/peaks.yaml", "\n- names: [Test GPU]\n")
    code = measured.folder / "src/lmlab/attention/tiled.py"
    before = code.stat()
    measured.append("src/lmlab/attention/tiled.py", "\nCHANGED = 1\n")
    os.utime(code, ns=(before.st_atime_ns, before.st_mtime_ns))  # preserved, as by rsync or tar
    measured.configure(end_to_end={"contexts": [16, 24]})
    jobs = measured.plan()
    assert set(jobs) == {"machine", "attention", "end_to_end", "report"}
    topics = sorted(Path(path).parts[3] for path in jobs["attention"])
    assert topics == ["topic~benchmark", "topic~model"]
    assert len(jobs["end_to_end"]) == 4
    assert all("context~24" in output for output in jobs["end_to_end"])


def test_another_torch_version_makes_measurements_stale(measured: Project) -> None:
    """A distribution found first on the path stands in for an installed version."""
    info = measured.folder / "src" / "torch-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    assert set(measured.plan()) == {*CHAPTERS, "report"}


def test_nodes_and_rendezvous_come_from_the_config(measured: Project) -> None:
    config = measured.folder / "config.yaml"
    text = config.read_text().replace("localhost:29500", "$(first_node):29400")
    config.write_text(text)
    assert set(measured.plan()) == {"report"}, "where nodes meet moves no number"
    text = text.replace('on_each_node: ""', "on_each_node: srun --ntasks-per-node=1")
    config.write_text(text.replace("nnodes: 1", "nnodes: 2"))
    result = f"results/{MACHINE}/collectives/placement~cpu/world_size~2.json"
    done = measured.run(f"snakemake -n -p {NANO} -- {result}")
    [line] = [line for line in done.stderr.splitlines() if "ranks.py" in line]
    shell = " ".join(shlex.split(line.partition("Shell command: ")[2]))
    assert "; srun --ntasks-per-node=1 /" in shell
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint $(first_node):29400"
    assert f"-- torchrun --nnodes 2 --nproc-per-node 1 {rendezvous} -m" in shell
    assert {"collectives", "data_parallel"} == set(measured.plan()) - {"report"}
