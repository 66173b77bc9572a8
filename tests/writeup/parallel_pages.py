"""A chapter of several ranks from the synthetic study, altered as a test wants it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from lmlab.writeup.registry import part
from tests.writeup import synthetic, synthetic_parallel

CHAPTERS = ("data_parallel", "sharded_optimizer", "fsdp")
KEY = "shared_gpu_2"
WHO = "2 ranks that share one GPU, gloo"


def changed(chapter: str, change: Any = None, **how: Any) -> Collected:
    """A chapter of the synthetic study, its measured job altered in place by `change`."""

    def make(point: Point, device: str) -> Result:
        result: Result = getattr(synthetic_parallel, chapter)(point, device, **how)
        if change is None or result.status != "ok":
            return result
        data = deepcopy(dict(result.data))
        change(data)
        return replace(result, data=data)

    return synthetic.collected(chapter, make=make)


def finding(name: str, collected: Collected) -> str:
    findings: dict[str, str] = part("findings", collected.chapter)(collected)
    return findings.get(name) or findings[f"{name}_{KEY}"]


def drop(*path: str) -> Any:
    """Take an arm's times away, as for one that failed or does not run here."""

    def change(data: dict[str, Any]) -> None:
        *ways, name = path
        for way in ways:
            data = data[way]
        data[name] = {"status": "failed", "reason": "gradients are off by 0.1",
                      "messages": 1, "message_bytes": 4, "largest_message_bytes": 4}  # fmt: skip

    return change
