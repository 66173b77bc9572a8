"""Figures of the data-parallel chapter: steps, the proof of overlap, the sweep over buckets."""

from __future__ import annotations

import statistics

import numpy as np
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures import rank_jobs
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import MIB, Job, jobs
from lmlab.writeup.overhead_model import Fit, added_ms, best_messages
from lmlab.writeup.tables.data_parallel import size_of


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name, one of each kind a job."""
    drawings: dict[str, Drawing] = {}
    for job in jobs(collected):
        drawings |= _of_job(job)
    return drawings


def _of_job(job: Job) -> dict[str, Drawing]:
    variants, caption = frames.variants(job), job.caption(size_of(job))
    fitted = frames.overhead_fit(job)
    return {
        f"steps_{job.key}": Drawing(
            alt=f"Time of a training step by data-parallel variant, {job.who}",
            caption=f"{caption} Slowest rank; rings: rounds, bars: their median; dashed: a step "
            "that talks to nobody.",
            draw=lambda: _steps(variants),
        ),
        f"overlap_{job.key}": Drawing(
            alt=f"Computation and communication of one step, a panel per variant, {job.who}",
            caption=f"One step of each variant on rank 0, from the {job.data['profiler']}, which "
            f"slows the host. {rank_jobs.overlap_note([v.trace for v in variants])} {job.who}; "
            f"{size_of(job)}, {job.work}.",
            draw=lambda: rank_jobs.overlap([(v.label, v.trace) for v in variants]),
        ),
        f"buckets_{job.key}": Drawing(
            alt=f"What communication adds to a step against the size of a message, {job.who}",
            caption=f"{caption} Markers are measured, lines are the fitted model.",
            draw=(lambda: _buckets(job, fitted)) if fitted is not None else None,
        ),
    }


def _steps(variants: list[Variant]) -> Figure:
    figure, (axis,) = style.panels(1, 1, height=0.9 + 0.27 * len(variants))
    for place, variant in enumerate(variants):
        samples, median = variant.samples_ms, variant.median_ms
        colour = style.COLOURS[5] if variant.name == frames.TORCH else style.COLOURS[0]
        axis.plot(samples, [place] * len(samples), "o", color=colour, fillstyle="none")
        axis.plot(median, place, "|", color=colour, markersize=13, markeredgewidth=2)
        if variant.name == frames.ALONE:
            axis.axvline(median, color=style.GUIDE, linestyle="--", linewidth=1)
    axis.set_yticks(range(len(variants)), [variant.label for variant in variants])
    axis.set_ylim(len(variants) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.set_xlabel("Step of the slowest rank (ms)")
    axis.set_title("A training step, variant by variant")
    return figure


def _buckets(job: Job, fitted: Fit) -> Figure:
    figure, (axis,) = style.panels(1, 1, height=3.2)
    sent = frames.sent(job)
    total = max(one.total_bytes for one in sent)
    messages = np.unique(np.geomspace(1, max(one.messages for one in sent) * 2, 300).round())
    backward = statistics.median(job.data["phases_ms"]["backward"])
    for index, (during, words) in enumerate(((False, "after backward"), (True, "during backward"))):
        look = style.series(index)
        hide = backward if during else 0.0
        curve = [
            added_ms(total, number, hide, bytes_per_ms=fitted.bytes_per_ms, call_ms=fitted.call_ms)
            for number in messages
        ]
        axis.plot(
            total / messages / MIB, curve, color=look["color"], linestyle=look["linestyle"],
            label=f"model, {words}",
        )  # fmt: skip
        here = [one for one in sent if (one.hide_ms > 0) == during]
        axis.plot(
            [one.total_bytes / one.messages / MIB for one in here],
            [one.added_ms for one in here],
            linestyle="none", marker=look["marker"], color=look["color"],
            label=f"measured, {words}",
        )  # fmt: skip
    best = best_messages(total, backward, bytes_per_ms=fitted.bytes_per_ms, call_ms=fitted.call_ms)
    axis.axvline(total / best / MIB, color=style.GUIDE, linestyle="--", linewidth=1,
                 label="model's best")  # fmt: skip
    axis.set_xlabel("Mean size of a message (MiB)")
    axis.set_ylabel("Added to a silent step (ms)")
    # A marker is half above its point, and the largest must not be cut by the frame.
    highest = max(axis.get_ylim()[1], *(1.08 * one.added_ms for one in sent))
    axis.set_ylim(min(0.0, *(1.2 * one.added_ms for one in sent)), highest)
    axis.set_title("What communication adds to a step, by the size of its messages")
    style.log_axis(axis, "x")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
