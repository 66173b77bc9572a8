"""What timeline and clock say of each other, and what the host did meanwhile.

Both see the same forward pass. The clock saw it alone; the timeline saw it under a profiler, which
makes the host slower and leaves the kernels as they are. So the two agree where the GPU is the
limit, and where the host is, the timeline is longer by what the profiler costs.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.frames.repeats import GPU_LIMITED_FROM, HOST_LIMITED_BELOW
from lmlab.writeup.numbers import counted, listed, percent, significant, span
from lmlab.writeup.numbers import every as all_of
from lmlab.writeup.places import extreme, place, where

NOTHING = "Nothing was recorded, so timeline and clock cannot be compared."
# A difference that a second process would show as well.
SAME_WITHIN = 0.05
# A wait shorter than this share of the step is the call itself and no waiting.
WAITS_FROM = 0.01
# A launch that takes so many times as long as elsewhere does more than launch, and a host that is
# so many launches ahead has a queue to wait for.
LAUNCH_WAITS_FROM, LAUNCHES_AHEAD = 2.0, 100


def clock(collected: Collected) -> str:
    """Timeline against the host's clock in the forward pass, and why they differ."""
    both = _both(collected)
    if both.empty:
        return NOTHING
    if collected.device == "cpu":
        return (
            "On a CPU the operators' own time under the profiler is "
            f"{span(100 * both['busy_share'], 2)} % of what the host's clock gives for the same "
            "pass without it. What is missing lies between operators: Python, dispatch, waiting "
            "for a core; what is over 100 % is the profiler's own time within them."
        )
    agree = both[(both["stretch"] - 1).abs() <= SAME_WITHIN]
    longer = both[both["stretch"] > 1 + SAME_WITHIN]
    shorter = both[both["stretch"] < 1 - SAME_WITHIN]
    parts = [_agree(agree, both), _longer(longer, both), _shorter(shorter, both), _limits(both)]
    return " ".join(part for part in parts if part)


def _both(collected: Collected) -> pd.DataFrame:
    """Points and their forward runs side by side."""
    forward = frames.of(frames.modes(collected), mode="forward")
    both = frames.points(collected).merge(forward, on=frames.PLACE)
    return both.assign(
        busy_share=both["busy_ms"] / both["median_ms"],
        stretch=both["span_ms"] / both["median_ms"],
        filled=both["busy_ms"] / both["span_ms"],
    )


def _agree(rows: pd.DataFrame, every: pd.DataFrame) -> str:
    within = f"within {percent(SAME_WITHIN, 1)}"
    if rows.empty:
        return f"In no point does the timeline's forward take as long as the clock says, {within}."
    return (
        f"In {_points(rows, every)} the timeline's forward takes as long as the host's clock says, "
        f"{within}: a profiler does not slow kernels down."
    )


def _longer(rows: pd.DataFrame, every: pd.DataFrame) -> str:
    """The timeline is longer by gaps, since busy time is the kernels' own."""
    if rows.empty:
        return ""
    return (
        f"In {_points(rows, every)} it takes {span(rows['stretch'])} times as long. What is longer "
        "are the gaps: the profiler lengthens every launch, and once the host is slower than the "
        f"GPU the launches set the pace; kernels run for {span(100 * rows['filled'], 2)} % of the "
        f"timeline there, and for {span(100 * rows['busy_share'], 2)} % of the clock's time."
    )


def _shorter(rows: pd.DataFrame, every: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    return (
        f"In {_points(rows, every)} it takes only {span(rows['stretch'])} times as long: the clock "
        "also counts what comes before the first kernel and after the last."
    )


def _limits(both: pd.DataFrame) -> str:
    """Without a profiler: for how much of the pass the GPU works, and so who is the limit."""
    idle = both[both["busy_share"] < HOST_LIMITED_BELOW]
    busy = both[both["busy_share"] >= GPU_LIMITED_FROM]
    said = []
    if len(busy):
        said.append(
            f"for at least {percent(GPU_LIMITED_FROM, 2)} of the pass in {_points(busy, both)}"
        )
    if len(idle):
        said.append(
            f"for only {span(100 * idle['busy_share'], 2)} % in {_points(idle, both)}, where the "
            "rest is host-bound: gaps in which the GPU waits for the next launch"
        )
    if not said:
        return f"By the clock, the GPU works for {span(100 * both['busy_share'], 2)} % of the pass."
    return f"By the clock, the GPU works {listed(said)}."


def _points(rows: pd.DataFrame, every: pd.DataFrame) -> str:
    if len(rows) == len(every):
        return all_of(len(rows), "point")
    return f"{len(rows)} of {counted(len(every), 'point')} ({where(rows, every)})"


def elsewhere(collected: Collected) -> str:
    """The clock of this chapter against that of the end-to-end chapter: across points."""
    points = frames.points(collected)
    both = points.merge(frames.end_to_end_forward(collected), on=frames.PLACE)
    if both.empty:
        return "The end-to-end chapter has no forward pass of the same points to compare with."
    ratio = both["median_ms"] / both["other_median_ms"]
    return (
        f"The end-to-end chapter timed the forward pass of {len(both)} of "
        f"{counted(len(points), 'point')} in processes of its own; this chapter's clock gives "
        f"{span(ratio)} times its medians, a ratio across points."
    )


def host(collected: Collected) -> str:
    """Where the host waits in a train step, and how much of the step waits for the host."""
    steps = frames.of(frames.modes(collected), mode="train_step")
    if steps.empty:
        return "Nothing was recorded of the host."
    if collected.device == "cpu":
        return "On a CPU the host is the device: there is nobody to wait for."
    return " ".join(part for part in (_waits(steps), _launches(steps), _late(steps)) if part)


def _waits(steps: pd.DataFrame) -> str:
    waiting = steps[steps["wait_ms"] > WAITS_FROM * steps["span_ms"]]
    if waiting.empty:
        return "In no train step is the host done early enough to wait for the GPU at the end."
    places = [
        f"in {call} after {after}" if after else f"in {call}"
        for call, after in dict.fromkeys(
            zip(waiting["wait_call"], waiting["wait_after"], strict=True)
        )
    ]
    most = extreme(
        waiting.assign(part=waiting["wait_ms"] / waiting["span_ms"]), "part", largest=True
    )
    return (
        f"In {len(waiting)} of {counted(len(steps), 'train step')} the host is done before the GPU "
        f"and waits {listed(places)}: for {percent(most['part'], 2)} of the step at most "
        f"({significant(most['wait_ms'])} ms of {significant(most['span_ms'])} ms, {place(most)})."
    )


def _launches(steps: pd.DataFrame) -> str:
    """A host far ahead is held up in the launches themselves, which no wait at the end shows."""
    known = steps[steps["launch_us"].notna()]
    if known.empty:
        return ""
    least, most = (extreme(known, "launch_us", largest=largest) for largest in (False, True))
    is_longer = most["launch_us"] >= LAUNCH_WAITS_FROM * least["launch_us"]
    if not (is_longer and 1e3 * most["delay_ms"] >= LAUNCHES_AHEAD * most["launch_us"]):
        return ""
    return (
        f"Far ahead it waits within its launches, since only so many can be queued: one takes "
        f"{significant(least['launch_us'], 2)} µs on average in {place(least)} and "
        f"{significant(most['launch_us'], 2)} µs in {place(most)}, where a kernel starts "
        f"{significant(most['delay_ms'])} ms after its launch in the median."
    )


def _late(steps: pd.DataFrame) -> str:
    shares = steps.assign(late=steps["late_gap_ms"] / steps["span_ms"])
    most, least = (extreme(shares, "late", largest=largest) for largest in (True, False))
    if most["late"] < WAITS_FROM:
        return (
            "Gaps before kernels that were launched too late make up less than "
            f"{percent(WAITS_FROM, 1)} of every step."
        )
    return (
        "Gaps before kernels that were launched too late make up "
        f"{percent(most['late'], 2)} of the step of {place(most)} and {percent(least['late'], 2)} "
        f"of that of {place(least)}; under a profiler, which makes the host slower than it is."
        f"{_longest_gap(steps)}"
    )


def _longest_gap(steps: pd.DataFrame) -> str:
    row = extreme(steps, "longest_gap_ms", largest=True)
    if not row["gap_before"]:
        return ""
    phase = f"in {row['gap_phase']} of " if row["gap_phase"] else "in "
    return (
        f" The longest gap of all, {significant(row['longest_gap_ms'])} ms, lies before "
        f"{row['gap_before']} {phase}{place(row)}."
    )


def slow_ranges(collected: Collected) -> str:
    """Ranges that took many times their median, and what ran in the longest."""
    rows = frames.slow_ranges(collected)
    if frames.modes(collected).empty:
        return "Nothing was recorded, so no range can be called slow."
    if rows.empty:
        return "No range took more than five times the median of its name on the host."
    longest = extreme(rows, "duration_ms", largest=True)
    ran = [
        f"{what} {longest[key]}"
        for what, key in (("on the device most time went to", "kernel"), ("on the host to", "call"))
        if longest[key]
    ]
    within = f"; in it {listed(ran)}" if ran else "; nothing was recorded in it"
    run = words.MODE_NAMES.get(longest["run"], "outside the runs")
    return (
        f"{counted(len(rows), 'range')} took more than five times the median of their name on the "
        f"host. The longest is {longest['range']} ({run}, {place(longest)}): "
        f"{significant(longest['duration_ms'])} ms, "
        f"{significant(longest['times'], 2)} times the median of {longest['instances']}{within}."
    )
