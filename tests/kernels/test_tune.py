"""The search tries what fits, keeps what is correct and fastest, and prints rows of the table."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmlab.kernels import configs, launch, tune
from lmlab.kernels.configs import Case, Tiles, shared_bytes
from lmlab.kernels.problem import Problem
from lmlab.kernels.tune import Trial, candidates
from tests.kernels.conftest import clear_plans

LIMIT = 227 * 1024
HOPPER = Case(
    direction="backward",
    architecture="hopper",
    bits=16,
    head_dim=128,
    is_causal=True,
    sequence=16384,
    rows=2**18,
)
ON_CPU = Problem.of(torch.empty(1, 2, 32, 16), torch.empty(1, 2, 32, 16), True)
SMALL = Tiles(block_m=16, block_n=32, warps=4, stages=2)
FAST = Tiles(block_m=64, block_n=64, warps=4, stages=2)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


@pytest.fixture(autouse=True)
def _default_choices() -> Iterator[None]:
    yield
    clear_plans()


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


def test_what_the_table_has_for_one_short_head_on_hopper_is_tried() -> None:
    for row in configs.rows():
        if "hopper" in row.architectures and row.rows <= 2048:
            case = replace(
                HOPPER,
                direction=row.direction,
                bits=row.bits,
                head_dim=row.head_dim,
                sequence=row.rows,
                rows=row.rows,
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

    assert tune.fastest(Trial(ON_CPU, "forward"), [SMALL, too_large, FAST]) == (FAST, 1.0)


def test_autotuning_searches_once_per_case_and_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Problem] = []

    def search(trial: Trial, tried: object) -> tuple[Tiles, float]:
        searched.append(trial.problem)
        return FAST, 1.0

    monkeypatch.setattr(tune, "fastest", search)
    tune.autotune()
    q = torch.randn(1, 1, 30, 16)
    for length in (30, 28, 30):
        x = q[:, :, :length]
        launch.forward(x, x, x, is_causal=True, scale=0.25)
    launch.forward(q, q, q, is_causal=False, scale=0.25)

    assert [problem.is_causal for problem in searched] == [True, False]


@pytest.mark.parametrize(("direction", "products"), [("forward", 2), ("backward", 5)])
def test_flops_follow_the_published_count(direction: configs.Direction, products: int) -> None:
    full = Trial(replace(ON_CPU, is_causal=False), direction)

    assert full.flops() == products * 2 * 2 * 32 * 32 * 16
    assert Trial(ON_CPU, direction).flops() == full.flops() / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to tune")
def test_without_a_gpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main([])
    assert caught.value.code == 2
    assert "a CUDA GPU is needed" in capsys.readouterr().err

    tune.autotune()
    q = torch.randn(1, 1, 30, 16)
    with pytest.raises(ValueError, match="a CUDA GPU is needed"):
        launch.forward(q, q, q, is_causal=True, scale=0.25)


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


def test_a_problem_that_no_tiles_fit_gives_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compile_and_check", lambda trial, tried, jobs: [])

    assert tune.tune(Trial(ON_CPU, "forward"), 1).startswith("# ")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_row_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    tune.main(["--head-dim", "64", "--sequence", "512", "--heads", "2", "--direction", "forward"])

    line, comment = capsys.readouterr().out.splitlines()
    assert configs._parse(line).tiles.block_m in (32, 64, 128)
    assert "TFLOP/s" in comment
