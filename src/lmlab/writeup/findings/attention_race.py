"""Who wins the race of the variants, where, and how far from the limit of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import compared, losses, wins_from
from lmlab.writeup.numbers import counted, factor, listed, percent, significant, span
from lmlab.writeup.places import extreme
from lmlab.writeup.tables.attention_tiles import CHOSEN, published_entries

RIVALS = ("naive", "compiled", "sdpa_flash")
"""Nowhere should our kernels be slower than these."""
MOST_NAMED = 3


def correctness(data: pd.DataFrame) -> str:
    """Whether every variant gave the right numbers before it was timed."""
    arms = data.drop_duplicates(["topic", "precision", "head_dim", "sequence", "size", "arm"])
    tried = arms[arms["errors"].notna()]
    if not len(tried):
        return "No variant was held against the reference."
    wrong = tried[tried["reason"].astype(str).str.contains("off by")]
    if not len(wrong):
        return (
            f"{counted(len(tried), 'arm')} were held against a reference in fp32 before they were "
            "timed, output and gradients; all are right."
        )
    named = [f"{frames.label(row['arm'])} ({row['reason']})" for _, row in wrong.iterrows()]
    return (
        f"{len(wrong)} of {counted(len(tried), 'arm')} were off against a reference in fp32 and "
        f"got no time: {listed(_few(named))}."
    )


def flash_wins(race: pd.DataFrame) -> str:
    """From which sequence on our kernels are faster than all others, a precision at a time."""
    both = frames.of(race, pass_="both")
    if not len(frames.measured(frames.of(both, arm=frames.OURS))):
        return _not_timed(race)
    told = [
        _wins(frames.of(both, precision=precision), precision)
        for precision in frames.order(both, "precision")
    ]
    return " ".join(told)


def _not_timed(race: pd.DataFrame) -> str:
    ours = frames.of(race, arm=frames.OURS)
    reasons = [str(reason) for reason in frames.order(ours, "reason")]
    why = f": {reasons[0]}" if reasons else ""
    return f"From which sequence on our kernels win is not known, they were not timed{why}."


def _wins(rows: pd.DataFrame, precision: str) -> str:
    groups: dict[str, list[str]] = {}
    for head_dim in frames.order(rows, "head_dim"):
        here = frames.of(rows, head_dim=head_dim)
        others = compared(here, frames.OURS)
        ratios = [frames.against(here, frames.OURS, other) for other in others]
        groups.setdefault(_won(ratios), []).append(str(head_dim))
    told = "; ".join(f"{_head_dims(names)} {phrase}" for phrase, names in groups.items())
    return f"In {precision}, forward and backward, our kernels beat every other variant: {told}."


def _won(ratios: Sequence[pd.DataFrame]) -> str:
    if not ratios:
        return "against nobody"
    every = pd.concat(ratios, ignore_index=True)
    since = wins_from(every)
    if since is None:
        lost = sorted(set(every["sequence"][every["verdict"] != "faster"]))
        if len(lost) == every["sequence"].nunique():
            return "nowhere beyond noise"
        return f"at some sequences, but not at {listed(_few([f'{s:,}' for s in lost]))}"
    first = min(every["sequence"])
    return "at every sequence" if since == first else f"from sequence {since:,} on"


def _head_dims(names: Sequence[str]) -> str:
    return f"head dim {listed(names)}"


def not_slower(race: pd.DataFrame) -> str:
    """Whether our kernels lose anywhere against the three that they must not lose against."""
    rivals = [arm for arm in RIVALS if arm in set(race["arm"])]
    pairs = sum(len(frames.against(race, frames.OURS, rival)) for rival in rivals)
    names = listed([frames.label(rival) for rival in rivals], "or")
    if not pairs:
        return "Our kernels were timed beside no other variant."
    lost = losses(race, frames.OURS, rivals)
    if not len(lost):
        return f"Nowhere are they slower than {names} beyond noise, in {pairs:,} comparisons."
    worst = extreme(lost, "speedup", largest=False)
    return (
        f"In {len(lost):,} of {pairs:,} comparisons they are slower than {names} beyond noise, "
        f"down to {factor(worst['speedup'])} against {frames.label(worst['other'])} "
        f"({worst['pass']}, head dim {worst['head_dim']}, sequence {worst['sequence']:,}, "
        f"{worst['precision']})."
    )


def growth(race: pd.DataFrame) -> str:
    """The power of the sequence by which the time of our kernels grows."""
    ours = frames.long_ones(frames.measured(frames.of(race, arm=frames.OURS, pass_="both")))
    powers = [
        power
        for precision in frames.order(ours, "precision")
        for power in frames.exponents(frames.of(ours, precision=precision), "median_ms")
    ]
    if not powers:
        return "How the time of our kernels grows is not known: too few sequences were timed."
    return (
        f"From sequence {min(ours['sequence']):,} on their time grows with the sequence to the "
        f"power of {span(powers)}; the arithmetic grows with its square."
    )


def distance_to_limit(collected: Collected, race: pd.DataFrame) -> str:
    """The best rate of each precision as a share of the measured matmul rate."""
    ours = frames.measured(frames.of(race, arm=frames.OURS, pass_="both"))
    told = [
        _best_rate(collected, frames.of(ours, precision=precision), precision)
        for precision in frames.order(ours, "precision")
    ]
    return " ".join(told) or "How far our kernels are from the limit is not known: none was timed."


def _best_rate(collected: Collected, rows: pd.DataFrame, precision: str) -> str:
    best = extreme(rows, "tflops", largest=True)
    rate = (
        f"In {precision} our kernels reach {significant(best['tflops'])} TFLOP/s forward and "
        f"backward (head dim {best['head_dim']}, sequence {best['sequence']:,})"
    )
    ceiling = collected.ceiling("ceilings", "matmul_tflops", precision, "tflops")
    if not ceiling:
        return f"{rate}; there is no measured matmul rate to hold it against."
    return f"{rate}, {percent(best['tflops'] / ceiling)} of the measured matmul rate."


def tiles(data: pd.DataFrame) -> str:
    """Which cut is fastest, what the worst one costs, what does not fit."""
    rows = frames.of(data, topic="tiles")
    if not len(rows):
        return "Tiles were not asked for."
    cuts = rows[rows["arm"] != CHOSEN]
    timed = frames.measured(cuts)
    if not len(timed):
        return f"No cut was timed: {rows['reason'].iloc[0] or 'not measured'}."
    told = [
        _best_cut(frames.of(rows, pass_=name, head_dim=head_dim))
        for head_dim in frames.order(timed, "head_dim")
        for name in frames.order(timed, "pass")
    ]
    large = frames.of(cuts, status="unsupported")
    if not len(large):
        return f"{' '.join(told)} Every cut that was tried fits."
    names = dict.fromkeys(f"{row['arm']} {row['pass']}" for _, row in large.iterrows())
    reason = str(large["reason"].iloc[0]).partition(": ")[2] or large["reason"].iloc[0]
    return f"{' '.join(told)} Not held by the GPU: {listed(names)} ({reason})."


def _best_cut(rows: pd.DataFrame) -> str:
    timed = frames.measured(rows[rows["arm"] != CHOSEN])
    if not len(timed):
        return "No cut of this kind fits."
    best, worst = (extreme(timed, "median_ms", largest=largest) for largest in (False, True))
    text = (
        f"{best['pass'].capitalize()}, head dim {best['head_dim']}: the fastest plain cut keeps "
        f"{best['kept']} rows and walks {best['walked']} ({significant(best['median_ms'])} ms); "
        f"the slowest, {worst['kept']} and {worst['walked']}, takes "
        f"{factor(worst['median_ms'] / best['median_ms'])} as long"
    )
    chosen = frames.measured(frames.of(rows, arm=CHOSEN))
    if not len(chosen):
        return f"{text}."
    return f"{text}. What the launch table takes: {significant(chosen['median_ms'].iloc[0])} ms."


def leaderboard(collected: Collected, data: pd.DataFrame) -> str:
    """Our place at the published shape."""
    rows = frames.of(data, topic="leaderboard", pass_="both")
    ours = frames.measured(frames.of(rows, arm=frames.OURS))
    if not len(rows):
        return "The published shape was not asked for."
    if not len(ours):
        reason = rows["reason"].iloc[0] or "not measured"
        return f"Our kernels were not timed at the published shape: {reason}."
    return " ".join(_place(collected, rows, head_dim) for head_dim in ours["head_dim"])


def _place(collected: Collected, rows: pd.DataFrame, head_dim: int) -> str:
    here = frames.measured(frames.of(rows, head_dim=head_dim)).sort_values("median_ms")
    ours = frames.of(here, arm=frames.OURS).iloc[0]
    others = here[here["arm"] != frames.OURS]
    text = f"At head dim {head_dim} our kernels take {significant(ours['median_ms'])} ms"
    if len(others):
        best = others.iloc[0]
        ratio = frames.against(here, frames.OURS, best["arm"]).iloc[0]
        how = {"faster": "faster than", "slower": "slower than", "same": "within noise of"}
        text += (
            f", {how[ratio['verdict']]} the best other variant ({frames.label(best['arm'])}, "
            f"{significant(best['median_ms'])} ms, a ratio of {factor(ratio['speedup'])})"
        )
    asked = frames.rows_of(collected, "leaderboard")[0].point.settings
    entries = published_entries(collected.references, head_dim, asked)
    if len(entries):
        entry = entries.iloc[0]
        text += f"; the best published entry, on another GPU ({entry['gpu']}), {entry['ms']} ms"
    return f"{text}."


def _few(items: Sequence[object]) -> list[str]:
    """The first few, and how many more."""
    shown = [str(item) for item in items[:MOST_NAMED]]
    left = len(items) - MOST_NAMED
    return [*shown, f"{left} more"] if left > 0 else shown
