"""The comparison page as a target of the workflow."""

from __future__ import annotations

import shutil

import pytest

from lmlab.study.files import ROOT
from tests.workflow.conftest import Project

pytestmark = pytest.mark.slow
NEVER = "--config study=nano machine=cpu-golden measure=never"


def test_the_page_of_machines_is_a_target(fresh: Project) -> None:
    golden = ROOT / "tests" / "golden" / "results" / "cpu-golden"
    shutil.copytree(golden, fresh.folder / "results" / "cpu-golden")
    fresh.run(f"snakemake --cores 1 report/compare.md {NEVER} compare=cpu-golden")
    page = fresh.folder / "report" / "compare.md"
    assert "## How long is a step?" in page.read_text()
    assert list((fresh.folder / "report" / "compare").glob("*.png"))
    assert fresh.plan(f"report/compare.md {NEVER} compare=cpu-golden") == {}
    wrong = fresh.run(f"snakemake -n report/compare.md {NEVER} compare=cpu-none", check=False)
    assert wrong.returncode
    assert "compare = 'cpu-none'" in wrong.stderr.splitlines()[-1]
