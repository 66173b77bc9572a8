"""The parts of a chapter's page, found by the chapter's name.

A chapter named `energy` is `tables/energy.py`, `figures/energy.py`, `findings/energy.py`,
`checks/energy.py` and the template `energy.md.j2`; there is no list to add it to. Parts are
imported by path and only for the chapter asked for, so that an edit of one chapter's code makes
that chapter's tables and figures stale and leaves the others alone. This module is read while the
workflow is parsed, hence it imports neither pandas nor matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lmlab.study.fingerprint import code_fingerprint

PARTS = ("tables", "figures", "findings", "checks")


def part(kind: str, chapter: str) -> Any:
    """The function `tables`, `figures`, `findings` or `checks` of one chapter."""
    return getattr(import_module(module_of(kind, chapter)), kind)


def module_of(kind: str, chapter: str) -> str:
    """Where a chapter's part lives."""
    return f"lmlab.writeup.{kind}.{chapter}"


def chapter_fingerprint(chapter: str) -> str:
    """The code that makes one chapter's tables, figures and findings."""
    return code_fingerprint(["lmlab.writeup.build", *(module_of(kind, chapter) for kind in PARTS)])


def page_fingerprint() -> str:
    """The code that puts the chapters into one page."""
    return code_fingerprint(["lmlab.writeup.page"])
