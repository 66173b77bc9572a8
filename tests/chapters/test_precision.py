"""What formats keep and lose: the numbers of the study, and what they must show."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.chapters.precision import measure as precision
from lmlab.jobs.outcome import Outcome, Unsupported
from tests.chapters.pages import answer, found, rendered, value_of
from tests.jobs.points import precision_point
from tests.report.study import result, written

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"term": 0.01, "terms": 1000}


def outcome_of(topic: str, **changes: Any) -> Outcome:
    return precision.measure(precision_point(topic, **{**SETTINGS, **changes}), CPU)


@pytest.fixture(scope="module")
def accumulation() -> Outcome:
    return outcome_of("accumulation")


def test_the_loops_end_where_published_ones_do_and_why(accumulation: Outcome) -> None:
    sums = {r["labels"]["loop"]: r["value"] for r in found(accumulation, "sum")}
    assert {loop: round(total, 4) for loop, total in sums.items()} == {
        "fp32 += fp32": 10.0001,
        "fp16 += fp16": 9.9531,
        "fp32 += fp16": 10.0021,
        "fp32 += fp16 cast up": 10.0021,
    }
    for loop, total in sums.items():
        assert value_of(accumulation, "error", loop=loop) == total - 10.0
    trace = accumulation.data["fp16_trace"]
    assert (trace["step"][0], trace["step"][-1]) == (1, 1000)
    assert trace["sum"][-1] == 9.953125
    assert value_of(accumulation, "term_in_fp16") == 0.01000213623046875
    # Near ten fp16 steps by 1/128, and the term of a hundredth is rounded to one such step.
    assert trace["sum"][-1] - trace["sum"][-2] == (1000 - trace["step"][-2]) / 128


@pytest.mark.parametrize("terms", [1, 2, 1000, 20_000])
def test_a_long_sum_is_followed_in_few_steps(terms: int) -> None:
    followed = precision.followed({"sum": torch.arange(1, terms + 1)})
    assert followed["step"] == followed["sum"]
    assert {1, terms} <= {*followed["step"]}
    assert len({*followed["step"]}) == min(terms, 500)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_autocast_lowers_matmuls_and_keeps_the_rest(name: str, dtype: str) -> None:
    outcome = outcome_of("autocast", dtype=name)
    kinds = {record["labels"]["component"]: record["value"] for record in outcome.measurements}
    assert kinds["fc1_output"] == kinds["logits"] == dtype
    assert kinds["parameters"] == kinds["loss"] == kinds["gradients"] == "float32"


def test_what_cannot_be_done_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="fp16 ends at 65504"):
        outcome_of("accumulation", term=100.0)
    with pytest.warns(UserWarning, match="autocast"), pytest.raises(Unsupported, match="float64"):
        precision.observed_dtypes(precision.toy_model(), torch.float64, CPU)
    monkeypatch.setattr(precision, "why_unsupported", lambda name, device: f"no {name} here")
    with pytest.raises(Unsupported, match="no bf16 here"):
        outcome_of("autocast", dtype="bf16")


@pytest.mark.parametrize(
    ("dtype", "exponent", "mantissa", "ones"),
    [("fp16", 5, 10, 2**11), ("bf16", 8, 7, 2**8), ("fp32", 8, 23, 2**24)],
)
def test_sums_of_ones_stall(dtype: str, exponent: int, mantissa: int, ones: int) -> None:
    outcome = outcome_of("formats")
    expected = {
        **{"exponent_bits": exponent, "mantissa_bits": mantissa, "spacing": 2.0**-mantissa},
        **{"largest_power": 2 ** (exponent - 1), "smallest_power": 2 - 2 ** (exponent - 1)},
    }
    assert {name: value_of(outcome, name, dtype=dtype) for name in expected} == expected
    assert value_of(outcome, "stalls_at", dtype=dtype, term=1.0) == ones
    sums = outcome.data["stalled_sums"]
    assert max(sums[dtype]) == min(ones, sums["step"][-1])


def test_fp16_loses_range_bf16_digits_and_narrow_sums_most() -> None:
    layernorm = outcome_of("layernorm")
    reasons = [r["reason"] for r in found(layernorm, "variance_error", dtype="fp16", sums="fp32")]
    assert (reasons[0], reasons[-1]) == ("underflow", "overflow")
    assert None in reasons
    for dtype in ("bf16", "fp32"):
        assert {r["status"] for r in found(layernorm, "variance_error", dtype=dtype)} == {"ok"}

    def error(dtype: str, sums: str = "fp32") -> float:
        return float(value_of(layernorm, "variance_error", dtype=dtype, scale=1.0, sums=sums))

    assert error("fp32") < 1e-6 < 1e-4 < error("fp16") < 1e-3 < error("bf16") < 1e-2
    # Partial sums in the format itself lose far more than rounding the squares does.
    assert error("bf16", "own format") > 5 * error("bf16")
    # LayerNorm survives every scale only with statistics in fp32.
    errors = found(layernorm, "output_error")
    assert {r["status"] for r in errors if "sums" not in r["labels"]} == {"ok"}
    at = {"dtype": "bf16", "scale": 1.0}
    (kept,) = (r["value"] for r in errors if r["labels"] == at)
    assert value_of(layernorm, "output_error", **at, sums="own format") > 3 * kept


def test_the_page_renders_with_some_topics(accumulation: Outcome, tmp_path: Path) -> None:
    given = {"settings": SETTINGS, "data": accumulation.data}
    point = result(
        {"topic": "accumulation"}, accumulation.measurements, chapter="precision", **given
    )
    records, term = outcome_of("formats", term=0.5).measurements, {"term": 0.5}
    formats = result({"topic": "formats"}, records, chapter="precision", settings=term)
    front, pages = rendered(tmp_path, written(tmp_path / "r", [point, formats]), "precision")
    assert "9.9531" in answer(front, "What do 16 bits lose?")
    assert " | adding 1 stalls at | adding 0.5 stalls at |" in pages["precision"]
    assert "| fp16 | 5 | 10 | -14 | 16 | 9.8e-04 | 2,048 | 1,024 |" in pages["precision"]
