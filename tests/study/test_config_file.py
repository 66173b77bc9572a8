"""Configuration as text: every key once, and values with their types."""

from pathlib import Path

import pytest
from snakemake.cli import parse_config

from lmlab.study.config import ConfigError
from lmlab.study.config_file import read, typed

TYPED = {
    "{a: {b: 4}}": {"a": {"b": 4}},
    "{a: {b: 0.5, c: false}}": {"a": {"b": 0.5, "c": False}},
    "[1, two, 3.0]": [1, "two", 3.0],
    "{size: 2.7b}": {"size": "2.7b"},
    '{a: "b: c: d"}': {"a": "b: c: d"},
}


@pytest.mark.parametrize("text", TYPED)
def test_values_inside_snakemakes_overrides_get_their_types(text: str) -> None:
    given = parse_config([f"key={text}", "study=nano", "seed=4"])
    assert typed(given) == {"key": TYPED[text]}


UNREADABLE = {
    "no text": (b"\xff\xfe\x00", "not a readable YAML file"),
    "no end": (b"a: [1", "not a readable YAML file"),
    "no depth": (b"a: " + b"[" * 500, "more than 20 levels"),
    "a tab": (b"\ta: 1", "not a readable YAML file"),
    "empty": (b"", "allowed: keys and values"),
    "a list": (b"- 1", "allowed: keys and values"),
    "a key twice": (b"sizes:\n  mine: {d: 6}\n  mine: {d: 3}\n", "line 3: 'mine' is given twice"),
}


@pytest.mark.parametrize(("content", "complaint"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unclear_file_is_one_line(content: bytes, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(file)
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_json_file_may_have_tabs(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{\n\t"study":\t"nano"\n}\n')
    assert read(file) == {"study": "nano"}


def test_a_merged_mapping_may_be_changed_in_part(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: &base {x: 1, y: 1}\nlast: {<<: *base, y: 2}\n")
    assert read(file)["last"] == {"x": 1, "y": 2}
