"""The project's own configuration, its studies and results, and reports from its templates."""

from pathlib import Path
from typing import Any

import yaml

from lmlab.cli.report import write_report
from lmlab.study.config import Study, load
from lmlab.study.files import ROOT

H200_RESULTS = ROOT / "results" / "nvidia-h200"
GOLDEN_RESULTS = ROOT / "tests" / "golden" / "results" / "cpu-golden"
STEP = (
    "end_to_end/size~cpu-small/context~16/batch~2/precision~fp32/mode~train_step/attention~naive/"
    "warmup~1/start~warm.json"
)
"""One of the golden results."""


def config(**changes: Any) -> dict[str, Any]:
    """A fresh copy of config.yaml, changed as asked."""
    return {**yaml.safe_load((ROOT / "config.yaml").read_text()), **changes}


def study(name: str, device: str = "cpu") -> Study:
    return load(config(study=name), device)


def report(
    config: dict[str, Any], machine: str, device: str, results: Path, out: Path
) -> list[str]:
    """Write a report of these results; returns its problems."""
    return write_report(config, machine=machine, device=device, results=results, out=out)
