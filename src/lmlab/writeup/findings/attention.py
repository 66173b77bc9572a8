"""What the attention measurements say, sentence by sentence."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.attention_board import leaderboard, tiles
from lmlab.writeup.findings.attention_checked import correctness
from lmlab.writeup.findings.attention_model import compiled_model, compiling_cost, model_attention
from lmlab.writeup.findings.attention_naive import (
    accounted_memory,
    compiled_attention,
    growth_with_head_dim,
    growth_with_sequence,
    out_of_memory,
)
from lmlab.writeup.findings.attention_race import (
    distance_to_limit,
    flash_wins,
    growth,
    not_slower,
)
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import fastest
from lmlab.writeup.numbers import counted, factor, factors, significant
from lmlab.writeup.places import extreme


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    data = frames.frame(collected)
    race = frames.of(data, topic="benchmark")
    return {
        "summary": summary(data),
        "out_of_memory": out_of_memory(data),
        "account": accounted_memory(collected),
        "growth_sequence": growth_with_sequence(data),
        "growth_head_dim": growth_with_head_dim(data),
        "compiled_attention": compiled_attention(data),
        "compiled_model": compiled_model(data),
        "compiling_cost": compiling_cost(data),
        "correctness": correctness(data),
        "flash_wins": flash_wins(race),
        "not_slower": not_slower(race),
        "growth_flash": growth(race),
        "limit": distance_to_limit(collected, race),
        "tiles": tiles(collected, data),
        "leaderboard": leaderboard(collected, data),
        "model_attention": model_attention(data),
    }


def summary(data: pd.DataFrame) -> str:
    """The chapter in a sentence or two, for the abstract."""
    parts = [_race_summary(frames.of(data, topic="benchmark")), _model_summary(data)]
    return " ".join(part for part in parts if part) or "No attention was measured."


def _race_summary(race: pd.DataFrame) -> str:
    both = frames.of(race, pass_="both")
    ratios = frames.against(both, frames.OURS, frames.NAIVE)
    if not len(ratios):
        naive = frames.measured(frames.of(both, arm=frames.NAIVE))
        if not len(naive):
            return ""
        last = naive.sort_values(["sequence", "head_dim"]).iloc[-1]
        return (
            f"Naive attention over {last['sequence']:,} tokens takes "
            f"{significant(last['median_ms'])} ms forward and backward (head dim "
            f"{last['head_dim']}, {last['precision']}); our kernels were not timed."
        )
    worst, best = (extreme(ratios, "speedup", largest=largest) for largest in (False, True))
    failed = len(frames.of(both, arm=frames.OURS, status="failed"))
    note = f" At {counted(failed, 'shape')} they failed and have no time." if failed else ""
    return (
        f"Forward and backward of one head of attention, our Triton kernels are {_ratio(worst)} to "
        f"{_ratio(best)} as fast as the naive formula{_beside_the_best(both)}.{note}"
    )


def _beside_the_best(both: pd.DataFrame) -> str:
    """How they stand beside whichever other variant is fastest at a shape."""
    others = fastest(both, without=[frames.OURS])
    ours = frames.measured(frames.of(both, arm=frames.OURS))
    pairs = others.merge(ours, on=["precision", "head_dim", "sequence"], suffixes=("_a", "_b"))
    if not len(pairs):
        return ""
    ratios = factors(pairs["median_ms_a"] / pairs["median_ms_b"])
    return f" and {ratios} as fast as the best other variant"


def _ratio(row: pd.Series) -> str:
    return (
        f"{factor(row['speedup'])} (head dim {row['head_dim']}, sequence {row['sequence']:,}, "
        f"{row['precision']})"
    )


def _model_summary(data: pd.DataFrame) -> str:
    ratios = frames.against(frames.of(data, topic="model"), frames.OURS, frames.NAIVE)
    if not len(ratios):
        return ""
    faster = ratios[ratios["verdict"] == "faster"]
    if not len(faster):
        return f"With them no train step is faster beyond noise, of {len(ratios)} measured."
    best = extreme(faster, "speedup", largest=True)
    return (
        f"With them a train step is up to {factor(best['speedup'])} as fast ({best['size']} at "
        f"context {best['context']})."
    )
