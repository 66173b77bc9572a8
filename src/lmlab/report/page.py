"""Render what each chapter declares through its templates, into pages.

A chapter's `page` module declares TITLE, TABLES, FIGURES and COMPARISONS (pairs become rows with a
`speedup`), may derive rows (`derive`), and computes the few facts its sentences need (`facts`).
Templates hold all prose: `<chapter>.md.j2` is the chapter's page, `front/<chapter>.md.j2` its
sections of the front page. If a part fails to render, only that part is lost.
"""

import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pandas as pd
from jinja2.ext import Extension
from markupsafe import Markup

from lmlab.report import provenance, text
from lmlab.report.compare import Comparison
from lmlab.report.figure import Figure
from lmlab.report.frame import FIELDS, MISSING, Results, extremes, select
from lmlab.report.table import Table
from lmlab.study.files import write_atomically

FRONT, INDEX = "writeup.md", "index.md"
LONGEST_MESSAGE = 200
PACKAGE = str(Path(__file__).parents[1])

Answer = dict[str, Markup]


@dataclass
class Chapter:
    """A chapter as its templates see it."""

    name: str
    title: str
    results: Results
    tables: dict[str, Table] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    compare: dict[str, Comparison] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)
    fault: str = ""  # why its page cannot be rendered

    @property
    def measured(self) -> bool:
        """Whether the chapter has at least one value, and can be rendered."""
        return not (self.fault or select(self.results.rows, chapter=self.name, status="ok").empty)

    @cached_property
    def own(self) -> Results:
        """The results restricted to this chapter's rows and the columns they use."""
        rows = select(self.results.rows, chapter=self.name)
        used = [name for name in rows if name in FIELDS or rows[name].notna().any()]
        return replace(self.results, rows=rows[used])

    def value(self, **where: Any) -> Any:
        """The single matching value of this chapter, or None."""
        return self.own.value(**where)

    def extremes(self, **where: Any) -> dict[str, Any] | None:
        """Number of matching rows, and those with the smallest and largest value; None if none."""
        return extremes(select(self.own.rows, status="ok", **where))

    def table(self, name: str) -> Markup:
        """A declared table as Markdown; empty if there is nothing to show."""
        table, rows = self.tables[name], self.own.rows
        if table.chapter is not None:
            rows = select(self.results.rows, chapter=table.chapter)
        return table.render(rows)


@dataclass(frozen=True)
class Report:
    """What to render, and the folder to write it to."""

    results: Results
    chapters: Mapping[str, Chapter]
    out: Path
    templates: Path
    faults: list[str] = field(default_factory=list)  # one line per part that failed to render

    def write(self) -> list[str]:
        """Write all pages and figures; return the faults."""
        (self.out / "figures").mkdir(parents=True, exist_ok=True)
        answers: dict[str, Answer] = {}
        sections: dict[str, Markup] = {}
        for name, chapter in self.chapters.items():
            page = self._render(f"{name}.md.j2", "chapters", chapter)
            write_atomically(self.out / "chapters" / f"{name}.md", page)
            answers |= answers_in(page, f"chapters/{name}.md")
            if (self.templates / (section := f"front/{name}.md.j2")).exists():
                sections[name] = self._render(section, ".", chapter)
        preface = self._render("preface.md.j2", ".")
        front = self._render("front.md.j2", ".", preface=preface, sections=sections)
        write_atomically(self.out / FRONT, front)
        answers |= answers_in(front, FRONT)
        write_atomically(self.out / INDEX, self._render("index.md.j2", ".", answers=answers))
        return self.faults

    def _render(
        self, template: str, folder: str, chapter: Chapter | None = None, **context: Any
    ) -> Markup:
        if chapter is not None and not chapter.measured:
            return self._placeholder(template, chapter, folder)
        name, where = chapter.name if chapter else "", self.out / folder
        try:
            source = environment_for(self.templates).get_template(template)
            page = source.render(
                **self.chapters,
                chapters=self.chapters,
                chapter=chapter,
                results=self.results,
                figure=partial(self._figure, folder, chapter),
                provenance=partial(provenance.of_chapter, self.results, name, where),
                summary=partial(provenance.summary, self.results),
                unreproducible=partial(provenance.unreproducible, self.results),
                **context,
            )
        except Exception as error:  # one bad value must not abort the report
            line = f"{template}: {described(error)}"
            self.faults.append(line)
            return Markup(f"*This part could not be rendered ({text.escape(line)}).*\n")
        return Markup(re.sub(r"\n{3,}", "\n\n", page).strip() + "\n")

    def _placeholder(self, template: str, chapter: Chapter, folder: str) -> Markup:
        """A part without values: its questions, or else its title, and the reason."""
        rows = select(self.results.rows, chapter=chapter.name, status=lambda s: s != MISSING)
        reasons = [chapter.fault] if chapter.fault else list(rows["reason"].dropna())
        state = "rendered" if chapter.fault else "measured yet"
        state += f" ({text.escape(reasons[0])})" if reasons else ""
        questions = re.findall(r"^### (.+)$", (self.templates / template).read_text(), re.MULTILINE)
        sections = [f"### {question}\n\n**Not {state}.**" for question in questions]
        end = provenance.of_chapter(self.results, chapter.name, self.out / folder)
        page = [f"# {chapter.title}", f"This chapter has not been {state}.", end]
        return Markup("\n\n".join(sections or page) + "\n")

    def _figure(
        self, folder: str, chapter: Chapter | None, name: str, of: Chapter | None = None
    ) -> Markup:
        """Link to a figure, which is drawn on first use; empty if it has no data."""
        owner = of or chapter
        assert owner is not None, "the front page names the chapter of a figure"
        path = self.out / "figures" / owner.name / f"{name}.png"
        if name not in owner.drawn and not owner.figures[name].draw(owner.own, path):
            return Markup("")
        owner.drawn.add(name)
        link = os.path.relpath(path, self.out / folder)
        return Markup(f"![{text.escape(owner.figures[name].title)}]({link})")


def build_chapter(name: str, page: ModuleType, results: Results) -> Chapter:
    """Evaluate a chapter's declarations over the results; skipped if nothing was measured."""
    tables, figures = (getattr(page, kind, {}) for kind in ("TABLES", "FIGURES"))
    chapter = Chapter(name, page.TITLE, results, tables, figures)
    if not chapter.measured:
        return chapter
    if hasattr(page, "derive"):
        chapter.own = replace(results, rows=page.derive(chapter.own.rows, results))
    rows = chapter.own.rows
    chapter.compare = {k: each.run(rows) for k, each in getattr(page, "COMPARISONS", {}).items()}
    found = [each.rows().assign(comparison=key) for key, each in chapter.compare.items() if each]
    chapter.own = replace(results, rows=pd.concat([rows, *found], ignore_index=True))
    if hasattr(page, "facts"):
        chapter.facts = page.facts(chapter)
    return chapter


def build_chapters(
    pages: Mapping[str, ModuleType], results: Results
) -> tuple[dict[str, Chapter], list[str]]:
    """Build all chapters; one that raises is replaced by an empty chapter and becomes a fault."""
    chapters: dict[str, Chapter] = {}
    faults: list[str] = []
    for name, page in pages.items():
        try:
            chapters[name] = build_chapter(name, page, results)
        except Exception as error:
            faults.append(f"{name}: {described(error)}")
            chapters[name] = Chapter(name, page.TITLE, results, fault=faults[-1])
    return chapters, faults


def described(error: Exception) -> str:
    """Format an error as one line, with the last line of our code or templates that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(PACKAGE) or f.filename.endswith(".j2")]
    where = (own or frames)[-1]
    message = " ".join(str(error).split())[:LONGEST_MESSAGE]
    return f"{type(error).__name__}: {message} ({Path(where.filename).name}:{where.lineno})"


class KeepTextLines(Extension):
    """Apply `trim_blocks` only to lines that consist of a single tag, so that a sentence ending in
    `{% endif %}` keeps its newline."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Protect the newline of every other line that ends in a tag."""
        return re.sub(r"(?m)^(?!\s*{%[^%]*%}\s*$)(.*%})$", r"\1{{ '' }}", source)


@cache
def environment_for(templates: Path) -> jinja2.Environment:
    """Strict Jinja environment that escapes expressions for Markdown unless they are Markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=text.escape,
        extensions=[KeepTextLines],
    )
    environment.filters |= {**text.FORMATS, "join": text.join, "quoted": text.quoted, "md": Markup}
    return environment


def answers_in(page: str, path: str) -> dict[str, Answer]:
    """Each section that opens with a bold answer: question and first sentence, keyed by link."""
    return {
        f"{path}#{text.slug(heading)}": {
            "question": Markup(heading),
            "sentence": Markup(re.split(r"(?<=[.?!]) ", " ".join(answer.split()))[0]),
        }
        for heading, answer in re.findall(r"^###? (.+)\n+\*\*([^*]+)\*\*", page, re.MULTILINE)
    }
