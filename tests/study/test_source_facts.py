"""What is known of a source is kept between processes, and never out of date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from lmlab.study.source_facts import facts_of
def compute(source):
    print("computed", end="")
    return len(source)
print(facts_of({source!r}, compute, {version!r}), end="")
"""


def ask(home: Path, source: bytes = b"x = 1", version: str = "one") -> str:
    """What another process prints: `computed` if it had to, then the fact."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(source=source, version=version)],
        env={**os.environ, "XDG_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_fact_is_computed_once(tmp_path: Path) -> None:
    assert ask(tmp_path) == "computed5"
    assert ask(tmp_path) == "5"


def test_another_source_or_another_way_is_another_fact(tmp_path: Path) -> None:
    ask(tmp_path)
    assert ask(tmp_path, source=b"x = 12") == "computed6"
    assert ask(tmp_path, version="two") == "computed5"


@pytest.mark.parametrize("content", ["", "{", "\udcff"], ids=["empty", "cut off", "no text"])
def test_a_broken_store_is_an_empty_one(content: str, tmp_path: Path) -> None:
    ask(tmp_path)
    (tmp_path / "lmlab" / "sources.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert ask(tmp_path) == "computed5"
    assert ask(tmp_path) == "5"


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "lmlab").write_text("a file where a folder should be")
    assert ask(tmp_path) == ask(tmp_path) == "computed5"
