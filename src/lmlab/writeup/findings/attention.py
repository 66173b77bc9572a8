"""What the attention measurements say, sentence by sentence."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.comparison import FEW_SAMPLES_APART, FEWEST_SAMPLES
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
    once,
)
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import beside
from lmlab.writeup.numbers import counted, factor, listed, percent, significant
from lmlab.writeup.places import extreme
from lmlab.writeup.tables.cells import WITHIN_NOISE


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
        "compiling_cost": compiling_cost(collected, data),
        "correctness": correctness(data),
        "told_apart": told_apart(),
        "flash_wins": flash_wins(race),
        "not_slower": not_slower(race),
        "growth_flash": growth(race),
        "limit": distance_to_limit(collected, race),
        "tiles": tiles(collected, data),
        "leaderboard": leaderboard(collected, data),
        "model_attention": model_attention(data),
    }


def told_apart() -> str:
    """What it takes to be called faster, or slower, in this chapter."""
    return (
        "One is called faster than another where the middle halves of their samples stay apart by "
        f"{percent(frames.LEAST_APART, 1)} at least, of fewer than {FEWEST_SAMPLES} samples "
        f"by {percent(FEW_SAMPLES_APART, 1)}; {WITHIN_NOISE} marks what is not told apart."
    )


def summary(data: pd.DataFrame) -> str:
    """The chapter in a sentence or two, for the abstract."""
    parts = [
        _race_summary(frames.of(data, topic="benchmark")),
        _board_summary(frames.of(data, topic="leaderboard", pass_="both")),
        _model_summary(data),
    ]
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
            f"{last['head_dim']}, {last['precision']}); our kernels were not timed beside it."
        )
    ends = [_ratio(extreme(ratios, "speedup", largest=largest)) for largest in (False, True)]
    same = int((ratios["verdict"] == "same").sum())
    noise = f" (within noise at {same} of {counted(len(ratios), 'shape')})" if same else ""
    failed = len(frames.of(both, arm=frames.OURS, status="failed"))
    note = f" At {counted(failed, 'shape')} they failed and have no time." if failed else ""
    return (
        f"Forward and backward of one head of attention, our Triton kernels are "
        f"{' to '.join(dict.fromkeys(ends))} as fast as the naive formula{noise}"
        f"{_beside_the_best(both)}.{note}"
    )


def _beside_the_best(both: pd.DataFrame) -> str:
    """How they stand beside whichever other variant is fastest at a shape, by precision."""
    ratios = _best_others(both)
    told = [
        f"{_span(part)} in {precision}{_without(frames.of(both, precision=precision))}"
        for precision, part in ratios.groupby("precision", sort=False)
    ]
    return f" and, beside the best other variant, {listed(told)}" if told else ""


def _best_others(rows: pd.DataFrame) -> pd.DataFrame:
    """Ours against the fastest other variant of each shape."""
    keys = ["precision", "head_dim", "sequence"]
    every = beside(rows, frames.OURS)
    if not len(every):
        return pd.DataFrame(columns=keys)
    return every.loc[every.groupby(keys, sort=False)["median_ms_a"].idxmin()]


def _span(ratios: pd.DataFrame) -> str:
    """From the least to the largest, and which of the two rests on one sample."""
    ends = [extreme(ratios, "speedup", largest=largest) for largest in (False, True)]
    notes: dict[str, str] = {}
    for end in ends:
        told = factor(end["speedup"])
        notes[told] = notes.get(told) or once(end)
    return " to ".join(f"{told}{_in_brackets(note)}" for told, note in notes.items())


def _in_brackets(note: str) -> str:
    return f" ({note.removeprefix('; ')})" if note else ""


def _without(rows: pd.DataFrame) -> str:
    """The variants that this precision leaves out: a race without them is another race."""
    gone = [
        frames.label(arm)
        for arm in frames.arms_of(rows)
        if (frames.of(rows, arm=arm)["status"] == "unsupported").all()
    ]
    return f" (where {listed(gone)} {'does' if len(gone) == 1 else 'do'} not run)" if gone else ""


def _ratio(row: pd.Series) -> str:
    return (
        f"{factor(row['speedup'])} (head dim {row['head_dim']}, sequence {row['sequence']:,}, "
        f"{row['precision']}{once(row)})"
    )


def _board_summary(both: pd.DataFrame) -> str:
    """The published shape, which fills the GPU as one head alone need not."""
    ours = frames.measured(frames.of(both, arm=frames.OURS))
    if not len(ours):
        return ""
    ratios = _best_others(both)
    told = [_beside_one(row, ratios) for _, row in ours.iterrows()]
    first = ours.iloc[0]
    return (
        f"At {counted(first['heads'], 'head')} over {first['sequence']:,} tokens in "
        f"{first['precision']} our kernels take {listed(told)}."
    )


def _beside_one(ours: pd.Series, ratios: pd.DataFrame) -> str:
    """`3.94 ms at head dim 64 (the best other, SDPA cuDNN, 4.25 ms; ours is 1.08× as fast)`."""
    text = f"{significant(ours['median_ms'])} ms at head dim {ours['head_dim']}"
    here = ratios[ratios["head_dim"] == ours["head_dim"]]
    if not len(here):
        return text
    best = here.iloc[0]
    noise = ", within noise" if best["verdict"] == "same" else ""
    return (
        f"{text} (the best other, {frames.label(best['other'])}, "
        f"{significant(best['median_ms_a'])} ms; ours is {factor(best['speedup'])} as fast"
        f"{noise}{once(best)})"
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
