"""Which tiles are fastest and which do not fit, and our place at the shape that others publish."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import (
    binary_bytes,
    counted,
    factor,
    listed,
    percent,
    significant,
    span,
)
from lmlab.writeup.places import extreme
from lmlab.writeup.references import published_entries
from lmlab.writeup.tables.attention_race import PASSES
from lmlab.writeup.tables.attention_tiles import CHOSEN, cut_name, needed_bytes, shared_limit

TOGETHER = {"forward": "forward", "backward": "backward", "both": "together"}
HOW = {"faster": "faster than", "slower": "slower than", "same": "within noise of"}


def tiles(collected: Collected, data: pd.DataFrame) -> str:
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
    return f"{' '.join(told)} {_too_large(collected, frames.of(cuts, status='unsupported'))}"


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
    taken = chosen.iloc[0]
    return (
        f"{text}. The launch table takes {cut_name(taken)}: {significant(taken['median_ms'])} ms, "
        f"{factor(best['median_ms'] / taken['median_ms'])} as fast as that cut."
    )


def _too_large(collected: Collected, refused: pd.DataFrame) -> str:
    if not len(refused):
        return "Every cut that was tried fits."
    told = [f"{cut_name(row)} {row['pass']} ({_refusal(row)})" for _, row in refused.iterrows()]
    room = f"; a program may have {binary_bytes(shared_limit(collected))}"
    return f"{counted(len(told), 'cut')} did not fit the GPU: {listed(told)}{room}."


def _refusal(row: pd.Series) -> str:
    needed = needed_bytes(row)
    if needed is not None:
        return f"needs {binary_bytes(needed)} of shared memory"
    return str(row["reason"]).partition(": ")[2] or str(row["reason"])


def leaderboard(collected: Collected, data: pd.DataFrame) -> str:
    """Our place at the published shape."""
    rows = frames.of(data, topic="leaderboard")
    ours = frames.measured(frames.of(rows, arm=frames.OURS, pass_="both"))
    if not len(rows):
        return "The published shape was not asked for."
    if not len(ours):
        told = frames.order(frames.of(rows, arm=frames.OURS), "reason")
        reason = told[0] if told else "not measured"
        return f"Our kernels were not timed at the published shape: {reason}."
    told = [_place(collected, rows, head_dim) for head_dim in ours["head_dim"]]
    return " ".join([_asked(ours.iloc[0]), *told])


def _asked(row: pd.Series) -> str:
    return (
        f"Forward and backward of {counted(row['heads'], 'head')} over {row['sequence']:,} tokens "
        f"in {row['precision']}, where the race above has one head."
    )


def _place(collected: Collected, rows: pd.DataFrame, head_dim: int) -> str:
    here = frames.measured(frames.of(rows, head_dim=head_dim))
    both = frames.of(here, pass_="both").sort_values("median_ms")
    ours = frames.of(both, arm=frames.OURS).iloc[0]
    others = both[both["arm"] != frames.OURS]
    text = f"At head dim {head_dim} our kernels take {significant(ours['median_ms'])} ms"
    if len(others):
        best = others.iloc[0]
        ratio = frames.against(both, frames.OURS, best["arm"]).iloc[0]
        text += (
            f", {HOW[ratio['verdict']]} the best other variant ({frames.label(best['arm'])}, "
            f"{significant(best['median_ms'])} ms; ours is {factor(ratio['speedup'])} as fast)"
        )
    limit = _share_of_limit(collected, frames.of(here, arm=frames.OURS))
    return f"{text}{_published(collected, head_dim)}.{_pass_by_pass(here)}{limit}"


def _share_of_limit(collected: Collected, ours: pd.DataFrame) -> str:
    """Each pass as a share of the measured matmul rate."""
    precision = ours["precision"].iloc[0]
    ceiling = collected.ceiling("ceilings", "matmul_tflops", precision, "tflops")
    if not ceiling:
        return ""
    rates = ours.set_index("pass")["tflops"]
    told = [f"{TOGETHER[n]} {percent(rates[n] / ceiling)}" for n in PASSES if n in rates.index]
    return f" Of the measured matmul rate they reach {listed(told)}."


def _published(collected: Collected, head_dim: int) -> str:
    asked = frames.rows_of(collected, "leaderboard")[0].point.settings
    entries = published_entries(collected.references, head_dim, asked)
    if not len(entries):
        return ""
    entry = extreme(entries.assign(time=entries["ms"].astype(float)), "time", largest=False)
    return f"; the best published entry, on another GPU ({entry['gpu']}), {entry['ms']} ms"


def _pass_by_pass(here: pd.DataFrame) -> str:
    """Whom we beat in every pass, and how it stands with each of the others."""
    others = [arm for arm in frames.arms_of(here) if arm != frames.OURS]
    pairs = {arm: frames.against(here, frames.OURS, arm) for arm in others}
    beaten = {arm: pair for arm, pair in pairs.items() if (pair["verdict"] == "faster").all()}
    told = [
        f"against {frames.label(arm)} they are {_ratios(pair)} as fast"
        for arm, pair in pairs.items()
        if arm not in beaten
    ]
    if beaten:
        names = [f"{frames.label(arm)} ({_span(pair)})" for arm, pair in beaten.items()]
        each = f"forward, backward and together they are faster than {listed(names)}"
        told = [each, *told]
    text = "; ".join(told)
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _span(pair: pd.DataFrame) -> str:
    return f"{span(pair['speedup'])} times as fast"


def _ratios(pair: pd.DataFrame) -> str:
    found = [(name, frames.of(pair, pass_=name)) for name in PASSES]
    return listed(
        f"{TOGETHER[name]} {factor(part['speedup'].iloc[0])}" for name, part in found if len(part)
    )
