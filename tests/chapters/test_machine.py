"""The machine card: measured ceilings, stated peaks, facts, and what they should be."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.chapters.machine import measure as machine
from lmlab.chapters.machine.page import against_bands, read_bands
from lmlab.jobs.catalog import all_points
from lmlab.measure.peaks import known_devices
from lmlab.measure.records import value, without_value
from lmlab.report.frame import Results, load, table_of
from lmlab.study.files import REFERENCES, ROOT
from lmlab.study.points import Point
from tests.chapters.pages import answer, by, found, rendered, value_of
from tests.project import study
from tests.report.study import result, written

CEILINGS = [
    value("matmul_rate", 50.0, "TFLOP/s", dtype="fp32", side=4096),
    without_value("matmul_rate", "unsupported", "no bf16 here", dtype="bf16"),
    value("copy_bandwidth", 4000.0, "GB/s", bytes=2**32),
]
PEAKS = {"tflops": {"fp32": 67.0}, "memory_tb_per_s": 4.8, "source": "a datasheet"}
CARD = {"name": "GPU", "sms": 132, "power_limit_w": 700.0, "cpu_model": "X"}


def test_a_cpu_has_ceilings_and_no_stated_peak(cpu: torch.device) -> None:
    outcome = machine.measure(Point("machine", {}, {"quick": True, "seed": 0}), cpu)
    rates = by(outcome, "dtype", "matmul_rate", side=256)
    assert list(rates) == ["fp32", "bf16"]
    assert min(rates.values()) > 0
    assert value_of(outcome, "copy_bandwidth") > 0
    assert found(outcome, "stated_matmul_rate") == []
    assert value_of(outcome, "device") == "cpu"


@pytest.mark.parametrize("peaks", [PEAKS, None], ids=["datasheet", "no datasheet"])
@pytest.mark.parametrize("flags", [(), ("power_capped",)], ids=["free", "capped"])
def test_every_answer_renders(tmp_path: Path, peaks: Any, flags: tuple[str, ...]) -> None:
    records = [*CEILINGS, *machine.facts(CARD, peaks)]
    card = result({}, records, chapter="machine", settings={"seed": 0}, flags=flags)
    front, pages = rendered(tmp_path, written(tmp_path / "r", [card]), "machine")
    assert "50.0 TFLOP/s" in answer(front, "What can this machine do?")
    for stated in ("67.0", "4,800"):
        assert (stated in pages["machine"]) is (peaks is not None)
    assert "cpu_model | X" in pages["machine"]


BANDS = read_bands(REFERENCES / "bands.yaml")
H200 = "NVIDIA H200"


class Named(Results):
    name = H200  # type: ignore[assignment]


def measured(rate: float, limit: float = 700.0, flags: tuple[str, ...] = ()) -> Results:
    base = {"chapter": "machine", "status": "ok"}
    card = {**base, "quantity": "power_limit_w", "value": limit}
    bf16 = {**base, "quantity": "matmul_rate", "dtype": "bf16", "value": rate, "flags": flags}
    return Named("nvidia-h200", table_of([bf16, card]))


@pytest.mark.parametrize(
    ("rate", "more", "cause"),
    [
        (760.0, {}, ""),
        (760.0, {"flags": ("power_capped",)}, ""),
        (400.0, {"flags": ("gpu_shared", "power_capped")}, "process"),
        (400.0, {"flags": ("throttled",)}, "throttled"),
        (400.0, {"limit": 350.0, "flags": ("power_capped",)}, "350 W instead of 700 W"),
        (400.0, {"flags": ("power_capped",)}, "power limit"),
        (400.0, {}, "clocks"),
        (950.0, {}, "libraries"),
    ],
)
def test_an_odd_figure_has_a_likely_cause(rate: float, more: dict[str, Any], cause: str) -> None:
    (found,) = against_bands(measured(rate, **more), BANDS)
    assert found["outside"] == bool(cause)
    assert cause in found["cause"]


def test_the_committed_h200_is_what_it_should_be() -> None:
    shown = ("machine", "end_to_end", "attention")
    points = [p for p in all_points(study("full", "cuda")) if p.chapter in shown]
    found = list(against_bands(load(points, ROOT / "results", "nvidia-h200"), BANDS))
    assert {"fp32 matmul", "bf16 matmul", "copy"} <= {figure["name"] for figure in found}
    assert [figure for figure in found if figure["outside"]] == []


def test_a_gpu_without_a_range_of_its_own_is_compared_with_its_datasheet() -> None:
    base = {"chapter": "machine", "status": "ok", "flags": (), "dtype": "bf16"}
    rates = {"stated_matmul_rate": 100.0, "matmul_rate": 40.0}
    rows = [{**base, "quantity": name, "value": rate} for name, rate in rates.items()]
    (found,) = against_bands(Results("some-gpu", table_of(rows)), BANDS)
    assert found["outside"]
    assert list(against_bands(Results("some-gpu", table_of(rows[1:])), BANDS)) == []


def test_bands_name_known_figures_and_gpus() -> None:
    extra = {"power_limit_w", *BANDS["figures"]}
    assert set(BANDS["shares"]) <= set(BANDS["figures"])
    assert H200 in known_devices()
    for ranges in BANDS["gpus"].values():
        assert set(ranges) <= extra
        limits = [limits for limits in ranges.values() if isinstance(limits, list)]
        assert all(low < high for low, high in limits)
