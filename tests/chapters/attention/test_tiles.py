"""Any tile size gives the same numbers; here through Triton's interpreter."""

import pytest
import torch

from lmlab.chapters.attention.measure import tiles as topic
from lmlab.chapters.attention.measure.problem import Problem, check, shape_of
from lmlab.jobs.outcome import Unsupported
from lmlab.kernels.problem import Direction
from tests.chapters.attention.points import tiles_point
from tests.chapters.pages import found, value_of

DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


def kernel(direction: Direction, device: torch.device) -> topic.Kernel:
    point = tiles_point(direction)
    shape = shape_of({**point.settings, **point.parameters, "sequence": 64})
    return topic.Kernel(Problem(shape, device, seed=0), direction)


@DIRECTIONS
def test_tiles_are_launched_checked_and_estimated(cpu: torch.device, direction: Direction) -> None:
    run = kernel(direction, cpu)
    tiles = topic.tiles_of(32, 16, direction, stages=2)
    errors = run.errors(tiles)
    assert set(errors) == ({"output"} if direction == "forward" else {"grad_q", "grad_k", "grad_v"})
    check(errors, torch.float32)
    resources = dict(run.resources(tiles))
    assert (resources.pop("estimated_shared_memory") or 0) > 0
    assert set(resources.values()) == {None}, "the interpreter compiles nothing"


@DIRECTIONS
def test_m_counts_queries_and_n_counts_keys_in_both_directions(direction: Direction) -> None:
    labels = topic.labels(topic.tiles_of(128, 32, direction, stages=3))
    assert (labels["block_m"], labels["block_n"]) == (128, 32)
    assert labels["num_warps"] == (8 if direction == "forward" else 4), "by the tile held"


def test_large_tiles_are_unsupported(cpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(**_: object) -> None:
        raise topic.launch.TilesTooLarge("tiles 32 x 16: out of resource: shared memory")

    run = kernel("forward", cpu)
    monkeypatch.setattr(run, "_call", too_large)
    with pytest.raises(Unsupported, match="out of resource: shared memory"):
        list(run.resources(topic.tiles_of(32, 16, "forward", stages=2)))


@pytest.mark.slow
def test_every_tile_size_and_the_chosen_one_are_timed(
    cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic, "refuse_unsupported", lambda *_: None)
    outcome = topic.measure(tiles_point(), cpu)
    times = found(outcome, "time")
    variants = ["32x32", "16x32", "chosen"]
    measured = [(time["labels"]["sequence"], time["labels"]["variant"]) for time in times]
    assert measured == [(sequence, name) for sequence in (32, 64) for name in variants]
    assert {time["status"] for time in times} == {"ok"}
    at = {"sequence": 64, "variant": "16x32"}
    assert value_of(outcome, "error", **at, block_m=16, tensor="output") < 1e-5
    assert value_of(outcome, "shared_memory_limit") > 0
