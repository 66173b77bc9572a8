"""The study, the machine, and what makes a result stale.

A measurement has no input files. What it depends on (the point, the code it runs, the version of
torch) is passed as params: touching a file reruns nothing, and an edit reruns the points that run
the edited code. A clone has no record of params: its results are judged by what they hold.
"""

import json
import os
import re
import shlex
import sys
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from snakemake.jobs import GroupJob, Job

# This file's own checkout, even when workflow/Snakefile or a module includes it.
ROOT = Path(workflow.current_basedir.get_path_or_uri(secret_free=True)).resolve().parent
sys.path.insert(0, str(ROOT / "src"))

from lmlab.jobs import budget
from lmlab.jobs.catalog import all_points
from lmlab.jobs.launch import ranks_per_node, torchrun_args
from lmlab.jobs.registry import check_code, fingerprint, has_ranks
from lmlab.jobs.staleness import (
    MISSING,
    advice,
    missing_parts,
    report_fingerprint,
    state_of,
    summary,
)
from lmlab.measure.identity import find_machine
from lmlab.measure.trace.nsys_command import (
    NSYS_UNAVAILABLE,
    UNDER_NSYS,
    NsysUnavailable,
    find_nsys,
    profile_options,
)
from lmlab.study import config_file
from lmlab.study.config import load
from lmlab.study.files import REFERENCES, TEMPLATES, check_writable
from lmlab.study.run_lock import acquire
from lmlab.study.selection import REPEAT, check_results_exist, machine_of, select

RESULTS = "results"


def stop(message):
    """Exit with one line: a wrong configuration needs no traceback."""
    print(message, file=sys.stderr)
    sys.exit(1)


HERE = find_machine()
TORCH = version("torch")  # without importing it
# In a module, keys that its own config lacks belong to the workflow that uses it.
TYPED = config_file.typed(workflow.config_settings.config)
update_config(config, {key: value for key, value in TYPED.items() if key in config})
try:
    SELECTION = select(config, HERE.id, HERE.device)
    STUDY = load(config, SELECTION.device)
    MACHINE, MEASURING = SELECTION.machine, SELECTION.measuring
    POINTS = {str(point.path(Path(RESULTS), MACHINE)): point for point in all_points(STUDY)}
    for point in POINTS.values():
        if has_ranks(point):
            ranks_per_node(point)
        check_code(point)
        fingerprint(point)
    check_results_exist(SELECTION, Path(RESULTS), HERE.id)
    if workflow.is_main_process and not workflow.output_settings.dryrun:
        RUN_LOCK = acquire(Path(".snakemake"))
except ValueError as error:
    stop(error)
REPORT = config["report"]
PATHS = {
    chapter: list(paths) for chapter, paths in groupby(POINTS, lambda path: POINTS[path].chapter)
}
PAGES = [f"{REPORT}/{page}.md" for page in ("writeup", "index", *map("chapters/{}".format, PATHS))]

# On a cluster nothing may outlive a point's job step, so a warm-start helper could not be reused;
# and there is no time budget.
if workflow.remote_exec:
    os.environ.setdefault("LMLAB_WARM_START", "0")
elif MEASURING:
    budget.start(STUDY.common["budget_s"], STUDY.common.get("budgets_s", {}))


wildcard_constraints:
    machine=re.escape(MACHINE) if MEASURING else "(?!)",
    point=r"[^/]+~.+",


def stem_of(chapter):
    """Path of a chapter's results below a machine's folder, as a pattern without suffix."""
    return f"{chapter}/{{point}}" if POINTS[PATHS[chapter][0]].parameters else chapter


def result_of(chapter):
    """A chapter's result files, as a pattern."""
    return f"{RESULTS}/{{machine}}/{stem_of(chapter)}.json"


def log_of(chapter):
    """A chapter's log files, as a pattern."""
    return f"logs/{{machine}}/{stem_of(chapter)}.log"


def point_at(chapter, wildcards):
    """The point that a job of the chapter measures."""
    path = result_of(chapter).format(**wildcards)
    if path not in POINTS:
        raise ValueError(f"{path} is not a point of the study {STUDY.name!r}")
    return POINTS[path]


# Both functions take only the wildcards. Snakemake does not record a param whose function also
# takes the output, so such a param never makes anything stale.
def point_json(chapter):
    """The point as JSON, as the job receives it."""
    return lambda wildcards: point_at(chapter, wildcards).to_json()


def made_with(chapter):
    """The code and the torch version that a result depends on."""
    return lambda wildcards: (f"code {fingerprint(point_at(chapter, wildcards))}, torch {TORCH}")


# The rest takes the output on purpose: moving the checkout or changing Python reruns nothing.
def unrecorded(*arguments):
    """Shell-quoted arguments, as a param that Snakemake does not record."""
    command = shlex.join(arguments)
    return lambda wildcards, output: command


def script(name):
    """The command that runs a script of this workflow."""
    return unrecorded(sys.executable, str(ROOT / "workflow" / "scripts" / name))


def ignore_budget(chapter):
    """The first point of a chapter is measured even when the time budget is used up."""
    first = PATHS[chapter][0]
    return lambda wildcards, output: (
        f"unset {budget.VARIABLE}; " if first in map(str, output) else ""
    )


def on_each_node(wildcards, output):
    """The command prefix that runs the rest of the line on every node."""
    return STUDY.ranks["on_each_node"]


def torchrun(chapter):
    """torchrun options, unrecorded: the endpoint affects no result; the point has the node count."""
    return lambda wildcards, output: " ".join(
        torchrun_args(point_at(chapter, wildcards), STUDY.ranks)
    )


def gpus_of(chapter):
    """GPUs per node that a job of the chapter requests from a cluster."""

    def gpus(wildcards):
        point = point_at(chapter, wildcards)
        return ranks_per_node(point) if point.parameters["placement"] == "own_gpu" else 1

    return gpus


def nsys_for(block):
    """The nsys that records this study's profiles, or None and the reason.

    Looked up where the jobs run: a cluster's job parses this file on its own node.
    """
    asked = block["profiler"]
    if not MEASURING or asked == "torch" or (asked == "auto" and SELECTION.device != "cuda"):
        return None, ""
    try:
        return find_nsys(), ""
    except NsysUnavailable as trouble:
        if asked == "nsys" and machine_of(MACHINE) == HERE.id:
            stop(f"config: profile.profiler = 'nsys', but {trouble}; allowed here: auto, torch")
        return None, str(trouble)


def results():
    """The study's result files: all of them where they can be measured, else those that exist."""
    return [path for path in POINTS if MEASURING or Path(path).exists()]


def repeated():
    """Result files of the machine's second set, which the report compares with the first."""
    paths = (point.path(Path(RESULTS), f"{MACHINE}@{REPEAT}") for point in POINTS.values())
    return [str(path) for path in paths if path.exists()]


def report_inputs(wildcards):
    """The results. Those that are stale, deleted or skipped are measured again.

    Snakemake's records do not travel with results, so in a clone it would take stale ones for
    current. And it does not make a missing file again while what depends on it is up to date: a
    result that was deleted to be measured again would stay deleted, and so would a figure.
    """
    force = workflow.dag.forcefiles
    if MEASURING:
        force.update(
            path
            for path, point in POINTS.items()
            if state_of(point, Path(RESULTS), MACHINE, torch_version=None).due
        )
    if Path(PAGES[0]).exists():
        force.update(path for path in results() if not Path(path).exists())
        force.update(PAGES if missing_parts(PAGES) else [])
    return [*results(), *repeated()]


def report_arguments(wildcards):
    """Arguments that describe the study to the report scripts."""
    study = {"config": json.dumps(config), "machine": MACHINE}
    study["device"] = SELECTION.device
    return shlex.join(word for key, value in study.items() for word in (f"--{key}", value))


def files_of(folder):
    """Files below a folder of the checkout, by relative path, so that moving it changes nothing."""
    return sorted(os.path.relpath(path) for path in folder.rglob("*") if path.is_file())


async def keep_current(job, skip_outputs=(), cleanup=Job.cleanup):
    """Clean up after a failed job as Snakemake does, but keep results that are current.

    If one job of a group fails, Snakemake deletes the outputs of all of them. Results are written
    atomically, so those that exist and are not stale are kept.
    """
    points = [POINTS[output] for output in job.output if output in POINTS]
    states = [state_of(point, Path(RESULTS), MACHINE, None) for point in points]
    current = states and all(
        state.state != MISSING and not state.needs_attention for state in states
    )
    await cleanup(job, {*skip_outputs, *(job.output if current else ())})


def log_reason(group, msg=None, log_error=GroupJob.log_error, **fields):
    """Print why an allocation failed, which Snakemake's own message leaves out."""
    if msg:
        print(msg.partition("\n    sbatch call")[0], file=sys.stderr)
    log_error(group, msg, **fields)


Job.cleanup = keep_current
GroupJob.log_error = log_reason
# If a submission fails, the Slurm plugin reads the `rule` of the job; without one it hangs.
setattr(GroupJob, "rule", property(lambda group: next(iter(group.jobs)).rule))


onstart:
    try:
        check_writable(
            file for job in workflow.dag.needrun_jobs() for file in [*job.output, *job.log]
        )
    except ValueError as error:
        stop(error)
    # Not known any earlier: on a cluster, this machine is not the one that measures.
    if workflow.non_local_exec:
        # No budget: time in the queue would count against it, and an allocation has its own limit.
        os.environ.pop(budget.VARIABLE, None)
        if config["machine"] == "auto":
            raise WorkflowError(
                "machine = 'auto', but the jobs run elsewhere: give --config machine=ID measure=always, "
                "see profiles/slurm/config.yaml"
            )


onsuccess:
    # Snakemake's metadata does not travel with results, so staleness is read off the results.
    torch_here = TORCH if machine_of(MACHINE) == HERE.id else None
    states = [state_of(point, Path(RESULTS), MACHINE, torch_here) for point in POINTS.values()]
    if any(state.needs_attention for state in states):
        todo = advice(STUDY.name, MACHINE, measuring=MEASURING)
        print(f"{summary(states)}; {todo}", file=sys.stderr)
    # A part that could not be rendered does not fail its page, so name it here.
    logs = (Path(log) for job in workflow.dag.finished_jobs for log in job.log)
    for log in filter(Path.exists, logs):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("not rendered: "):
                print(line, file=sys.stderr)
