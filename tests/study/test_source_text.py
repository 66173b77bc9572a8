"""A file read as text: which names it may define, and where it is no Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmlab.study.source_text import BrokenSource, may_define, parse

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
    with pytest.raises(BrokenSource) as caught:
        parse(source, Path("mine.py"))
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1
