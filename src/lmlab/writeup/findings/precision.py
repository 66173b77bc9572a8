"""What the precision experiments say of sums, of autocast and of LayerNorm."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.accumulation import accumulation, cast, drift
from lmlab.writeup.findings.layernorm import (
    enough_range_and_digits,
    output_finite,
    variance_digits,
    variance_range,
)
from lmlab.writeup.frames import precision as frames
from lmlab.writeup.numbers import listed
from lmlab.writeup.table import STATUS_CELLS


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    variances = frames.variances(collected)
    return {
        "summary": summary(collected),
        "accumulation": accumulation(collected),
        "cast": cast(collected),
        "drift": drift(collected),
        "autocast": autocast(collected),
        "variance_range": variance_range(variances),
        "variance_digits": variance_digits(variances),
        "bf16_enough": enough_range_and_digits(variances),
        "layernorm_output": output_finite(frames.output_errors(collected)),
    }


def summary(collected: Collected) -> str:
    """The chapter in one sentence, for the abstract."""
    loops = frames.loops(collected)
    if not {"fp32", "fp16"} <= set(loops):
        return "The accumulation loops were not measured."
    return (
        f"A sum that should be {loops['fp32']['exact']:g} ends at {loops['fp16']['result']:.4f} in "
        f"fp16 and at {loops['fp32']['result']:.4f} in fp32."
    )


def autocast(collected: Collected) -> str:
    """Which parts of the toy model stay in fp32."""
    found = frames.autocast(collected)
    refused = [
        f"{row.point.parameters['dtype']}, {STATUS_CELLS[row.status]}"
        + (f" ({row.reason})" if row.reason else "")
        for row in frames.rows_of(collected, "autocast")
        if row.status != "ok"
    ]
    # Types that keep the same parts in fp32 share a sentence.
    alike: dict[tuple[tuple[str, bool], ...], list[str]] = {}
    for dtype, components in found.items():
        wide = tuple((name, frames.BITS[kind] >= 32) for name, kind in components.items())
        alike.setdefault(wide, []).append(dtype)
    told = [_kept(listed(dtypes), dict(wide)) for wide, dtypes in alike.items()]
    if refused:
        told.append(f"Autocast without an answer: {'; '.join(refused)}.")
    return " ".join(told) or "What autocast keeps in fp32 is not known: it was not measured."


def _kept(dtypes: str, wide: dict[str, bool]) -> str:
    kept = [frames.COMPONENTS.get(name, name) for name, is_wide in wide.items() if is_wide]
    low = [frames.COMPONENTS.get(name, name) for name, is_wide in wide.items() if not is_wide]
    start = f"Under autocast to {dtypes}"
    if not low:
        return f"{start} everything stays in fp32."
    if not kept:
        return f"{start} nothing stays in fp32."
    return f"{start} these stay in fp32: {listed(kept)}; in 16 bit: {listed(low)}."
