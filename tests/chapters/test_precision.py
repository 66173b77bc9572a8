"""What formats keep and lose: the numbers of the study, and what they must show."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from lmlab.chapters.precision import measure as precision
from lmlab.jobs.outcome import Unsupported
from tests.jobs.points import precision_point


@pytest.fixture(scope="module")
def accumulation() -> dict[str, Any]:
    return precision.accumulation(terms=1000, term=0.01)


@pytest.fixture(scope="module")
def layernorm() -> dict[str, Any]:
    return precision.layernorm(seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("loop", "result"),
    [
        ("fp32", 10.0001),
        ("fp16", 9.9531),
        ("fp32_plus_fp16", 10.0021),
        ("fp32_plus_fp16_cast", 10.0021),
    ],
)
def test_the_four_loops_end_where_the_study_says(
    accumulation: dict[str, Any], loop: str, result: float
) -> None:
    (found,) = [row for row in accumulation["loops"] if row["name"] == loop]
    assert round(found["result"], 4) == result
    assert found["error"] == found["result"] - 10.0


def test_loops_name_the_formats_that_they_add(accumulation: dict[str, Any]) -> None:
    formats = {row["name"]: (row["accumulator"], row["term"]) for row in accumulation["loops"]}
    assert formats == {
        "fp32": ("float32", "float32"),
        "fp16": ("float16", "float16"),
        "fp32_plus_fp16": ("float32", "float16"),
        "fp32_plus_fp16_cast": ("float32", "float32"),
    }


def test_the_trace_explains_the_fp16_sum(accumulation: dict[str, Any]) -> None:
    trace = accumulation["fp16_trace"]
    assert trace["step"][0] == 1
    assert trace["step"][-1] == 1000
    assert trace["sum"][-1] == 9.953125
    assert accumulation["term_in_fp16"] == 0.01000213623046875
    # Near ten fp16 steps by 1/128, and the term of a hundredth is rounded to one such step.
    assert trace["spacing"][-1] == 1 / 128
    assert trace["added"][-1] == 1 / 128


@pytest.mark.parametrize("terms", [1, 2, 1000, 20_000])
def test_a_trace_is_short_and_keeps_every_change_of_spacing(terms: int) -> None:
    term = torch.tensor(0.01, dtype=torch.float16)
    sums = precision.running_sums(torch.float16, term, terms)
    trace = precision.trace(sums)
    spacing = {2.0 ** (torch.frexp(value)[1].item() - 11) for value in sums}
    assert len(trace["step"]) <= 200
    assert set(trace["spacing"]) == spacing
    neighbours = zip(trace["step"], itertools.pairwise(trace["spacing"]), strict=False)
    changes = [step for step, (here, after) in neighbours if here != after]
    assert all(step + 1 in trace["step"] for step in changes)


def test_a_sum_beyond_fp16_is_unsupported(cpu: torch.device) -> None:
    point = precision_point("accumulation", terms=1000, term=100.0)
    with pytest.raises(Unsupported, match="fp16 ends at 65504"):
        precision.measure(point, cpu)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_autocast_runs_products_in_16_bit_and_keeps_the_rest(
    name: str, dtype: str, cpu: torch.device
) -> None:
    data = precision.measure(precision_point("autocast", dtype=name), cpu).data
    found = {row["name"]: row["dtype"] for row in data["components"]}
    assert data["device"] == "cpu"
    assert data["dtype"] == dtype
    assert list(found) == [
        *("parameters", "fc1_output", "layernorm_output", "logits", "loss", "gradients")
    ]
    assert found["fc1_output"] == found["logits"] == dtype
    assert found["parameters"] == found["loss"] == found["gradients"] == "float32"


def test_a_device_that_refuses_the_type_is_unsupported(
    monkeypatch: pytest.MonkeyPatch, cpu: torch.device
) -> None:
    monkeypatch.setattr(precision, "why_unsupported", lambda name, device: f"no {name} here")
    with pytest.raises(Unsupported, match="no bf16 here"):
        precision.measure(precision_point("autocast", dtype="bf16"), cpu)


def test_autocast_that_switches_itself_off_is_unsupported(cpu: torch.device) -> None:
    model = precision.ToyModel()
    with pytest.warns(UserWarning, match="autocast"), pytest.raises(Unsupported, match="float64"):
        precision.observed_dtypes(model, torch.float64, cpu)


def rows(layernorm: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    return [row for row in layernorm["rows"] if row["dtype"] == dtype]


def test_a_variance_in_fp16_vanishes_below_and_overflows_above(layernorm: dict[str, Any]) -> None:
    found = rows(layernorm, "fp16")
    assert found[0]["underflow"]
    assert found[0]["computed_variance"] == 0.0
    assert found[-1]["overflow"]
    assert found[-1]["computed_variance"] is None
    assert found[-1]["relative_error"] is None
    assert any(not (row["overflow"] or row["underflow"]) for row in found)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_wide_exponent_neither_vanishes_nor_overflows(
    layernorm: dict[str, Any], dtype: str
) -> None:
    assert not any(row["overflow"] or row["underflow"] for row in rows(layernorm, dtype))


def test_bf16_pays_for_its_exponent_with_digits(layernorm: dict[str, Any]) -> None:
    at_one = {row["dtype"]: row["relative_error"] for row in layernorm["rows"] if row["scale"] == 1}
    assert 1e-3 < at_one["bf16"] < 1e-2
    assert 1e-4 < at_one["fp16"] < 1e-3
    assert at_one["fp32"] < 1e-6


def test_layernorm_itself_survives_every_scale(layernorm: dict[str, Any]) -> None:
    assert len(layernorm["layernorm_rows"]) == len(layernorm["rows"])
    assert all(row["largest_error"] is not None for row in layernorm["layernorm_rows"])


def test_all_data_is_plain_json(accumulation: dict[str, Any], layernorm: dict[str, Any]) -> None:
    for data in (accumulation, layernorm):
        assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_an_unknown_topic_is_named(cpu: torch.device) -> None:
    with pytest.raises(ValueError, match="topic = 'rounding'"):
        precision.measure(precision_point("rounding"), cpu)
