"""One chapter: results in, figures and one JSON document out.

The document holds everything the page says about the chapter, already chosen and rounded, so that
the page is templates only: an edit of a sentence in a template renders again in a second and
touches neither results nor figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lmlab.study.config import load
from lmlab.study.files import REFERENCES, write_atomically
from lmlab.study.results import LacksKey, ResultError
from lmlab.writeup.collect import Collected, collect
from lmlab.writeup.figure import Drawing, save
from lmlab.writeup.provenance import provenance
from lmlab.writeup.registry import part

T = TypeVar("T")


def build(
    config: Mapping[str, Any],
    chapter: str,
    *,
    machine: str,
    device: str,
    results: Path,
    figures: Path,
    out: Path,
) -> None:
    """Make a chapter's figures and its document from whatever results there are."""
    study = load(config, device)
    refused: dict[Path, ResultError] = {}

    def attempt() -> tuple[dict[str, Any], Mapping[str, Drawing]]:
        collected = collect(
            study, chapter, machine=machine, device=device, results=results,
            references=REFERENCES, refused=refused,
        )  # fmt: skip
        return document_of(collected), part("figures", chapter)(collected)

    document, drawings = _without_those_that_lack(attempt, refused)
    # From the document's own folder, so that a report can be moved as a whole.
    place = os.path.relpath(figures, out.parent)
    document["figures"] = _draw(drawings, figures, place)
    write_atomically(out, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _without_those_that_lack(attempt: Callable[[], T], refused: dict[Path, ResultError]) -> T:
    """Try until no result lacks what is read; those that do are refused from then on."""
    while True:
        try:
            return attempt()
        except LacksKey as lack:
            if lack.source in refused:
                raise
            refused[lack.source] = lack


def document_of(collected: Collected) -> dict[str, Any]:
    """Everything about a chapter but its figures."""
    tables = part("tables", collected.chapter)(collected)
    return {
        "chapter": collected.chapter,
        "study": collected.study.name,
        "machine": collected.machine,
        "device": collected.device,
        "device_name": collected.device_name,
        "tables": {name: table.to_json() for name, table in tables.items()},
        "findings": part("findings", collected.chapter)(collected),
        "warnings": part("checks", collected.chapter)(collected),
        **provenance(collected),
    }


def _draw(drawings: Mapping[str, Drawing], folder: Path, place: str) -> dict[str, dict[str, Any]]:
    """Write every figure, and remove those of an earlier run that are no longer drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    written: set[Path] = set()
    described = {}
    for name, drawing in drawings.items():
        files = save(drawing, folder, name)
        written.update(files)
        described[name] = {
            "alt": drawing.alt,
            "caption": drawing.caption,
            "files": {file.suffix[1:]: f"{place}/{file.name}" for file in files},
        }
    for old in (file for kind in ("png", "svg") for file in folder.glob(f"*.{kind}")):
        if old not in written:
            old.unlink()
    return described
