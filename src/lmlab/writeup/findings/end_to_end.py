"""What the end-to-end measurements say, sentence by sentence."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.host_limit import host_limit
from lmlab.writeup.findings.repeatability import between_processes, spread
from lmlab.writeup.findings.speedup import speedup_findings
from lmlab.writeup.findings.step_times import backward_ratio, growth, phase_range
from lmlab.writeup.findings.warm_up import enough_warmup, settling, warmup_effect
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.speedup import BASE, compared_precisions, speedups
from lmlab.writeup.numbers import counted, factor, listed, percent, significant
from lmlab.writeup.places import extreme, place

MODES = {
    "forward": "forward alone (no gradient)",
    "forward_backward": "forward with backward",
    "train_step": "a whole training step",
}


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    data = frames.frame(collected)
    precisions = frames.order(frames.grid(data), "precision")
    return {
        "summary": summary(collected, data),
        "modes": modes(data),
        **{
            f"times_{precision}_{phase}": phase_range(data, precision, phase)
            for precision in precisions
            for phase in ("forward", "backward")
        },
        **{f"growth_{precision}": growth(data, precision) for precision in precisions},
        "backward_ratio": backward_ratio(data),
        "spread": spread(data, collected.device),
        "between_processes": between_processes(data),
        "utilisation": utilisation(collected, data),
        "host_limit": host_limit(data, collected.device),
        "warmup_effect": warmup_effect(data),
        "enough_warmup": enough_warmup(data),
        "settling": settling(data),
        **{
            name: text
            for precision in compared_precisions(data)
            for name, text in speedup_findings(data, precision).items()
        },
        "published": published(collected, data),
    }


def summary(collected: Collected, data: pd.DataFrame) -> str:
    """The chapter in two sentences, for the abstract."""
    steps = _steps(data)
    if not len(steps):
        return "No training step was measured."
    low, high = (extreme(steps, "median_ms", largest=largest) for largest in (False, True))
    text = (
        f"A training step takes from {significant(low['median_ms'])} ms ({place(low)}, "
        f"{low['precision']}) to {significant(high['median_ms'])} ms ({place(high)}, "
        f"{high['precision']})."
    )
    return " ".join([text, *(_speedup_summary(data, p) for p in compared_precisions(data))])


def _speedup_summary(data: pd.DataFrame, precision: str) -> str:
    ratios = frames.of(speedups(data, precision), what="whole step")
    if not len(ratios):
        return f"{precision} could not be compared with {BASE}."
    faster, slower = (ratios[ratios["verdict"] == word] for word in ("faster", "slower"))
    gain = f" (up to {factor(faster['speedup'].max())})" if len(faster) else ""
    loss = f" (down to {factor(slower['speedup'].min())})" if len(slower) else ""
    return (
        f"Against {BASE}, {precision} makes {len(faster)} of {counted(len(ratios), 'step')} faster "
        f"beyond noise{gain} and {len(slower) or 'none'} slower{loss}."
    )


def modes(data: pd.DataFrame) -> str:
    """What is timed."""
    names = frames.order(frames.grid(data), "mode")
    if not names:
        return "The study asks for no point of the grid."
    return (
        f"Every size and context is timed in {counted(len(names), 'mode')}: "
        f"{listed(MODES[name] for name in names)}."
    )


def utilisation(collected: Collected, data: pd.DataFrame) -> str:
    """The best share of the peak that a training step reaches, a precision at a time."""
    steps = _steps(data)
    steps = steps[steps["tflops"].notna()]
    parts = [
        _best_share(collected, frames.of(steps, precision=precision), precision)
        for precision in frames.order(steps, "precision")
    ]
    return " ".join(parts) or "No utilisation: no training step with known FLOPs was measured."


def _best_share(collected: Collected, steps: pd.DataFrame, precision: str) -> str:
    best = extreme(steps, "tflops", largest=True)
    rate = f"{significant(best['tflops'])} TFLOP/s ({place(best)})"
    peak = collected.ceiling("peaks", "tflops", precision)
    ceiling = collected.ceiling("ceilings", "matmul_tflops", precision, "tflops")
    shares = [
        f"{percent(best['tflops'] / limit)} of {name}"
        for limit, name in ((peak, "the stated peak (MFU)"), (ceiling, "the measured matmul rate"))
        if limit
    ]
    without = "" if peak else f"; no MFU, there is no sourced peak for {collected.device_name}"
    reached = f", {' and '.join(shares)}" if shares else ""
    return f"In {precision} a training step reaches at most {rate}{reached}{without}."


def published(collected: Collected, data: pd.DataFrame) -> str:
    """Why there is no published table, where there is none."""
    if collected.device == "cpu":
        return "The published figures are of GPUs; those of a CPU have nothing to stand beside."
    return "No size of this study has published figures at the same batch and warm-up."


def _steps(data: pd.DataFrame) -> pd.DataFrame:
    return frames.measured(frames.of(frames.grid(data), mode="train_step", phase="total"))
