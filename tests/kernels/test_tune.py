"""The search tries what fits, keeps what is correct and fastest, and prints rows of the table."""

import itertools
import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmlab.kernels import configs, launch, tune
from lmlab.kernels.configs import Case, Tiles, shared_bytes
from lmlab.kernels.problem import Problem
from lmlab.kernels.tune import Trial, candidates
from tests.kernels.conftest import DEVICES, SetDevice

LIMIT = 227 * 1024
HOPPER = Case(
    direction="backward",
    architecture="hopper",
    bits=16,
    head_dim=128,
    is_causal=True,
    sequence=16384,
    blocks_per_sm=32.0,
)
ON_CPU = Problem.of(torch.empty(1, 2, 32, 16), torch.empty(1, 2, 32, 16), True)
SMALL = Tiles(block_m=16, block_n=32, warps=4, stages=2)
FAST = Tiles(block_m=64, block_n=64, warps=4, stages=2)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


@DIRECTIONS
@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("bits", [16, 32])
def test_candidates_are_distinct_and_fit(
    direction: configs.Direction, head_dim: int, bits: int
) -> None:
    case = replace(HOPPER, direction=direction, head_dim=head_dim, bits=bits)

    found = list(candidates(case, LIMIT))

    assert 1 < len(found) == len(set(found))
    assert all(shared_bytes(case, tiles) <= LIMIT for tiles in found)


@pytest.mark.parametrize(
    ("option", "changes", "tried"),
    [
        ("warp_specialized", {}, True),
        ("warp_specialized", {"bits": 32}, False),
        ("warp_specialized", {"architecture": "ada"}, False),
        ("fused", {}, True),
        ("fused", {"direction": "forward"}, False),
        ("inline_delta", {"sequence": 1024}, True),
        ("inline_delta", {"sequence": 4096}, False),
        ("tma", {}, True),
        ("tma", {"architecture": "ada"}, False),
    ],
)
def test_options_are_tried_where_they_can_help(
    option: str, changes: dict[str, Any], tried: bool
) -> None:
    found = candidates(replace(HOPPER, **changes), LIMIT)

    assert any(getattr(tiles, option) for tiles in found) is tried


def test_what_the_table_has_on_hopper_is_tried() -> None:
    for row in configs.rows():
        if "hopper" in row.architectures and row.bits == 16:
            case = replace(
                HOPPER,
                direction=row.direction,
                head_dim=row.head_dim,
                sequence=min(row.sequence, 2048),
            )
            assert row.tiles in set(candidates(case, LIMIT)), row


@pytest.mark.slow
@DIRECTIONS
def test_only_correct_tiles_that_fit_are_usable(
    direction: configs.Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, function = Trial(ON_CPU, direction), getattr(launch, direction)
    assert tune.is_usable(trial, FAST)

    def wrong(*inputs: Any, **options: Any) -> Any:
        first, *others = function(*inputs, **options)
        return first + 1.0, *others

    monkeypatch.setattr(launch, direction, wrong)
    assert not tune.is_usable(trial, FAST)

    def refuse(*inputs: Any, **options: Any) -> None:
        raise launch.TilesTooLarge("tiles 128 x 128")

    monkeypatch.setattr(launch, direction, refuse)
    assert not tune.is_usable(trial, FAST)


def test_a_hanging_candidate_is_abandoned() -> None:
    class Hangs:
        def get(self, seconds: float) -> bool:
            raise multiprocessing.TimeoutError

    assert not tune._is_yes(Hangs())  # type: ignore[arg-type]


def test_the_fastest_wins_and_what_does_not_fit_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {SMALL: 2.0, FAST: 1.0}
    monkeypatch.setattr(
        tune, "time_ms", lambda trial, inputs, tiles, budget: times.get(tiles, float("inf"))
    )
    too_large = replace(FAST, stages=5)

    assert tune.fastest(Trial(ON_CPU, "forward"), [SMALL, too_large, FAST]) == FAST


@DIRECTIONS
def test_rows_cover_the_grid_and_neighbours_that_agree_are_one(
    direction: configs.Direction, monkeypatch: pytest.MonkeyPatch, set_device: SetDevice
) -> None:
    set_device(DEVICES["hopper"])
    like = replace(ON_CPU, dtype=torch.bfloat16, head_dim=64)
    monkeypatch.setattr(tune, "usable", lambda trial, tried, jobs: list(tried))

    def fastest(trial: Trial, tried: list[Tiles]) -> Tiles:
        return min(tried, key=lambda t: abs(t.stages - 2) + (trial.problem.heads > 20) * t.block_m)

    monkeypatch.setattr(tune, "fastest", fastest)
    rows = [configs._parse(line) for line in tune.tune(like, direction, [256, 4096], 1)]

    for trial in tune.trials(like, direction, [256, 4096]):
        covering = next(row for row in rows if row.covers(trial.case()))
        assert covering.tiles == fastest(trial, list(candidates(trial.case(), LIMIT)))
    assert all((a.sequence, a.tiles) != (b.sequence, b.tiles) for a, b in itertools.pairwise(rows))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to tune")
def test_without_a_gpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main([])
    assert caught.value.code == 2
    assert "a CUDA GPU is needed" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--head-dim=0", "--sequence=-64", "--jobs=many"])
def test_a_wrong_number_is_a_one_line_error(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main([argument])

    option, value = argument.split("=")
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"{option}: must be a positive integer, got {value!r}")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_shape_between_two_tuned_ones_is_not_slower_than_both(
    head_dim: int, direction: configs.Direction
) -> None:
    """Per row of queries and key, a tenth being noise and the tail of the last wave."""
    device = torch.device("cuda", 0)

    def cost(heads: int, length: int) -> float:
        problem = Problem(
            device, torch.bfloat16, 1, heads, heads, length, length, head_dim, True, False
        )
        trial = Trial(problem, direction)
        time = tune.time_ms(trial, trial.inputs(), None, 50)  # type: ignore[arg-type]
        return time / (heads * length * (length + 1024))

    for heads in (48, 160):
        for low, between, high in ((512, 777, 1024), (1024, 1600, 2048), (2048, 3001, 4096)):
            assert cost(heads, between) < 1.1 * max(cost(heads, low), cost(heads, high))
