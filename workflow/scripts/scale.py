"""How planning and reporting scale: CPU seconds by number of points, as a table.

    python workflow/scripts/scale.py 100 1000 10000

Each size is a study of about that many end-to-end points in a temporary folder, with results copied
from the committed ones of the H200. Nothing is measured.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lmlab.jobs.catalog import points_of
from lmlab.study.config import load
from lmlab.study.files import ROOT, write_atomically
from lmlab.study.points import Point

MACHINE = "nvidia-h200"
MEASURED = ROOT / "results" / MACHINE / "end_to_end"
SNAKEMAKE = ["snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1"]
COMMANDS = {
    "plan, nothing measured": [*SNAKEMAKE, "-n", "--config", "measure=always"],  # first: no results
    "status": ["lmlab", "status"],
    "plan, all measured": [*SNAKEMAKE, "-n"],
    "page": [*SNAKEMAKE, "report/writeup.md"],
}


def main(sizes: Sequence[str]) -> None:
    """Print one line per size."""
    print("| points |", *(f"{name} (s) |" for name in COMMANDS), "largest (MB) |")
    print("|---" * (len(COMMANDS) + 2) + "|")
    for size in map(int, sizes):
        with tempfile.TemporaryDirectory() as folder:
            points = study_of(size, Path(folder))
            times = [cpu_seconds(words, Path(folder), points) for words in COMMANDS.values()]
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
        print(f"| {len(points):,} |", *(f"{time:.1f} |" for time in times), f"{memory:.0f} |")


def study_of(size: int, folder: Path) -> list[Point]:
    """Write a study of about `size` points to the folder; return its points."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text()) | {"machine": MACHINE}
    blocks = config["studies"]["full"]
    for block in blocks.values():
        if "enabled" in block:
            block["enabled"] = block is blocks["end_to_end"]
    per_context = 5 * 2 * 3
    contexts = [16 * (n + 1) for n in range(-(-size // per_context))]
    blocks["end_to_end"] |= {"contexts": contexts, "more": [], "graph_checks": []}
    (folder / "config.yaml").write_text(json.dumps(config))
    return points_of(load(config, "cuda"), "end_to_end")


def cpu_seconds(words: Sequence[str], folder: Path, points: Sequence[Point]) -> float:
    """CPU time of a command and its child processes."""
    if "measure=always" not in words:
        for point in points:
            write_result(point, folder / "results")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_result(point: Point, results: Path) -> None:
    """Write a result for the point, with numbers of a committed one of its mode and precision."""
    path = point.path(results, MACHINE)
    if not path.exists():
        numbers = measured(str(point.parameters["precision"]), str(point.parameters["mode"]))
        mine = {"parameters": point.parameters, "settings": point.settings}
        write_atomically(path, json.dumps(numbers | mine))


@cache
def measured(precision: str, mode: str) -> dict[str, Any]:
    """A committed result of a small model at this precision and mode."""
    pattern = f"size~small/*/*/precision~{precision}/mode~{mode}/*/*/*.json"
    result: dict[str, Any] = json.loads(min(MEASURED.glob(pattern)).read_text())
    return result


if __name__ == "__main__":
    main(sys.argv[1:] or ["100", "1000", "10000"])
