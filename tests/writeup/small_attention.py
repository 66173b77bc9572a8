"""The attention chapter in small, its arms taking what a test says: enough for every sentence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any

from lmlab.study.chapters import points_of
from lmlab.study.config import Study, load
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from tests.writeup import factory, synthetic
from tests.writeup.synthetic_attention import attention

EVERYWHERE: Mapping[str, Any] = {}
Change = Callable[[Point, dict[str, Any]], object]
"""Looks at a point and changes what its result holds; False leaves the point unmeasured."""


def study(**topics: Mapping[str, Any]) -> Study:
    """The full study with few shapes, some keys of its topics replaced."""
    values = factory.config(study="full")
    block = values["studies"]["full"]["attention"]
    block["sizes"] = ["small", "medium"]
    few: dict[str, dict[str, Any]] = {
        "naive": {"head_dims": [16, 64], "sequences": [1024, 4096, 8192]},
        "benchmark": {
            "head_dims": [64],
            "sequences": [128, 4096],
            "precisions": ["bf16"],
            "compile": {"head_dims": [64], "sequences": [128, 4096]},
        },
        "leaderboard": {"head_dims": [64]},
        "model": {"contexts": [128, 1024]},
        "tiles": {"kept": [64, 256], "walked": [64, 128]},
    }
    for topic, keys in few.items():
        block[topic].update({**keys, **topics.get(topic, {})})
    return load(values, "cuda")


STUDY = study()


def collected(change: Change | None = None, what: Study = STUDY, device: str = "cuda") -> Collected:
    """The chapter with the change made to every result."""

    def make(point: Point, device: str) -> Result | None:
        result = attention(point, device)
        values = deepcopy(
            {
                "status": result.status,
                "reason": result.reason,
                "measurements": dict(result.measurements),
                "data": dict(result.data),
            }
        )
        if change is not None and change(point, values) is False:
            return None
        return factory.result(point, device, **values)

    (card_point,) = points_of(what, "machine")
    card = synthetic.card(card_point, device)
    return factory.collected("attention", make, device, card=card, what=what)


def nothing(point: Point, values: dict[str, Any]) -> bool:
    """No point was measured."""
    return False


def scaled(factors: Mapping[str, float], **where: Any) -> Change:
    """Arms (or `arm.pass`) that take so many times as long, at points with these parameters."""

    def change(point: Point, values: dict[str, Any]) -> None:
        if not where.items() <= point.parameters.items():
            return
        for name, old in values["measurements"].items():
            factor = factors.get(name, factors.get(name.partition(".")[0], 1.0))
            samples = [factor * ms for ms in old["samples_ms"]]
            values["measurements"][name] = factory.measurement(samples, clock=old["clock"])

    return change


def sampled_once(arms: Collection[str], **where: Any) -> Change:
    """Arms of which one sample was taken, at points with these parameters."""

    def change(point: Point, values: dict[str, Any]) -> None:
        if not where.items() <= point.parameters.items():
            return
        for name, old in values["measurements"].items():
            if name.partition(".")[0] in arms:
                values["measurements"][name] = factory.measurement(
                    [old["median_ms"]], clock=old["clock"]
                )

    return change


def noisy(point: Point, values: dict[str, Any]) -> None:
    """Samples so far apart that nothing can be told from them."""
    for name, old in values["measurements"].items():
        samples = [old["median_ms"] * factor for factor in (0.2, 0.5, 1, 4, 9)]
        values["measurements"][name] = factory.measurement(samples, clock=old["clock"])


def without(arms: Mapping[str, tuple[str, str]], **where: Any) -> Change:
    """Arms that ended with a status and a reason instead of times."""

    def change(point: Point, values: dict[str, Any]) -> None:
        if not where.items() <= point.parameters.items():
            return
        for arm, (status, reason) in arms.items():
            if arm in values["data"].get("arms", {}):
                values["data"]["arms"][arm] = {"status": status, "reason": reason}
                for name in [n for n in values["measurements"] if n.partition(".")[0] == arm]:
                    del values["measurements"][name]

    return change


def noted(arm: str, where: Mapping[str, Any] = EVERYWHERE, **facts: Any) -> Change:
    """Facts of an arm replaced wherever it ran, at points with these parameters."""

    def change(point: Point, values: dict[str, Any]) -> None:
        if not where.items() <= point.parameters.items():
            return
        if arm in values["data"].get("arms", {}):
            values["data"]["arms"][arm].update(facts)

    return change


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(point: Point, values: dict[str, Any]) -> object:
        return False if any(c(point, values) is False for c in changes) else None

    return change
