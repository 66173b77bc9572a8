"""Jobs of several ranks, as three chapters read them: who took part, and what each arm gave.

Backend, number of ranks and where they ran are what the process group said of itself while it
measured; nothing here reads them off a path.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmlab.study.results import LacksKey, Result, Told
from lmlab.writeup.caption import describe, device_of
from lmlab.writeup.collect import Collected, Row
from lmlab.writeup.numbers import counted, listed

BACKENDS = {"nccl": "NCCL", "gloo": "gloo"}
PLACES = {"own_gpu": "with a GPU each", "shared_gpu": "that share one GPU", "cpu": "on CPU cores"}
MIB = 2**20


@dataclass(frozen=True)
class Job:
    """One measured point."""

    row: Row
    result: Result

    @property
    def data(self) -> Mapping[str, Any]:
        return self.result.data

    @property
    def key(self) -> str:
        """What its tables and figures are named by."""
        parameters = self.result.parameters
        return f"{parameters['placement']}_{parameters['world_size']}"

    @property
    def world_size(self) -> int:
        return int(self.data["ranks"]["world_size"])

    @property
    def shared(self) -> bool:
        """Whether ranks compute on one GPU together."""
        ranks = self.data["ranks"]
        return bool(ranks["device"] == "cuda" and ranks["gpus"] < ranks["world_size"])

    @property
    def host_runs_ahead(self) -> bool:
        """Whether a message is handed over by a host that does not wait for its GPU.

        NCCL's messages are kernels and start when their turn comes; gloo's start with the call.
        """
        ranks = self.data["ranks"]
        return bool(ranks["device"] == "cuda" and ranks["backend"] == "gloo")

    @property
    def who(self) -> str:
        """`2 ranks that share one GPU, gloo`."""
        ranks = self.data["ranks"]
        backend = BACKENDS.get(ranks["backend"], ranks["backend"])
        number = counted(self.world_size, "rank")
        own = "cpu" if ranks["device"] == "cpu" else "shared_gpu" if self.shared else "own_gpu"
        return f"{number} {PLACES[own]}, {backend}"

    @property
    def work(self) -> str:
        """What no column shows."""
        parameters = self.result.parameters
        batch = f"batch {parameters['batch']} a rank"
        return f"context {parameters['context']}, {batch}, {parameters['precision']}"

    def rounds(self, taken: int) -> str:
        """`8`, or `3 of 8` where the time was up before all that were asked for."""
        return str(taken) if self.took_all(taken) else f"{taken} of {self._asked}"

    def took_all(self, taken: int) -> bool:
        """Whether that is every round that the study asks for."""
        return taken >= self._asked

    @property
    def _asked(self) -> int:
        return int(self.result.settings["rounds"])

    def place(self, size: str) -> str:
        """Ranks, model and device, for what is not a time."""
        return f"{self.who}; {size}, {self.work}. {device_of(self.result)}."

    def caption(self, size: str) -> str:
        """Ranks, device, model and statistics, from the result."""
        statistics_of = describe([self.result], columns=["batch"])
        return f"{self.who}; {size}, {self.work}. {statistics_of}"


def jobs(collected: Collected) -> list[Job]:
    """The points that were measured, in the study's order."""
    return [
        Job(row, _clocked(row.result))
        for row in collected.rows
        if row.result is not None and row.status == "ok"
    ]


def _clocked(result: Result) -> Result:
    """The result, if its measurements are there: captions tell their clock and number."""
    times = result.measurements
    if not times and isinstance(times, Told) and times.source is not None:
        raise LacksKey(times.source, "measurements")
    return result


def left_out(collected: Collected) -> str:
    """The points without numbers in a sentence, reasons and all; empty if there are none."""
    alike: dict[tuple[str, str], list[Row]] = {}
    for row in collected.rows:
        if row.status != "ok":
            place = PLACES[str(row.point.parameters["placement"])]
            alike.setdefault((place, row.status), []).append(row)
    parts = [_without(place, rows) for (place, _), rows in alike.items()]
    return f"Without numbers: {'; '.join(parts)}." if parts else ""


def _without(place: str, rows: Sequence[Row]) -> str:
    """`2, 4 and 8 ranks with a GPU each (needs 2 GPUs, 1 found, and so on)`."""
    worlds = listed(str(row.point.parameters["world_size"]) for row in rows)
    reasons = list(dict.fromkeys(row.reason or "not measured" for row in rows))
    more = ", and so on" if len(reasons) > 1 else ""
    return f"{worlds} ranks {place} ({reasons[0]}{more})"


def size_settings(job: Job) -> Mapping[str, Any]:
    """The shape of the size that was taken."""
    sizes: Sequence[Mapping[str, Any]] = job.result.settings["sizes"]
    return next(one for one in sizes if one["size"] == job.data["choice"]["size"])


def slowest(ranks_ms: Sequence[Sequence[float]]) -> list[float]:
    """Round by round the time of the slowest rank: that is when a step is over."""
    return [max(times) for times in zip(*ranks_ms, strict=True)]


def skew(ranks_ms: Sequence[Sequence[float]]) -> float:
    """The median over rounds of how far apart the first and the last rank finish."""
    return statistics.median(max(times) - min(times) for times in zip(*ranks_ms, strict=True))


def rank_shares(trace: Mapping[str, Any]) -> list[float]:
    """What of its messages every rank hides; empty where no message was seen."""
    return [float(share) for share in trace["overlapped_share_by_rank"] if share is not None]


def hideable(trace: Mapping[str, Any]) -> float | None:
    """The share of its messages that all computing of a step could cover; None without any."""
    under_way = float(trace["communication_ms"])
    return min(1.0, float(trace["compute_ms"]) / under_way) if under_way else None


def sound(arms: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The arms that have times, by their status: one that says so and has none is found out."""
    return {name: arm for name, arm in arms.items() if arm["status"] == "ok"}
