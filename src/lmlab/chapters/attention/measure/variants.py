"""The arms of a comparison: several variants measured in one process, each with its own standing.

A ratio is honest only between times of one process. One variant that runs out of memory, or that
this machine does not have, must then not take the others with it: it gets a status and a reason of
its own, and the race goes on without it. The point as a whole is ok as long as one arm is.

`data["arms"]` of a result: name to `{"status", "reason", ...}`, where status is one of a result's
(ok, oom, unsupported, failed) or `capped`, for an arm whose turn alone would outlast the point.
"""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from lmlab.attention.support import why_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported, without_numbers
from lmlab.jobs.run import memory_reason
from lmlab.measure.device import is_out_of_memory
from lmlab.measure.statistics import Measurement
from lmlab.study.results import Status

CAPPED = "capped"
NO_ROOM_FOR_A_KERNEL = "Triton Error [CUDA]: out of memory"
"""What a kernel that is loaded says when tensors have taken all of the memory."""


class Capped(Exception):
    """An arm that would take longer than it is given; the message says how long."""


class WrongNumbers(Exception):
    """An arm whose output or gradients are off; the message says by how much."""


class Arms:
    """Names, in order, with what came of each so far."""

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._device = device
        self.rows: dict[str, dict[str, Any]] = {
            name: {"status": "ok", "reason": None} for name in names
        }

    @property
    def running(self) -> list[str]:
        """Arms that nothing has stopped yet."""
        return [name for name, row in self.rows.items() if row["status"] == "ok"]

    def note(self, name: str, **facts: Any) -> None:
        """Keep numbers of an arm beside its standing."""
        self.rows[name].update(facts)

    def attempt(self, name: str) -> AbstractContextManager[None]:
        """Run a block for one arm; what it raises stops this arm and no other."""
        return _Attempt(self, name)

    def stop(self, name: str, error: Exception) -> None:
        """Take an arm out, with the reason in one line."""
        status, reason = self._verdict(error)
        line = without_numbers("failed", reason).reason
        self.rows[name].update(status=status, reason=line)

    def _verdict(self, error: Exception) -> tuple[str, str]:
        if isinstance(error, Unsupported):
            return "unsupported", str(error)
        if isinstance(error, Capped):
            return CAPPED, str(error)
        for cause in _chain(error):  # the compiler wraps what it meets
            if is_out_of_memory(cause) or NO_ROOM_FOR_A_KERNEL in str(cause):
                return "oom", memory_reason(cause, self._device)
        if isinstance(error, WrongNumbers):
            return "failed", str(error)
        traceback.print_exception(error)
        return "failed", f"{type(error).__name__}: {error}"

    def tidy(self) -> None:
        """Give back what a broken arm has left, so that the next one finds all of the memory."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def outcome(self, measurements: Mapping[str, Measurement], data: Mapping[str, Any]) -> Outcome:
        """The point's outcome: ok if an arm is, else what the first arm came to."""
        data = {**data, "arms": self.rows}
        if self.running:
            return Outcome(measurements=measurements, data=data)
        status, reason = next(iter(self.rows.values()))["status"], self._all_reasons()
        known: Status = "unsupported" if status == CAPPED else status
        return Outcome(status=known, reason=reason, data=data)

    def _all_reasons(self) -> str | None:
        told = "; ".join(f"{name}: {row['reason']}" for name, row in self.rows.items())
        return without_numbers("failed", told).reason


class _Attempt(AbstractContextManager[None]):
    """A block whose error stops one arm.

    A class, because the frames of an error hold the tensors that filled the memory, and whoever is
    called with an error holds its frames: in a generator they would outlive the tidying up.
    """

    def __init__(self, arms: Arms, name: str) -> None:
        self._arms, self._name = arms, name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._arms.stop(self._name, error)
        del frames
        for cause in _chain(error):
            cause.with_traceback(None)
        self._arms.tidy()
        return True


def finite(number: float) -> float | None:
    """A number as a result may hold it: JSON knows neither infinity nor what is not a number."""
    return number if math.isfinite(number) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def refuse_unsupported(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise `Unsupported` for a variant that does not run such inputs here."""
    if reason := why_unsupported(name, device=device, dtype=dtype, head_dim=head_dim):
        raise Unsupported(reason)
