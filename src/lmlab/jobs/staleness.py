"""How a point stands: measured or not, and by what. No torch.

Snakemake reruns what its own records call stale. Those records stay behind when results travel: in
a fresh clone every result looks current. A result carries the fingerprint of its code, its settings
and torch's version, so each can be held against the present without any record.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lmlab.jobs.registry import fingerprint
from lmlab.study.points import Point
from lmlab.study.results import Result, ResultError, read_of

MISSING, UNREADABLE = "missing", "unreadable"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One point of the study and what is known of it."""

    point: Point
    state: str
    """A result's status, or missing, or unreadable."""
    reason: str | None = None
    """Why it is not ok."""
    other_code: bool = False
    """Made by other code than the present."""
    other_settings: tuple[str, ...] = ()
    """Settings that differ, as `key then (now key)`."""
    other_torch: str | None = None
    """The version of torch it was made with, where that is not the present one."""

    @property
    def is_current(self) -> bool:
        """Whether the present code, settings and torch would measure the same thing."""
        return not (self.other_code or self.other_settings or self.other_torch)

    def remarks(self) -> list[str]:
        """What a reader should know beyond the state."""
        remarks = [self.reason] if self.reason else []
        remarks += ["made by other code"] if self.other_code else []
        remarks += [f"other settings: {', '.join(self.other_settings)}"] * bool(self.other_settings)
        return remarks + ([f"made with torch {self.other_torch}"] if self.other_torch else [])


def standing(point: Point, results: Path, machine: str, torch_version: str | None) -> Standing:
    """Hold a machine's result against the present; without a version, torch is not compared."""
    path = point.path(results, machine)
    if not path.exists():
        return Standing(point=point, state=MISSING)
    try:
        result = read_of(point, path, machine)
    except ResultError as error:
        return Standing(point=point, state=UNREADABLE, reason=str(error))
    made_with = str(result.versions["torch"])
    same_torch = torch_version is None or _public(made_with) == _public(torch_version)
    return Standing(
        point=point,
        state=result.status,
        reason=result.reason,
        other_code=result.code_fingerprint != fingerprint(point),
        other_settings=tuple(_differences(point, result)),
        other_torch=None if same_torch else made_with,
    )


FAULTS: dict[str, Callable[[Standing], object]] = {
    "were made by other code than the present": lambda each: each.other_code,
    "were made with other settings": lambda each: each.other_settings,
    "were made with another torch": lambda each: each.other_torch,
    "cannot be read": lambda each: each.state == UNREADABLE,
}


def remarks_on(standings: Mapping[str, Standing]) -> Iterator[str]:
    """A line for each fault that results, by their paths, have; one of them is named."""
    for fault, has in FAULTS.items():
        paths = [path for path, each in standings.items() if has(each)]
        if paths:
            yield f"{len(paths)} of {len(standings)} results {fault}, {paths[0]} among them"


def advice(machine: str, here: str, *, measuring: bool, options: Sequence[str] = ()) -> str:
    """What can be done about results that are not the present's; elsewhere none can be remade.

    `options` are those by which `lmlab status` looks at the same study.
    """
    of_machine = [] if machine == here else ["--machine", machine]
    listing = shlex.join(["lmlab", "status", *of_machine, *options])
    anew = ", deleting them measures them anew" if measuring else ""
    return f"`{listing}` lists them{anew}"


def installed_torch() -> str:
    """The version of torch that a measurement would use now, without importing it."""
    return version("torch")


def _public(torch_version: str) -> str:
    """Without the build's label: the package calls itself 2.13.0, torch says 2.13.0+cu130."""
    return torch_version.partition("+")[0]


def _differences(point: Point, result: Result) -> list[str]:
    then, now = result.settings, point.settings
    return [
        f"{key} {then.get(key, 'absent')} (now {now.get(key, 'absent')})"
        for key in dict.fromkeys([*now, *then])
        if then.get(key) != now.get(key)
    ]
