"""From what came of a point to the result that is kept: the numbers with their provenance.

A record is opened before the measurement and closed after it. The code's fingerprint is taken at
the opening, because a file edited while a long point runs is not the file that it runs. A point
whose process died can no longer close its own; whoever waited for it opens one that began earlier.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from lmlab.jobs.outcome import Outcome, killed_by
from lmlab.jobs.registry import fingerprint
from lmlab.measure.environment import commit, versions
from lmlab.measure.identity import Machine
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from lmlab.study.results import Result


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a result before its numbers are."""

    point: Point
    machine: Machine
    code_fingerprint: str
    commit: dict[str, Any]
    started_at: datetime
    began_s: float
    """Reading of the monotonic clock at `started_at`."""

    def close(self, outcome: Outcome) -> Result:
        """The result of the point, as it is written."""
        return Result(
            chapter=self.point.chapter,
            parameters=self.point.parameters,
            settings=self.point.settings,
            status=outcome.status,
            reason=outcome.reason,
            measurements=tuple(outcome.measurements),
            data=outcome.data,
            flags=outcome.flags,
            machine={
                "id": self.machine.id,
                "device": self.machine.device,
                "name": self.machine.name,
            },
            versions=versions(),
            commit=self.commit,
            code_fingerprint=self.code_fingerprint,
            started_at=self.started_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            elapsed_s=round(time.monotonic() - self.began_s, 3),
        )


def open_record(point: Point, machine: Machine, *, began_s: float | None = None) -> Record:
    """The record of a point that begins now, or began at that reading of the monotonic clock."""
    now_s = time.monotonic()
    began_s = now_s if began_s is None else began_s
    return Record(
        point=point,
        machine=machine,
        code_fingerprint=fingerprint(point),
        commit=commit(ROOT),
        started_at=datetime.now(UTC) - timedelta(seconds=now_s - began_s),
        began_s=began_s,
    )


def crashed(point: Point, machine: Machine, *, signal_number: int, began_s: float) -> Result:
    """The result of a point whose process died of a signal before it could write one."""
    return open_record(point, machine, began_s=began_s).close(killed_by(signal_number))
