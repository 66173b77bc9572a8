"""Vendor peaks: exact names, sources, and no guesses."""

from __future__ import annotations

import pytest

from lmlab.measure.peaks import known_devices, peaks_of


def test_an_h200_has_the_figures_of_its_datasheet() -> None:
    peaks = peaks_of("NVIDIA H200")
    assert peaks is not None
    assert peaks["tflops"] == {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}
    assert peaks["memory_tb_per_s"] == 4.8


@pytest.mark.parametrize(
    "name",
    [
        *("", "NVIDIA H2000", "NVIDIA H100", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        *("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "AMD EPYC 7763 64-Core Processor"),
    ],
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peaks_of(name) is None


@pytest.mark.parametrize("name", known_devices())
def test_every_entry_is_unique_complete_and_sourced(name: str) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert known_devices().count(name) == 1
    assert set(peaks["tflops"]) == {"fp32", "tf32", "fp16", "bf16"}
    assert peaks["tflops"]["fp32"] <= peaks["tflops"]["tf32"]
    # Dense tensor rates: bf16 is twice tf32 on every chip here, to the digits that vendors print.
    assert peaks["tflops"]["bf16"] == pytest.approx(2 * peaks["tflops"]["tf32"], rel=0.02)
    assert 0.1 < peaks["memory_tb_per_s"] < 10
    assert "datasheet" in peaks["source"] or "whitepaper" in peaks["source"]
