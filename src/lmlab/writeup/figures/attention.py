"""Figures of the attention chapter: how naive grows, who wins where, how tiles matter."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures.attention_model import model_figures
from lmlab.writeup.figures.attention_naive import naive_figures
from lmlab.writeup.figures.attention_race import race_figures
from lmlab.writeup.figures.attention_tiles import tile_figures
from lmlab.writeup.frames import attention as frames


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name; a topic that the study leaves out has none."""
    data = frames.frame(collected)
    return {
        **naive_figures(collected, data),
        **race_figures(collected, data),
        **tile_figures(collected, data),
        **model_figures(collected, data),
    }
