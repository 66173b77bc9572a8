"""The largest size that fits and keeps its step short, and a reason for each one that does not."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from lmlab.jobs import autosize
from lmlab.jobs.autosize import choose, why_too_large, why_too_slow
from lmlab.jobs.rank_work import candidates, expected_memory
from lmlab.measure.records import Record
from tests.jobs.points import rank_point

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")
POINT = rank_point("data_parallel", {"huge": 4096, "wide": 512, "slim": 16})
SIZES = candidates(POINT)


def chosen(
    monkeypatch: pytest.MonkeyPatch, rate: float, steps_s: dict[str, float] | None
) -> list[Record]:
    monkeypatch.setattr(autosize, "bandwidth", lambda device: rate)
    by_workload = {SIZES[size]: step_s for size, step_s in (steps_s or {}).items()}
    monkeypatch.setattr(autosize, "trial_s", lambda _, workload, __: by_workload[workload])
    trial = None if steps_s is None else Mock()
    return choose(POINT, CPU, purpose="time", limit_s=2.0, trial=trial)[1]


@pytest.mark.parametrize(
    ("rate", "steps_s", "size"),
    [
        (1e12, {"huge": 5.0, "wide": 1.5, "slim": 0.1}, "wide"),
        (1e6, {"slim": 0.1}, "slim"),
        (1.0, {"slim": 9.0}, "slim"),
        (1e7, None, "wide"),
    ],
    ids=["first quick one", "what the link can carry", "last even if slow", "without a trial"],
)
def test_the_first_size_that_is_quick_is_taken(
    monkeypatch: pytest.MonkeyPatch, rate: float, steps_s: dict[str, float] | None, size: str
) -> None:
    records = chosen(monkeypatch, rate, steps_s)
    found = {r["quantity"]: r["value"] for r in records if r["status"] == "ok"}
    assert (found["size"], found["over_limit"]) == (size, steps_s == {"slim": 9.0})
    assert found["all_reduce_bandwidth"] == rate / 1e9
    assert found.get("trial_step") == (steps_s[size] * 1e3 if steps_s else None)
    left_out = [r["labels"]["candidate"] for r in records if r["status"] == "unsupported"]
    assert [*left_out, size] == list(SIZES)[: len(left_out) + 1]


def test_no_size_that_fits_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosize, "free_bytes", lambda device: 1000.0)
    with pytest.raises(MemoryError, match="slim"):
        chosen(monkeypatch, 1e12, {})


def test_ranks_that_share_a_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = SIZES["wide"]
    expected = expected_memory(wide, CPU)
    assert expected is not None
    free = 1.5 * expected.peak
    monkeypatch.setattr(autosize, "free_bytes", lambda device: free)
    assert why_too_large(wide, CPU) is None
    monkeypatch.setattr(autosize.across_ranks, "ranks_per_device", lambda device: 2)
    assert why_too_large(wide, CPU) is not None


def test_a_model_of_unknown_size_is_tried() -> None:
    mine = replace(SIZES["huge"], model="mine.net:Net")
    assert why_too_slow(mine, 1.0, messages=1, limit_s=1e-9) is None
    assert why_too_large(mine, CPU) is None
