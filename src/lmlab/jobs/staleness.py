"""Whether a point has a result, and whether it is stale. No torch.

Snakemake decides what to rerun from its own records, which do not travel with results: in a fresh
clone every result looks current. A result carries its code fingerprint, its settings and its torch
version, so staleness can be judged without those records. jobs/registry.py defines which modules
count as a point's code, study/fingerprint.py what counts within them, and rules/common.smk what
Snakemake reruns.
"""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmlab.jobs.budget import SKIPPED_PREFIX
from lmlab.jobs.registry import fingerprint
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import code_fingerprint, locate
from lmlab.study.points import Point
from lmlab.study.results import ResultError, checked, read

MISSING, UNREADABLE = "missing", "unreadable"
# What the summary counts, in this order.
FAILED, UNCOMMITTED = "with failed variants", "from uncommitted code"
CODE, SETTINGS = "stale (code changed)", "stale (settings changed)"
TORCH = "stale (measured with another torch)"
SKIPPED = "skipped for lack of time"
COUNTED = (FAILED, SKIPPED, CODE, SETTINGS, TORCH, UNCOMMITTED)
# Overhead per point: starting its process, and Snakemake choosing the next job.
START_S = 0.5
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)")


@dataclass(frozen=True, kw_only=True)
class PointState:
    """One point of the study and what is known of its result."""

    point: Point
    state: str  # a result's status, or missing, or unreadable
    remarks: Sequence[str] = ()  # why there are no numbers, failed variants, what makes it stale
    counted: Collection[str] = ()  # which of `COUNTED` apply
    elapsed_s: float | None = None  # how long measuring the result took

    @property
    def due(self) -> bool:
        """Whether it is measured again even if Snakemake has no record of it."""
        return not {CODE, SETTINGS, SKIPPED}.isdisjoint(self.counted)

    @property
    def needs_attention(self) -> bool:
        """Whether a user should look at it: stale, or unreadable."""
        return not {CODE, SETTINGS, TORCH}.isdisjoint(self.counted) or self.state == UNREADABLE


def state_of(point: Point, results: Path, machine: str, torch_version: str | None) -> PointState:
    """Compare a result with the current code, settings and torch (not compared if None)."""
    path = point.path(results, machine)
    if not path.exists():
        return PointState(point=point, state=MISSING)
    try:
        result = checked(read(path), point, path, machine)
    except ResultError as error:
        return PointState(point=point, state=UNREADABLE, remarks=[str(error)])
    found: dict[str, list[str]] = {}  # remarks by entry of `COUNTED`
    if failed := result.failed_variants():
        found[FAILED] = failed
    if (result.reason or "").startswith(SKIPPED_PREFIX):
        found[SKIPPED] = []
    if result.code_fingerprint != fingerprint(point):
        found[CODE] = ["stale: code changed"]
    then, now = result.settings, point.settings
    if settings := [
        f"{key} {then.get(key, 'absent')}, now {now.get(key, 'absent')}"
        for key in {**now, **then}
        if then.get(key) != now.get(key)
    ]:
        found[SETTINGS] = [f"stale: settings changed ({', '.join(settings)})"]
    torch_then = str(result.versions["torch"])
    # Ignore the build label: the package's version is 2.13.0, torch reports 2.13.0+cu130.
    if torch_version and torch_then.partition("+")[0] != torch_version.partition("+")[0]:
        found[TORCH] = [f"measured with torch {torch_then}"]
    if result.commit["dirty"]:
        found[UNCOMMITTED] = []
    reason = [result.reason] if result.reason else []
    return PointState(
        point=point,
        state=result.status,
        remarks=[*reason, *(remark for remarks in found.values() for remark in remarks)],
        counted=found.keys(),
        elapsed_s=result.elapsed_s,
    )


def summary(states: Sequence[PointState]) -> str:
    """Count points by state, then those to which a remark of `COUNTED` applies."""
    counts = Counter(each.state for each in states)
    counted = Counter(what for each in states for what in each.counted)
    parts = [f"{count} {state}" for state, count in counts.most_common()]
    notes = [f"{counted[what]} {what}" for what in COUNTED if counted[what]]
    return "; ".join([f"{len(states)} points: {', '.join(parts)}", *notes])


def estimate(states: Sequence[PointState]) -> str:
    """How long measuring the missing and stale points will take, based on their last measurement
    with the same settings."""
    due = [each for each in states if each.state == MISSING or each.due or TORCH in each.counted]
    before = [each for each in due if {SETTINGS, SKIPPED}.isdisjoint(each.counted)]
    known = [each.elapsed_s + START_S for each in before if each.elapsed_s is not None]
    parts = [f"about {sum(known) / 60:.2g} min for {len(known)} measured before"] if known else []
    if unknown := len(due) - len(known):
        parts.append(f"unknown for {unknown}")
    return f"{len(due)} to measure: {', '.join(parts)}" if due else "nothing to measure"


def advice(study: str, machine: str, *, measuring: bool) -> str:
    """What to do about stale results; another machine's cannot be remeasured here."""
    command = ["lmlab", "status", "--machine", machine, "--config", f"study={study}"]
    again = "; delete those that `snakemake -n` does not plan to measure" if measuring else ""
    return f"`{shlex.join(command)}` lists them{again}"


def report_fingerprint(program: str, chapters: Iterable[str]) -> str:
    """A hash of the code that renders pages: module `program` and the chapters' page modules."""
    path = (str(ROOT / "src"),)
    pages = (f"lmlab.chapters.{chapter}.page" for chapter in chapters)
    return code_fingerprint([program, *(page for page in pages if locate(page, path))], path)


def missing_parts(pages: Iterable[str]) -> list[Path]:
    """Pages of a report, and images they link to, that do not exist."""
    files = [Path(page) for page in pages]
    linked = [
        file.parent / link
        for file in filter(Path.exists, files)
        for link in IMAGE.findall(file.read_text())
        if "://" not in link
    ]
    return [file for file in (*files, *linked) if not file.exists()]
