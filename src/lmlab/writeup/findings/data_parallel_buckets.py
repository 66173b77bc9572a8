"""Which bucket is best, by the fitted model of the overhead and by measurement.

The model lets messages follow one another on the link. Where a backend has several under way at
once, that saves time beside what backward hides: variants that wait for each message then take
longer than the model says, those that do not take less, and the gap between the two is longer than
backward lasts. That is said only where rounds, compared one by one, show it.
"""

from __future__ import annotations

from lmlab.writeup.findings.rank_jobs import difference_words
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import MIB, Job
from lmlab.writeup.numbers import counted, percent, significant, span
from lmlab.writeup.overhead_model import Fit, added_ms, best_messages
from lmlab.writeup.paired import difference_interval

# A model that misses more than this share of what it describes describes something else.
GOOD_FIT = 0.25
# A variant that the model misses by less than this share of the largest is met.
MET = 0.01


def added_words(variant: Variant) -> str:
    """What a variant adds to a silent step."""
    if variant.added_ms is None:
        return "an unknown time"
    return f"{significant(variant.added_ms)} ms" if variant.added_ms > 0 else "nothing measurable"


def buckets(job: Job) -> str:
    """Which bucket is best by the model and by measurement."""
    fitted = frames.overhead_fit(job)
    sweep = [v for v in frames.talking(job) if v.name.startswith("bucketed_")]
    if fitted is None or not sweep:
        return f"{job.who}: too few variants were measured to fit the model of the overhead."
    best = min(sweep, key=lambda variant: variant.median_ms)
    link = f"{fitted.gb_per_s:.3g} GB/s and {significant(fitted.call_ms, 2)} ms a message"
    if fitted.missed_share > GOOD_FIT:
        return (
            f"{job.who}: the model does not describe these times: fitted to {link} it misses "
            f"{percent(fitted.missed_share, 2)} of what was measured. The fastest bucket measured "
            f"is that of {best.label.removeprefix('bucketed, ')}.{_leaning(job, fitted)}"
        )
    number, mean_mib, added = _optimum(job, fitted)
    return (
        f"{job.who}: the model fits with {link} and misses {percent(fitted.missed_share, 2)} of "
        f"what was measured. Its best is {counted(number, 'message')} of {significant(mean_mib)} "
        f"MiB, which would add {significant(added)} ms; the fastest bucket measured is that of "
        f"{best.label.removeprefix('bucketed, ')}, which adds {added_words(best)}. "
        f"{_told_apart(job, fitted, best, added)}{_leaning(job, fitted)}"
    )


def _told_apart(job: Job, fitted: Fit, best: Variant, least_ms: float) -> str:
    """Whether the model is good enough to prefer its best to the best measured."""
    (sent,) = [one for one in frames.sent(job) if one.name == best.name]
    modelled = fitted.of(sent)
    saves, misses = modelled - least_ms, fitted.missed_ms
    missed = f"{significant(misses, 2)} ms (root mean square)"
    told = (
        f"more than the {missed} that it misses over all variants: its best is worth trying"
        if saves > misses
        else f"while over all variants it misses {missed}: it does not tell the two apart"
    )
    return (
        f"For that one it says {significant(modelled)} ms, {significant(saves, 2)} ms above its "
        f"best, {told}."
    )


def _optimum(job: Job, fitted: Fit) -> tuple[int, float, float]:
    """Number of messages, their mean size in MiB, and what they would add."""
    total = max(sent.total_bytes for sent in frames.sent(job))
    backward = frames.backward_ms(job)
    link = {"bytes_per_ms": fitted.bytes_per_ms, "call_ms": fitted.call_ms}
    number = best_messages(total, backward, **link)
    return number, total / number / MIB, added_ms(total, number, backward, **link)


def _leaning(job: Job, fitted: Fit) -> str:
    """Whether the model errs one way after backward and the other way during it."""
    sent = frames.sent(job)
    missed = {s.name: s.added_ms - fitted.of(s) for s in sent}  # what the model leaves out
    met = MET * max(abs(s.added_ms) for s in sent)
    after, during = ([s for s in sent if (s.hide_ms > 0) == within] for within in (False, True))
    short = [missed[s.name] for s in after if missed[s.name] > met]
    over = [s for s in during if missed[s.name] < -met]
    if not after or len(short) < len(after) or 2 * len(over) <= len(during):
        return ""
    return (
        f" Its misses lean: it says too little, by {span(short)} ms, for what is sent after "
        f"backward, and too much for {len(over)} of {len(during)} variants that send during it."
        f"{_gap(job)}"
    )


def _gap(job: Job) -> str:
    """Whether rounds show more saved than backward could hide, although messages are more."""
    known = {variant.name: variant for variant in frames.talking(job)}
    within = [v for v in known.values() if v.name.startswith(frames.DURING)]
    flat, best = known.get("flat"), min(within, key=lambda variant: variant.median_ms)
    if flat is None:
        return ""
    saved = difference_interval(flat.samples_ms, best.samples_ms)
    if saved is None or saved.low <= 0:
        return ""
    backward = frames.backward_ms(job)
    told = (
        "several messages at once save time too, which the model leaves out"
        if saved.low > backward
        else "rounds do not show more saved than that"
    )
    return (
        f" Round by round {best.plain_label} takes {significant(saved.difference)} ms less than "
        f"flat ({difference_words(saved, job)}), and backward, all that could hide messages, lasts "
        f"{significant(backward)} ms: {told}."
    )
