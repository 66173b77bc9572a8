"""The search tries what fits, keeps what is right and fastest, and prints lines of the table."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lmlab.kernels import configs, launch, tune
from lmlab.kernels.configs import Case, Tiles, shared_bytes
from lmlab.kernels.problem import Problem
from lmlab.kernels.tune import Trial, candidates

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
SMALL = Tiles(kept=32, walked=16, warps=4, stages=2)
FAST = Tiles(kept=16, walked=16, warps=4, stages=2)


@pytest.fixture(autouse=True)
def _back_to_the_table() -> Iterator[None]:
    yield
    launch.choose_with(None)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("bits", [16, 32])
def test_candidates_fit_and_hold_more_than_one_choice(
    direction: configs.Direction, head_dim: int, bits: int
) -> None:
    case = replace(HOPPER, direction=direction, head_dim=head_dim, bits=bits)

    found = list(candidates(case, LIMIT))

    assert len(found) > 1
    assert len(set(found)) == len(found)
    assert all(shared_bytes(case, tiles) <= LIMIT for tiles in found)


def test_the_tiles_known_to_be_good_on_an_h200_are_among_them() -> None:
    found = {(t.kept, t.walked, t.warps, t.stages) for t in candidates(HOPPER, LIMIT)}

    assert {(128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 4, 2)} <= found


def test_specialised_warps_are_tried_on_hopper_in_16_bit() -> None:
    for case, tried in (
        (HOPPER, True),
        (replace(HOPPER, direction="forward", head_dim=64), True),
        (replace(HOPPER, bits=32), False),
        (replace(HOPPER, architecture="ada"), False),
    ):
        assert any(tiles.specialised for tiles in candidates(case, LIMIT)) is tried


def test_short_sequences_try_a_delta_of_their_own() -> None:
    short = replace(HOPPER, direction="backward", sequence=1024)

    assert any(tiles.own_delta for tiles in candidates(short, LIMIT))
    assert not any(tiles.own_delta for tiles in candidates(replace(short, sequence=4096), LIMIT))


def test_what_the_table_has_for_one_short_head_on_hopper_is_tried() -> None:
    for row in configs.rows():
        if "hopper" in row.architectures and row.rows <= 2048:
            case = Case(
                architecture="hopper",
                direction=row.direction,
                bits=row.bits,
                head_dim=row.head_dim,
                is_causal=True,
                sequence=row.rows,
                rows=row.rows,
            )
            assert row.tiles in set(candidates(case, LIMIT)), row


def test_only_gpus_with_a_copy_engine_try_descriptors() -> None:
    ada = replace(HOPPER, architecture="ada")

    assert any(tiles.descriptors for tiles in candidates(HOPPER, LIMIT))
    assert not any(tiles.descriptors for tiles in candidates(ada, LIMIT))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_right_tiles_are_found_right(direction: configs.Direction) -> None:
    assert tune.is_right(Trial(ON_CPU, direction), Tiles(kept=64, walked=64, warps=4, stages=1))


def test_wrong_numbers_do_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    right = launch.forward

    def wrong(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = right(*inputs, **options)  # type: ignore[arg-type]
        return o + 1.0, lse

    monkeypatch.setattr(launch, "forward", wrong)

    assert not tune.is_right(Trial(ON_CPU, "forward"), Tiles(kept=64, walked=64, warps=4, stages=1))


def test_tiles_too_large_for_the_gpu_are_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*inputs: object, **options: object) -> None:
        raise launch.TilesTooLarge("tiles 128 x 128")

    trial = Trial(ON_CPU, "forward")
    assert tune.is_usable(trial, FAST)

    monkeypatch.setattr(launch, "forward", refuse)
    assert not tune.is_usable(trial, FAST)


class Hangs:
    def get(self, seconds: float) -> bool:
        raise multiprocessing.TimeoutError


def test_what_hangs_is_given_up() -> None:
    assert not tune._is_yes(Hangs())  # type: ignore[arg-type]


def test_the_fastest_wins_and_what_does_not_fit_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {SMALL: 2.0, FAST: 1.0}
    monkeypatch.setattr(
        tune, "time_ms", lambda trial, inputs, tiles, budget: times.get(tiles, float("inf"))
    )
    too_large = Tiles(kept=128, walked=128, warps=8, stages=5)

    assert tune.fastest(Trial(ON_CPU, "forward"), [SMALL, too_large, FAST]) == (FAST, 1.0)


def test_autotuning_searches_once_a_case_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_operations_are_counted_as_published_numbers_count_them(
    direction: configs.Direction, products: int
) -> None:
    full = Trial(replace(ON_CPU, is_causal=False), direction)

    assert full.flops() == products * 2 * 2 * 32 * 32 * 16
    assert Trial(ON_CPU, direction).flops() == full.flops() / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to tune")
def test_without_a_gpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main([])

    assert caught.value.code == 2
    assert "a CUDA GPU is needed" in capsys.readouterr().err


def test_autotuning_on_a_cpu_says_what_it_lacks() -> None:
    tune.autotune()
    q = torch.randn(1, 1, 30, 16)

    with pytest.raises(ValueError, match="a CUDA GPU is needed"):
        launch.forward(q, q, q, is_causal=True, scale=0.25)


@pytest.mark.parametrize("option", ["--head-dim", "--sequence", "--batch", "--heads", "--jobs"])
@pytest.mark.parametrize("value", ["0", "-64", "many"])
def test_a_wrong_number_is_refused_before_anything_is_tried(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main([f"{option}={value}"])

    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"{option}: {value!r} is not allowed; an integer of at least 1 is")


def test_a_problem_that_no_tiles_fit_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "compile_and_check", lambda trial, tried, jobs: [])

    line = tune.tune(Trial(ON_CPU, "forward"), 1)

    assert line.startswith("# ")
    assert "cuts fits and is right" in line


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_line_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    tune.main(["--head-dim", "64", "--sequence", "512", "--heads", "2", "--direction", "forward"])

    line, comment = capsys.readouterr().out.splitlines()
    assert configs._row(line).tiles.kept in (64, 128)
    assert "TFLOP/s" in comment
