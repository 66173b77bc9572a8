"""Join the study, its results and the chapters' pages into a report.

A result that passes every check may still hold what a page's code trips over. It is then searched
for, left out and named, so that one bad file costs its own numbers and not a chapter.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pandas as pd

from lmlab.jobs.catalog import all_points
from lmlab.report.explore import explorer
from lmlab.report.frame import Results, load, load_references
from lmlab.report.page import Chapter, Report, build_chapters, described
from lmlab.study.config import Study
from lmlab.study.config import load as load_study
from lmlab.study.files import write_atomically
from lmlab.study.selection import REPEAT

# Results that fail on a page one by one; more than this is a fault of the page.
LEFT_OUT_AT_MOST = 5


def write_report(
    config: Mapping[str, Any],
    *,
    machine: str,
    device: str,
    results: Path,
    templates: Path,
    references: Path,
    out: Path,
) -> list[str]:
    """Write all pages into the folder `out`, or the interactive page if it is an HTML file; returns
    one line per file that could not be used and per part that could not be rendered."""
    study = load_study(config, device)
    found = load_results(study, machine, results, references)
    left_out = 0
    while (made := Attempt(study, found, templates, out)).write() and left_out < LEFT_OUT_AT_MOST:
        if (path := made.culprit()) is None:
            break
        found = found.without([path], f"left out, its page fails: {made.faults[0]}")
        left_out += 1
    return [*found.problems, *(f"not rendered: {fault}" for fault in made.faults)]


class Attempt:
    """A report of some results, and what could not be rendered of it."""

    def __init__(self, study: Study, results: Results, templates: Path, out: Path) -> None:
        self.study, self.results, self.templates, self.out = study, results, templates, out
        self.chapters, self.faults = chapters_of(study, results)

    def write(self) -> list[str]:
        """Write what can be rendered; returns one line per part that cannot."""
        if self.out.suffix == ".html":
            if (page := self._interactive(self.results, self.chapters)) is not None:
                write_atomically(self.out, page)
        else:
            self.faults += self._report(self.out, self.results, self.chapters).write()
        return self.faults

    def culprit(self) -> str | None:
        """The result file without which the first part that failed would be rendered, found by
        bisection: pages cope with missing results. First among those of the failing chapter."""
        part = self.faults[0].removeprefix("front/")
        chapter = next((n for n in self.chapters if part.startswith((f"{n}:", f"{n}.md.j2:"))), "")
        fails = partial(self._fails, chapter)
        files = self.results.results
        own = [path for path, result in files.items() if result.chapter == chapter]
        for suspects in (own, [path for path in files if path not in own]):
            while len(suspects) > 1:
                half = len(suspects) // 2
                cured = not fails(self.results.without(suspects[:half]))
                suspects = suspects[:half] if cured else suspects[half:]
            if suspects and not fails(self.results.without(suspects)):
                return suspects[0]
        return None

    def _fails(self, name: str, results: Results) -> bool:
        """Whether a chapter, or without a name the interactive page, fails with these results."""
        if not name and self.out.suffix == ".html":
            return self._interactive(results, chapters_of(self.study, results)[0]) is None
        if not name:
            return True  # the front page as a whole: no result is to blame
        rebuilt, faults = build_chapters([(name, page_of(name))], results)
        with TemporaryDirectory() as folder:
            report = self._report(Path(folder), results, {**self.chapters, **rebuilt})
            report.parts(rebuilt[name])
            return bool(faults or report.faults)

    def _interactive(self, results: Results, chapters: Mapping[str, Chapter]) -> str | None:
        try:
            return explorer(results, chapters, self.templates / "explore.html")
        except Exception as error:  # one bad value must not cost the page
            self.faults.append(f"explore.html: {described(error)}")
            return None

    def _report(self, out: Path, results: Results, chapters: Mapping[str, Chapter]) -> Report:
        return Report(results, chapters, out, self.templates)


def load_results(study: Study, machine: str, results: Path, references: Path) -> Results:
    """The study's results with the published figures of other GPUs, and the machine's second set
    where there is one."""
    points, second = all_points(study), f"{machine}@{REPEAT}"
    found = load(points, results, machine)
    rows = pd.concat([found.rows, load_references(references)], ignore_index=True)
    repeat = load(points, results, second) if (results / second).is_dir() else None
    return replace(found, rows=rows, repeat=repeat)


def chapters_of(study: Study, results: Results) -> tuple[dict[str, Chapter], list[str]]:
    """The chapters of the study, built from their page modules."""
    return build_chapters([(name, page_of(name)) for name in study.chapters], results)


def page_of(chapter: str) -> ModuleType:
    """The declarations of a chapter's page."""
    return import_module(f"lmlab.chapters.{chapter}.page")
