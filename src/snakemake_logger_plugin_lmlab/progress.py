"""What is running, how many are left, about how long, and what the last point gave.

The time left is each rule's own mean so far times what is left of it, because a table takes a
second and a large model a minute: one mean over all would be wrong for both. Points that share an
allocation of a cluster are reported together when all are done; each then counts an equal part of
that time.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmlab.study.results import ResultError, read


@dataclass(frozen=True)
class Running:
    """A job between its start and its end."""

    rule: str
    label: str
    outputs: Sequence[str]
    started: float
    sharing: int  # how many jobs the time from start to end is for


class Progress:
    """Counts jobs by rule and turns their start and end into lines."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.expected: Counter[str] = Counter()
        self.finished: dict[str, list[float]] = defaultdict(list)
        self.running: dict[int, Running] = {}
        self.shared: dict[int, int] = {}

    def expect(self, stats: Mapping[str, int]) -> None:
        """Take the number of jobs a rule from Snakemake's own count."""
        self.expected = Counter({rule: n for rule, n in stats.items() if rule != "total"})

    def share(self, jobs: Sequence[int]) -> str:
        """Jobs that will begin and end together: the line that says so."""
        self.shared.update(dict.fromkeys(jobs, len(jobs)))
        return f"{self._count(self.done)} {len(jobs)} points share an allocation ..."

    def start(
        self, job: int, rule: str, wildcards: Mapping[str, str] | None, outputs: Sequence[str]
    ) -> str:
        """A job has begun: the line that says so."""
        label = describe(rule, wildcards or {})
        self.running[job] = Running(rule, label, outputs, self.now(), self.shared.get(job, 1))
        return f"{self._count(self.done + len(self.running))} {label} ..."

    def finish(self, job: int) -> str | None:
        """A job has ended: what it was, what it gave, what is left."""
        ended = self.running.pop(job, None)
        if ended is None:
            return None
        took = (self.now() - ended.started) / ended.sharing
        self.finished[ended.rule].append(took)
        gave = outcome(ended.outputs)
        return (
            f"{self._count(self.done)} {ended.label}: {gave + ', ' if gave else ''}"
            f"in {'about ' if ended.sharing > 1 else ''}{duration(took)}{self._left()}"
        )

    @property
    def done(self) -> int:
        """How many jobs have ended."""
        return sum(len(times) for times in self.finished.values())

    def seconds_left(self) -> float:
        """Each rule's mean so far, or the mean of all where it has not run yet."""
        every = [took for times in self.finished.values() for took in times]
        overall = sum(every) / len(every) if every else 0.0
        return sum(
            (count - len(times := self.finished.get(rule, [])))
            * (sum(times) / len(times) if times else overall)
            for rule, count in self.expected.items()
        )

    def _count(self, number: int) -> str:
        total = str(sum(self.expected.values()))
        return f"[{number:>{len(total)}}/{total}]"

    def _left(self) -> str:
        left = sum(self.expected.values()) - self.done
        return f"; {left} left, about {duration(self.seconds_left())}" if left > 0 else ""


def describe(rule: str, wildcards: Mapping[str, str]) -> str:
    """A job in the study's words: `size~small/context~128` reads as `size=small context=128`."""
    words = [
        value.replace("/", " ").replace("~", "=")
        for name, value in wildcards.items()
        if name != "machine"
    ]
    return " ".join([rule, *words])


def outcome(outputs: Sequence[str]) -> str:
    """The headline of a measured point and its broken arms; nothing for another file."""
    for output in outputs:
        path = Path(output)
        if path.suffix == ".json" and path.is_file() and path.parts[0] == "results":
            try:
                result = read(path)
            except ResultError as error:
                return str(error)
            return ", ".join([result.headline(), *result.failed_variants()])
    return ""


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
