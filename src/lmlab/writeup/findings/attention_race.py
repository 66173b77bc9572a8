"""Who wins the race of the variants, where, and how far from the limit of the machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.attention_checked import few, head_dims
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.attention_rates import steps
from lmlab.writeup.frames.race import beside
from lmlab.writeup.numbers import counted, factor, factors, listed, percent, significant, span
from lmlab.writeup.places import extreme
from lmlab.writeup.tables.attention_race import TITLES

RIVALS = ("naive", "compiled", "sdpa_flash")
"""Nowhere should our kernels be slower than these."""
MOST_NAMED = 6
PRODUCTS_OF_FP32 = {"tf32": 3, "bf16": 6}
"""Products on tensor cores that together hold the digits of one in fp32."""
STILL_FILLING_BELOW = 1.9
"""A power of the sequence below this is not the square any more."""
RISE = 2 ** (2 - STILL_FILLING_BELOW) - 1
"""Of a rate over twice the sequence at that power."""


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
    every = beside(rows, frames.OURS)
    gaps = _gaps(frames.of(rows, arm=frames.OURS))
    if not len(every):
        return f"In {precision} our kernels were timed beside no other variant.{gaps}"
    asked = frames.order(rows, "sequence")
    naive = every[every["other"] == frames.NAIVE]
    against_naive = f"naive {_where(naive, asked)}, and " if len(naive) else ""
    return (
        f"In {precision}, forward and backward together, our kernels are faster than "
        f"{against_naive}than every other variant {_where(every, asked)}.{_ahead(every)}"
        f"{_undecided(every)}{gaps}"
    )


def _where(ratios: pd.DataFrame, asked: Collection[int]) -> str:
    """At which head dimensions and sequences all of these comparisons are won beyond noise."""
    groups: dict[str, list[str]] = {}
    for head_dim in frames.order(ratios, "head_dim"):
        here = frames.of(ratios, head_dim=head_dim)
        lost = set(here["sequence"][here["verdict"] != "faster"])
        timed = sorted(set(here["sequence"]))
        pattern = _pattern if len(timed) == len(asked) else _list_with_gaps
        groups.setdefault(pattern(lost, timed), []).append(str(head_dim))
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{phrase} (head dim {listed(names)})" for phrase, names in groups.items())


def _pattern(lost: Collection[int], every: Sequence[int]) -> str:
    won = [sequence for sequence in every if sequence not in lost]
    if not lost:
        return "at every sequence timed"
    if not won:
        return "nowhere beyond noise"
    if won == list(every[-len(won) :]):
        return f"from sequence {won[0]:,} on"
    if won == list(every[: len(won)]):
        return f"up to sequence {won[-1]:,}"
    return f"at all sequences but {listed(few([f'{s:,}' for s in sorted(lost)]))}"


def _list_with_gaps(lost: Collection[int], timed: Sequence[int]) -> str:
    """One by one: `from 4,096 on` would speak of sequences that nobody timed."""
    won = [f"{sequence:,}" for sequence in timed if sequence not in lost]
    if not lost or not won:
        return _pattern(lost, timed)
    others = listed([f"{sequence:,}" for sequence in sorted(lost)], "or")
    return f"at sequence {listed(won)}, not at {others}"


def _ahead(every: pd.DataFrame) -> str:
    """Who is ahead of ours, how often, and where by how much at the most."""
    slower = every[every["verdict"] == "slower"]
    told = [
        f"{frames.label(str(other))} is ahead at {counted(len(part), 'shape')}, there ours is "
        f"{_down_to(part)}"
        for other, part in slower.groupby("other", sort=False)
    ]
    return _sentence("; ".join(told))


def _undecided(every: pd.DataFrame) -> str:
    """Who is neither ahead of ours nor behind: what is not won need not be lost."""
    told = [
        f"{frames.label(str(other))} at {', '.join(head_dims(part))} (ours "
        f"{factors(part['speedup'])} as fast{_how_many_once(part)})"
        for other, part in every[every["verdict"] == "same"].groupby("other", sort=False)
    ]
    return _sentence(f"not told apart from ours: {'; '.join(few(told))}" if told else "")


def _how_many_once(ratios: pd.DataFrame) -> str:
    notes = [note for _, row in ratios.iterrows() if (note := once(row))]
    if not notes or len(notes) == len(ratios):
        return "".join(notes[:1])
    return f"; {len(notes)} of {len(ratios)} from one sample"


def once(ratio: pd.Series) -> str:
    """What is said of a ratio that rests on a single sample of either side."""
    return "; one sample" if min(ratio["n_a"], ratio["n_b"]) == 1 else ""


def _sentence(text: str) -> str:
    """Set behind what was said before it; nothing stays nothing."""
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _down_to(part: pd.DataFrame) -> str:
    worst = extreme(part, "speedup", largest=False)
    least = "" if len(part) == 1 else "down to "
    return (
        f"{least}{factor(worst['speedup'])} as fast (head dim {worst['head_dim']}, sequence "
        f"{worst['sequence']:,})"
    )


def _gaps(ours: pd.DataFrame) -> str:
    """Shapes at which our kernels have no time, by what happened."""
    gone = ours[ours["median_ms"].isna()]
    told = [
        f"{frames.STATUSES[str(status)]} at {len(part)}"
        for status, part in gone.groupby("status", sort=False)
    ]
    return f" Of {counted(len(ours), 'shape')}, ours is {listed(told)}." if told else ""


def not_slower(race: pd.DataFrame) -> str:
    """Whether our kernels lose anywhere: to the three that they must not lose to, and to any."""
    every = beside(race, frames.OURS)
    return f"{_not_slower_than_rivals(race, every)}{_lost_to_any(every)}"


def _lost_to_any(every: pd.DataFrame) -> str:
    """All comparisons there are, since three rivals that were picked are not all."""
    if not set(every["other"]) - set(RIVALS):
        return ""
    lost = every[every["verdict"] == "slower"]
    count = f"{len(lost):,}" if len(lost) else "none"
    told = [
        f"{len(part):,} {TITLES[str(name)].lower()} in {precision} ({_to_whom(part)})"
        for (precision, name), part in lost.groupby(["precision", "pass"], sort=False)
    ]
    listing = f": {listed(told)}. The first folded table of this section lists them"
    return (
        f" Against all other variants, pass by pass, they lose {count} of "
        f"{counted(len(every), 'comparison')} beyond noise"
        f"{listing if told else ''}."
    )


def _to_whom(lost: pd.DataFrame) -> str:
    """`to SDPA cuDNN and FlexAttention, down to 0.813× against FlexAttention, head dim 32`."""
    worst = extreme(lost, "speedup", largest=False)
    names = [frames.label(str(other)) for other in dict.fromkeys(lost["other"])]
    least = "" if len(lost) == 1 else "down to "
    whom = f" against {frames.label(worst['other'])}" if len(names) > 1 else ""
    return (
        f"to {listed(names)}, {least}{factor(worst['speedup'])}{whom}, head dim "
        f"{worst['head_dim']}, sequence {worst['sequence']:,}"
    )


def _not_slower_than_rivals(race: pd.DataFrame, every: pd.DataFrame) -> str:
    if not len(every):
        return "Our kernels were timed beside no other variant."
    pairs = every[every["other"].isin(RIVALS)]
    if not len(pairs):
        return f"They were not timed beside {listed(map(frames.label, RIVALS), 'or')}."
    rivals = [arm for arm in RIVALS if arm in set(race["arm"])]
    names = listed([frames.label(rival) for rival in rivals], "or")
    lost = pairs[pairs["verdict"] == "slower"]
    if not len(lost):
        return f"Nowhere are they slower than {names} beyond noise, in {len(pairs):,} comparisons."
    told = [
        f"{factor(row['speedup'])} against {frames.label(row['other'])} "
        f"({TITLES[row['pass']].lower()}, head dim {row['head_dim']}, sequence "
        f"{row['sequence']:,}, {row['precision']})"
        for _, row in lost.sort_values("speedup").iterrows()
    ]
    return (
        f"In {len(lost):,} of {len(pairs):,} comparisons, pass by pass, they are slower than "
        f"{names} beyond noise: {listed(few(told, MOST_NAMED))}."
    )


def growth(race: pd.DataFrame) -> str:
    """The power of the sequence by which the time of our kernels grows, and what a head costs."""
    ours = frames.measured(frames.of(race, arm=frames.OURS, pass_="both"))
    long = frames.long_ones(ours)
    powers = _powers(long)
    if not powers:
        return "How the time of our kernels grows is not known: too few sequences were timed."
    few = f" ({counted(len(powers), 'fit')})" if len(powers) < _lines(race) else ""
    text = (
        f"From sequence {min(long['sequence']):,} on their time grows with the sequence to the "
        f"power of {span(powers)}{few}"
    )
    last = _last_powers(frames.last_two(long, frames.order(race, "sequence")))
    if last:
        text += f", over the last two sequences alone {span(last.values())}"
    every_pass = frames.measured(frames.of(race, arm=frames.OURS, sequence=set(long["sequence"])))
    taken = steps(every_pass)
    return (
        f"{text}; the arithmetic grows with its square.{_still_rising(taken, last)}"
        f"{_falls(taken)}{_wider(ours)}"
    )


def _lines(race: pd.DataFrame) -> int:
    """Precisions and head dimensions that the study asks for."""
    return len(race[["precision", "head_dim"]].drop_duplicates())


def _still_rising(taken: pd.DataFrame, last: Mapping[tuple[Any, Any], float]) -> str:
    """Where the rate rose all the way and still does, beyond noise.

    One that fell and came back rises at the end too, but it is not a GPU that fills.
    """
    fell = _cases(taken[~(taken["rise"] > 0)])
    longest = taken.groupby(["precision", "head_dim"])["sequence_b"].transform("max")
    at_the_end = frames.of(taken[taken["sequence_b"] == longest], pass_="both", verdict="faster")
    rising = [
        case
        for case in _cases(at_the_end) - fell
        if last.get(case, STILL_FILLING_BELOW) < STILL_FILLING_BELOW
    ]
    if not rising:
        return ""
    where = "In all cases" if len(rising) == len(last) else f"In {len(rising)} of {len(last)} cases"
    return (
        f" {where} their rate rises at every step from there on, in each pass, and over the last "
        f"two by more than {percent(RISE, 1)}: one head alone fills the GPU only when it is long."
    )


def _cases(rows: pd.DataFrame) -> set[tuple[Any, Any]]:
    return set(zip(rows["precision"], rows["head_dim"], strict=True))


def _falls(taken: pd.DataFrame) -> str:
    """Longer sequences at which the rate is lower beyond noise, the deepest fall first."""
    fell = taken[taken["verdict"] == "slower"].sort_values("rise")
    told = [
        f"{TITLES[row['pass']].lower()} by {percent(-row['rise'], 2)} ({row['precision']}, head "
        f"dim {row['head_dim']}, sequence {row['sequence_a']:,} to {row['sequence_b']:,})"
        for _, row in fell.iterrows()
    ]
    return f" Their rate falls beyond noise: {listed(few(told, MOST_NAMED))}." if told else ""


def _last_powers(rows: pd.DataFrame) -> dict[tuple[Any, Any], float]:
    """The power over the last two sequences, by precision and head dimension."""
    return {
        (precision, head_dim): frames.exponent(list(part["sequence"]), list(part["median_ms"]))
        for (precision, head_dim), part in rows.groupby(["precision", "head_dim"], sort=False)
        if part["sequence"].nunique() == 2
    }


def _powers(rows: pd.DataFrame) -> list[float]:
    return [
        power
        for precision in frames.order(rows, "precision")
        for power in frames.exponents(frames.of(rows, precision=precision), "median_ms")
    ]


def _wider(ours: pd.DataFrame) -> str:
    """What a wide head takes against a narrow one, at the longest sequence that has several."""
    told = []
    for precision in frames.order(ours, "precision"):
        here = frames.of(ours, precision=precision)
        several = here.groupby("sequence")["head_dim"].nunique()
        several = several[several > 1]
        if len(several):
            longest: Any = max(several.index)
            times = frames.of(here, sequence=longest).set_index("head_dim")["median_ms"]
            low, high = min(times.index), max(times.index)
            told.append(
                f"in {precision}, head dim {high} takes {factor(times[high] / times[low])} as long "
                f"as {low} (sequence {longest:,}), with {factor(high / low, 2)} the arithmetic"
            )
    return _sentence("; ".join(told))


def distance_to_limit(collected: Collected, race: pd.DataFrame) -> str:
    """The best rates of each precision as a share of the measured matmul rate."""
    ours = frames.measured(frames.of(race, arm=frames.OURS, pass_={"forward", "both"}))
    told = [
        _best_rates(collected, frames.of(ours, precision=precision), precision)
        for precision in frames.order(ours, "precision")
    ]
    return " ".join(told) or "How far our kernels are from the limit is not known: none was timed."


def _best_rates(collected: Collected, rows: pd.DataFrame, precision: str) -> str:
    ceiling = collected.ceiling("ceilings", "matmul_tflops", precision, "tflops")
    bests = [
        extreme(frames.of(rows, pass_=name), "tflops", largest=True)
        for name in ("forward", "both")
        if len(frames.of(rows, pass_=name))
    ]
    if not ceiling:
        return (
            f"In {precision} our kernels reach {listed(map(_rate, bests))}; there is no measured "
            "matmul rate to hold that against."
        )
    rates = [f"{_rate(best)} or {percent(best['tflops'] / ceiling)}" for best in bests]
    text = f"In {precision} our kernels reach {' and '.join(rates)} of the measured matmul rate"
    bound = _bound_of_fp32(collected) if precision == "fp32" else None
    if bound is None:
        return f"{text}."
    shares = listed(percent(best["tflops"] / bound) for best in bests)
    return (
        f"{text}, which is that of products outside the tensor cores and no bound. Put together on "
        "tensor cores, from three products of TF32 or six of bf16, fp32 products run at "
        f"{significant(bound)} TFLOP/s at most; these are {shares} of it."
    )


def _rate(best: pd.Series) -> str:
    once = "; one sample" if best["n"] == 1 else ""
    return (
        f"{significant(best['tflops'])} TFLOP/s {TITLES[best['pass']].lower()} (head dim "
        f"{best['head_dim']}, sequence {best['sequence']:,}{once})"
    )


def _bound_of_fp32(collected: Collected) -> float | None:
    """What tensor cores give for fp32, by the better of the two ways to put a product together."""
    rates = [
        (collected.ceiling("ceilings", "matmul_tflops", name, "tflops"), products)
        for name, products in PRODUCTS_OF_FP32.items()
    ]
    return max((rate / products for rate, products in rates if rate), default=None)
