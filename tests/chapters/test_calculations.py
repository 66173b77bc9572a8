"""The question of the configuration, worked out: the numbers that the page prints."""

from typing import Any

import pytest
import torch

from lmlab.chapters.calculations.measure import measure
from lmlab.jobs.catalog import points_of
from lmlab.jobs.outcome import Outcome
from lmlab.study.points import Point
from tests.chapters.pages import found, value_of
from tests.project import study

CPU = torch.device("cpu")
TENSOR_PARALLEL = {"scheme": "tensor parallel"}
[POINT] = points_of(study("full", "cuda"), "calculations")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return measure(POINT, CPU)


@pytest.mark.parametrize(
    ("quantity", "labels", "expected"),
    [
        ("parameters", {}, 219_848_638_464),
        ("state_memory", {"part": "total"}, 3_517_578_215_424),
        ("state_devices", {}, 44),
        ("fewest_devices", {"tokens": 4096}, 61),
        ("memory_per_device", {"tokens": 4096}, pytest.approx(94.19e9, rel=1e-3)),
        ("gpus_unsharded", {"tokens": 4096}, 45),
        ("mesh_devices", {}, 64),
        ("batch_tokens", {"messages": "hidden"}, pytest.approx(20444.4, abs=0.1)),
        ("all_reduce_bytes", {"ranks": 8, "way": "ring"}, 1.75),
        ("all_reduce_bytes", {"ranks": 8, "way": "whole tensors"}, 7.0),
        # 6 B D F FLOPs; 2^20 tokens / 2555.6; 1.5 x 53248 / 2555.6, and their product.
        ("scheme_flops", {"scheme": "FSDP", "direction": "forward"}, 6 * 2**20 * 16384 * 53248),
        ("scheme_devices", {"scheme": "FSDP", "direction": "backward"}, pytest.approx(410.3, 1e-3)),
        ("scheme_devices", {**TENSOR_PARALLEL, "direction": "forward"}, pytest.approx(31.25, 1e-3)),
        ("split_devices", {"axes": "overlapped"}, pytest.approx(12824, 1e-3)),
        ("split_devices", {"axes": "in turn"}, pytest.approx(3206, 1e-3)),
    ],
)
def test_the_question_of_the_configuration_worked_out(
    outcome: Outcome, quantity: str, labels: dict[str, Any], expected: Any
) -> None:
    assert value_of(outcome, quantity, **labels) == expected


def test_every_lever_lowers_the_compute_bound_batch(outcome: Outcome) -> None:
    times = {part: value_of(outcome, "block_time", part=part) for part in ("compute", "weights")}
    assert times["compute"] == pytest.approx(times["weights"])
    before, *after = (record["value"] for record in found(outcome, "lever_tokens"))
    assert before == pytest.approx(value_of(outcome, "batch_tokens", messages="hidden"))
    assert all(tokens < before for tokens in after)


def test_what_no_batch_hides_has_a_reason() -> None:
    slow = Point("calculations", {}, {**POINT.settings, "device_bytes_per_s": 1e6})
    (record,) = found(measure(slow, CPU), "batch_tokens", messages="hidden")
    assert record["status"] == "unsupported"
