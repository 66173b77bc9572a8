"""Answers of the precision chapter that are known in advance: arithmetic is the same everywhere."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames.precision import LOOPS, data_of, loops

# A hundredth added a thousand times, to four decimals, as every published write-up has it.
KNOWN_TERMS, KNOWN_TERM = 1000, 0.01
KNOWN_RESULTS = {
    "fp32": "10.0001",
    "fp16": "9.9531",
    "fp32_plus_fp16": "10.0021",
    "fp32_plus_fp16_cast": "10.0021",
}


def checks(collected: Collected) -> list[str]:
    """The four loops give what IEEE arithmetic gives."""
    data = data_of(collected, "accumulation")
    if data is None or (data["terms"], data["term"]) != (KNOWN_TERMS, KNOWN_TERM):
        return []
    found = {name: f"{loop['result']:.4f}" for name, loop in loops(collected).items()}
    return [
        f"The loop {LOOPS[name]} gives {found[name]}; IEEE arithmetic gives {known}."
        for name, known in KNOWN_RESULTS.items()
        if found.get(name, known) != known
    ]
