"""The search tries what fits, keeps what is correct and fastest, and prints rows of the table."""

import itertools
import multiprocessing.dummy
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmlab.kernels import configs, launch, tune
from lmlab.kernels.configs import Tiles, shared_bytes
from lmlab.kernels.problem import Problem
from lmlab.kernels.tune import Trial, candidates
from tests.kernels.conftest import CASE, DEVICES, SetDevice

LIMIT = 227 * 1024
HOPPER = replace(CASE, direction="backward", head_dim=128)
ON_CPU = Problem.of(torch.empty(1, 2, 32, 16), torch.empty(1, 2, 32, 16), True)
SMALL = Tiles(block_m=16, block_n=32, warps=4, stages=2)
FAST = Tiles(block_m=64, block_n=64, warps=4, stages=2)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


@DIRECTIONS
@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("bits", [16, 32])
def test_candidates_differ_and_fit(direction: configs.Direction, head_dim: int, bits: int) -> None:
    case = replace(HOPPER, direction=direction, head_dim=head_dim, bits=bits)
    found = list(candidates(case, LIMIT))
    assert 1 < len(found) == len(set(found))
    assert all(shared_bytes(case, tiles) <= LIMIT for tiles in found)


OPTIONS: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "warp_specialized": [({}, True), ({"bits": 32}, False), ({"architecture": "ada"}, False)],
    "fused": [({"head_dim": 64}, True), ({}, False), ({"direction": "forward"}, False)],
    "inline_delta": [({"sequence": 1024}, True), ({"sequence": 4096}, False)],
    "tma": [({}, True), ({"architecture": "ada"}, False)],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_tried_where_they_can_help(option: str) -> None:
    for changes, tried in OPTIONS[option]:
        found = candidates(replace(HOPPER, **changes), LIMIT)
        assert any(getattr(tiles, option) for tiles in found) is tried


def test_what_the_table_has_on_hopper_is_tried() -> None:
    for row in configs.rows():
        if "hopper" in row.architectures and row.bits == 16:
            changes = {"direction": row.direction, "head_dim": row.head_dim}
            case = replace(HOPPER, **changes, sequence=min(row.sequence, 2048))
            assert row.tiles in set(candidates(case, LIMIT)), row


@pytest.mark.slow
@DIRECTIONS
def test_only_correct_tiles(direction: configs.Direction, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_hanging_candidate_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_usable(trial: Trial, tiles: Tiles) -> bool:
        if tiles == SMALL:
            raise multiprocessing.TimeoutError  # what waiting for it ends with
        return True

    monkeypatch.setattr(tune, "is_usable", is_usable)
    monkeypatch.setattr(tune, "get_context", lambda method: multiprocessing.dummy)
    assert tune.usable(Trial(ON_CPU, "forward"), [SMALL, FAST], 1) == [FAST]


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            [],
            "a CUDA GPU is needed",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune"),
        ),
        *(
            ([f"{option}={value}"], f"{option}: must be a positive integer, got {value!r}")
            for option, value in (("--head-dim", "0"), ("--sequence", "-64"), ("--jobs", "many"))
        ),
    ],
)
def test_what_cannot_be_tuned_is_a_one_line_error(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main(arguments)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]
