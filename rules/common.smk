"""What the rules share: the study, this machine, and what makes a result stale.

A measurement has no input files. What it depends on (the point, the code it runs, torch's version)
is given as params, so that a touched file reruns nothing, an edit reruns what it reaches, and a
fresh clone, whose file times mean nothing, reruns nothing at all.
"""

import json
import os
import re
import shlex
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

# Where this file is, whoever includes it: workflow/Snakefile, or a workflow that has it as a module.
ROOT = Path(workflow.current_basedir.get_path_or_uri(secret_free=True)).resolve().parent
sys.path.insert(0, str(ROOT / "src"))

from lmlab.jobs.launch import ranks_here, torchrun_words
from lmlab.jobs.registry import check_code, code_modules, fingerprint_of, has_ranks
from lmlab.jobs.staleness import advice, installed_torch, remarks_on, standing
from lmlab.measure.identity import find_machine
from lmlab.study import config_file
from lmlab.jobs.catalog import all_points, points_of
from lmlab.study.config import load
from lmlab.study.files import REFERENCES, TEMPLATES
from lmlab.study.overrides import retyped, words
from lmlab.study.selection import check_results_are_there, select


RESULTS = "results"
PEAKS = ROOT / "src" / "lmlab" / "measure" / "peaks.yaml"


def stop(message):
    """End with one line: a wrong configuration needs no traceback."""
    print(message, file=sys.stderr)
    sys.exit(1)


# Hundreds of points run the same few modules, and files do not change while the workflow is parsed.
code_of = cache(fingerprint_of)
torch_now = cache(installed_torch)
HERE = find_machine()
# What a module was not given is not its own, though it stands on the same command line.
TYPED = retyped(workflow.config_settings.config)
update_config(config, {key: value for key, value in TYPED.items() if key in config})
try:
    # Of a key that stands twice in a file Snakemake has taken the last, without a word. Where this
    # is a module, the files are those of the workflow that has it.
    if Path(workflow.main_snakefile).resolve().is_relative_to(ROOT):
        for file in workflow.configfiles:
            config_file.read(Path(file))
    SELECTION = select(config, HERE.id, HERE.device)
    STUDY = load(config, SELECTION.device)
    MACHINE, MEASURING = SELECTION.machine, SELECTION.measuring
    POINTS = {str(point.path(Path(RESULTS), MACHINE)): point for point in all_points(STUDY)}
    for point in filter(has_ranks, POINTS.values()):
        ranks_here(point)  # a world that its nodes cannot share evenly shows here
    for point in POINTS.values():
        check_code(point)  # a model or an attention that is not there shows here
        code_of(tuple(code_modules(point)))  # and here a file beside it that is no Python
    check_results_are_there(SELECTION, Path(RESULTS), HERE.id)
except ValueError as error:
    stop(error)
REPORT = config["report"]

# On a cluster every point is a job step of its own, and nothing may outlive its step: a helper that
# waits for the next point would wait in vain.
if workflow.remote_exec:
    os.environ.setdefault("LMLAB_WARM_START", "0")


wildcard_constraints:
    machine=re.escape(MACHINE) if MEASURING else "(?!)",
    point=r"[^/]+~.+",
    chapter="|".join(GRIDS),


def point_at(chapter, wildcards):
    """The point whose result a job of the chapter writes."""
    name = f"{chapter}/{wildcards.point}" if "point" in wildcards.keys() else chapter
    path = f"{RESULTS}/{wildcards.machine}/{name}.json"
    if path not in POINTS:
        raise ValueError(f"{path} is not a point of the study {STUDY.name!r}")
    return POINTS[path]


# Both are functions of the wildcards alone: a param that looks at the output is derived in
# Snakemake's eyes, left out of its records, and never makes anything stale.
def point_json(chapter):
    """What a job of the chapter is asked to measure."""
    return lambda wildcards: point_at(chapter, wildcards).to_json()


def made_with(chapter):
    """The code and the torch that a result stands for; another one makes it stale."""
    return lambda wildcards: (
        f"code {code_of(tuple(code_modules(point_at(chapter, wildcards))))}, "
        f"torch {torch_now()}"
    )


def results_of(chapter):
    """A chapter's result files: all of them where they can be measured, else those that exist."""
    paths = [str(point.path(Path(RESULTS), MACHINE)) for point in points_of(STUDY, chapter)]
    return paths if MEASURING else [path for path in paths if Path(path).exists()]


def results_read_by(chapter):
    """The result files of other chapters that a chapter's page reads."""
    return [path for other in READS.get(chapter, ()) for path in results_of(other)]


def kept(files, output):
    """Inputs of an output, those made again that are gone although it is there: Snakemake lets an
    input be gone while the output is up to date, and a result that was deleted to be measured anew
    would stay deleted."""
    if Path(output).exists():
        workflow.dag.forcefiles.update(file for file in files if not Path(file).exists())
    return files


def options_of_status():
    """By which `lmlab status` looks at the study of this run."""
    given = deepcopy(workflow.config_settings.overwrite_config)  # files and words together
    update_config(given, TYPED)
    given.pop("machine", None)
    return ["--config", *words(given)] if given else []


def remarks_on_results():
    """What Snakemake's own records cannot tell: they stay behind when results travel."""
    torch_version = torch_now() if MACHINE == HERE.id else None
    standings = {
        path: standing(point, Path(RESULTS), MACHINE, torch_version)
        for path, point in POINTS.items()
    }
    return remarks_on(standings)


onstart:
    # Only now is it known who executes: a cluster's jobs cannot look at the machine that plans.
    if workflow.non_local_exec and config["machine"] == "auto":
        raise WorkflowError(
            "machine = 'auto', but the jobs run elsewhere: give --config machine=ID measure=always, "
            "see profiles/slurm/config.yaml"
        )


onsuccess:
    for remark in remarks_on_results():
        what_to_do = advice(MACHINE, HERE.id, measuring=MEASURING, options=options_of_status())
        print(f"{remark}; {what_to_do}", file=sys.stderr)


def files_of(folder, pattern):
    """Files of the checkout as seen from here: absolute paths would differ in one that moved."""
    return sorted(os.path.relpath(path) for path in folder.glob(pattern))


def script(name):
    """How a script is called. Takes the output, so that Snakemake keeps it out of its records: a
    checkout that moved, or another Python, makes nothing stale."""
    command = shlex.join([sys.executable, str(ROOT / "workflow" / "scripts" / name)])
    return lambda wildcards, output: command


# Every measurement is called alike; the script takes care of a warm start.
MEASURE = (
    "{params.script} --point {params.point:q} --machine {wildcards.machine} "
    "--out {output:q} > {log:q} 2>&1"
)


# A measurement with several processes, each a rank of one torchrun.
RANKS = (
    "{params.on_each_node} {params.script} --point {params.point:q} --machine {wildcards.machine} "
    "--out {output:q} -- {params.torchrun} > {log:q} 2>&1"
)


# How nodes are reached and find each other moves no number, so both take the output, as a script
# does; the number of nodes is in the point.
def on_each_node(wildcards, output):
    """What starts the command that follows on every node."""
    return STUDY.ranks["on_each_node"]


def torchrun(chapter):
    """The torchrun command of a job of the chapter; the script adds what each rank runs."""
    return lambda wildcards, output: " ".join(
        torchrun_words(point_at(chapter, wildcards).parameters["world_size"], STUDY.ranks)
    )


def gpus_of(chapter):
    """GPUs that a job of the chapter asks a cluster for on one node; on this machine it is alone."""

    def gpus(wildcards):
        point = point_at(chapter, wildcards)
        return ranks_here(point) if point.parameters["placement"] == "own_gpu" else 1

    return gpus
