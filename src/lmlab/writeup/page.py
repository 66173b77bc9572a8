"""The page: chapter documents into templates, and nothing else.

Everything a template prints passes through `escape`, so that a kernel's name or an error message
cannot break the page; only what this module renders itself (tables, figures) is taken as Markdown.
A template that names a table or finding that the chapter does not have is a mistake in the
template, and ends in one line. The page carries no date and no commit of its own: the same
documents give the same bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from lmlab.study.files import write_atomically
from lmlab.writeup.appendix import appendix, totals
from lmlab.writeup.markdown import Markdown, anchor, code, escape, image
from lmlab.writeup.numbers import counted
from lmlab.writeup.table import table_from_json, to_markdown

PAGE_TEMPLATE = "writeup.md.j2"
CONTENTS_MARK = "<!-- contents -->"
CONTENTS_TITLE = "Contents"
FENCE = re.compile(r"^(```|~~~)")
HEADING = re.compile(r"^(#{2,3}) (.+)$")


class PageError(ValueError):
    """A page that cannot be rendered, in one line."""


@dataclass(frozen=True)
class Chapter:
    """What a template may ask of a chapter's document."""

    document: Mapping[str, Any]
    folder: Path
    """Where the document lies; its figures are named from there."""
    page_folder: Path

    @property
    def name(self) -> str:
        return str(self.document["chapter"])

    def __getitem__(self, key: str) -> Any:
        return self.document[key]

    @property
    def is_measured(self) -> bool:
        """Whether there is any result of it, with a number or without."""
        counts = self.document["counts"]
        return bool(counts["ok"] or counts["not_ok"])

    def finding(self, name: str) -> str:
        """A sentence chosen by the data."""
        return str(self._named("findings", name))

    def table(self, name: str) -> Markdown:
        """A table with caption and sources."""
        return to_markdown(table_from_json(self._named("tables", name)))

    def title_of(self, name: str) -> str:
        """A table's title, for the line that unfolds it."""
        return str(self._named("tables", name)["title"])

    def findings_named(self, start: str) -> list[str]:
        """Names of the findings that start so."""
        return [name for name in self.document["findings"] if name.startswith(start)]

    def tables_named(self, start: str) -> list[str]:
        """Names of the tables that start so: one a precision, one a variant."""
        return [name for name in self.document["tables"] if name.startswith(start)]

    def figures_named(self, start: str) -> list[str]:
        """The same for figures."""
        return [name for name in self.document["figures"] if name.startswith(start)]

    def figure(self, name: str) -> Markdown:
        """A figure with its caption, or the sentence that there was nothing to draw."""
        figure = self._named("figures", name)
        if not figure["files"]:
            return Markdown(f"*No figure ({escape(figure['alt'])}): nothing measured to draw.*")
        png, svg = (self._link(figure["files"][kind]) for kind in ("png", "svg"))
        return Markdown(
            f"{image(figure['alt'], png, svg)}\n\n<sub>{escape(figure['caption'])}</sub>"
        )

    def warnings(self) -> Markdown:
        """Failed checks as a block that stands out; nothing when all passed."""
        lines = [f"> - {escape(text)}" for text in self.document["warnings"]]
        if not lines:
            return Markdown("")
        return Markdown("\n".join(["> [!WARNING]", "> Checks that failed:", ">", *lines, ""]))

    def _named(self, kind: str, name: str) -> Any:
        found = self.document[kind]
        if name not in found:
            have = ", ".join(found) or "none"
            raise PageError(f"{self.name}: no {kind[:-1]} named {name!r}; there are: {have}")
        return found[name]

    def _link(self, path: str) -> str:
        return Path(os.path.relpath(self.folder / path, self.page_folder)).as_posix()


def write_page(documents: Sequence[Path], *, templates: Path, out: Path) -> None:
    """Render the page of these chapters, in this order."""
    write_atomically(out, render(documents, templates=templates, page_folder=out.parent))


def render(documents: Sequence[Path], *, templates: Path, page_folder: Path) -> str:
    """The page as text."""
    chapters = [Chapter(_read(path), path.parent, page_folder) for path in documents]
    written = [chapter.document for chapter in chapters]
    # A section of nothing but "not measured" tells a reader less than one line does.
    shown = [chapter for chapter in chapters if chapter.is_measured] or chapters
    try:
        text = (
            environment(templates)
            .get_template(PAGE_TEMPLATE)
            .render(
                chapters=shown,
                unmeasured=[chapter.name for chapter in chapters if chapter not in shown],
                appendix=appendix(written),
                totals=totals(written),
            )
        )
    except jinja2.TemplateError as error:
        raise PageError(f"templates: {_place(error)}{error.message}") from error
    return _tidy(text.replace(CONTENTS_MARK, contents(text)))


def environment(templates: Path) -> jinja2.Environment:
    """Templates whose every expression is escaped unless it is Markdown already."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        finalize=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML: `finalize` does the escaping
    )
    filters: dict[str, Callable[..., Any]] = {"code": code, "counted": counted}
    made.filters.update(filters)
    return made


def contents(page: str) -> str:
    """Links to the page's headings, as GitHub anchors them."""
    taken: dict[str, int] = {}
    lines = []
    fenced = False
    for line in page.splitlines():
        fenced ^= bool(FENCE.match(line))
        found = None if fenced else HEADING.match(line)
        if found and found[2] != CONTENTS_TITLE:
            indent = "  " * (len(found[1]) - 2)
            plain = re.sub(r"[`\\]", "", found[2])
            lines.append(f"{indent}- [{found[2]}](#{anchor(plain, taken)})")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PageError(f"{path}: not a chapter's document ({error})") from error
    return document


def _place(error: jinja2.TemplateError) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.name}, line {error.lineno}: "
    return ""


def _tidy(text: str) -> str:
    """At most one empty line in a row, none at the end of lines, one newline at the end."""
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
