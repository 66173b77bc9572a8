"""From shape to launch: enough programs for the GPU, and neighbours that share the L2."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lmlab.kernels import problem as problem_module
from lmlab.kernels.configs import Tiles
from lmlab.kernels.problem import Problem, UnsupportedDevice, backward_plan, forward_plan
from tests.kernels.conftest import DEVICES, SetDevice

TILES = Tiles(block_m=64, block_n=64, warps=4, stages=3)
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
GROUPED = replace(SIXTEEN_HEADS, kv_heads=4)
FP32 = replace(ONE_HEAD, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _h200(set_device: SetDevice) -> None:
    set_device(DEVICES["hopper"])


def of_length(length: int) -> Problem:
    return replace(ONE_HEAD, queries=length, keys=length)


@pytest.mark.parametrize(
    ("length", "splits"),
    [(64, 1), (128, 1), (512, 2), (1024, 4), (2048, 8), (4096, 4), (8192, 2), (16384, 1)],
)
def test_keys_are_split_until_the_gpu_is_full(length: int, splits: int) -> None:
    plan = forward_plan(of_length(length), TILES)

    assert plan.splits == plan.constants["SPLITS"] == splits
    assert plan.programs == length // 64 * splits


def test_splits_can_be_requested() -> None:
    assert forward_plan(SIXTEEN_HEADS, replace(TILES, splits=3)).programs == 256 * 16 * 3


def test_heads_scheduled_together_fit_half_of_the_l2() -> None:
    per_head = 2 * 16384 * 64 * 2

    assert forward_plan(SIXTEEN_HEADS, TILES).l2_heads == 30 * 2**20 // per_head == 7
    assert forward_plan(replace(SIXTEEN_HEADS, keys=2**24), TILES).l2_heads == 1
    assert forward_plan(replace(SIXTEEN_HEADS, keys=64, queries=64), TILES).l2_heads == 16
    assert forward_plan(GROUPED, TILES).l2_heads == 4 * 4  # query heads of a group stay together


@pytest.mark.parametrize(
    ("problem", "paired", "programs"),
    [
        pytest.param(SIXTEEN_HEADS, True, 256 * 16, id="many tiles"),
        pytest.param(of_length(8192), False, 128 + 128, id="few tiles"),
        pytest.param(of_length(4096), False, (64 + 64) * 2, id="fewer tiles, two splits"),
        pytest.param(of_length(128), False, 2 + 2, id="loops too short to split"),
        pytest.param(GROUPED, False, 256 * 4 + 256 * 16, id="grouped heads"),
    ],
)
def test_the_backward_pairs_key_and_query_tiles_if_there_are_enough(
    problem: Problem, paired: bool, programs: int
) -> None:
    plan = backward_plan(problem, TILES)

    assert plan.constants["PAIRED"] is paired
    assert plan.programs == programs


def test_only_unpaired_programs_split_a_loop() -> None:
    requested = replace(TILES, splits=4)

    assert backward_plan(SIXTEEN_HEADS, requested).splits == 1
    assert backward_plan(of_length(4096), requested).splits == 4


@pytest.mark.parametrize("plan", [forward_plan, backward_plan])
@pytest.mark.parametrize(
    ("queries", "keys", "ragged"),
    [(128, 128, (False, False)), (100, 128, (True, False)), (128, 130, (False, True))],
)
def test_ragged_ends_are_known(
    plan: Any, queries: int, keys: int, ragged: tuple[bool, bool]
) -> None:
    constants = plan(replace(ONE_HEAD, queries=queries, keys=keys), TILES).constants

    assert (constants["RAGGED_QUERIES"], constants["RAGGED_KEYS"]) == ragged


@pytest.mark.parametrize(
    ("fp32_dot", "tf32", "precision", "terms"),
    [
        ("ieee", False, "ieee", 1),
        ("tf32x3", False, "tf32x3", 1),
        ("bf16x6", False, "ieee", 3),
        ("tf32x3", True, "tf32", 1),
        ("bf16x6", True, "tf32", 1),
    ],
)
def test_fp32_products_are_exact_unless_tf32_is_requested(
    fp32_dot: Any, tf32: bool, precision: str, terms: int
) -> None:
    tiles = replace(TILES, fp32_dot=fp32_dot)
    constants = backward_plan(replace(FP32, tf32=tf32), tiles).constants

    assert (constants["PRECISION"], constants["TERMS"]) == (precision, terms)
    assert forward_plan(replace(FP32, tf32=tf32), tiles).constants["PRECISION"] == precision


def test_tf32_is_requested_through_pytorch() -> None:
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


def test_a_gpu_before_ampere_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class T4:
        name, major, minor = "Tesla T4", 7, 5

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: T4)

    with pytest.raises(UnsupportedDevice, match=r"Tesla T4 has compute capability 7\.5, 8\.0"):
        problem_module.device_info.__wrapped__(torch.device("cuda", 0))
