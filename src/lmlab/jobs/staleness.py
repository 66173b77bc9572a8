"""Whether a point has a result, and whether that is stale. No torch.

Snakemake reruns what its own records call stale, but those records do not travel with results: in a
fresh clone every result looks current. A result carries the fingerprint of its code, its settings
and the version of torch, so it can be compared with the present without any record. Which modules
count as its code is in jobs/registry.py, what counts within them in study/fingerprint.py; what
Snakemake itself reruns, in rules/common.smk.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lmlab.jobs.registry import code_modules, fingerprint_of
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import code_fingerprint
from lmlab.study.points import Point
from lmlab.study.results import ResultError, read_of

MISSING, UNREADABLE = "missing", "unreadable"
CODE, SETTINGS, TORCH = "code changed", "settings changed", "measured with another torch"
# Between two points: a process starts, and Snakemake chooses the next job.
START_S = 0.5
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)")


@dataclass(frozen=True, kw_only=True)
class PointState:
    """One point of the study and what is known of its result."""

    point: Point
    state: str  # a result's status, or missing, or unreadable
    reason: str | None = None  # why there are no numbers
    failed_variants: Sequence[str] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    """What makes it stale, of code, settings and torch, each with a remark."""
    uncommitted: bool = False  # measured with code that was not committed
    elapsed_s: float | None = None  # how long the present result took

    @property
    def needs_attention(self) -> bool:
        """Whether a user should look at it: stale, or unreadable."""
        return bool(self.changes) or self.state == UNREADABLE

    def remarks(self) -> list[str]:
        """What a reader should know beyond the state."""
        reasons = [self.reason] if self.reason else []
        return [*self.failed_variants, *reasons, *self.changes.values()]


def state_of(
    point: Point,
    results: Path,
    machine: str,
    torch_version: str | None,
    code_of: Callable[[tuple[str, ...]], str] = fingerprint_of,
) -> PointState:
    """Compare a machine's result with the present; without a version, torch is not compared. A
    caller with many points gives a cached `code_of`: they run the same few modules."""
    path = point.path(results, machine)
    if not path.exists():
        return PointState(point=point, state=MISSING)
    try:
        result = read_of(point, path, machine)
    except ResultError as error:
        return PointState(point=point, state=UNREADABLE, reason=str(error))
    changes = {}
    if result.code_fingerprint != code_of(tuple(code_modules(point))):
        changes[CODE] = "stale: code changed"
    if settings := _differences(result.settings, point.settings):
        changes[SETTINGS] = f"stale: settings changed ({', '.join(settings)})"
    then = str(result.versions["torch"])
    # Without the build's label: the package is called 2.13.0, torch says 2.13.0+cu130.
    if torch_version and then.partition("+")[0] != torch_version.partition("+")[0]:
        changes[TORCH] = f"measured with torch {then}"
    return PointState(
        point=point,
        state=result.status,
        reason=result.reason,
        failed_variants=result.failed_variants(),
        changes=changes,
        uncommitted=bool(result.commit["dirty"]),
        elapsed_s=result.elapsed_s,
    )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {then.get(key, 'absent')}, now {now.get(key, 'absent')}"
        for key in dict.fromkeys([*now, *then])
        if then.get(key) != now.get(key)
    ]


def summary(states: Sequence[PointState]) -> str:
    """Number of points by state, and remarks about them."""
    counts = Counter(each.state for each in states)
    remarks = {
        "with failed variants": sum(bool(each.failed_variants) for each in states),
        **{
            f"stale ({what})": sum(what in each.changes for each in states)
            for what in (CODE, SETTINGS, TORCH)
        },
        "from uncommitted code": sum(each.uncommitted for each in states),
    }
    parts = [f"{count} {state}" for state, count in counts.most_common()]
    notes = [f"{count} {what}" for what, count in remarks.items() if count]
    return "; ".join([f"{len(states)} points: {', '.join(parts)}", *notes])


def estimate(states: Sequence[PointState]) -> str:
    """How long measuring what is missing or stale will take, from what it took the last time with
    the same settings."""
    due = [each for each in states if each.state == MISSING or each.needs_attention]
    before = [each for each in due if SETTINGS not in each.changes]
    known = [each.elapsed_s + START_S for each in before if each.elapsed_s is not None]
    parts = [f"about {sum(known) / 60:.2g} min for {len(known)} measured before"] if known else []
    if unknown := len(due) - len(known):
        parts.append(f"unknown for {unknown}")
    return f"{len(due)} to measure: {', '.join(parts)}" if due else "nothing to measure"


def advice(study: str, machine: str, *, measuring: bool) -> str:
    """What to do about stale results; those of another machine cannot be measured again here."""
    command = ["lmlab", "status", "--machine", machine, "--config", f"study={study}"]
    again = "; delete them to measure them again" if measuring else ""
    return f"`{shlex.join(command)}` lists them{again}"


def installed_torch() -> str:
    """The version of torch that a measurement would use now, without importing it."""
    return version("torch")


def report_fingerprint(chapters: Iterable[str], *more: str) -> str:
    """A hash of the code that turns the results of some chapters into pages; `more` names further
    modules of it."""
    source = ROOT / "src"
    pages = [source / "lmlab" / "chapters" / chapter / "page.py" for chapter in chapters]
    files = [*(source / "lmlab" / "report").rglob("*.py"), *filter(Path.exists, pages)]
    modules = [".".join(file.relative_to(source).with_suffix("").parts) for file in files]
    roots = [module.removesuffix(".__init__") for module in modules]
    return code_fingerprint([*roots, *more], [str(source)])


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
