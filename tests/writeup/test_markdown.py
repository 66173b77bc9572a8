"""What a result says arrives on the page, whatever characters it is made of."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lmlab.writeup.markdown import Markdown, anchor, code, escape, image
from lmlab.writeup.table import Column, Table, table_from_json, to_markdown

NAMES = [
    "void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<float, float>>(int, T2)",
    "ampere_sgemm_128x64_tn",
    "_start*and*end_",
    "a|b||c",
    "`tick` ``two``",
    "[link](http://example.org) ![x](y)",
    "$x^2$ and $y$",
    "size~small/context~128",
    "<script>alert(1)</script> &amp; &lt;",
    "back\\slash \\| \\*",
    "# no heading",
    "- no list",
    "1. no list",
    "https://example.org/a_b_c",
]
PRINTABLE = st.text(
    st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=60
).filter(lambda text: text.strip() == text and "  " not in text)


@pytest.fixture(scope="module")
def github() -> MarkdownIt:
    """GitHub's dialect as a renderer: tables, strikethrough, raw HTML let through."""
    return MarkdownIt("gfm-like", {"linkify": False, "html": True})


def visible(html: str) -> str:
    """The text a reader sees."""
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def cells(html: str) -> list[str]:
    return [visible(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", html, re.DOTALL)]


@pytest.mark.parametrize("name", NAMES)
def test_names_survive_in_running_text(github: MarkdownIt, name: str) -> None:
    html = github.render(escape(name))
    assert visible(html) == name
    assert html.startswith("<p>"), "neither a heading nor a list"
    assert not re.search(r"<(em|strong|s|a|img|script)\b", html)


@pytest.mark.parametrize("is_code", [False, True], ids=["text", "code"])
@pytest.mark.parametrize("name", NAMES)
def test_names_survive_in_table_cells(github: MarkdownIt, name: str, is_code: bool) -> None:
    columns = [Column("Kernel", "left", code=is_code), Column("ms")]
    table = Table("T", columns, [[name, "1.0"], ["plain", "2.0"]], "Caption.", ["results/*.json"])
    assert cells(github.render(to_markdown(table))) == [name, "1.0", "plain", "2.0"]


@given(PRINTABLE)
@example("~~a~~")
@example("a\\")
@example("`")
def test_any_printable_text_survives_in_a_cell(text: str) -> None:
    github = MarkdownIt("gfm-like", {"linkify": False, "html": True})
    table = Table("T", [Column("A", "left"), Column("B", "left")], [[text, "x"]], "C.", [])
    assert cells(github.render(to_markdown(table))) == [text, "x"]


@given(PRINTABLE)
def test_any_printable_text_survives_as_code_in_a_cell(text: str) -> None:
    github = MarkdownIt("gfm-like", {"linkify": False, "html": True})
    table = Table("T", [Column("A", code=True)], [[text]], "C.", [])
    # A backslash before a bar cannot be told from an escaped bar inside code.
    if "\\|" not in text:
        assert cells(github.render(to_markdown(table))) == [text]


def test_a_line_break_becomes_a_space() -> None:
    assert escape("one\ntwo") == "one two"
    assert code("one\ntwo") == "`one two`"


def test_markdown_is_not_escaped_twice() -> None:
    assert escape(Markdown("**bold**")) == "**bold**"


def test_a_dollar_starts_no_formula() -> None:
    assert "$" not in escape("$x$ costs $5")


def test_a_table_names_its_sources_as_code(github: MarkdownIt) -> None:
    source = "results/m/size~*/context~*.json (20 files)"
    html = github.render(to_markdown(Table("T", [Column("A")], [["1"]], "Caption.", [source])))
    assert "<code>results/m/size~*/context~*.json</code> (20 files)" in html


def test_a_table_comes_back_from_json_the_same() -> None:
    table = Table("T", [Column("A", "left", code=True)], [["x"]], "C.", ["s"])
    assert to_markdown(table_from_json(table.to_json())) == to_markdown(table)


def test_an_image_opens_its_vector_version(github: MarkdownIt) -> None:
    html = github.render(image("a <b> | c", "figures/x y.png", "figures/x.svg"))
    assert '<a href="figures/x.svg"><img src="figures/x%20y.png" alt="a &lt;b&gt; | c"' in html


def test_anchors_are_githubs() -> None:
    taken: dict[str, int] = {}
    assert anchor("Host or device: who is the limit?", taken) == "host-or-device-who-is-the-limit"
    assert anchor("Precision", taken) == "precision"
    assert anchor("Precision", taken) == "precision-1"
