"""Join the study, its results and the chapters' pages into a report.

Results are validated when they are read. If a page's code still fails on one, only that part of the
report is lost, and it is named.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from lmlab.jobs.catalog import all_points
from lmlab.report.explore import explorer
from lmlab.report.frame import Results, load
from lmlab.report.page import Report, build_chapters
from lmlab.result_sets.published import load_published
from lmlab.study.config import Study
from lmlab.study.config import load as load_study
from lmlab.study.files import REFERENCES, TEMPLATES, write_atomically
from lmlab.study.selection import REPEAT


def write_report(
    config: Mapping[str, Any], *, machine: str, device: str, results: Path, out: Path
) -> list[str]:
    """Write all pages into the folder `out`, or the interactive page if it is an HTML file; returns
    one line per file that could not be used and per part that could not be rendered."""
    study = load_study(config, device)
    found = load_results(study, machine, results)
    chapters, faults = build_chapters({c: page_of(c) for c in study.chapters}, found)
    if out.suffix == ".html":
        page, more = explorer(found, chapters, TEMPLATES / "explore.html")
        write_atomically(out, page)
    else:
        more = Report(found, chapters, out, TEMPLATES).write()
    problems = [*found.problems, *(found.repeat.problems if found.repeat else ())]
    return [*problems, *(f"not rendered: {fault}" for fault in (*faults, *more))]


def load_results(study: Study, machine: str, results: Path) -> Results:
    """The study's results, the published figures and, if there is one, the repeat set."""
    points, second = all_points(study), f"{machine}@{REPEAT}"
    found = load(points, results, machine)
    rows = pd.concat([found.rows, load_published(REFERENCES)], ignore_index=True)
    repeat = load(points, results, second) if (results / second).is_dir() else None
    return replace(found, rows=rows, repeat=repeat)


def page_of(chapter: str) -> ModuleType:
    """The declarations of a chapter's page."""
    return import_module(f"lmlab.chapters.{chapter}.page")
