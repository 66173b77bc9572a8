"""The example of CONTRIBUTING.md is a complete chapter: measured, drawn and written up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmlab.study.files import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"^(?:# |{# )(\S+)(?: #})?\n(.*)", re.DOTALL)
COPIED = ("src", "rules", "workflow", "report", "profiles", "Snakefile", "config.yaml")
LONGEST = 80


def example() -> tuple[dict[str, str], str, str]:
    """Files by path, the block of the study, and its schema."""
    files, parts = {}, {}
    for language, text in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        named = NAMED.match(text)
        if language in ("python", "jinja") and named:
            files[named[1]] = named[2]
        else:
            parts[language] = text
    return files, parts["yaml"], parts["json"]


def test_it_is_short() -> None:
    files, block, schema = example()
    lines = [line for text in [*files.values(), block, schema] for line in text.splitlines()]
    assert len([line for line in lines if line.strip()]) < LONGEST


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    files, block, schema = example()
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "src/lmlab/chapters/copies/__init__.py").write_text("")
    add_to_study(tmp_path, yaml.safe_load(block), json.loads(schema))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "snakemake",
            "--cores",
            "1",
            "--resources",
            "gpu=1",
            "--config",
            "study=nano",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "### How fast is a copy?\n\n**Up to" in (tmp_path / "report/writeup.md").read_text()
    assert "figures/copies/copies.png" in (tmp_path / "report/chapters/copies.md").read_text()
    assert (tmp_path / "report/figures/copies/copies.png").exists()


def add_to_study(tree: Path, block: dict[str, object], schema: dict[str, object]) -> None:
    """The example's block in every study; of the others only the machine card is left on."""
    config = yaml.safe_load((tree / "config.yaml").read_text())
    for study in config["studies"].values():
        for chapter in study.values():
            if "enabled" in chapter:
                chapter["enabled"] = False
        study.update(block)
    (tree / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    path = tree / "workflow/schemas/config.schema.json"
    config_schema = json.loads(path.read_text())
    config_schema["$defs"]["study"]["properties"]["copies"] = schema
    path.write_text(json.dumps(config_schema))
