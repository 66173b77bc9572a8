"""Join the study, its results and the chapters' pages into a report.

A result that passes every check may still hold what a page's code trips over. It is then searched
for, left out and named, so that one bad file costs its own numbers and not a chapter.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
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
from lmlab.report.frame import Results, load
from lmlab.report.page import Chapter, Report, build_chapters, described
from lmlab.result_sets.published import load_published
from lmlab.study.config import Study
from lmlab.study.config import load as load_study
from lmlab.study.files import write_atomically
from lmlab.study.selection import REPEAT

# Per failing chapter. An error that is left after that is the page's own: no result is to blame.
MOST_LEFT_OUT = 3


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

    def written(faults: Mapping[str, str]) -> Attempt:
        """The report without the results that make a page fail, given with what they make fail."""
        kept = found
        for path, fault in faults.items():
            kept = kept.without([path], f"left out, its page fails: {fault}")
        return Attempt(study, kept, templates, out)

    left_out: dict[str, str] = {}
    made = written(left_out)
    for _ in range(MOST_LEFT_OUT):
        if not (culprits := made.culprits()):
            break
        left_out |= culprits
        made = written(left_out)
    else:
        own = {error_in(fault) for fault in made.faults}
        guilty = {path: f for path, f in left_out.items() if error_in(f) not in own}
        made = written(guilty) if own else made
    return [*made.results.problems, *(f"not rendered: {fault}" for fault in made.faults)]


def error_in(fault: str) -> str:
    """A fault without the part that could not be rendered."""
    return fault.partition(": ")[2]


class Attempt:
    """A report of some results, written, and what could not be rendered of it."""

    def __init__(self, study: Study, results: Results, templates: Path, out: Path) -> None:
        self.study, self.results, self.templates, self.out = study, results, templates, out
        self.chapters, self.faults = chapters_of(study.chapters, results)
        if out.suffix == ".html":
            self.faults += self._interactive(results, self.chapters, out)
        else:
            self.faults += Report(results, self.chapters, out, templates).write()

    def culprits(self) -> dict[str, str]:
        """One result per failing chapter that has to be left out, and what it makes fail; if only
        the page around the chapters fails, one result for that."""
        if not self.faults:
            return {}
        failing = {self._chapter(fault): fault for fault in reversed(self.faults)}
        whole = failing.pop("", "")
        parts = failing or {"": whole}
        return {path: fault for name, fault in parts.items() if (path := self._culprit(name))}

    def _chapter(self, fault: str) -> str:
        part = fault.removeprefix("front/")
        return next((n for n in self.chapters if part.startswith((f"{n}:", f"{n}.md.j2:"))), "")

    def _culprit(self, chapter: str) -> str | None:
        """Pages cope with missing results: if the part is rendered without any of the suspects,
        the first one that makes it fail is found by bisection. The chapter's own come last, because
        without them nothing is left to fail."""
        files = self.results.results
        own = [path for path, result in files.items() if result.chapter == chapter]
        fails = partial(self._fails, chapter)
        for suspects in ([path for path in files if path not in own], own):
            if suspects and not fails(suspects):
                kept = range(1, len(suspects))
                return suspects[bisect_left(kept, True, key=lambda n: fails(suspects[n:]))]
        return None

    def _fails(self, chapter: str, left_out: list[str]) -> bool:
        results = self.results.without(left_out)
        rebuilt, faults = chapters_of([chapter] if chapter else self.study.chapters, results)
        with TemporaryDirectory() as folder:
            chapters = {**self.chapters, **rebuilt}
            report = Report(results, chapters, Path(folder), self.templates)
            if self.out.suffix == ".html":
                faults += self._interactive(results, chapters, Path(folder, "page.html"))
            elif chapter:
                report.parts(rebuilt[chapter])
            else:
                report.front({})
            return bool(faults or report.faults)

    def _interactive(
        self, results: Results, chapters: Mapping[str, Chapter], out: Path
    ) -> list[str]:
        try:
            page = explorer(results, chapters, self.templates / "explore.html")
        except Exception as error:  # one bad value must not cost the page
            return [f"explore.html: {described(error)}"]
        write_atomically(out, page)
        return []


def load_results(study: Study, machine: str, results: Path, references: Path) -> Results:
    """The study's results with the published figures of other GPUs, and the machine's second set
    where there is one."""
    points, second = all_points(study), f"{machine}@{REPEAT}"
    found = load(points, results, machine)
    rows = pd.concat([found.rows, load_published(references)], ignore_index=True)
    repeat = load(points, results, second) if (results / second).is_dir() else None
    return replace(found, rows=rows, repeat=repeat)


def chapters_of(names: Iterable[str], results: Results) -> tuple[dict[str, Chapter], list[str]]:
    """Chapters built from their page modules, and what could not be."""
    return build_chapters([(name, page_of(name)) for name in names], results)


def page_of(chapter: str) -> ModuleType:
    """The declarations of a chapter's page."""
    return import_module(f"lmlab.chapters.{chapter}.page")
