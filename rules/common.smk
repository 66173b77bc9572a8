"""What the rules share: the study, this machine, and what makes a result stale.

A measurement has no input files. What it depends on (the point, the code it runs, torch's version)
is given as params, so that a touched file reruns nothing, an edit reruns what it reaches, and a
fresh clone, whose file times mean nothing, reruns nothing at all.
"""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(workflow.basedir).resolve()
if not (ROOT / "src").is_dir():  # included by workflow/Snakefile
    ROOT = ROOT.parent
sys.path.insert(0, str(ROOT / "src"))

from lmlab.experiments.registry import fingerprint
from lmlab.measure.identity import find_machine
from lmlab.study.chapters import GRIDS, all_points, points_of
from lmlab.study.config import ConfigError, load
from lmlab.study.files import REFERENCES, TEMPLATES
from lmlab.writeup.registry import chapter_fingerprint, page_fingerprint

RESULTS = "results"
PYTHON = sys.executable
SCRIPTS = ROOT / "workflow" / "scripts"


def stop(message):
    """End with one line: a wrong configuration needs no traceback."""
    print(message, file=sys.stderr)
    sys.exit(1)


THIS_MACHINE = find_machine()
MACHINE = (
    THIS_MACHINE.id
    if config.get("machine", "auto") == "auto"
    else str(config["machine"])
)
DEVICE = (
    THIS_MACHINE.device
    if MACHINE == THIS_MACHINE.id
    else ("cpu" if MACHINE.startswith("cpu-") else "cuda")
)
try:
    STUDY = load(config, DEVICE)
    POINTS = {
        str(point.path(Path(RESULTS), MACHINE)): point for point in all_points(STUDY)
    }
except ValueError as error:
    stop(error)

REPORT = config["report"]
# Another machine's results are read, never measured here.
MEASURING = config["measure"] == "always" or (
    config["measure"] == "auto" and MACHINE == THIS_MACHINE.id
)


wildcard_constraints:
    machine=re.escape(MACHINE) if MEASURING else "(?!)",
    point=r"[^/]+~.+",
    chapter="|".join(GRIDS),


def point_at(wildcards, output):
    """The point whose result a job writes."""
    if str(output) not in POINTS:
        raise ValueError(f"{output} is not a point of the study {STUDY.name!r}")
    return POINTS[str(output)]


def point_json(wildcards, output):
    return point_at(wildcards, output).to_json()


def made_with(wildcards, output):
    """The code and the torch that a result stands for; another one makes it stale."""
    return f"code {fingerprint(point_at(wildcards, output))}, torch {version('torch')}"


def results_of(chapter):
    """A chapter's result files: all of them where they can be measured, else those that exist."""
    paths = [
        str(point.path(Path(RESULTS), MACHINE)) for point in points_of(STUDY, chapter)
    ]
    return paths if MEASURING else [path for path in paths if Path(path).exists()]


# One line a measurement rule would otherwise repeat. The script takes care of a warm start.
MEASURE = (
    f"{PYTHON} {SCRIPTS}/measure.py --point {{params.point:q}} --machine {{wildcards.machine}} "
    "--out {output} > {log} 2>&1"
)
