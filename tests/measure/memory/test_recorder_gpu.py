"""The caching allocator's own history, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmlab.chapters.memory.measure import timeline as memory_modes
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
    torch.cuda.set_per_process_memory_fraction(3e8 / total, GPU)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)


def modes_of(**changes: Any) -> dict[str, Any]:
    point = memory_point(**{**MODEL, "context": 256, "batch": 4, **changes})
    modes: dict[str, Any] = memory_modes.measure_modes(point, GPU).data["modes"]
    return modes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_replayed_peak_is_the_allocators_own_within_2_percent(precision: str) -> None:
    for mode in modes_of(precision=precision).values():
        assert mode["status"] == "ok"
        assert mode["replayed_bytes"] == pytest.approx(mode["max_memory_allocated_bytes"], rel=0.02)
        # cuBLAS workspaces of tens of MiB are large relative to so small a model.
        off = abs(mode["predicted"]["bytes"] - mode["replayed_bytes"])
        assert off < 0.25 * mode["replayed_bytes"] or off < 96 * 2**20


def test_recording_does_not_change_the_peak() -> None:
    modes = modes_of()
    for name in ("forward", "forward_graph"):
        recorded = modes[name]["max_memory_allocated_bytes"]
        assert recorded == pytest.approx(modes[name]["unrecorded_peak_bytes"], rel=0.02)


@pytest.mark.usefixtures("little_memory")
def test_running_out_of_memory_records_the_failed_request(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modes = modes_of(context=512, batch=8)
    failed = modes["train_step"]
    assert failed["status"] == "oom"
    assert failed["asked_bytes"] > 0
    assert failed["live_categories_bytes"]["parameters"] > 0
    assert (tmp_path / failed["snapshot"]).exists()
