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

STARTS, MOST_TURNS, TINY = 7, 20, 1e-12
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

    def of(self, sent: Sent) -> float:
        """What the model says that a variant adds."""
        return added_ms(
            sent.total_bytes, sent.messages, sent.hide_ms,
            bytes_per_ms=self.bytes_per_ms, call_ms=self.call_ms,
        )  # fmt: skip


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
    """Bandwidth and time of a call from what variants added; None if fewer than three are there.

    Once it is known which term decides for each variant, the model is linear in 1/B and c. So terms
    are guessed from many starting points, the linear problem is solved, and terms are looked up
    anew, until nothing changes; the best of all ends is taken.
    """
    usable = [sent for sent in variants if sent.messages > 0]
    if len(usable) < 3:
        return None
    measured = np.array([sent.added_ms for sent in usable])
    scale = max(float(np.abs(measured).max()), 1e-6)
    rate = max(sent.total_bytes for sent in usable) / scale
    ends = [
        _settle(usable, measured, 1 / (rate * faster), scale * share)
        for faster in np.geomspace(0.1, 1e3, STARTS)
        for share in np.geomspace(1e-6, 0.1, STARTS)
    ]
    missed, per_byte, call = min(ends)
    return Fit(
        bytes_per_ms=1 / per_byte,
        call_ms=call,
        missed_ms=missed,
        missed_share=missed / max(float(np.abs(measured).mean()), 1e-9),
    )


def _settle(
    usable: Sequence[Sent], measured: Floats, per_byte: float, call: float
) -> tuple[float, float, float]:
    """What is missed, 1/B and c at the best place on the way from a starting point."""
    best = (float("inf"), per_byte, call)
    for _ in range(MOST_TURNS):
        design, fixed = _terms(usable, per_byte, call)
        missed = math.sqrt(float(np.square(design @ [per_byte, call] + fixed - measured).mean()))
        best = min(best, (missed, per_byte, call))
        solution = np.linalg.lstsq(design, measured - fixed, rcond=None)[0]
        after = (max(float(solution[0]), TINY), max(float(solution[1]), TINY))
        if after == (per_byte, call):
            break
        per_byte, call = after
    return best


def _terms(usable: Sequence[Sent], per_byte: float, call: float) -> tuple[Floats, Floats]:
    """Factors of 1/B and of c, and what is neither, in the term that decides for each variant."""
    total = np.array([float(sent.total_bytes) for sent in usable])
    number = np.array([float(sent.messages) for sent in usable])
    hidden = np.array([sent.hide_ms for sent in usable]) * (1 - 1 / number)
    last = total / number * per_byte + call > total * per_byte + number * call - hidden
    factors = np.stack([np.where(last, total / number, total), np.where(last, 1, number)], axis=1)
    return factors, np.where(last, 0.0, -hidden)
