"""Published figures are typed in by hand: a slip is one line that says where it is."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmlab.study.files import REFERENCES, ROOT
from lmlab.study.results import ResultError
from lmlab.writeup import build as building
from lmlab.writeup import references
from lmlab.writeup.published_file import PublishedError
from tests.writeup import factory

BOARD = {"heads": 16, "sequence": 16384, "precision": "bf16"}
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "times": (
        "end_to_end.csv",
        lambda folder: references.published_times(folder, precision="fp32", warmup=5),
    ),
    "peaks": ("memory.csv", references.published_peaks),
    "steps": ("distributed.csv", lambda folder: references.published_steps(folder, "ddp")),
    "all_reduce": ("distributed.csv", references.published_all_reduce),
    "failures": ("out_of_memory.csv", references.published_failures),
    "attention": (
        "attention.csv",
        lambda folder: references.published_attention(folder, 64),
    ),
    "board": (
        "leaderboard.csv",
        lambda folder: references.published_entries(folder, 64, BOARD),
    ),
}
NUMBER = "a number above zero"
COUNT = "a whole number"
IF_STATED = "a whole number, or nothing where it is not stated"
# Who reads it, the start of a line that is read, the column, a cell that is wrong, what is allowed.
SLIPS = [
    ("times", "001,H800 PCIe,small", "mean_ms", "notanumber", NUMBER),
    ("times", "001,H800 PCIe,small", "mean_ms", "nan", NUMBER),
    ("times", "001,H800 PCIe,small", "mean_ms", "", NUMBER),
    ("times", "001,H800 PCIe,small", "mean_ms", "0", NUMBER),
    ("times", "001,H800 PCIe,small", "mean_ms", "-3.5", NUMBER),
    ("times", "001,H800 PCIe,small", "context", "long", IF_STATED),
    ("times", "001,H800 PCIe,small", "batch", "4.0", IF_STATED),
    ("times", "001,H800 PCIe,small", "warmup", "five", IF_STATED),
    ("peaks", "001,H800 PCIe,2.7b", "peak_gib", "18 GiB", NUMBER),
    ("peaks", "001,H800 PCIe,2.7b", "context", "long", IF_STATED),
    ("steps", "002,2x RTX 4090,ddp", "value", "notanumber", NUMBER),
    ("all_reduce", "002,2x RTX 4090,all_reduce", "value", "notanumber", NUMBER),
    ("all_reduce", "002,2x RTX 4090,all_reduce", "parameter", "1 GiB", "as in '64 MiB'"),
    ("failures", "002,RTX 4090,fp32", "context", "long", IF_STATED),
    ("attention", "001,H800 PCIe,eager", "ms", "notanumber", NUMBER),
    ("attention", "001,H800 PCIe,eager", "ms", "", NUMBER),
    ("attention", "001,H800 PCIe,eager", "sequence", "1k", COUNT),
    ("board", "H100", "ms", "notanumber", NUMBER),
    ("board", "H100", "head_dim", "", COUNT),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files, to be spoilt."""
    return shutil.copytree(REFERENCES, tmp_path / "references")


def spoil(file: Path, start: str, column: str, value: str) -> int:
    """Write a value into a column of the first train step, or other row, that starts so."""
    lines = file.read_text().splitlines()
    place = lines[0].split(",").index(column)
    at = next(
        i
        for i, line in enumerate(lines)
        if line.startswith(start) and ("ddp" not in start or "train_step" in line)
    )
    cells = lines[at].split(",")
    cells[place] = value
    lines[at] = ",".join(cells)
    file.write_text("\n".join(lines) + "\n")
    return at + 1


@pytest.mark.parametrize("reader", READERS)
def test_the_files_as_they_are(reader: str, tmp_path: Path) -> None:
    _, read = READERS[reader]
    assert len(read(REFERENCES))
    assert not len(read(tmp_path)), "a file that is not there has no rows"


@pytest.mark.parametrize(("reader", "start", "column", "value", "allowed"), SLIPS)
def test_a_wrong_cell(
    reader: str, start: str, column: str, value: str, allowed: str, folder: Path
) -> None:
    name, read = READERS[reader]
    line = spoil(folder / name, start, column, value)
    with pytest.raises(PublishedError) as raised:
        read(folder)
    told = str(raised.value)
    assert told.startswith(f"{folder / name}: line {line}: {column} = {value!r}, allowed: ")
    assert told.endswith(allowed)


@pytest.mark.parametrize("reader", READERS)
def test_a_misspelt_column(reader: str, folder: Path) -> None:
    name, read = READERS[reader]
    file = folder / name
    file.write_text(file.read_text().replace("gpu", "gup", 1))
    with pytest.raises(PublishedError) as raised:
        read(folder)
    told = str(raised.value)
    assert told.startswith(f"{file}: line 1: column 'gpu' is not there; found: ")
    assert "gup, " in told.partition("found: ")[2].partition("allowed: ")[0]
    assert "gpu, " in told.partition("allowed: ")[2]
    assert "\n" not in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "line 1: column 'source' is not there; found: ; allowed: "),
        (b"source,source,gpu\n", "line 1: column 'source' is there twice; found: source, source"),
        (b"source,gpu,what,size,context\n\n000,A10,fp32\n", "line 3: 3 cells, allowed: 5, one a"),
        (b"source,gpu\n000,\xff\n", "not a readable CSV file ('utf-8' codec can't decode"),
    ],
    ids=["empty", "column twice", "cells missing", "not text"],
)
def test_a_file_that_is_no_table(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "out_of_memory.csv"
    file.write_bytes(content)
    with pytest.raises(PublishedError) as raised:
        references.published_failures(tmp_path)
    assert str(raised.value).startswith(f"{file}: {told}")
    assert "\n" not in str(raised.value)


def test_what_a_spreadsheet_writes_is_read(tmp_path: Path) -> None:
    text = "source,gpu,what,size,context\r\n000,A10, fp32 ,xl,256\r\n\r\n"
    (tmp_path / "out_of_memory.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (row,) = references.published_failures(tmp_path).to_dict("records")
    assert row == {"source": "000", "gpu": "A10", "what": "fp32", "size": "xl", "context": "256"}


def test_the_chapter_ends_in_that_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert issubclass(PublishedError, ResultError), "which the script knows"
    line = spoil(folder / "memory.csv", "001,H800 PCIe,2.7b", "peak_gib", "notanumber")
    script = ROOT / "workflow" / "scripts" / "chapter.py"
    monkeypatch.setattr(building, "REFERENCES", folder)
    arguments = {
        "config": json.dumps(factory.config(study="full")), "chapter": "memory",
        "machine": "nvidia-h200", "device": "cuda", "results": tmp_path / "results",
        "figures": tmp_path / "figures", "out": tmp_path / "memory.json",
    }  # fmt: skip
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"{folder / 'memory.csv'}: line {line}: peak_gib = 'notanumber', allowed: {NUMBER}\n"
    )
