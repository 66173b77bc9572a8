"""Where a chapter's numbers come from: what the appendix prints.

Versions, commits and code fingerprints are those that the results carry, never those of the
checkout that renders them: a page rendered next year from today's results must say the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, Row

SIZE_KEYS = ("d_model", "d_ff", "num_layers", "num_heads")


def provenance(collected: Collected) -> dict[str, Any]:
    """Counts, problems, flags, commits, versions, code and settings of one chapter's results."""
    rows, results = collected.rows, collected.results
    return {
        "counts": {
            "points": len(rows),
            "ok": sum(row.status == "ok" for row in rows),
            "not_ok": sum(row.status not in {"ok", "missing"} for row in rows),
            "missing": sum(row.status == "missing" for row in rows),
        },
        "not_ok": [_problem(row) for row in rows if row.status not in {"ok", "missing"}],
        "not_measured": [row.path for row in rows if row.status == "missing"],
        "other_settings": [
            {"path": row.path, "settings": row.other_settings} for row in rows if row.other_settings
        ],
        "flags": _flags(rows),
        "measured_on": tally({"name": r.machine["name"]} for r in results),
        "versions": tally(r.versions for r in results),
        "code": tally(
            {**r.commit, "fingerprint": r.code_fingerprint, **_topic(r)} for r in results
        ),
        "clocks": sorted({m["clock"] for r in results for m in r.measurements.values()}),
        "sizes": _sizes(rows),
        "settings": _settings(result.settings for result in results),
        "settings_by_topic": _settings_by_topic(results),
    }


def tally(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each different item once, with how many results carry it; most frequent first."""
    counts = Counter(json.dumps(dict(item), sort_keys=True) for item in items)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return [{**json.loads(text), "results": count} for text, count in ranked]


def _problem(row: Row) -> dict[str, Any]:
    return {
        "path": row.path,
        "label": row.point.label(),
        "status": row.status,
        "reason": row.reason or "no reason given",
    }


def _flags(rows: Iterable[Row]) -> list[dict[str, Any]]:
    raised: dict[str, list[str]] = {}
    for row in rows:
        for flag in row.result.flags if row.result is not None else ():
            raised.setdefault(flag, []).append(row.path)
    return [{"flag": flag, "paths": raised[flag]} for flag in sorted(raised)]


def _topic(result: Result) -> dict[str, Any]:
    """Which experiment of its chapter a result is of, where there are several."""
    return {key: value for key, value in result.parameters.items() if key == "topic"}


def _settings_by_topic(results: Iterable[Result]) -> dict[str, dict[str, list[Any]]]:
    """The settings of every topic for themselves; nothing of a chapter that has no topics."""
    topics: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        for topic in _topic(result).values():
            topics.setdefault(topic, []).append(result.settings)
    return {topic: _settings(settings) for topic, settings in topics.items()}


def _sizes(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The hyper-parameters behind each size's name that results were measured with."""
    sizes: list[dict[str, Any]] = []
    for row in rows:
        if row.result is not None and "size" in row.result.parameters:
            settings = row.result.settings
            shape = {key: settings[key] for key in SIZE_KEYS if key in settings}
            size = {"size": row.result.parameters["size"], **shape}
            if size not in sizes:
                sizes.append(size)
        if row.result is not None:  # of which one was chosen where it was measured
            candidates = row.result.settings.get("sizes", [])
            sizes += [size for size in candidates if size not in sizes]
    return sizes


def _settings(all_settings: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every other setting with the values that results were measured under, in study order."""
    values: dict[str, list[Any]] = {}
    for settings in all_settings:
        for key, value in settings.items():
            if key in SIZE_KEYS:
                continue
            if key == "sizes":
                value = ", ".join(size["size"] for size in value)
            seen = values.setdefault(key, [])
            if value not in seen:
                seen.append(value)
    return values
