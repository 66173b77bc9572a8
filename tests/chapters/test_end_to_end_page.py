"""Step times on the page: derived quantities, verdicts and every branch of the answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.measure.records import value
from lmlab.report.frame import Results
from lmlab.study.results import Result
from tests.chapters.pages import answer, built, rendered
from tests.report.study import machine_card, result, time_record, written


def step(
    wall: float, device: float | None, *, mode: str = "train_step", samples: Sequence[float] | None
    = None, warmup_samples: Sequence[float] = (), **parameters: Any,
) -> Result:  # fmt: skip
    """A step of `wall` ms: a quarter forward, half backward, a quarter optimizer."""
    shares = {"forward": 0.25, "backward": 0.5, "optimizer": 0.25, "total": 1.0}
    if mode == "forward_backward":
        shares = {"forward": 0.25, "backward": 0.5, "total": 0.75}
    jitter = samples or [1.0, 1.001, 0.999]
    clocks = {"wall": [wall * j for j in jitter], **({"device": [device]} if device else {})}
    records = [
        time_record([ms * share for ms in times], clock, phase=phase)
        for clock, times in clocks.items()
        for phase, share in shares.items()
    ]
    if warmup_samples:
        records.append(time_record(warmup_samples, phase="total", quantity="warmup_time"))
    records += [
        value("tokens", 512, ""),
        value("flops", 1e12, "FLOP", phase="forward", kind="matmul"),
    ]
    point = {"size": "small", "context": 128, "batch": 4, "precision": "fp32"}
    point |= {"mode": mode, "warmup": 5, "start": "warm", **parameters}
    return result(point, records, chapter="end_to_end", settings={"num_layers": 4})


def study(folder: Path, bf16: float, device: float | None, between: float = 1.0) -> Results:
    """fp32 steps of 100 ms and bf16 steps; `between` is how far two processes lie apart."""
    steps = []
    for precision, wall in (("fp32", 100.0), ("bf16", bf16)):
        busy = None if device is None else wall * device
        steps.append(step(wall, busy, precision=precision))
        steps.append(step(wall * between, busy, precision=precision, mode="forward_backward"))
    cold = [300.0, *[100.0] * 9]
    steps += [
        step(100.0, None, start="cold", warmup=0, samples=[c / 100 for c in cold]),
        step(100.0, None, start="cold", warmup=5, warmup_samples=cold[:5]),
    ]
    return written(folder, [*steps, machine_card("fp32", 50.0, 100.0, 1000.0)])


def test_quantities_are_derived_from_what_was_measured(tmp_path: Path) -> None:
    chapter = built(study(tmp_path, 40.0, 0.5), "end_to_end", "machine")["end_to_end"]
    fp32 = {"precision": "fp32", "mode": "train_step", "start": "warm"}
    assert chapter.value(quantity="per_layer", clock="wall", **fp32) == pytest.approx(75 / 4)
    assert chapter.value(quantity="busy_share", phase="total", **fp32) == pytest.approx(0.5)
    assert chapter.value(quantity="throughput", **fp32) == pytest.approx(5120)
    for clock, share in (("wall", 0.1), ("device", 0.2)):
        assert chapter.value(quantity="mfu", clock=clock, **fp32) == pytest.approx(share)
        assert chapter.value(quantity="measured_mfu", clock=clock, **fp32) == 2 * share
    assert chapter.facts["first_step_extra"]["high"]["value"] == pytest.approx(200)
    assert chapter.facts["settles_at"] == 2


@pytest.mark.parametrize(
    ("bf16", "between", "device", "verdict", "by_device"),
    [
        pytest.param(40.0, 1.0, 0.5, "faster", "2.5x", id="host-bound"),
        pytest.param(40.0, 1.0, 0.99, "faster", "2.5x", id="GPU-bound"),
        pytest.param(160.0, 1.0, 0.99, "slower", "0.62x", id="slower"),
        pytest.param(100.1, 1.0, 0.99, "same", "same", id="same"),
        pytest.param(80.0, 1.6, 0.99, "undecided", "1.25x", id="undecided"),
        pytest.param(80.0, 1.6, None, "undecided", None, id="CPU"),
    ],
)
def test_every_answer_renders(
    tmp_path: Path, bf16: float, between: float, device: float | None, verdict: str, by_device: str
    | None,
) -> None:  # fmt: skip
    results = study(tmp_path / "r", bf16, device, between)
    chapter = built(results, "end_to_end", "machine")["end_to_end"]
    assert [pair.verdict for pair in chapter.compare["bf16"]] == [verdict]
    if by_device:
        (pair,) = chapter.compare["bf16_device"]
        assert pair.ratio == pytest.approx(100 / bf16)
        assert f"| small | {by_device} |" in chapter.table("front_bf16")
    front, _ = rendered(tmp_path, results, "machine", "end_to_end")
    assert answer(front, "Does bf16 pay?").startswith("Yes" if verdict == "faster" else "No")
    expected = {0.5: "host", 0.99: "GPU", None: "Not measured"}[device]
    assert expected in answer(front, "Is the host or the GPU the bottleneck?")


def with_replay(point: Result) -> Result:
    """Forward: 10 ms as a graph, of which 8 ms are kernels and 2 ms the pauses of 1000 of them."""
    records = [value("kernels", 1000, "", phase="forward")]
    for quantity, ms, clock in (("replay", 10.0, "events"), ("busy", 8.0, "device")):
        records.append(
            time_record([ms], clock=clock, phase="forward", quantity=f"graph_{quantity}_time")
        )
    return replace(point, measurements=(*point.measurements, *records))


def test_a_graph_replay_is_compared_with_device_time(tmp_path: Path) -> None:
    steps = [step(100.0, 32.0, mode="forward_backward", batch=batch) for batch in (4, 1)]
    results = written(tmp_path, map(with_replay, steps))
    table = built(results, "end_to_end")["end_to_end"].table("graph_checks")
    for batch in (4, 1):
        cells = "forward | 8.00 | 10.0 | 1.25x | 1.00x | 1,000 | 2.00"
        assert f"| small, batch {batch} | {cells} |" in table


@pytest.mark.parametrize(
    ("samples", "cell"),
    [
        pytest.param([1.0] * 20, "| 100 |", id="steady"),
        pytest.param([1.0, 1.2] * 10, "| 100 to 120↕ |", id="bimodal"),
        pytest.param([1 + i / 100 for i in range(21)], "| 105 to 115↕ |", id="drifting"),
    ],
)
def test_an_unsteady_step_is_a_range(tmp_path: Path, samples: list[float], cell: str) -> None:
    results = written(tmp_path / "r", [step(100.0, None, samples=samples)])
    front, pages = rendered(tmp_path, results, "end_to_end")
    assert cell in pages["end_to_end"]
    throughput = next(line for line in pages["end_to_end"].split("tokens/s")[1].splitlines()[2:])
    assert ("↕" in throughput) == ("↕" in cell), "what is computed from it has the mark too"
    assert cell.strip("|↕ ") in answer(front, "How long is a step?")


def test_a_first_step_is_one_number_even_if_the_steps_drift(tmp_path: Path) -> None:
    drifting = [3.0, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.9, 0.8, 0.7]
    cold = step(100.0, None, start="cold", warmup=0, samples=drifting)
    later = step(1.0, None, start="cold", warmup=7, samples=[100, 105, 95])
    chapter = built(written(tmp_path, [cold, later]), "end_to_end")["end_to_end"]
    assert "| 300 | 90.0 | 65.4 | 5.00 | 210 |" in chapter.table("first_steps")
