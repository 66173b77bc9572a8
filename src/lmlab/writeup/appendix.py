"""The appendix: what all chapters' results have in common, and what went wrong where.

Each chapter's document carries its own provenance; here they are put together for a reader who
wants to know once what the page rests on. Only tables: the words around them are the template's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmlab.study.config import OUR_MODEL
from lmlab.writeup.collect import pattern_of
from lmlab.writeup.markdown import Markdown, code, escape
from lmlab.writeup.markdown import table as markdown_table
from lmlab.writeup.numbers import counted, listed
from lmlab.writeup.provenance import SIZE_KEYS

FLAG_MEANINGS = {
    "gpu_shared": "another process was on the GPU",
    "noisy": "the middle half of the samples, of all parts together where they took turns, spans "
    "more than 10 % of the median",
    "power_capped": "the GPU ran into its power limit, normal under matrix products",
    "throttled": "the GPU lowered its clocks because of heat or supply",
}
GAP, NOISY_INSIDE = "gap", "noisy_inside"
"""Findings by which a chapter tells of cases inside its results that no count of points shows."""
Document = Mapping[str, Any]


@dataclass(frozen=True)
class Appendix:
    """Tables for the end of the page; empty where there is nothing to tell."""

    counts: Markdown
    versions: Markdown
    code: Markdown
    sizes: Markdown
    settings: Markdown
    flags: Markdown
    problems: Markdown
    not_measured: Markdown
    other_settings: Markdown


def totals(documents: Sequence[Document]) -> dict[str, Any]:
    """Numbers over all chapters, for the page's opening."""
    ok, not_ok, missing = (
        sum(document["counts"][key] for document in documents)
        for key in ("ok", "not_ok", "missing")
    )
    gaps = [f"{counted(not_ok, 'point')} ended without a number"] if not_ok else []
    verb = "was" if missing == 1 else "were"
    gaps += [f"{counted(missing, 'point')} {verb} not measured"] if missing else []
    inside = _told(documents, GAP)
    return {
        "measured": ok,
        "not_ok": not_ok,
        "missing": missing,
        "gaps": listed([*gaps, *inside]) or "no point failed and none is missing",
        "cut": bool(inside),
        "clocks": sorted({clock for document in documents for clock in document["clocks"]}),
        "own_models": sorted({*_models(documents)} - {OUR_MODEL}),
    }


def _told(documents: Iterable[Document], name: str) -> list[str]:
    """What chapters say under this name; those with nothing to say are left out."""
    return [text for document in documents if (text := document["findings"].get(name))]


def _models(documents: Iterable[Document]) -> Iterator[str]:
    """The classes that results were measured with; a page of a user's own says so."""
    for document in documents:
        yield from document["settings"].get("model", ())


def appendix(documents: Sequence[Document]) -> Appendix:
    """One appendix for all chapters."""
    return Appendix(
        counts=_counts(documents),
        versions=_versions(documents),
        code=_code(documents),
        sizes=_sizes(documents),
        settings=_settings(documents),
        flags=_flags(documents),
        problems=_problems(documents),
        not_measured=_not_measured(documents),
        other_settings=_other_settings(documents),
    )


def _counts(documents: Sequence[Document]) -> Markdown:
    rows = [
        [code(d["chapter"], in_table=True), *(escape(d["counts"][key]) for key in _COUNTS)]
        for d in documents
    ]
    return _table(["Chapter", *_COUNTS.values()], rows, right=range(1, 5))


_COUNTS = {"points": "Points", "ok": "Measured", "not_ok": "Not ok", "missing": "Not measured"}


def _versions(documents: Sequence[Document]) -> Markdown:
    """One column a set of versions; more than one set means that results are of several days."""
    sets = _merged(documents, "versions")
    names = sorted({name for versions in sets for name in versions if name != "results"})
    header = ["", *(counted(versions["results"], "result") for versions in sets)]
    rows = [
        [escape(name), *(escape(versions.get(name) or "none") for versions in sets)]
        for name in names
    ]
    return _table(header, rows) if sets else Markdown("")


def _code(documents: Sequence[Document]) -> Markdown:
    rows = [
        [
            _part(document, made.get("topic")),
            code(made["id"], in_table=True) if made["id"] else escape("not in a repository"),
            escape("yes" if made["dirty"] else "no"),
            code(made["fingerprint"], in_table=True),
            escape(made["results"]),
        ]
        for document in documents
        for made in document["code"]
    ]
    header = ["Chapter", "Commit", "Uncommitted edits when measured", "Code fingerprint", "Results"]
    return _table(header, rows, right=[4]) if rows else Markdown("")


def _settings(documents: Sequence[Document]) -> Markdown:
    """Settings that hold for a whole chapter, or for a topic of it where it has any.

    Those behind a size's name have their own table.
    """
    rows = [
        [_part(document, topic), code(key, in_table=True), escape(_values(values))]
        for document in documents
        for topic, settings in _by_topic(document).items()
        for key, values in settings.items()
    ]
    return _table(["Chapter", "Setting", "Value"], rows) if rows else Markdown("")


def _by_topic(document: Document) -> Mapping[str | None, Mapping[str, Sequence[Any]]]:
    """The settings of each topic, where the document tells them apart."""
    return document.get("settings_by_topic") or {None: document["settings"]}


def _part(document: Document, topic: str | None) -> Markdown:
    """A chapter, or one topic of it: `attention/naive`, as its results lie in folders."""
    return code("/".join(filter(None, [document["chapter"], topic])), in_table=True)


def _sizes(documents: Sequence[Document]) -> Markdown:
    """What stands behind a size's name, as the results were measured."""
    sizes = {
        tuple(size.items()): size for document in documents for size in document["sizes"]
    }.values()
    header = ["Size", *(key for key in SIZE_KEYS)]
    rows = [
        [code(size["size"], in_table=True), *(escape(f"{size[key]:,}") for key in SIZE_KEYS)]
        for size in sizes
    ]
    return _table(header, rows, right=range(1, 5)) if rows else Markdown("")


def _values(values: Sequence[Any]) -> str:
    nested = any(isinstance(value, list | Mapping) for value in values)
    return ("; " if nested else ", ").join(map(_value, values))


def _value(value: Any) -> str:
    """Lists and mappings as people write them."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_shape(inner) for inner in value)
    return str(value)


def _shape(value: Any) -> str:
    """An item of a list; one that is a list itself has sides: `32 × 64`."""
    return " × ".join(map(_value, value)) if isinstance(value, list) else _value(value)


def _flags(documents: Sequence[Document]) -> Markdown:
    rows = [
        [
            code(raised["flag"], in_table=True),
            escape(FLAG_MEANINGS.get(raised["flag"], "")),
            escape(len(raised["paths"])),
            _files(raised["paths"]),
        ]
        for document in documents
        for raised in document["flags"]
    ]
    header = ["Flag", "Meaning", "Results", "Where"]
    inside = [escape(text) for text in _told(documents, NOISY_INSIDE)]
    if not rows and not inside:
        return Markdown("")
    table = _table(header, rows, right=[2]) if rows else escape("No result raised a flag.")
    return Markdown("\n\n".join([table, *inside]))


def _problems(documents: Sequence[Document]) -> Markdown:
    rows = [
        [
            code(problem["label"], in_table=True),
            escape(problem["status"]),
            escape(problem["reason"]),
        ]
        for document in documents
        for problem in document["not_ok"]
    ]
    return _table(["Point", "Status", "Reason"], rows) if rows else Markdown("")


def _not_measured(documents: Sequence[Document]) -> Markdown:
    rows = [
        [code(document["chapter"], in_table=True), escape(len(paths)), _files(paths)]
        for document in documents
        if (paths := document["not_measured"])
    ]
    return _table(["Chapter", "Points", "Where"], rows, right=[1]) if rows else Markdown("")


def _other_settings(documents: Sequence[Document]) -> Markdown:
    rows = [
        [code(other["path"], in_table=True), code(", ".join(other["settings"]), in_table=True)]
        for document in documents
        for other in document["other_settings"]
    ]
    return _table(["Result", "Settings that differ"], rows) if rows else Markdown("")


def _files(paths: Sequence[str]) -> Markdown:
    """A few paths as they are, many as one pattern."""
    shown = paths if len(paths) <= 3 else [pattern_of(paths)]
    return Markdown("<br>".join(code(path, in_table=True) for path in shown))


def _merged(documents: Iterable[Document], key: str) -> list[dict[str, Any]]:
    """The chapters' tallies as one, most frequent first."""
    totals: dict[tuple[tuple[str, Any], ...], int] = {}
    for document in documents:
        for item in document[key]:
            identity = tuple(sorted((k, v) for k, v in item.items() if k != "results"))
            totals[identity] = totals.get(identity, 0) + item["results"]
    ranked = sorted(totals.items(), key=lambda pair: (-pair[1], str(pair[0])))
    return [{**dict(identity), "results": count} for identity, count in ranked]


def _table(
    header: Sequence[str], rows: Sequence[list[Markdown]], right: Iterable[int] = ()
) -> Markdown:
    align = ["right" if i in set(right) else "left" for i in range(len(header))]
    return markdown_table([escape(title) for title in header], align, list(rows))
