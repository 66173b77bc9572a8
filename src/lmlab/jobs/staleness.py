"""Whether a point has a result, and whether that is stale. No torch.

Snakemake reruns what its own records call stale, but those records do not travel with results: in a
fresh clone every result looks current. A result carries the fingerprint of its code, its settings
and the version of torch, so it can be compared with the present without any record.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lmlab.jobs.registry import code_modules, fingerprint_of
from lmlab.study.files import ROOT
from lmlab.study.fingerprint import code_fingerprint
from lmlab.study.points import Point
from lmlab.study.results import Result, ResultError, read_of

MISSING, UNREADABLE = "missing", "unreadable"
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)")


@dataclass(frozen=True, kw_only=True)
class PointState:
    """One point of the study and what is known of its result."""

    point: Point
    state: str
    """A result's status, or missing, or unreadable."""
    reason: str | None = None
    """Why there are no numbers."""
    failed_variants: tuple[str, ...] = ()
    code_changed: bool = False
    settings_changed: tuple[str, ...] = ()
    """Each as `key then, now value`."""
    other_torch: str | None = None
    """The version of torch it was measured with, if that is not the present one."""
    uncommitted: bool = False
    """Measured with code that was not committed."""

    @property
    def stale(self) -> bool:
        """Whether the present code, settings or torch would measure something else."""
        return bool(self.code_changed or self.settings_changed or self.other_torch)

    @property
    def needs_attention(self) -> bool:
        """Whether a user should look at it: stale, or unreadable."""
        return self.stale or self.state == UNREADABLE

    def remarks(self) -> list[str]:
        """What a reader should know beyond the state."""
        settings = ", ".join(self.settings_changed)
        possible = {
            self.reason: self.reason,
            "stale: code changed": self.code_changed,
            f"stale: settings changed ({settings})": settings,
            f"measured with torch {self.other_torch}": self.other_torch,
        }
        return [*self.failed_variants, *(str(text) for text, true in possible.items() if true)]


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
    measured_with = str(result.versions["torch"])
    same_torch = torch_version is None or _public(measured_with) == _public(torch_version)
    return PointState(
        point=point,
        state=result.status,
        reason=result.reason,
        failed_variants=tuple(result.failed_variants()),
        code_changed=result.code_fingerprint != code_of(tuple(code_modules(point))),
        settings_changed=tuple(_differences(point, result)),
        other_torch=None if same_torch else measured_with,
        uncommitted=bool(result.commit["dirty"]),
    )


def summary(states: Sequence[PointState]) -> str:
    """Number of points by state, and remarks about them."""
    counts = Counter(each.state for each in states)
    remarks = {
        "with failed variants": sum(bool(each.failed_variants) for each in states),
        "stale (code changed)": sum(each.code_changed for each in states),
        "stale (settings changed)": sum(bool(each.settings_changed) for each in states),
        "stale (measured with another torch)": sum(bool(each.other_torch) for each in states),
        "from uncommitted code": sum(each.uncommitted for each in states),
    }
    parts = [f"{count} {state}" for state, count in counts.most_common()]
    notes = [f"{count} {what}" for what, count in remarks.items() if count]
    return "; ".join([f"{len(states)} points: {', '.join(parts)}", *notes])


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


def _public(torch_version: str) -> str:
    """Without the build's label: the package is called 2.13.0, torch says 2.13.0+cu130."""
    return torch_version.partition("+")[0]


def _differences(point: Point, result: Result) -> list[str]:
    then, now = result.settings, point.settings
    return [
        f"{key} {then.get(key, 'absent')}, now {now.get(key, 'absent')}"
        for key in dict.fromkeys([*now, *then])
        if then.get(key) != now.get(key)
    ]
