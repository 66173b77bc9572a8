"""What is not measured on a device ends with a reason before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from lmlab.jobs import preflight
from lmlab.jobs.catalog import all_points
from lmlab.jobs.outcome import Unsupported
from lmlab.jobs.preflight import (
    SLOW,
    flops_of_step,
    product_s,
    refuse_unsupported,
)
from lmlab.jobs.registry import load
from lmlab.model.cost import flops
from lmlab.model.shape import ModelShape
from lmlab.study.config import load as load_study
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from tests.chapters.attention.points import benchmark_point
from tests.jobs.points import end_to_end_point

CPU = torch.device("cpu")
LARGE = {"d_model": 512, "d_ff": 2048, "context": 512}


@pytest.fixture
def slow_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores that multiply bf16 number by number."""

    def seconds(dtype: torch.dtype) -> float:
        return 0.1 if dtype == torch.bfloat16 else 0.1 / (2 * SLOW)

    monkeypatch.setattr(preflight, "product_s", seconds)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_an_attention_that_is_not_itself_on_a_device_is_not_measured_in_a_model() -> None:
    with pytest.raises(Unsupported, match="attention = 'flash': on a CPU"):
        load("end_to_end")(end_to_end_point(attention="flash"), CPU)
    ranks = Point("fsdp", {"attention": "sdpa_cudnn", "precision": "bf16"}, {"sizes": ["small"]})
    with pytest.raises(Unsupported, match="sdpa_cudnn"):  # before their size is chosen
        refuse_unsupported(ranks, CPU)


def test_variants_of_one_point_are_not_judged_here() -> None:
    asked = {"attention": "flash", "variants": ["naive", "flash"], "precision": "fp32"}
    refuse_unsupported(Point("attention", {"topic": "model"}, asked), CPU)


@pytest.mark.usefixtures("slow_bf16")
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(end_to_end_point(precision="bf16", **LARGE), id="model"),
        pytest.param(benchmark_point("naive", precision="bf16", sequence=4096), id="attention"),
    ],
)
def test_a_long_step_in_a_slow_type_is_refused(point: Point) -> None:
    with pytest.raises(Unsupported, match=r"^bf16 has no fast matmul on this CPU: .* over 0.5 s$"):
        load(point.chapter)(point, CPU)


@pytest.mark.usefixtures("slow_bf16")
@pytest.mark.parametrize(
    ("device", "changes"),
    [
        pytest.param("cpu", {"precision": "bf16"}, id="a short step"),
        pytest.param("cpu", {"precision": "fp32", **LARGE}, id="another type"),
        pytest.param("cpu", {"precision": "bf16", "model": "m:M", **LARGE}, id="own model"),
        pytest.param("cpu", {"precision": "bf16", "start": "cold", **LARGE}, id="a cold start"),
        pytest.param("cuda", {"precision": "bf16", **LARGE}, id="not judged by its host"),
    ],
)
def test_what_is_short_or_fast_or_not_counted_or_cold_is_measured(
    device: str, changes: dict[str, Any]
) -> None:
    refuse_unsupported(end_to_end_point(**changes), torch.device(device))


def test_a_type_with_fast_products_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "product_s", lambda dtype: 0.1)
    refuse_unsupported(end_to_end_point(precision="bf16", **LARGE), CPU)


def test_products_are_those_of_the_points_own_mode_and_of_both_passes_of_attention() -> None:
    point = end_to_end_point(mode="forward")
    asked = {**point.settings, **point.parameters}
    shape = ModelShape(**{key: asked[key] for key in ModelShape.__dataclass_fields__})
    assert flops_of_step(asked) == flops(shape, mode="forward")["forward"]["matmul"]
    assert flops_of_step({**asked, "mode": "train_step"}) == 3 * flops_of_step(asked)
    point = benchmark_point("naive", sequence=64, head_dim=16, causal=False)
    asked = {**point.settings, **point.parameters}
    assert flops_of_step(asked) == 14 * asked["batch"] * 64**2 * 16


@pytest.mark.parametrize("study", ["full", "tiny", "nano"])
def test_products_of_every_point_can_be_counted(study: str) -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    points = all_points(load_study({**config, "study": study}, "cpu"))
    counted = {p.chapter for p in points if flops_of_step({**p.settings, **p.parameters}) > 0}
    assert counted == {"end_to_end", "memory", "profile", "attention", "fastest_step"}


def test_a_product_is_timed_in_one_thread_and_all_are_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, set_threads, asked = torch.get_num_threads(), torch.set_num_threads, []

    def note(count: int) -> None:
        asked.append(count)
        set_threads(count)

    monkeypatch.setattr(torch, "set_num_threads", note)
    product_s.cache_clear()
    assert product_s(torch.float32) > 0
    assert asked == [1, before]
    assert torch.get_num_threads() == before
