"""The committed writeup is what the committed results and the present templates give."""

from __future__ import annotations

import shutil

import pytest

from lmlab.study.files import ROOT
from tests.workflow.conftest import Project

MACHINE = "nvidia-h200"


@pytest.mark.slow
def test_the_committed_page_is_the_one_that_its_results_give(fresh: Project) -> None:
    shutil.copytree(ROOT / "results" / MACHINE, fresh.folder / "results" / MACHINE)
    fresh.run(f"snakemake --config machine={MACHINE} measure=never report=docs/{MACHINE}")
    page = f"docs/{MACHINE}/writeup.md"
    assert (fresh.folder / page).read_text() == (ROOT / page).read_text(), "run `make example`"
