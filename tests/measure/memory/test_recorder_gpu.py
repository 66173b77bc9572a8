"""The caching allocator's own history, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmlab.chapters.memory.measure import timeline
from tests.jobs.points import memory_point

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GPU = torch.device("cuda", 0)
MODEL = {"vocab_size": 10_000, "d_model": 512, "d_ff": 2048, "num_layers": 4, "num_heads": 8}


@pytest.fixture
def little_memory() -> Iterator[None]:
    total = torch.cuda.mem_get_info(GPU)[1]
    torch.cuda.set_per_process_memory_fraction(5e8 / total, GPU)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)


def modes_of(**changes: Any) -> dict[str, dict[str, Any]]:
    """Values by mode and quantity, of records that have no other label."""
    point = memory_point(**{**MODEL, "context": 256, "batch": 4, **changes})
    found: dict[str, dict[str, Any]] = {}
    for record in timeline.measure_modes(point, GPU).measurements:
        labels = record["labels"]
        if "mode" in labels and labels.keys() <= {"mode", "phase", "stage"}:
            found.setdefault(labels["mode"], {})[record["quantity"]] = record["value"]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_replayed_peak_is_the_allocators_own_within_2_percent(precision: str) -> None:
    modes = modes_of(precision=precision)
    for mode in modes.values():
        assert mode["replayed_peak"] == pytest.approx(mode["allocator_peak"], rel=0.02)
        # Next to so small a model the workspaces of cuBLAS, tens of MiB, are large.
        off = abs(mode["predicted_peak"] - mode["replayed_peak"])
        assert off < 0.25 * mode["replayed_peak"] or off < 96 * 2**20
    for name in ("forward", "forward_graph"):
        peaks = modes[name]
        assert peaks["peak_memory"] == pytest.approx(peaks["unrecorded_peak"], rel=0.02)


@pytest.mark.usefixtures("little_memory")
def test_running_out_of_memory_records_the_failed_request(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = modes_of(context=512, batch=8)["train_step"]
    assert failed["peak_memory"] is None
    assert failed["asked"] > 0
    assert (tmp_path / failed["snapshot"]).exists()
