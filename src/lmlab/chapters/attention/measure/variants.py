"""The variants of one point, measured in one process, each with its own records and status.

Ratios are trustworthy only between times of one process. A variant that runs out of memory, or that
this machine does not have, must not cost the others their numbers: it gets a record with a status
and a reason, and the others are still measured. The point is ok as long as one variant is.
"""

import gc
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from lmlab.attention.support import why_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported, without_numbers
from lmlab.jobs.run import memory_reason
from lmlab.measure.device import is_out_of_memory
from lmlab.measure.records import Label, Record, timed, value, without_value
from lmlab.measure.statistics import Measurement
from lmlab.study.results import Status

Labels = Mapping[str, Label]

KERNEL_OUT_OF_MEMORY = "Triton Error [CUDA]: out of memory"
"""Raised when a kernel is loaded and tensors have taken all of the memory."""


class WrongNumbers(Exception):
    """Output or gradients of a variant are wrong; the message says by how much."""


class Variants:
    """Variants in order, with their records so far and why some of them were stopped."""

    def __init__(self, names: Iterable[str] | Mapping[str, Labels], device: torch.device) -> None:
        labels = names if isinstance(names, Mapping) else {name: {} for name in names}
        self._labels = {name: {"variant": name, **more} for name, more in labels.items()}
        self.device = device
        self._failures: dict[str, tuple[Status, str]] = {}
        self.records: list[Record] = []

    @property
    def running(self) -> list[str]:
        """Variants that nothing has stopped."""
        return [name for name in self._labels if name not in self._failures]

    def note(
        self, name: str, quantity: str, number: float | None, unit: str, **labels: Label
    ) -> None:
        """Record a number of a variant; what is unknown or not finite is left out."""
        if number is not None and math.isfinite(number):
            self.records.append(value(quantity, number, unit, **self._labels[name], **labels))

    def time(self, name: str, measurement: Measurement, **labels: Label) -> None:
        """Record a time of a variant."""
        self.records.append(timed(measurement, "time", **self._labels[name], **labels))

    def attempt(self, name: str) -> AbstractContextManager[None]:
        """Run a block for one variant; an error in it stops this variant and no other."""
        return _Attempt(self, name)

    def stop(self, name: str, error: Exception) -> None:
        """Take a variant out, with the reason in one line."""
        status, reason = self._verdict(error)
        self._failures[name] = status, str(without_numbers(status, reason).reason)
        self.records.append(without_value("time", *self._failures[name], **self._labels[name]))

    def _verdict(self, error: Exception) -> tuple[Status, str]:
        if isinstance(error, Unsupported):
            return "unsupported", str(error)
        for cause in _chain(error):  # the compiler wraps errors
            if is_out_of_memory(cause) or KERNEL_OUT_OF_MEMORY in str(cause):
                return "oom", memory_reason(cause, self.device)
        if isinstance(error, WrongNumbers):
            return "failed", str(error)
        traceback.print_exception(error)
        return "failed", f"{type(error).__name__}: {error}"

    def outcome(self, *shared: Record) -> Outcome:
        """The records of the point and of its variants; if all failed, the status of the first."""
        if self.running:
            return Outcome(measurements=[*shared, *self.records])
        reasons = (f"{name}: {reason}" for name, (_, reason) in self._failures.items())
        return without_numbers(next(iter(self._failures.values()))[0], "; ".join(reasons))


class _Attempt(AbstractContextManager[None]):
    """A block whose error stops one variant. A class, as the frames of an error hold the tensors
    that filled the memory: in a generator they would outlive the cleanup."""

    def __init__(self, variants: Variants, name: str) -> None:
        self._variants, self._name = variants, name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._variants.stop(self._name, error)
        del frames
        for cause in _chain(error):
            cause.with_traceback(None)
        free_memory(self._variants.device)
        return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def free_memory(device: torch.device) -> None:
    """Release what nothing uses any more, so that the next variant finds all of the memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """Bytes in tensors now; a CPU does not count them."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def refuse_unsupported(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise `Unsupported` for a variant that does not support such inputs on this device."""
    if reason := why_unsupported(name, device=device, dtype=dtype, head_dim=head_dim):
        raise Unsupported(reason)
