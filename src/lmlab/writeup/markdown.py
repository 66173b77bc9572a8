"""Text into GitHub's Markdown so that every character arrives.

A kernel is called `void f<float, 4>(T*, __half|int)`; a browser drops what it takes for a tag, a
table ends its cell at the bar, an underscore starts italics, a dollar starts a formula and one
tilde strikes a path through. Everything that comes from a result is therefore plain text until
this module escapes it, and only strings of type `Markdown` are taken as they are.
"""

from __future__ import annotations

import re

# A backslash keeps these literal in GitHub's dialect, inside a table too.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~]")
# Inside a word an underscore is only an underscore; anywhere else it may start italics.
_EDGE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What makes a heading, a list or a quote out of the start of a line.
_LINE_START = re.compile(r"^(\s*)(#{1,6}(?=\s|$)|[-+](?=\s|$)|=+|\d+(?=[.)](?:\s|$)))")


class Markdown(str):
    """A string that is Markdown already."""

    __slots__ = ()


def escape(text: object) -> Markdown:
    """Plain text as Markdown that shows the same characters; line breaks become spaces."""
    if isinstance(text, Markdown):
        return text
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("$", "&#36;")
    line = _SPECIAL.sub(r"\\\g<0>", line)
    line = _EDGE_UNDERSCORE.sub(r"\\_", line)
    return Markdown(_LINE_START.sub(_defuse, line))


def code(text: object, *, in_table: bool = False) -> Markdown:
    """A code span that holds the text whatever backticks it contains."""
    line = " ".join(str(text).split())
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    fence = "`" * (longest + 1)
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    if in_table:  # the table is cut into cells before code is looked for
        line = line.replace("|", "\\|")
    return Markdown(f"{fence}{padding}{line}{padding}{fence}")


def table(header: list[Markdown], align: list[str], rows: list[list[Markdown]]) -> Markdown:
    """A GitHub table; columns are padded so that the file reads as a table too."""
    cells = [header, *rows]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    rule = [_rule(kind, width) for kind, width in zip(align, widths, strict=True)]
    lines = [_line(header, align, widths), f"| {' | '.join(rule)} |"]
    lines += [_line(row, align, widths) for row in rows]
    return Markdown("\n".join(lines))


def image(alt: str, png: str, svg: str) -> Markdown:
    """A picture that opens as its vector version."""
    return Markdown(f"[![{escape(alt)}]({_link(png)})]({_link(svg)})")


def anchor(heading: str, taken: dict[str, int]) -> str:
    """The anchor GitHub gives a heading; `taken` counts headings of the same text."""
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
    seen = taken.get(words, 0)
    taken[words] = seen + 1
    return f"{words}-{seen}" if seen else words


def _defuse(match: re.Match[str]) -> str:
    space, mark = match.groups()
    return f"{space}{mark}\\" if mark.isdigit() else f"{space}\\{mark}"


def _rule(kind: str, width: int) -> str:
    return "-" * (width - 1) + ":" if kind == "right" else "-" * width


def _line(row: list[Markdown], align: list[str], widths: list[int]) -> str:
    padded = [
        cell.rjust(width) if kind == "right" else cell.ljust(width)
        for cell, kind, width in zip(row, align, widths, strict=True)
    ]
    return f"| {' | '.join(padded)} |"


def _link(path: str) -> str:
    return path.replace(" ", "%20").replace("(", "%28").replace(")", "%29")
