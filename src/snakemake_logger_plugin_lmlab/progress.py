"""How many jobs are done, what the last one gave, and about how long the rest will take."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lmlab.study.results import ResultError, read


class Progress:
    """Turns the start and end of jobs into lines."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.expected = 0
        self.done = 0
        self.began: float | None = None
        self.running: dict[int, tuple[str, Sequence[str]]] = {}

    def start(
        self, job: int, rule: str, wildcards: Mapping[str, str] | None, outputs: Sequence[str]
    ) -> None:
        """Note a job that has begun."""
        self.began = self.now() if self.began is None else self.began
        # `size~small/context~128` reads as `size=small context=128`.
        point = (wildcards or {}).get("point", "").replace("/", " ").replace("~", "=")
        self.running[job] = (f"{rule} {point}".strip(), outputs)

    def name_of(self, job: int) -> str:
        """The rule and the point of a job that is running."""
        return self.running[job][0] if job in self.running else ""

    def finish(self, job: int) -> str:
        """A line on a job that has ended: what it was, what it gave, what is left."""
        if job not in self.running or self.began is None:
            return ""
        label, outputs = self.running.pop(job)
        self.done += 1
        left = self.expected - self.done
        seconds = (self.now() - self.began) / self.done * left
        gave = f": {text}" if (text := outcome(outputs)) else ""
        rest = f"; {left} left, about {duration(seconds)}" if left > 0 else ""
        width = len(str(self.expected))
        return f"[{self.done:>{width}}/{self.expected}] {label}{gave}{rest}"


def outcome(outputs: Sequence[str]) -> str:
    """What a measured point gave, and its failed variants; nothing for another file."""
    for path in map(Path, outputs):
        if path.suffix == ".json" and path.is_file() and path.parts[0] == "results":
            try:
                result = read(path)
            except ResultError as error:
                return str(error)
            return ", ".join([result.headline(), *result.failed_variants()])
    return ""


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
