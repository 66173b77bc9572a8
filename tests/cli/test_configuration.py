"""The configuration as the command line finds it: a file, and keys set over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmlab.cli.configuration import read_config
from lmlab.study.config import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("study: auto\nranks: {nnodes: 1, rdzv_backend: c10d}\n")
    return path


MERGED = {
    "nothing": ([], "auto", {"nnodes": 1, "rdzv_backend": "c10d"}),
    "a key": (["study=nano"], "nano", {"nnodes": 1, "rdzv_backend": "c10d"}),
    "a part of a mapping": (["ranks={nnodes: 2}"], "auto", {"nnodes": 2, "rdzv_backend": "c10d"}),
    "a value in place of a mapping": (["ranks=3"], "auto", 3),
    "a mapping in place of a value": (
        ["study={a: 1}"],
        {"a": 1},
        {"nnodes": 1, "rdzv_backend": "c10d"},
    ),
}


@pytest.mark.parametrize(("words", "study", "ranks"), MERGED.values(), ids=MERGED)
def test_what_is_not_named_stays_as_the_file_has_it(
    words: list[str], study: Any, ranks: Any, file: Path
) -> None:
    assert read_config(file, words) == {"study": study, "ranks": ranks}


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"a: [1", b"\ta: 1"], ids=["no text", "no end", "a tab"]
)
def test_a_file_that_is_no_yaml_is_named_in_one_line(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"mine\.yaml: not a readable YAML file") as caught:
        read_config(file, [])
    assert len(str(caught.value).splitlines()) == 1


def test_a_json_file_may_have_tabs(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{\n\t"study":\t"nano"\n}\n')
    assert read_config(file, []) == {"study": "nano"}


@pytest.mark.parametrize("content", ["", "- 1", "text"], ids=["empty", "a list", "a text"])
def test_a_file_without_keys_is_refused(content: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match="allowed: keys and values"):
        read_config(file, [])


def test_a_key_that_stands_twice_is_named_with_its_line(file: Path) -> None:
    file.write_text("sizes:\n  mine: {d_model: 64}\n  other: {}\n  mine: {d_model: 32}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 4: 'mine' is given twice; allowed: "):
        read_config(file, [])


def test_a_key_that_stands_twice_in_an_override_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^config: ranks = .*: 'nnodes' is given twice; allowed"):
        read_config(file, ["ranks={nnodes: 1, nnodes: 2}"])


def test_a_merged_mapping_may_be_changed_in_part(file: Path) -> None:
    file.write_text(
        "last: {<<: &b {<<: &a {x: 1, y: 1}, y: 2}, z: 3}\nagain: {<<: *b, x: 4}\nfirst: *a\n"
    )
    assert read_config(file, []) == {
        "last": {"x": 1, "y": 2, "z": 3},
        "again": {"x": 4, "y": 2},
        "first": {"x": 1, "y": 1},
    }
