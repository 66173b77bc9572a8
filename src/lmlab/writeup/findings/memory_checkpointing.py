"""What checkpointing buys and costs: which strategy fits, which is best, what nesting adds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.comparison import timed, verdict
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.numbers import binary_bytes, counted, factor, listed, percent
from lmlab.writeup.places import extreme

NOT_MEASURED = "Activation checkpointing was not measured."
# Peaks this near to the lowest are as good as it.
AS_LOW_WITHIN = 0.01
# The cost model looks at the first and the last segment that backward comes to. In the first no
# block has its gradients yet; only in the last can more than this share of them be there, and there
# it is unless a segment is half of the model or more.
LATE_IN_BACKWARD = 0.5


def fits(arms: pd.DataFrame) -> str:
    """Which strategies fit on this machine."""
    if not len(arms):
        return NOT_MEASURED
    ran, not_ran = frames.measured(arms), arms[arms["status"] != "ok"]
    plain = frames.of(arms, kind="none")
    if not len(not_ran):
        return "Every strategy fits here."
    told = listed(f"{row['name']} ({row['reason']})" for _, row in not_ran.iterrows())
    start = f"{len(ran)} of {len(arms)} strategies ran; not: {told}."
    if not (len(plain) and plain.iloc[0]["status"] == "oom" and len(ran)):
        return start
    predicted = plain.iloc[0]["predicted_bytes"]
    need = "" if math.isnan(predicted) else f", which would need {binary_bytes(predicted)},"
    return f"Keeping everything{need} does not fit here; with checkpointing the step runs. {start}"


def best(collected: Collected, arms: pd.DataFrame) -> str:
    """The best segment without nesting: by measurement, and by the model."""
    every_k = frames.measured(frames.of(arms, kind="every")) if len(arms) else arms
    if not len(every_k):
        return "No segment length was measured." if len(arms) else NOT_MEASURED
    lowest = extreme(every_k, "peak_bytes", largest=False)
    text = (
        "The lowest peak of the segment lengths measured is that of "
        f"{_blocks(lowest['blocks'])}, {binary_bytes(lowest['peak_bytes'])}"
    )
    predicted = _data(collected)["best_predicted"]
    if predicted is None:
        return f"{text}; the cost model does not describe this model."
    height = binary_bytes(predicted["bytes"])
    # Where the peak lies outside the blocks, several lengths are equally good.
    as_good = lowest["predicted_bytes"] <= (1 + AS_LOW_WITHIN) * predicted["bytes"]
    choice = (
        "as the cost model predicts"
        if as_good
        else f"while the cost model chooses {_blocks(predicted['blocks'])}"
    )
    return f"{text}, {choice} ({height}). {_rule(collected, every_k, lowest)}".strip()


def _rule(collected: Collected, every_k: pd.DataFrame, lowest: pd.Series) -> str:
    """Why it is not the square root of the number of blocks: that depends on where the peak is."""
    if lowest["predicted_activations"] == 0:
        return (
            f"The cost model puts this peak into the {lowest['predicted_phase']} phase, when no "
            "activation is left: no other segment length can lower it."
        )
    if _peaks_late(lowest):
        return _rule_of_the_last_segment(every_k, lowest, _data(collected)["num_layers"])
    if (
        lowest["predicted_phase"] == "backward"
        and 2 * lowest["blocks"] < _data(collected)["num_layers"]
    ):
        return _rule_of_the_first_segment(_data(collected))
    return ""


def _peaks_late(arm: pd.Series) -> bool:
    """Whether the predicted peak lies in the last segment that backward comes to."""
    late = arm["predicted_gradient_share"] > LATE_IN_BACKWARD
    in_a_segment = arm["predicted_phase"] == "backward" and arm["predicted_activations"] > 0
    return bool(in_a_segment and late)


def _rule_of_the_last_segment(every_k: pd.DataFrame, lowest: pd.Series, layers: int) -> str:
    """With the other segments' inputs gone, only the length of one segment counts."""
    text = (
        "The cost model puts this peak into the last segment of backward, when "
        f"{percent(lowest['predicted_gradient_share'], 2)} of the gradients are there: the inputs "
        "of the other segments are gone and one segment's activations remain"
    )
    if lowest["blocks"] > every_k["blocks"].min():
        return f"{text}."
    return f"{text}, so the shortest segment is best, not one near √{layers} = {_root(layers)}."


def _rule_of_the_first_segment(data: Mapping[str, Any]) -> str:
    """With all inputs still there, their number is weighed against the length of a segment."""
    plain = next((arm for arm in data["arms"] if arm["kind"] == "none" and arm["predicted"]), None)
    if plain is None:
        return ""
    layers = data["num_layers"]
    block = plain["predicted"]["categories_bytes"]["activations"] / layers
    ratio = block / data["input_bytes"]
    ideal = math.sqrt(layers / ratio)
    return (
        f"A block's activations are about {ratio:.0f} times its input, so the sum of "
        f"{layers} / k inputs and k blocks' activations is smallest near k = {ideal:.1f}, not near "
        f"√{layers} = {_root(layers)}."
    )


def _root(layers: int) -> str:
    return f"{math.sqrt(layers):.1f}"


def price(arms: pd.DataFrame) -> str:
    """What the lowest peak costs in time."""
    ran = frames.measured(arms) if len(arms) else arms
    if not len(ran):
        return NOT_MEASURED if not len(arms) else "No strategy has a time."
    lowest = extreme(ran, "peak_bytes", largest=False)
    near = ran[ran["peak_bytes"] <= (1 + AS_LOW_WITHIN) * lowest["peak_bytes"]]
    chosen = extreme(near, "median_ms", largest=False)
    plain = frames.of(ran, kind="none")
    if chosen["kind"] == "none":
        return "Keeping everything has the lowest peak here: checkpointing does not lower it."
    if len(plain):
        return _against(chosen, plain.iloc[0], "which keeps everything")
    others = ran[ran["name"] != chosen["name"]]
    if not len(others):
        return f"Only {chosen['name']} ran, so there is no time to compare its own with."
    return _against(chosen, extreme(others, "median_ms", largest=False), "the fastest other one")


def _against(chosen: pd.Series, base: pd.Series, what: str) -> str:
    saved = percent(1 - chosen["peak_bytes"] / base["peak_bytes"], 2)
    start = f"Against {base['name']}, {what}, {chosen['name']} lowers the peak by {saved}"
    if verdict(timed(chosen), timed(base), margin=0.0) == "same":
        return f"{start}; the times of their steps are the same within noise."
    ratio = factor(chosen["median_ms"] / base["median_ms"])
    return f"{start} and makes a step {ratio} as long."


def nesting(collected: Collected, arms: pd.DataFrame) -> str:
    """What halves within halves add."""
    nested = frames.measured(frames.of(arms, kind="nested")) if len(arms) else arms
    if not len(nested):
        return "The nested strategy was not measured."
    row = nested.iloc[0]
    layers = _data(collected)["num_layers"]
    levels = math.ceil(math.log2(layers)) if layers > 1 else 1
    text = (
        f"Nested, {counted(layers, 'block')} are halved {counted(levels, 'time')}: forward leaves "
        f"{binary_bytes(row['kept_bytes'])} and the peak is {binary_bytes(row['peak_bytes'])}"
    )
    single = frames.measured(frames.of(arms, name="every-1"))
    if not len(single):
        return f"{text}."
    one = single.iloc[0]
    ratio = row["peak_bytes"] / one["peak_bytes"]
    if abs(ratio - 1) <= AS_LOW_WITHIN:
        height = f"the same peak within {percent(AS_LOW_WITHIN, 1)}"
    else:
        height = f"{percent(abs(ratio - 1), 2)} {'below' if ratio < 1 else 'above'} its peak"
    same = verdict(timed(row), timed(one), margin=0.0) == "same"
    longer = factor(row["median_ms"] / one["median_ms"])
    time = "in the same time within noise" if same else f"in a step {longer} as long"
    return (
        f"{text}. Against a checkpoint at every block, which leaves "
        f"{binary_bytes(one['kept_bytes'])}, that is {height}, {time}.{_why_as_high(row, one)}"
    )


def _why_as_high(nested: pd.Series, single: pd.Series) -> str:
    """Why keeping fewer inputs does not lower the peak, where the cost model knows it."""
    saved = single["kept_bytes"] - nested["kept_bytes"]
    apart = abs(nested["peak_bytes"] / single["peak_bytes"] - 1)
    if apart > AS_LOW_WITHIN or saved <= 0 or not (_peaks_late(nested) and _peaks_late(single)):
        return ""
    return (
        " The cost model puts both peaks into the last block of backward, when "
        f"{percent(single['predicted_gradient_share'], 2)} of the gradients are there: the "
        f"{binary_bytes(saved)} that nesting keeps less would be freed by then anyway."
    )


def _blocks(count: float) -> str:
    return counted(int(count), "block")


def _data(collected: Collected) -> Mapping[str, Any]:
    for row in frames.rows_of(collected, frames.CHECKPOINTING):
        if row.result is not None and "arms" in row.result.data:
            return row.result.data
    return {}
