"""Values of Snakemake's command line, and the way back to one."""

from __future__ import annotations

import pytest
from snakemake.cli import parse_config

from lmlab.cli.configuration import read_config
from lmlab.study.overrides import retyped, words

TYPED = {
    "{a: {b: 4}}": {"a": {"b": 4}},
    "{a: {b: 0.5, c: false}}": {"a": {"b": 0.5, "c": False}},
    "[1, two, 3.0]": [1, "two", 3.0],
    "{size: 2.7b}": {"size": "2.7b"},
    '{a: "b: c: d"}': {"a": "b: c: d"},
}


@pytest.mark.parametrize("text", TYPED)
def test_what_is_inside_gets_its_type(text: str) -> None:
    given = parse_config([f"key={text}"])
    assert retyped(given) == {"key": TYPED[text]}


def test_single_values_have_their_types_already() -> None:
    given = parse_config(["study=nano", "seed=4", "ranks={nnodes: 3}"])
    assert retyped(given) == {"ranks": {"nnodes": 3}}


@pytest.mark.parametrize("text", TYPED)
def test_overrides_can_be_written_again(text: str) -> None:
    written = words({"study": "nano", **retyped(parse_config([f"key={text}"]))})
    config = read_config(None, written)
    assert config["study"] == "nano"
    assert config["key"] == TYPED[text]
