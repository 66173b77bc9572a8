"""Numbers that contradict each other are found, one check at a time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.checks import end_to_end, machine, precision
from tests.writeup import factory, synthetic

GPU_LIMITED = {"size": "2.7b", "context": 1024, "precision": "fp32", "mode": "train_step"}


def altered(where: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> list[str]:
    """Warnings after a change to the results with these parameters."""

    def make(point: Point, device: str) -> Result:
        result = synthetic.end_to_end(point, device)
        if not where.items() <= point.parameters.items():
            return result
        values = deepcopy({"measurements": dict(result.measurements), "data": dict(result.data)})
        change(values)
        return factory.result(point, device, **values)

    return end_to_end.checks(synthetic.collected("end_to_end", make=make))


def slower(*phases: str, factor: float = 2.0) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for phase in phases:
            old = values["measurements"][phase]
            values["measurements"][phase] = factory.measurement(
                [factor * ms for ms in old["samples_ms"]]
            )

    return change


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_sound_results_raise_no_warning(device: str) -> None:
    for chapter in (end_to_end, machine, precision):
        name = chapter.__name__.rpartition(".")[2]
        assert chapter.checks(synthetic.collected(name, device)) == []


def throttled(values: dict[str, Any]) -> None:
    """Everything takes twice the time, the GPU's work included."""
    slower(*values["measurements"])(values)
    if values["data"]["gpu_busy_ms"]:
        values["data"]["gpu_busy_ms"] = {
            phase: 2 * ms for phase, ms in values["data"]["gpu_busy_ms"].items()
        }


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_same_pass_in_two_modes(phase: str) -> None:
    warnings = altered({**GPU_LIMITED, "mode": "forward_backward"}, throttled)
    assert any(
        warning.startswith(
            f"The same quantity twice: {phase} in mode forward_backward and in mode train_step "
            "differs by more than its noise for 2.7b at context 1024, fp32"
        )
        for warning in warnings
    )


def test_the_same_pass_twice_on_a_cpu() -> None:
    def make(point: Point, device: str) -> Result:
        result = synthetic.end_to_end(point, device)
        if point.parameters["mode"] != "forward_backward" or point.parameters["context"] != 64:
            return result
        values = deepcopy({"measurements": dict(result.measurements), "data": dict(result.data)})
        throttled(values)
        return factory.result(point, device, **values)

    warnings = end_to_end.checks(synthetic.collected("end_to_end", "cpu", make))
    assert len([w for w in warnings if w.startswith("The same quantity twice")]) == 12


def test_a_cold_process_against_the_grid() -> None:
    cold = {"start": "cold", "size": "2.7b", "warmup": 5}
    warnings = altered(cold, throttled)
    assert [warning.split(" differs")[0] for warning in warnings] == [
        f"The same quantity twice: {phase} in a cold start and in a warm start"
        for phase in ("forward", "backward", "optimizer")
    ]


def test_where_the_host_is_the_limit_two_processes_may_differ() -> None:
    host_limited = {"size": "small", "context": 128, "precision": "bf16"}
    everything = ("forward", "backward", "total")
    assert altered({**host_limited, "mode": "forward_backward"}, slower(*everything)) == []


@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["too short", "too long"])
def test_backward_where_the_gpu_is_the_limit(factor: float) -> None:
    warnings = altered(GPU_LIMITED, slower("backward", factor=factor))
    expected = "Backward should take about twice forward where the GPU is the limit; for 2.7b"
    # A longer backward also leaves the GPU idle, and then nothing is expected of it.
    assert any(warning.startswith(expected) for warning in warnings) is (factor < 1)


def test_backward_longer_with_a_busy_gpu() -> None:
    def change(values: dict[str, Any]) -> None:
        slower("backward", factor=2.0)(values)
        values["data"]["gpu_busy_ms"]["backward"] *= 2

    assert any("it takes 4.00 times as long" in warning for warning in altered(GPU_LIMITED, change))


def test_where_the_host_is_the_limit_nothing_is_expected_of_backward() -> None:
    host_limited = {**GPU_LIMITED, "size": "small", "context": 128, "precision": "bf16"}
    assert altered(host_limited, slower("backward", "total", factor=1.3)) != []  # sum of phases
    assert not any("twice" in warning for warning in altered(host_limited, slower("backward")))


def test_phases_that_do_not_add_up() -> None:
    warnings = altered(GPU_LIMITED, slower("total", factor=1.2))
    assert any(w.startswith("The phases of 2.7b at context 1024, fp32") for w in warnings)


def test_a_rate_above_the_peak() -> None:
    def change(values: dict[str, Any]) -> None:
        values["data"]["flops"]["forward"]["matmul"] *= 10

    assert any("above the stated peak of 67.0" in w for w in altered(GPU_LIMITED, change))


def test_a_gpu_busy_for_longer_than_the_phase() -> None:
    def change(values: dict[str, Any]) -> None:
        values["data"]["gpu_busy_ms"]["optimizer"] *= 3

    assert any("longer than the phase lasts" in w for w in altered(GPU_LIMITED, change))


def test_ceilings_above_the_peaks() -> None:
    (point,) = [row.point for row in synthetic.collected("machine").rows]
    data = deepcopy(dict(synthetic.card(point).data))
    data["ceilings"]["matmul_tflops"]["bf16"]["tflops"] = 2000.0
    data["ceilings"]["copy_gb_per_s"]["gb_per_s"] = 9000.0
    card = factory.result(point, data=data)
    warnings = machine.checks(factory.collected("machine", lambda p, d: card, card=card))
    assert ["bf16 matmul rate" in warnings[0], "copy rate" in warnings[1]] == [True, True]


def sums(**changes: Any) -> list[str]:
    def make(point: Point, device: str) -> Result:
        result = synthetic.precision(point, device)
        if point.parameters["topic"] != "accumulation":
            return result
        data = deepcopy(dict(result.data))
        data.update({key: value for key, value in changes.items() if key in data})
        data["loops"][1]["result"] = changes.get("fp16", data["loops"][1]["result"])
        return factory.result(point, device, data=data)

    return precision.checks(factory.collected("precision", make))


def test_a_sum_that_ieee_arithmetic_does_not_give() -> None:
    assert sums(fp16=9.9999) == [
        "The loop fp16 += fp16 gives 9.9999; IEEE arithmetic gives 9.9531."
    ]


def test_other_terms_have_no_known_answer() -> None:
    assert sums(fp16=9.9999, terms=500) == []


def test_nothing_measured_contradicts_nothing() -> None:
    for chapter in (end_to_end, machine, precision):
        name = chapter.__name__.rpartition(".")[2]
        assert chapter.checks(factory.collected(name, lambda point, device: None)) == []
