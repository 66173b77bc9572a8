"""The fastest step: a ladder and its kernels per size, and the leaderboard's step.

One point measures all rungs of a ladder, because they are compared within one process.
"""

from collections.abc import Mapping
from typing import Any

from lmlab.study.config import Study
from lmlab.study.points import Point

SHARED = ("attentions", "batches", "checkpoint", "warmup", "steps", "energy_s")
PER_SIZE = ("rungs", "samples", "variant_cap_s")


def points(study: Study, block: Mapping[str, Any]) -> list[Point]:
    """The points of every topic that the block names, in their order."""
    base = block["batch"]
    if uneven := [batch for batch in block["batches"] if batch > base and batch % base]:
        raise ValueError(f"config: fastest_step.batches = {uneven}; allowed: multiples of {base}")
    settings = {
        **{key: block[key] for key in SHARED},
        "time_cap_s": study.common["time_cap_s"],
        # The precision of the first rung, and the attentions whose code a result depends on.
        "precision": "fp32",
        "variants": ["naive", *block["attentions"]],
    }
    found = []
    for topic in block["topics"]:
        if topic == "leaderboard":
            common = {key: study.common[key] for key in ("rope_theta", "seed")}
            asked = {**common, **settings, **block["leaderboard"]}
            parameters = {"topic": topic, "sequence": asked.pop("sequence")}
            found.append(Point("fastest_step", parameters, asked))
            continue
        own = {key: block[key] for key in PER_SIZE}
        for size in block["sizes"]:
            shape = {"topic": topic, "size": size, "context": block["context"]}
            parameters = {**shape, "batch": block["batch"], **study.own_model()}
            asked = {**study.size_settings(size), **own, **settings}
            found.append(Point("fastest_step", parameters, asked))
    return found
