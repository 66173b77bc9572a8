"""The study through a submit command, here a script that starts each job immediately."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from lmlab.jobs.catalog import chapters
from lmlab.study.files import ROOT
from lmlab.study.results import read
from tests.workflow.conftest import MACHINE, Project

PLUGIN = find_spec("snakemake_executor_plugin_cluster_generic")
# The job outlives the submit command, which prints an id, as a batch system does.
SUBMIT = '#!/bin/sh\nsetsid sh "$1" > /dev/null 2>&1 < /dev/null &\necho $!\n'
COMMAND = (
    "snakemake --workflow-profile batch --cluster-generic-submit-cmd ./submit.sh "
    "--latency-wait 10 --seconds-between-status-checks 1 "
    f"--config study=nano machine={MACHINE} measure=always"
)


@pytest.mark.slow
@pytest.mark.skipif(PLUGIN is None, reason="snakemake-executor-plugin-cluster-generic is missing")
def test_jobs_are_submitted_and_a_failed_one_costs_no_other_point(fresh: Project) -> None:
    assert PLUGIN is not None
    assert PLUGIN.origin is not None
    path = os.pathsep.join(map(str, (fresh.folder / "src", Path(PLUGIN.origin).parents[1])))
    (fresh.folder / "submit.sh").write_text(SUBMIT)
    (fresh.folder / "submit.sh").chmod(0o755)
    fresh.configure("precision", common={"budget_s": 1})  # jobs in a queue have no such limit
    # One point of the group fails as long as the file `kill` exists.
    refuse = "import os, sys\nif os.path.exists('kill') and 'layernorm' in str(sys.argv): exit(1)\n"
    fresh.replace("workflow/scripts/measure.py", "import argparse\n", f"import argparse\n{refuse}")
    (fresh.folder / "kill").touch()
    first = fresh.run(COMMAND, check=False, PYTHONPATH=path)
    assert first.returncode != 0
    before = fresh.results()
    assert 1 <= len(before) <= 4, first.stderr
    assert not any("layernorm" in name for name in before)
    (fresh.folder / "kill").unlink()
    fresh.run(COMMAND, PYTHONPATH=path)
    after = fresh.results()
    assert before.items() <= after.items(), "complete results are kept as they are"
    assert len(after) == 5
    assert all(read(fresh.folder / name).status == "ok" for name in after)
    assert (fresh.folder / "report/writeup.md").exists()


@pytest.mark.parametrize("name", ["slurm", "batch"])
def test_the_profile_groups_the_points_of_every_chapter(name: str) -> None:
    profile = yaml.safe_load((ROOT / f"profiles/{name}/config.yaml").read_text())
    grouped = {assignment.partition("=")[0] for assignment in profile["groups"]}
    assert grouped == set(chapters())
