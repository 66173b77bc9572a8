"""Every problem gets tiles that fit the device, and enough programs that share the L2."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmlab.kernels import configs
from lmlab.kernels import problem as problem_module
from lmlab.kernels.configs import Tiles, choose, format_row, shared_bytes
from lmlab.kernels.plan import backward_plan, forward_plan
from lmlab.kernels.problem import DeviceInfo, Problem, UnsupportedDevice
from lmlab.measure.precision import tf32_allowed
from tests.kernels.conftest import DEVICES, GPU, SIXTEEN_HEADS, SetDevice

KIB = 1024
SHARED_LIMIT = {
    "ampere": 99 * KIB,  # RTX 3090
    "ada": 99 * KIB,  # RTX 4090
    "hopper": 227 * KIB,  # H100
    "blackwell": 99 * KIB,  # RTX 5090
    "cpu": 2**30,
}  # the least that a GPU of the architecture has

lengths = st.integers(1, 2**20)
problems = st.builds(
    replace,
    st.just(SIXTEEN_HEADS),
    direction=st.sampled_from(["forward", "backward"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    head_dim=st.integers(1, 256),
    is_causal=st.booleans(),
    batch=st.integers(1, 2**16),
    queries=lengths,
    keys=lengths,
)


@given(problems, st.sampled_from(sorted(SHARED_LIMIT)))
def test_every_problem_has_ever_smaller_tiles_that_fit(problem: Problem, name: str) -> None:
    limit = SHARED_LIMIT[name]
    info = DeviceInfo(name, 132, limit, 2**20)
    with patch.object(problem_module, "device_info", lambda device: info):
        chosen = choose(problem)
        sizes = [shared_bytes(problem, tiles) for tiles in chosen]
    assert max(sizes) <= limit
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(min(tiles.block_m, tiles.block_n) >= 16 for tiles in chosen)


SWITCHES = ("tma", "paired", "warp_specialized", "fused", "inline_delta")
TILES = Tiles(block_m=128, block_n=64, warps=8, stages=3)


@given(
    st.builds(
        Tiles,
        block_m=st.sampled_from([16, 64, 192]),
        block_n=st.sampled_from([32, 128]),
        warps=st.sampled_from([4, 8]),
        stages=st.integers(1, 5),
        **dict.fromkeys(SWITCHES, st.booleans()),
        programs_per_sm=st.sampled_from([1, 2]),
        fp32_dot=st.sampled_from(["ieee", "tf32x3", "bf16x6"]),
    )
)
def test_a_row_of_the_table_round_trips(tiles: Tiles) -> None:
    row = configs._parse(format_row(SIXTEEN_HEADS, tiles))
    assert row.tiles == tiles
    assert row.covers(SIXTEEN_HEADS)


OTHERS = {"direction": "backward", "dtype": torch.float32, "head_dim": 128, "is_causal": False}
# A longer sequence, more blocks per SM, and a length that is not a multiple of 64.
OTHERS |= {"keys": 32768, "batch": 2, "queries": 16383}


def test_a_row_does_not_cover_other_problems_or_architectures(set_device: SetDevice) -> None:
    row = configs._parse(format_row(SIXTEEN_HEADS, TILES) + " whole")
    assert row.covers(SIXTEEN_HEADS)
    for name, value in OTHERS.items():
        assert not row.covers(replace(SIXTEEN_HEADS, **{name: value})), name  # type: ignore[arg-type]
    set_device(DEVICES["ada"])
    assert not row.covers(SIXTEEN_HEADS)


def test_the_first_row_that_covers_a_problem_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (
        configs._parse(format_row(of_length(n), replace(TILES, block_m=m)))
        for n, m in ((1024, 16), (16384, 64))
    )
    monkeypatch.setattr(configs, "rows", lambda: (small, large))
    assert configs.look_up(of_length(1000)).block_m == 16
    assert configs.look_up(of_length(1025)).block_m == 64


def test_a_device_too_small_for_any_tile_is_a_one_line_error(set_device: SetDevice) -> None:
    set_device(DeviceInfo("hopper", 132, 2 * KIB, 2**20))
    with pytest.raises(ValueError, match="does not fit the 2 KiB of shared memory"):
        choose(SIXTEEN_HEADS)


def test_architectures() -> None:
    names = {(7, 5): None, (8, 6): "ampere", (8, 9): "ada", (9, 0): "hopper", (12, 0): "blackwell"}
    assert {capability: problem_module.architecture(*capability) for capability in names} == names


SMALL = Tiles(block_m=64, block_n=64, warps=4, stages=3)
ONE_HEAD = replace(SIXTEEN_HEADS, heads=1, kv_heads=1)
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
    plan = forward_plan(of_length(length), SMALL)
    assert plan.splits == plan.constants["SPLITS"] == splits
    assert plan.programs == length // 64 * splits


@pytest.mark.parametrize(("heads", "rows"), [(2, 128), (3, 192), (4, 128), (8, 192)])
def test_without_a_mask_the_number_of_waves_decides(heads: int, rows: int) -> None:
    problem = replace(of_length(8192), heads=heads, kv_heads=heads, is_causal=False)
    assert configs.look_up(problem).block_m == rows
    assert configs.look_up(replace(problem, is_causal=True)).block_m == 128


def test_without_a_mask_or_with_wide_heads_a_tile_per_sm_is_not_split() -> None:
    for is_causal, head_dim, splits in ((False, 128, 1), (True, 128, 2), (True, 256, 1)):
        problem = replace(of_length(16384), head_dim=head_dim, is_causal=is_causal)
        assert forward_plan(problem, configs.look_up(problem)).splits == splits


def test_heads_scheduled_together_fit_half_of_the_l2() -> None:
    per_head = 2 * 16384 * 64 * 2
    assert forward_plan(SIXTEEN_HEADS, SMALL).l2_heads == 30 * 2**20 // per_head == 7
    assert forward_plan(replace(SIXTEEN_HEADS, keys=2**24), SMALL).l2_heads == 1
    assert forward_plan(replace(SIXTEEN_HEADS, keys=64, queries=64), SMALL).l2_heads == 16
    assert forward_plan(GROUPED, SMALL).l2_heads == 4 * 4  # query heads of a group stay together


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
def test_the_backward_pairs_tiles(problem: Problem, paired: bool, programs: int) -> None:
    plan = backward_plan(problem, SMALL)
    assert plan.constants["PAIRED"] is paired
    assert plan.programs == programs


def test_splits_can_be_requested_unless_tiles_are_paired() -> None:
    requested = replace(SMALL, splits=3)
    assert forward_plan(SIXTEEN_HEADS, requested).programs == 256 * 16 * 3
    assert backward_plan(SIXTEEN_HEADS, requested).splits == 1
    assert backward_plan(of_length(4096), requested).splits == 3


@pytest.mark.parametrize("plan", [forward_plan, backward_plan])
@pytest.mark.parametrize(
    ("queries", "keys", "ragged"),
    [(128, 128, (False, False)), (100, 128, (True, False)), (128, 130, (False, True))],
)
def test_ragged_ends(plan: Any, queries: int, keys: int, ragged: tuple[bool, bool]) -> None:
    constants = plan(replace(ONE_HEAD, queries=queries, keys=keys), SMALL).constants
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
def test_fp32_products_are_exact(fp32_dot: Any, tf32: bool, precision: str, terms: int) -> None:
    tiles = replace(SMALL, fp32_dot=fp32_dot)
    constants = backward_plan(replace(FP32, tf32=tf32), tiles).constants
    assert (constants["PRECISION"], constants["TERMS"]) == (precision, terms)
    assert forward_plan(replace(FP32, tf32=tf32), tiles).constants["PRECISION"] == precision


def test_tf32_is_requested_through_pytorch() -> None:
    q = torch.empty(1, 1, 4, 16)
    for allowed in (True, False):
        with tf32_allowed(allowed):
            assert Problem.of(q, q, True, "forward").tf32 is allowed
            assert not Problem.of(q.half(), q.half(), True, "forward").tf32


def test_a_gpu_before_ampere_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    t4 = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: t4)
    with pytest.raises(UnsupportedDevice, match=r"Tesla T4 has compute capability 7\.5, 8\.0"):
        problem_module.device_info.__wrapped__(GPU)


def test_programs_in_a_ring_all_run_at_once(
    monkeypatch: pytest.MonkeyPatch, set_device: SetDevice
) -> None:
    set_device(DEVICES["hopper"])
    possible = replace(SIXTEEN_HEADS, heads=2, kv_heads=2, is_causal=False, direction="backward")
    assert configs.look_up(possible).rotated
    others: list[dict[str, Any]] = [{"is_causal": True}, {"queries": 8192}, {"kv_heads": 1}]
    for change in (*others, {"queries": 32768, "keys": 32768}):
        assert not configs.look_up(replace(possible, **change)).rotated
    monkeypatch.setattr(configs.distributed, "is_initialized", lambda: True)
    assert not configs.look_up(possible).rotated


def test_no_row_of_the_table_is_hidden_by_an_earlier_one() -> None:
    bounds = [(row, (row.head_dim, row.sequence, row.blocks_per_sm)) for row in configs.rows()]
    for place, (row, most) in enumerate(bounds):
        for earlier, limits in bounds[:place]:
            wider = all(limit >= bound for limit, bound in zip(limits, most, strict=True))
            hides = set(row.architectures) <= set(earlier.architectures) and (
                (earlier.direction, earlier.bits) == (row.direction, row.bits)
                and set(row.masks) <= set(earlier.masks)
                and (row.whole_only or not earlier.whole_only)
                and not earlier.tiles.rotated  # not possible everywhere
            )
            assert not (wider and hides), f"{row} is never chosen: {earlier}"
