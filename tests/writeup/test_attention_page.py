"""The attention chapter as a page: rendered whole, on a GPU, on a CPU and without a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmlab.study.files import TEMPLATES, write_atomically
from lmlab.writeup.build import document_of
from lmlab.writeup.page import render
from tests.writeup import synthetic
from tests.writeup.small_attention import collected, nothing

MADE = {
    "gpu": lambda: collected(),
    "cpu": lambda: synthetic.collected("attention", "cpu"),
    "nothing": lambda: collected(nothing),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_chapter_is_rendered(kind: str, tmp_path: Path) -> None:
    from lmlab.writeup.registry import part

    made = MADE[kind]()
    document = document_of(made)
    document["figures"] = {
        name: {"alt": drawing.alt, "caption": drawing.caption, "files": {}}
        for name, drawing in part("figures", "attention")(made).items()
    }
    out = tmp_path / "attention.json"
    write_atomically(out, json.dumps(document))
    page = render([out], templates=TEMPLATES, page_folder=tmp_path)
    assert page.count("<details>") == page.count("</details>") == (6 if kind == "cpu" else 3)
    for heading in ("Naive attention", "Where compiling pays", "Tiles", "Inside the model"):
        assert f"### {heading}\n" in page
    assert ("published: best verified" in page) == (kind == "gpu")
