"""What averaging gradients adds to a step, as a function of how many messages carry them.

A message costs its bytes over the bandwidth and a fixed time for the call. Sent after backward, n
messages of together S bytes add

    S / B + n c

to the step (S bytes, B bandwidth, c time of a call). Sent during backward, which lasts h, the first
message can leave when its share 1/n of the gradients is there, so up to h (1 - 1/n) of that is
hidden; but the last one holds the gradients that come last, and nothing hides it:

    max(S / B + n c - h (1 - 1/n),  S / (n B) + c)

Few messages leave late, many pay for calls. Where the link is the limit the first term decides, and
its best number of messages is sqrt(h / c): the bandwidth has no part in it. Where the link is quick
the second one decides until calls catch up.

B and c are fitted: the pair that comes closest to all variants at once, those after backward (h
counted as zero) and those during it, in the sum of squares of what the model misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVELS, POINTS = 5, 61
MOST_MESSAGES = 100_000


@dataclass(frozen=True, kw_only=True)
class Sent:
    """How one variant sent its gradients, and what that added to its step."""

    name: str
    total_bytes: int
    messages: int
    hide_ms: float
    """How long backward lasts, for a variant that talks during it; else zero."""
    added_ms: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The link as the model sees it."""

    bytes_per_ms: float
    call_ms: float
    missed_ms: float
    """Root of the mean square of what the model misses."""
    missed_share: float
    """The same over the mean of what was measured."""

    @property
    def gb_per_s(self) -> float:
        return self.bytes_per_ms / 1e6


def added_ms(
    total_bytes: float, messages: float, hide_ms: float, *, bytes_per_ms: float, call_ms: float
) -> float:
    """What averaging adds to a step."""
    sending = total_bytes / bytes_per_ms + messages * call_ms
    last = total_bytes / messages / bytes_per_ms + call_ms
    return max(sending - hide_ms * (1 - 1 / messages), last)


def best_messages(
    total_bytes: float, hide_ms: float, *, bytes_per_ms: float, call_ms: float
) -> int:
    """The number of messages that adds least when they leave during backward."""

    def added(messages: int) -> float:
        return added_ms(total_bytes, messages, hide_ms, bytes_per_ms=bytes_per_ms, call_ms=call_ms)

    tried = {round(10 ** (step / 100)) for step in range(int(100 * math.log10(MOST_MESSAGES)))}
    near = min(sorted(tried), key=added)
    reach = max(2, near // 20)
    return min(range(max(1, near - reach), near + reach + 1), key=added)


def fit(variants: Sequence[Sent]) -> Fit | None:
    """Bandwidth and time of a call from what variants added; None if fewer than three are there."""
    usable = [sent for sent in variants if sent.messages > 0]
    if len(usable) < 3:
        return None
    measured = np.array([sent.added_ms for sent in usable])
    scale = max(float(np.abs(measured).max()), 1e-6)
    rate = max(sent.total_bytes for sent in usable) / scale
    rates, calls = (rate * 1e-2, rate * 1e4), (scale * 1e-7, scale)
    for _ in range(LEVELS):
        rate_grid, call_grid = (np.geomspace(low, high, POINTS) for low, high in (rates, calls))
        errors = _errors(usable, measured, rate_grid, call_grid)
        at_rate, at_call = np.unravel_index(int(errors.argmin()), errors.shape)
        rates, calls = _around(rate_grid, int(at_rate)), _around(call_grid, int(at_call))
    missed = math.sqrt(float(errors.min()))
    return Fit(
        bytes_per_ms=float(rate_grid[at_rate]),
        call_ms=float(call_grid[at_call]),
        missed_ms=missed,
        missed_share=missed / max(float(np.abs(measured).mean()), 1e-9),
    )


def _errors(usable: Sequence[Sent], measured: Floats, rates: Floats, calls: Floats) -> Floats:
    """Mean square of what the model misses, for every pair of bandwidth and call."""
    rate, call = rates[:, None, None], calls[None, :, None]
    total = np.array([float(sent.total_bytes) for sent in usable])
    messages = np.array([float(sent.messages) for sent in usable])
    hide = np.array([sent.hide_ms for sent in usable])
    sending = total / rate + messages * call - hide * (1 - 1 / messages)
    last = total / messages / rate + call
    squares: Floats = ((np.maximum(sending, last) - measured) ** 2).mean(axis=2)
    return squares


def _around(grid: Floats, index: int) -> tuple[float, float]:
    """The neighbours of the best point: where the next, finer grid lies."""
    return float(grid[max(index - 1, 0)]), float(grid[min(index + 1, len(grid) - 1)])
