"""What is not measured on a device ends with a reason before anything is built."""

import pytest
import torch

from lmlab.jobs import preflight
from lmlab.jobs.catalog import all_points
from lmlab.jobs.outcome import Unsupported
from lmlab.jobs.preflight import SLOW, flops_of_step, product_s, refuse_unsupported
from lmlab.model.cost import flops
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point
from tests.chapters.attention.points import benchmark_point
from tests.jobs.points import end_to_end_point
from tests.project import study

CPU = torch.device("cpu")
LARGE = {"d_model": 512, "d_ff": 2048, "context": 512}


@pytest.fixture
def slow_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores that multiply bf16 number by number."""
    seconds = {torch.bfloat16: 0.1, torch.float32: 0.1 / (2 * SLOW)}
    monkeypatch.setattr(preflight, "product_s", seconds.__getitem__)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


REFUSED = {
    "a precision that the device lacks": (end_to_end_point(precision="tf32"), "tf32"),
    "an attention that is not itself here": (
        end_to_end_point(attention="flash"),
        "attention = 'flash': on a CPU",
    ),
    "before ranks choose their size": (
        Point("fsdp", {"attention": "sdpa_cudnn", "precision": "bf16"}, {"sizes": ["small"]}),
        "sdpa_cudnn",
    ),
    "a long step of a model": (
        end_to_end_point(precision="bf16", **LARGE),
        "^bf16 has no fast matmul on this CPU: ",
    ),
    "long attention": (
        benchmark_point("naive", precision="bf16", sequence=4096),
        "^bf16 has no fast matmul on this CPU: ",
    ),
}
VARIANTS = {"attention": "flash", "variants": ["naive", "flash"], "precision": "fp32"}
MEASURED = {
    "a short step": ("cpu", end_to_end_point(precision="bf16")),
    "another type": ("cpu", end_to_end_point(**LARGE)),
    "own model": ("cpu", end_to_end_point(precision="bf16", model="m:M", **LARGE)),
    "a cold start": ("cpu", end_to_end_point(precision="bf16", start="cold", **LARGE)),
    "not judged by its host": ("cuda", end_to_end_point(precision="bf16", **LARGE)),
    "variants judge one by one": ("cpu", Point("attention", {"topic": "model"}, VARIANTS)),
}


@pytest.mark.usefixtures("slow_bf16")
@pytest.mark.parametrize(("point", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_the_device_lacks_or_is_slow_at_is_refused(point: Point, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        refuse_unsupported(point, CPU)


@pytest.mark.usefixtures("slow_bf16")
@pytest.mark.parametrize(("device", "point"), MEASURED.values(), ids=MEASURED)
def test_what_is_short_fast_cold_or_not_counted_is_measured(device: str, point: Point) -> None:
    refuse_unsupported(point, torch.device(device))


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


@pytest.mark.parametrize("name", ["full", "tiny", "nano"])
def test_products_of_every_point_can_be_counted(name: str) -> None:
    points = all_points(study(name))
    counted = {p.chapter for p in points if flops_of_step({**p.settings, **p.parameters}) > 0}
    assert counted == {"end_to_end", "memory", "profile", "attention", "fastest_step"}


def test_a_product_is_timed_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before, asked = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    product_s.cache_clear()
    assert product_s(torch.float32) > 0
    assert asked == [1, before]
