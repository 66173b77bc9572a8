"""The search tries what fits, keeps what is correct and fastest, and prints rows of the table."""

import itertools
import multiprocessing.dummy
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lmlab.kernels import configs, launch, tune
from lmlab.kernels.configs import Tiles, shared_bytes
from lmlab.kernels.problem import Direction, Problem
from lmlab.kernels.tune import candidates
from lmlab.measure.kernel_clock import measure_in_rounds
from tests.kernels.conftest import DEVICES, SIXTEEN_HEADS, SetDevice

BACKWARD = replace(SIXTEEN_HEADS, direction="backward", head_dim=128)
ON_CPU = Problem.of(torch.empty(1, 2, 32, 16), torch.empty(1, 2, 32, 16), True, "forward")
SMALL = Tiles(block_m=16, block_n=32, warps=4, stages=2)
FAST = Tiles(block_m=64, block_n=64, warps=4, stages=2)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


@DIRECTIONS
@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_candidates_differ_and_fit(
    direction: Direction, head_dim: int, dtype: torch.dtype, set_device: SetDevice
) -> None:
    set_device(DEVICES["hopper"])
    problem = replace(BACKWARD, direction=direction, head_dim=head_dim, dtype=dtype)
    found = list(candidates(problem))
    assert 1 < len(found) == len(set(found))
    assert all(shared_bytes(problem, tiles) <= problem.gpu.shared_limit for tiles in found)


@pytest.mark.parametrize(
    ("option", "gpu", "changes", "tried"),
    [
        ("warp_specialized", "hopper", {}, True),
        ("warp_specialized", "hopper", {"dtype": torch.float32}, False),
        ("warp_specialized", "ada", {}, False),
        ("fused", "hopper", {"head_dim": 64}, True),
        ("fused", "hopper", {}, False),
        ("fused", "hopper", {"head_dim": 64, "direction": "forward"}, False),
        ("inline_delta", "hopper", {"queries": 1024, "keys": 1024}, True),
        ("inline_delta", "hopper", {"queries": 4096, "keys": 4096}, False),
        ("tma", "hopper", {}, True),
        ("tma", "ada", {}, False),
    ],
)
def test_options_are_tried_where_they_can_help(
    option: str, gpu: str, changes: dict[str, Any], tried: bool, set_device: SetDevice
) -> None:
    set_device(DEVICES[gpu])
    found = candidates(replace(BACKWARD, **changes))
    assert any(getattr(tiles, option) for tiles in found) is tried


def test_what_the_table_has_on_hopper_is_tried(set_device: SetDevice) -> None:
    set_device(DEVICES["hopper"])
    for row in configs.rows():
        if "hopper" in row.architectures and row.bits == 16:
            length = min(row.sequence, 2048)
            sizes = {"head_dim": row.head_dim, "is_causal": row.masks[0]}
            problem = replace(BACKWARD, direction=row.direction, **sizes)
            assert row.tiles in set(candidates(replace(problem, queries=length, keys=length))), row


@pytest.mark.slow
@DIRECTIONS
def test_only_correct_tiles(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, function = replace(ON_CPU, direction=direction), getattr(launch, direction)
    assert tune.is_usable(problem, FAST)

    def wrong(*inputs: Any, **options: Any) -> Any:
        assert inputs[0].shape[2] % 64, "the problem is ragged"
        first, *others = function(*inputs, **options)
        return first + 1.0, *others

    monkeypatch.setattr(launch, direction, wrong)
    assert not tune.is_usable(problem, FAST)

    too_large = launch.TilesTooLarge("tiles 128 x 128")
    monkeypatch.setattr(launch, direction, Mock(side_effect=too_large))
    assert not tune.is_usable(problem, FAST)


def test_a_hanging_candidate_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    # What waiting for the first ends with.
    ends = [multiprocessing.TimeoutError, True]
    monkeypatch.setattr(tune, "is_usable", Mock(side_effect=ends))
    monkeypatch.setattr(tune, "get_context", lambda method: multiprocessing.dummy)
    assert tune.usable(ON_CPU, [SMALL, FAST], 1) == [FAST]


def test_inputs_have_the_layout_of_a_model() -> None:
    for x in tune.inputs_of(replace(ON_CPU, batch=2, direction="backward"))[:5]:
        assert x.shape == (2, 2, 32, 16)
        assert x.transpose(1, 2).is_contiguous()


def test_the_fastest_wins_and_what_does_not_fit_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    too_large = replace(FAST, stages=5)

    def run(problem: Problem, inputs: tuple[torch.Tensor, ...], tiles: Tiles) -> None:
        if tiles == too_large:
            raise launch.TilesTooLarge("tiles 64 x 64")
        time.sleep(0.02 if tiles == SMALL else 0.001)

    monkeypatch.setattr(tune, "run", run)
    assert tune.fastest(ON_CPU, [SMALL, too_large, FAST]) == FAST
    assert tune.fastest(ON_CPU, [too_large]) is None


def test_what_fails_otherwise_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "run", Mock(side_effect=RuntimeError("an illegal address")))
    with pytest.raises(RuntimeError, match="an illegal address"):
        tune.fastest(ON_CPU, [SMALL])


def test_the_grid_fills_the_gpu_to_powers_of_two_with_a_models_heads(set_device: SetDevice) -> None:
    set_device(DEVICES["hopper"])
    found = list(tune.problems(SIXTEEN_HEADS, tune.LENGTHS))
    rows = [configs._parse(tune.format_row(problem, SMALL)) for problem in found]
    assert {row.blocks_per_sm for row in rows if row.sequence <= 2048} == set(tune.BLOCKS_PER_SM)
    assert max(problem.heads for problem in found) == tune.MODEL_HEADS
    assert len({(row.sequence, row.blocks_per_sm) for row in rows}) == len(rows)


@DIRECTIONS
@pytest.mark.parametrize("differ", [False, True], ids=["as whole lengths", "ragged differ"])
def test_rows_cover_the_grid_and_neighbours_that_agree_are_one(
    direction: Direction, differ: bool, monkeypatch: pytest.MonkeyPatch, set_device: SetDevice
) -> None:
    set_device(DEVICES["hopper"])
    like = replace(ON_CPU, dtype=torch.bfloat16, head_dim=64, direction=direction)
    monkeypatch.setattr(tune, "usable", lambda problem, tried, jobs: list(tried))

    def fastest(problem: Problem, tried: list[Tiles]) -> Tiles:
        stages = 3 if differ and problem.batch_heads > 4 and not problem.is_whole else 2
        large = problem.batch_heads > 20
        return min(tried, key=lambda t: 1000 * abs(t.stages - stages) + large * t.block_m)

    monkeypatch.setattr(tune, "fastest", fastest)
    rows = [configs._parse(line) for line in tune.tune(like, [4096, 256], 1)]
    for whole, shorter in itertools.product(tune.problems(like, [256, 4096]), (0, 1, 24, 63)):
        problem = tune.of_length(whole, whole.queries - shorter)
        covering = next(row for row in rows if row.covers(problem))
        assert covering.tiles == fastest(problem, list(candidates(problem)))
    assert any(row.whole_only for row in rows) is differ
    pairs = itertools.pairwise(row for row in rows if not row.whole_only)
    assert differ or all((a.sequence, a.tiles) != (b.sequence, b.tiles) for a, b in pairs)


@pytest.mark.gpu
@DIRECTIONS
def test_a_gpu_is_tuned(
    direction: Direction, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = [FAST, replace(FAST, stages=3)]
    monkeypatch.setattr(tune, "candidates", lambda problem: tried)
    monkeypatch.setattr(tune, "BLOCKS_PER_SM", [1.0])
    tune.main([f"--direction={direction}", "--head-dim=64", "--sequence=256", "--jobs=1"])
    rows = [configs._parse(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row.tiles in tried for row in rows)
    for length in (256, 200):
        q = torch.empty(1, 1, length, 64, dtype=torch.bfloat16, device="cuda")
        assert any(row.covers(Problem.of(q, q, True, direction)) for row in rows)


BETWEEN = [
    [(3, 32, n, 64) for n in (512, 768, 1024)],
    [(3, n, 1024, 64) for n in (16, 24, 32)],
    [(8, n, 2048, 64) for n in (3, 4, 5)],
    [(3, 8, n, 128) for n in (512, 768, 1024)],
    [(3, n, 1024, 128) for n in (2, 3, 4)],
]
"""Shapes (batch, heads, sequence, head dimension) of growing work, one between two others."""


@pytest.mark.gpu
@DIRECTIONS
@pytest.mark.parametrize("shapes", BETWEEN, ids=lambda shapes: str(shapes[1]))
def test_a_shape_between_two_others_is_not_slower_than_both(
    shapes: list[tuple[int, ...]], direction: Direction
) -> None:
    tensors = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    problems = [Problem.of(q, q, True, direction) for q in tensors]
    calls = [partial(tune.run, problem, tune.inputs_of(problem), None) for problem in problems]
    for call in calls:
        call()  # compiles
    variants = {str(place): partial(lambda call: call, call) for place, call in enumerate(calls)}
    measured, _ = measure_in_rounds(variants, device=problems[0].device, budget=tune.FINAL)
    low, between, high = (measured[name].median_ms for name in variants)
    assert between <= 1.05 * max(low, high)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune")
def test_without_a_gpu_there_is_nothing_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.main([])
    assert "a CUDA GPU is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(
            ([f"{option}={value}"], f"{option}: must be a positive integer, got {value!r}")
            for option, value in (("--head-dim", "0"), ("--jobs", "many"))
        ),
        *(([f"--sequence={n}"], f"--sequence: invalid choice: {n}") for n in (-64, 32, 1000)),
    ],
)
def test_what_cannot_be_tuned_is_a_one_line_error(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.main(arguments)
    assert expected in capsys.readouterr().err.splitlines()[-1]
