"""Numbers and text for Markdown: significant digits, units, escaping."""

import html
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

GIB, MIB = 2**30, 2**20
DASH, NOT_STATED = "–", "not stated"
UNSTEADY = ("drifting", "bimodal")


def number(value: float, digits: int = 3) -> str:
    """Three significant digits, thousands separated: 0.0123, 12.3, 1,230."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # Of the rounded value, which may have a digit more: 9.996 with three digits is 10.0.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


# Factors from stored units (ms, bytes, joules, FLOPs) to displayed ones.
SCALES = {"ms": 1.0, "us": 1e3, "s": 1e-3, "mJ": 1e3, "TFLOP": 1e-12, "GB": 1e-9, "MB": 1e-6}
SCALES |= {"GiB": 1 / GIB, "MiB": 1 / MIB, "KiB": 1 / 1024}


def scaled(factor: float) -> Callable[[Any], str]:
    """A format that multiplies first: bytes to GiB, milliseconds to seconds."""
    return lambda value: number(float(value) * factor)


def percent(value: float) -> str:
    """A share as a whole percentage; one decimal below ten."""
    share = 100 * float(value)
    return f"{share:.0f} %" if abs(share) >= 9.95 or share == 0 else f"{share:.1f} %"


def times(value: float) -> str:
    """A ratio: 2.3x; between 1 and 2 with one more digit, so that 1.03x does not read 1.0x."""
    value = 1.0 if 0.995 <= value < 1 else float(value)
    return f"{number(value, 3 if value >= 10 or 1 <= value < 2 else 2)}x"


WORDS = {"True": "yes", "False": "no"}
WORDS |= {"forward_backward": "forward and backward", "train_step": "training step"}


def plain(value: Any) -> str:
    """The display name of a label."""
    return WORDS.get(str(value), str(value))


FORMATS: dict[str, Callable[[Any], str]] = {
    "number": number,
    "integer": lambda value: f"{round(float(value)):,}",
    "ceiling": lambda value: f"{math.ceil(float(value)):,}",
    "text": plain,
    "digits": lambda value: f"{float(value):.4f}",
    **{unit: scaled(factor) for unit, factor in SCALES.items()},
    "percent": percent,
    "times": times,
    "scientific": lambda value: f"{float(value):.1e}",
}


def unsteady(row: Mapping[str, Any]) -> bool:
    """Whether the samples of a measurement drift or fall into two groups."""
    return row.get("stability") in UNSTEADY


def quoted(row: Mapping[str, Any], format: str = "number", field: str = "value") -> str:
    """Format a measured value; if its samples are unsteady, as their interquartile range."""
    show, computed = FORMATS[format], row.get("n") is None or row["n"] != row["n"]
    if field == "value" and unsteady(row) and not computed:
        return f"{show(row['q1'])} to {show(row['q3'])}"
    return show(row[field])


def escape(text: object) -> str:
    """Escape text from results for Markdown and HTML, on one line."""
    if isinstance(text, Markup):
        return str(text)
    line = html.escape(" ".join(str(text).split()), quote=False)
    line = re.sub(r"([\\`*|\[\]])", r"\\\1", line)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], labels: int) -> str:
    """A Markdown table, unpadded to keep diffs small; the first `labels` columns align left."""
    rule = ["---" if index < labels else "--:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


def join(items: Sequence[Any], last: str = "and") -> str:
    """A list in a sentence: a, b and c."""
    names = [str(item) for item in items]
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def shortened(lines: Sequence[str], most: int, more: str) -> list[str]:
    """The first lines; if there are others, `more` names their number: "{} more"."""
    rest = len(lines) - most
    return [*lines[:most], more.format(rest)] if rest > 0 else [*lines]


def grouped_reasons(reasons: Iterable[str]) -> list[tuple[int, str]]:
    """Group reasons that differ only in numbers; return each group's size and first reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        found[re.sub(r"\d[\d.]*(e[+-]\d+)?", "", reason)].append(reason)
    return [(len(each), each[0] + ", and similar" * (len({*each}) > 1)) for each in found.values()]


def slug(heading: str) -> str:
    """The anchor that GitHub generates for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
