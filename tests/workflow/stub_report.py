"""Stands in for workflow/scripts/report.py and explore.py: the same arguments, the same files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser()
for option in ("config", "machine", "device", "templates", "references", "out"):
    parser.add_argument(f"--{option}", required=True)
arguments = parser.parse_args()
config, out = json.loads(arguments.config), Path(arguments.out)
if out.suffix == ".html":
    out.write_text("<html></html>")
    raise SystemExit
study = {"cuda": "full", "cpu": "tiny"}[arguments.device]
blocks = config["studies"][study if config["study"] == "auto" else config["study"]]
templates = "".join(file.read_text() for file in sorted(Path(arguments.templates).rglob("*.j2")))
results = sorted(Path("results", arguments.machine).rglob("*.json"))
(out / "writeup.md").write_text(f"{templates}\n{[file.read_text() for file in results]}\n")
(out / "index.md").write_text("index\n")
for chapter, block in blocks.items():
    if chapter != "common" and block.get("enabled", True):
        (out / "figures" / chapter).mkdir(parents=True, exist_ok=True)
        (out / "figures" / chapter / "one.svg").write_text("<svg/>")
        (out / "chapters").mkdir(exist_ok=True)
        (out / "chapters" / f"{chapter}.md").write_text(f"![one](../figures/{chapter}/one.svg)\n")
