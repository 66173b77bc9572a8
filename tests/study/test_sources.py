"""Source files: which names they may define, what is no Python, and a cache never out of date."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.study.sources import may_define, parse

HAS_NET = {
    "a class": "class Net: ...",
    "a class where an import fails": "try:\n    import x\nexcept ImportError:\n    class Net: ...",
    "a function": "def Net(): ...",
    "another's class": "from elsewhere import Net",
    "another's class renamed": "from elsewhere import Other as Net",
    "an assignment": "Net = make()",
    "whatever another has": "from elsewhere import *",
    "what is made when asked for": "def __getattr__(name): ...",
    "what is made by hand": "globals()['N' + 'et'] = 1",
}
HAS_NONE = {
    "nothing": "",
    "another name": "class Nets: ...",
    "a comment": "# Net",
    "a text": "'Net'",
    "its own name renamed": "from elsewhere import Net as Other",
}


@pytest.mark.parametrize("case", [*HAS_NET, *HAS_NONE])
def test_a_name_is_found_without_running_the_file(case: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text({**HAS_NET, **HAS_NONE}[case])
    assert may_define(file, "Net") == (case in HAS_NET)


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    assert not may_define(file, "Net")
    file.write_text("class Net: ...")
    os.utime(file, ns=(1, 1))
    assert may_define(file, "Net")


BROKEN = {
    "a line that is no Python": (b"x = 1\nclass Net(:\n", "mine.py, line 2: "),
    "bytes that are no text": (b"\x00", "mine.py"),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_python_is_one_line_with_its_place(source: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=rf"\A{message}[^\n]*\Z"):
        parse(source, Path("mine.py"))


PROGRAM = """
from lmlab.study import sources
sources.MAX_ENTRIES = 2
def compute(source):
    print("computed", end="")
    return len(source)
for source in {asked!r}:
    print(sources.facts_of(source, compute, {version!r}), end="")
"""


def ask(home: Path, *asked: bytes, version: str = "one") -> str:
    """What another process prints for each source: `computed` if it had to, then the fact."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(asked=asked or (b"x = 1",), version=version)],
        env={**os.environ, "XDG_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_another_source_or_another_way_is_another_fact(tmp_path: Path) -> None:
    ask(tmp_path)
    assert ask(tmp_path, b"x = 12") == "computed6"
    assert ask(tmp_path, version="two") == "computed5"


def test_a_full_store_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    ask(tmp_path, b"1", b"12")
    assert ask(tmp_path, b"1", b"123") == "1computed3"
    assert ask(tmp_path, b"1", b"123", b"12") == "13computed2"


@pytest.mark.parametrize("content", ["", "{", "\udcff"], ids=["empty", "cut off", "no text"])
def test_a_broken_store_is_an_empty_one(content: str, tmp_path: Path) -> None:
    ask(tmp_path)
    (tmp_path / "lmlab" / "sources.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert ask(tmp_path) == "computed5"
    assert ask(tmp_path) == "5"


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "lmlab").write_text("a file where a folder should be")
    assert ask(tmp_path) == ask(tmp_path) == "computed5"
