"""The variants of one point, measured in one process, each with its own records and status.

Only times from one process give trustworthy ratios. A variant that runs out of memory, or that is
not available on this machine, must not cost the others their numbers: it gets a record with a
status and a reason, and the others are still measured. The point is ok if any variant is.
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
        """Variants that have not been stopped."""
        return [name for name in self._labels if name not in self._failures]

    def note(
        self, name: str, quantity: str, number: float | None, unit: str, **labels: Label
    ) -> None:
        """Record a number of a variant; None and numbers that are not finite are left out."""
        if number is not None and math.isfinite(number):
            self.records.append(value(quantity, number, unit, **self._labels[name], **labels))

    def time(self, name: str, measurement: Measurement, **labels: Label) -> None:
        """Record a time of a variant."""
        self.records.append(timed(measurement, "time", **self._labels[name], **labels))

    def attempt(self, name: str) -> AbstractContextManager[None]:
        """Run a block for one variant; an error in it stops this variant and no other."""
        return _Attempt(self, name)

    def stop(self, name: str, error: Exception) -> None:
        """Stop a variant and record its status, with the reason in one line."""
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
        """All records; if no variant is left, the status of the first and the reasons of all."""
        if self.running:
            return Outcome(measurements=[*shared, *self.records])
        reasons = (f"{name}: {reason}" for name, (_, reason) in self._failures.items())
        return without_numbers(next(iter(self._failures.values()))[0], "; ".join(reasons))


class _Attempt(AbstractContextManager[None]):
    """A block whose error stops one variant. A class, because the error's frames hold the tensors
    that filled the memory, and a generator would keep them alive during the cleanup."""

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
    """Release unused memory, so that all of it is available to the next variant."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """Bytes allocated to tensors; 0 on a CPU, which does not count them."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def refuse_unsupported(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise `Unsupported` for a variant that does not support such inputs on this device."""
    if reason := why_unsupported(name, device=device, dtype=dtype, head_dim=head_dim):
        raise Unsupported(reason)
