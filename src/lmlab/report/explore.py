"""The interactive page: all results and all declared figures in one HTML file that works offline.

Data and JavaScript are inlined, so the file can be mailed around and opened without a network.
"""

import gzip
import html
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.report.frame import FIELDS, Results, select
from lmlab.report.page import Chapter, described

# Fields that a row keeps besides its parameters and labels.
SHOWN = ("value", "unit", "clock", "n", "samples", "source")
MAX_SAMPLES = 10
DIGITS = 4


def explorer(
    results: Results, chapters: Mapping[str, Chapter], template: Path
) -> tuple[str, list[str]]:
    """Render the page, on which parameters and labels that vary can be selected; also return one
    line per figure that failed."""
    import vl_convert  # a large native library that only this page needs

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    sources = {path: number for number, path in enumerate(results.results)}
    faults: list[str] = []
    data = {
        "rows": [row for name in chapters for row in _rows(results, name, sources)],
        "sources": [
            {
                "file": path,
                "started": result.started_at,
                "commit": str(result.commit["id"])[:7]
                + " (uncommitted)" * bool(result.commit["dirty"]),
                "torch": str(result.versions["torch"]),
                "flags": ", ".join(result.flags),
            }
            for path, result in results.results.items()
        ],
        "figures": [each for chapter in chapters.values() for each in _figures(chapter, faults)],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "machine": html.escape(results.name),
        # `</script` in a string could end the script element.
        "bundle": bundle.replace("</script", "<\\/script"),
        "data": b64encode(gzip.compress(text.encode(), mtime=0)).decode(),
    }
    return re.sub(r"%%(\w+)%%", lambda found: parts[found[1]], template.read_text()), faults


def _figures(chapter: Chapter, faults: list[str]) -> Iterator[dict[str, Any]]:
    """The figures of a chapter that have data."""
    for name, figure in chapter.figures.items() if chapter.measured else ():
        try:
            spec = _plain(figure.vega(chapter.own))
            if spec["data"]["values"]:
                yield {"name": f"{chapter.title}: {figure.title}", "spec": spec}
        except Exception as error:  # one bad value must not abort the page
            faults.append(f"{chapter.name}, figure {name}: {described(error)}")


def _rows(results: Results, chapter: str, sources: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """The measured numbers of a chapter, with the labels that vary within their quantity."""
    rows = select(results.rows, chapter=chapter, status="ok")
    rows = rows.loc[[isinstance(value, int | float) for value in rows["value"]]]
    rows = rows.assign(samples=rows["samples"].str[:MAX_SAMPLES])
    settings = {name for result in results.of(chapter) for name in result.settings}
    settings -= {name for result in results.of(chapter) for name in result.parameters}
    for _, found in rows.groupby("quantity", sort=False):
        fields = [str(name) for name in found if _shown(str(name), found[name], settings)]
        found = found.assign(source=found["source"].map(sources))[["chapter", "quantity", *fields]]
        for row in found.to_dict("records"):
            yield {name: value for name, value in _plain(row).items() if value is not None}


def _shown(name: str, column: "pd.Series[Any]", settings: set[str]) -> bool:
    """Whether a row keeps a field: one of SHOWN, or a scalar parameter or label that varies (absent
    counts as a value), but no settings or statistics."""
    known = column.dropna()
    if name in SHOWN or known.empty:
        return not known.empty
    if name in FIELDS or name in settings:
        return False
    scalars = known.map(lambda value: isinstance(value, str | int | float | bool)).all()
    return bool(scalars and known.nunique() + (len(known) < len(column)) > 1)


def _plain(value: Any) -> Any:
    """Convert to JSON values: floats rounded to 4 significant digits, null for missing."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if value is None or pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
