"""From shape to launch: enough programs for the GPU, neighbours that share the L2."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lmlab.kernels import problem as problem_module
from lmlab.kernels.configs import Tiles
from lmlab.kernels.problem import Problem, Processor, UnsupportedDevice, backward_plan, forward_plan

H200 = Processor("hopper", 132, 227 * 1024, 60 * 2**20)
TILES = Tiles(kept=64, walked=64, warps=4, stages=3)
ONE_HEAD = Problem(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    batch=1,
    heads=1,
    kv_heads=1,
    queries=16384,
    keys=16384,
    head_dim=64,
    is_causal=True,
    tf32=False,
)
SIXTEEN_HEADS = replace(ONE_HEAD, heads=16, kv_heads=16)


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "processor", lambda device: H200)
    forward_plan.cache_clear()
    backward_plan.cache_clear()


def of_length(length: int) -> Problem:
    return replace(ONE_HEAD, queries=length, keys=length)


@pytest.mark.parametrize(
    ("length", "splits"),
    [(64, 1), (128, 1), (512, 2), (1024, 4), (2048, 8), (4096, 4), (8192, 2), (16384, 1)],
)
def test_keys_are_shared_out_while_the_gpu_has_room(length: int, splits: int) -> None:
    plan = forward_plan(of_length(length), TILES)

    assert plan.splits == plan.constants["SPLITS"] == splits
    assert plan.programs == plan.grid == length // 64 * splits


def test_splits_can_be_asked_for() -> None:
    assert forward_plan(SIXTEEN_HEADS, replace(TILES, splits=3)).programs == 256 * 16 * 3


def test_persistent_programs_are_as_many_as_the_gpu_holds() -> None:
    plan = forward_plan(SIXTEEN_HEADS, replace(TILES, persistent=True))

    assert plan.grid == 132 * 3  # 58 KiB each, of 227
    assert plan.programs == 256 * 16


def test_heads_abreast_fit_half_of_the_l2() -> None:
    per_head = 2 * 16384 * 64 * 2

    assert forward_plan(SIXTEEN_HEADS, TILES).abreast == 30 * 2**20 // per_head == 7
    assert forward_plan(replace(SIXTEEN_HEADS, keys=2**24), TILES).abreast == 1
    assert forward_plan(replace(SIXTEEN_HEADS, keys=64, queries=64), TILES).abreast == 16


def test_heads_of_a_group_stay_together() -> None:
    grouped = replace(SIXTEEN_HEADS, kv_heads=4)

    assert forward_plan(grouped, TILES).abreast == 4 * 4


def test_backward_pairs_tiles_of_keys_and_queries_when_there_are_enough() -> None:
    plan = backward_plan(SIXTEEN_HEADS, TILES)

    assert plan.constants["PAIRED"]
    assert plan.programs == 256 * 16


@pytest.mark.parametrize(
    ("problem", "programs"),
    [
        pytest.param(of_length(8192), 128 + 128, id="few tiles"),
        pytest.param(of_length(4096), (64 + 64) * 2, id="fewer tiles, two to a walk"),
        pytest.param(of_length(128), 2 + 2, id="walks too short to share"),
        pytest.param(replace(SIXTEEN_HEADS, kv_heads=4), 256 * 4 + 256 * 16, id="grouped heads"),
    ],
)
def test_backward_takes_them_apart_otherwise(problem: Problem, programs: int) -> None:
    plan = backward_plan(problem, TILES)

    assert not plan.constants["PAIRED"]
    assert plan.programs == programs


@pytest.mark.parametrize("plan", [forward_plan, backward_plan])
@pytest.mark.parametrize(
    ("queries", "keys", "ragged"),
    [(128, 128, (False, False)), (100, 128, (True, False)), (128, 130, (False, True))],
)
def test_rows_beyond_the_end_are_known(
    plan: Callable[[Problem, Tiles], problem_module.Plan],
    queries: int,
    keys: int,
    ragged: tuple[bool, bool],
) -> None:
    constants = plan(replace(ONE_HEAD, queries=queries, keys=keys), TILES).constants

    assert (constants["RAGGED_QUERIES"], constants["RAGGED_KEYS"]) == ragged


def test_tf32_is_taken_when_asked_for_and_else_what_the_tiles_say() -> None:
    exact = replace(ONE_HEAD, dtype=torch.float32)
    three = replace(TILES, products="tf32x3")

    assert forward_plan(exact, TILES).constants["PRECISION"] == "ieee"
    assert forward_plan(exact, three).constants["PRECISION"] == "tf32x3"
    assert forward_plan(replace(exact, tf32=True), three).constants["PRECISION"] == "tf32"


def test_numbers_are_cut_into_parts_unless_tf32_will_do() -> None:
    exact = replace(ONE_HEAD, dtype=torch.float32)
    six = replace(TILES, products="bf16x6")

    in_parts = backward_plan(exact, six).constants
    whole = backward_plan(replace(exact, tf32=True), six).constants

    assert (in_parts["PARTS"], in_parts["PRECISION"]) == (3, "ieee")
    assert (whole["PARTS"], whole["PRECISION"]) == (1, "tf32")


def test_a_walk_is_shared_only_by_programs_that_do_nothing_else() -> None:
    asked_for = replace(TILES, splits=4)

    assert backward_plan(SIXTEEN_HEADS, asked_for).splits == 1
    assert backward_plan(of_length(4096), asked_for).splits == 4


def test_tf32_is_asked_for_in_pytorchs_way() -> None:
    q = torch.empty(1, 1, 4, 16)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert Problem.of(q, q, True).tf32
        assert not Problem.of(q.half(), q.half(), True).tf32
        torch.set_float32_matmul_precision("highest")
        assert not Problem.of(q, q, True).tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_old_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    class Facts:
        name, major, minor = "Tesla T4", 7, 5

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)

    with pytest.raises(UnsupportedDevice, match=r"Tesla T4 has compute capability 7\.5, 8\.0"):
        problem_module.processor.__wrapped__(torch.device("cuda", 0))
