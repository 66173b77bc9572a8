"""Tables of the attention chapter, topic by topic; a topic that the study leaves out has none."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.table import Table
from lmlab.writeup.tables.attention_account import accounts
from lmlab.writeup.tables.attention_board import leaderboard
from lmlab.writeup.tables.attention_model import compiled_model, model
from lmlab.writeup.tables.attention_naive import compiled_naive, naive
from lmlab.writeup.tables.attention_published import published_naive, published_race
from lmlab.writeup.tables.attention_race import limits, lost, races
from lmlab.writeup.tables.attention_tiles import tiles


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name."""
    data = frames.frame(collected)
    made = {
        "naive": naive(collected, data),
        **accounts(collected),
        "published_naive": published_naive(collected, data),
        "compiled_naive": compiled_naive(collected, data),
        "compiled_model": compiled_model(collected, data),
        "limits": limits(collected, data),
        "lost": lost(collected, data),
        **races(collected, data),
        "published_race": published_race(collected, data),
        "tiles": tiles(collected, data),
        "leaderboard": leaderboard(collected, data),
        "model": model(collected, data),
    }
    return {name: table for name, table in made.items() if table is not None}
