"""What formats keep and lose: the numbers of the study, and what they must show."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.chapters.precision import measure as precision
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.study.results import Result
from tests.chapters.pages import answer, found, rendered, value_of
from tests.jobs.points import precision_point
from tests.report.study import result, written


@pytest.fixture(scope="module")
def accumulation() -> Outcome:
    return precision.accumulation(terms=1000, term=0.01)


@pytest.fixture(scope="module")
def layernorm() -> Outcome:
    return Outcome(measurements=precision.layernorm(seed=0, device=torch.device("cpu")))


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("fp32 += fp32", 10.0001),
        ("fp16 += fp16", 9.9531),
        ("fp32 += fp16", 10.0021),
        ("fp32 += fp16 cast up", 10.0021),
    ],
)
def test_the_four_loops_end_where_published_ones_do(
    accumulation: Outcome, loop: str, expected: float
) -> None:
    found = value_of(accumulation, "sum", loop=loop)
    assert round(found, 4) == expected
    assert value_of(accumulation, "error", loop=loop) == found - 10.0


def test_the_trace_explains_the_fp16_sum(accumulation: Outcome) -> None:
    trace = accumulation.data["fp16_trace"]
    assert (trace["step"][0], trace["step"][-1]) == (1, 1000)
    assert trace["sum"][-1] == 9.953125
    assert value_of(accumulation, "term_in_fp16") == 0.01000213623046875
    # Near ten fp16 steps by 1/128, and the term of a hundredth is rounded to one such step.
    assert trace["spacing"][-1] == trace["added"][-1] == 1 / 128


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
def test_autocast_lowers_matmuls_and_keeps_the_rest(
    name: str, dtype: str, cpu: torch.device
) -> None:
    outcome = precision.measure(precision_point("autocast", dtype=name), cpu)
    kinds = {record["labels"]["component"]: record["value"] for record in outcome.measurements}
    assert kinds["fc1_output"] == kinds["logits"] == dtype
    assert kinds["parameters"] == kinds["loss"] == kinds["gradients"] == "float32"


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


@pytest.mark.parametrize(
    ("dtype", "exponent", "mantissa", "ones"),
    [("fp16", 5, 10, 2**11), ("bf16", 8, 7, 2**8), ("fp32", 8, 23, 2**24)],
)
def test_a_format_is_its_bits_and_a_sum_of_ones_stalls_in_it(
    cpu: torch.device, dtype: str, exponent: int, mantissa: int, ones: int
) -> None:
    outcome = precision.measure(precision_point("formats", term=0.01), cpu)
    bits = [value_of(outcome, f"{part}_bits", dtype=dtype) for part in ("exponent", "mantissa")]
    assert bits == [exponent, mantissa]
    assert value_of(outcome, "largest_power", dtype=dtype) == 2 ** (exponent - 1)
    assert value_of(outcome, "smallest_power", dtype=dtype) == 2 - 2 ** (exponent - 1)
    assert value_of(outcome, "spacing", dtype=dtype) == 2.0**-mantissa
    assert value_of(outcome, "stalls_at", dtype=dtype, term=1.0) == ones
    assert max(outcome.data["stalled_sums"][dtype]) == min(
        ones, outcome.data["stalled_sums"]["step"][-1]
    )


def test_a_variance_in_fp16_vanishes_below_and_overflows_above(layernorm: Outcome) -> None:
    reasons = [r["reason"] for r in found(layernorm, "variance_error", dtype="fp16", sums="fp32")]
    assert reasons[0] == "underflow"
    assert reasons[-1] == "overflow"
    assert None in reasons


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_wide_exponent_neither_vanishes_nor_overflows(layernorm: Outcome, dtype: str) -> None:
    assert {r["status"] for r in found(layernorm, "variance_error", dtype=dtype)} == {"ok"}


def test_bf16_pays_for_its_exponent_with_digits(layernorm: Outcome) -> None:
    def error(dtype: str, sums: str) -> float:
        found = value_of(layernorm, "variance_error", dtype=dtype, scale=1.0, sums=sums)
        return float(found)

    assert 1e-3 < error("bf16", "fp32") < 1e-2
    assert 1e-4 < error("fp16", "fp32") < 1e-3
    assert error("fp32", "fp32") < 1e-6
    # Partial sums in the format itself lose far more than rounding the squares does.
    assert error("bf16", "own format") > 5 * error("bf16", "fp32")


def test_layernorm_survives_every_scale_only_with_statistics_in_fp32(layernorm: Outcome) -> None:
    errors = found(layernorm, "output_error")
    assert {r["status"] for r in errors if "sums" not in r["labels"]} == {"ok"}
    own = {"dtype": "bf16", "scale": 1.0, "sums": "own format"}
    (kept,) = (r["value"] for r in errors if r["labels"] == {"dtype": "bf16", "scale": 1.0})
    assert value_of(layernorm, "output_error", **own) > 3 * kept


def test_the_page_renders_with_and_without_all_topics(
    accumulation: Outcome, layernorm: Outcome, tmp_path: Path
) -> None:
    def point(topic: str, outcome: Outcome, **more: Any) -> Result:
        settings = {"seed": 0, "term": 0.01, "terms": 1000}
        parameters = {"topic": topic, **more}
        return result(
            parameters,
            outcome.measurements,
            chapter="precision",
            settings=settings,
            data=outcome.data,
        )

    autocast = precision.autocast("bf16", 0, torch.device("cpu"))
    points = [
        point("accumulation", accumulation),
        point("formats", precision.formats(0.01)),
        point("autocast", autocast, dtype="bf16"),
        point("layernorm", layernorm),
    ]
    for number in (1, 4):
        folder = tmp_path / str(number)
        front, _ = rendered(folder, written(folder / "r", points[:number]), "precision")
        assert "9.9531" in answer(front, "What do 16 bits lose?")


def test_an_unknown_topic_is_named(cpu: torch.device) -> None:
    with pytest.raises(ValueError, match="topic = 'rounding'"):
        precision.measure(precision_point("rounding"), cpu)
