"""Ceilings that a machine cannot have."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.numbers import significant


def checks(collected: Collected) -> list[str]:
    """A measured ceiling lies below the stated peak, or one of the two is wrong."""
    warnings = []
    for name, row in (collected.ceiling("ceilings", "matmul_tflops") or {}).items():
        peak = collected.ceiling("peaks", "tflops", name)
        if peak is not None and row["tflops"] is not None and row["tflops"] > peak:
            warnings.append(
                f"The measured {name} matmul rate, {significant(row['tflops'])} TFLOP/s, is above "
                f"the stated peak of {significant(peak)}."
            )
    copied = collected.ceiling("ceilings", "copy_gb_per_s", "gb_per_s")
    memory = collected.ceiling("peaks", "memory_tb_per_s")
    if copied is not None and memory is not None and copied > 1000 * memory:
        warnings.append(
            f"The measured copy rate, {significant(copied)} GB/s, is above the stated memory "
            f"bandwidth of {significant(1000 * memory)}."
        )
    return warnings
