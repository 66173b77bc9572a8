"""The example of CONTRIBUTING.md is a complete chapter: measured, drawn and written up."""

import json
import re

import pytest
import yaml

from lmlab.study.files import ROOT
from tests.workflow.conftest import COMMAND, NANO, Project

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"^(?:# |{# )(\S+)(?: #})?\n(.*)", re.DOTALL)
LONGEST = 80


def example() -> tuple[dict[str, str], str, str]:
    files, parts = {}, {}
    for language, text in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        named = NAMED.match(text)
        if language in ("python", "jinja") and named:
            files[named[1]] = named[2]
        else:
            assert language not in parts, "each of these blocks has one place"
            parts[language] = text
    return files, parts["yaml"], parts["json"]


def test_it_is_short() -> None:
    files, block, schema = example()
    lines = [line for text in [*files.values(), block, schema] for line in text.splitlines()]
    assert len([line for line in lines if line.strip()]) < LONGEST


@pytest.mark.slow
def test_it_runs(fresh: Project) -> None:
    files, block, schema = example()
    for path, text in files.items():
        (fresh.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (fresh.folder / path).write_text(text)
    chapter = yaml.safe_load(block)
    fresh.configure(*chapter, **chapter)
    path = fresh.folder / "workflow/schemas/config.schema.json"
    config_schema = json.loads(path.read_text())
    config_schema["$defs"]["study"]["properties"]["copies"] = json.loads(schema)
    path.write_text(json.dumps(config_schema))
    fresh.run(f"{COMMAND} {NANO}")
    report = fresh.folder / "report"
    assert "### How fast is a copy?\n\n**Up to" in (report / "writeup.md").read_text()
    assert "figures/copies/copies.png" in (report / "chapters/copies.md").read_text()
    assert (report / "figures/copies/copies.png").exists()
