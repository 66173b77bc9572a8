"""The chapters that train on several ranks, measured for real on two small ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmlab.chapters.data_parallel import measure as data_parallel
from lmlab.chapters.data_parallel import variants as data_parallel_arms
from lmlab.chapters.data_parallel.variants import gradient_error, twin
from lmlab.chapters.fsdp import measure as fsdp
from lmlab.chapters.fsdp import variants as fsdp_arms
from lmlab.chapters.sharded_optimizer import measure as sharded_optimizer
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.rank_work import RankWork, candidates
from lmlab.parallel.ddp_flat import FlatDDP
from lmlab.parallel.sharded_optimizer import ShardedOptimizer
from lmlab.study.points import Point
from lmlab.study.results import SIZE_LIMIT_BYTES
from tests.parallel.launcher import RankPool

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WORLD = 2
ROUNDS = 3


def point(chapter: str, **parameters: Any) -> Point:
    """A model of a few thousand parameters."""
    return Point(
        chapter,
        {
            "placement": "cpu", "world_size": WORLD, "context": 8, "batch": 2, "precision": "fp32",
            "attention": "naive", **parameters,
        },
        {
            "model": "lmlab.model.transformer:TransformerLM", "vocab_size": 31,
            "rope_theta": 10000.0, "seed": 0,
            "sizes": [
                {"size": "slim", "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2}
            ],
            "bucket_sizes_mb": [0.005, 1], "torch_bucket_mb": 1, "bucket_mb": 0.005,
            "step_limit_s": 5.0, "warmup": 1, "rounds": ROUNDS, "time_cap_s": 20.0, "nnodes": 1,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


def measure_here(chapter: str, **parameters: Any) -> dict[str, Any]:
    """What a rank returns, as a result would hold it."""
    modules = {"data_parallel": data_parallel, "sharded_optimizer": sharded_optimizer, "fsdp": fsdp}
    outcome: Outcome = modules[chapter].measure(point(chapter, **parameters), CPU)
    times = {name: m.to_json() for name, m in outcome.measurements.items()}
    return {"times": times, **json.loads(json.dumps(dict(outcome.data), allow_nan=False))}


@pytest.fixture(scope="module")
def dp(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(measure_here, WORLD, chapter="data_parallel")[0]


@pytest.fixture(scope="module")
def sharded(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(measure_here, WORLD, chapter="sharded_optimizer")[0]


@pytest.fixture(scope="module")
def fully(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(measure_here, WORLD, chapter="fsdp")[0]


def test_all_variants_are_arms_of_one_job(dp: dict[str, Any]) -> None:
    names = ["alone", "naive", "flat", "overlapped", "bucketed_0.005", "bucketed_1", "torch_ddp"]
    assert list(dp["arms"]) == names
    assert {arm["status"] for arm in dp["arms"].values()} == {"ok"}
    for name in names:
        by_rank = dp["arms"][name]["ranks_ms"]
        assert [len(times) for times in by_rank] == [ROUNDS] * WORLD
        assert dp["times"][name]["samples_ms"] == [max(t) for t in zip(*by_rank, strict=True)]


def test_messages_are_counted(dp: dict[str, Any]) -> None:
    messages = {name: arm["messages"] for name, arm in dp["arms"].items()}
    assert messages["alone"] == 0
    assert messages["flat"] == messages["bucketed_1"] == 1
    assert messages["naive"] == messages["overlapped"] == 21
    assert 1 < messages["bucketed_0.005"] < 21
    assert dp["arms"]["flat"]["message_bytes"] == dp["gradient_bytes"] + 4 * 21


def test_traces_show_what_was_sent(dp: dict[str, Any]) -> None:
    assert dp["arms"]["alone"]["trace"]["messages_seen"] == 0
    for name in ("naive", "flat", "overlapped", "bucketed_0.005"):
        arm = dp["arms"][name]
        assert arm["trace"]["messages_seen"] == arm["messages"]
        assert arm["trace"]["communication_ms"] > 0
    assert dp["arms"]["flat"]["trace"]["overlapped_share"] == 0


def test_the_phases_of_a_silent_step_are_there(dp: dict[str, Any]) -> None:
    assert set(dp["phases_ms"]) == {"forward", "backward", "optimizer", "total"}


def test_results_stay_small(dp: dict[str, Any], fully: dict[str, Any]) -> None:
    assert len(json.dumps(dp)) < SIZE_LIMIT_BYTES / 2
    assert len(json.dumps(fully)) < SIZE_LIMIT_BYTES / 2


class Forgetful(FlatDDP):
    """Loses the last gradient's average."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        list(self.module.parameters())[-1].grad.mul_(1.5)  # type: ignore[union-attr]


def check_with_a_forgetful_arm() -> dict[str, Any]:
    asked = point("data_parallel")
    work = RankWork(candidates(asked, CPU)[0].workload, CPU)
    model = work.model()
    with patch.object(data_parallel_arms, "FlatDDP", Forgetful):
        arms = data_parallel.make_arms(asked, work, model)
    faults = data_parallel.check(arms, work, model)
    nothing: Any = None  # neither rounds nor traces are looked at
    kept = data_parallel.entry("flat", arms["flat"], faults["flat"], nothing, nothing)
    return {"flat": kept, "naive": faults["naive"]}


def test_an_arm_whose_gradients_are_off_gets_no_time(ranks: RankPool) -> None:
    for found in ranks.run(check_with_a_forgetful_arm, WORLD):
        assert found["flat"]["status"] == "failed"
        assert "gradients are off by" in found["flat"]["reason"]
        assert "ranks_ms" not in found["flat"]
        assert "reason" not in found["naive"]
        assert found["naive"]["gradient_error"] < 1e-5


def test_the_sharded_optimizer_keeps_its_share_alone(sharded: dict[str, Any]) -> None:
    arms = sharded["memory"]["arms"]
    assert {arm["status"] for arm in arms.values()} == {"ok"}
    state = {
        name: [r["moments"]["after_step"]["parts_bytes"]["optimizer_state"] for r in arm["ranks"]]
        for name, arm in arms.items()
    }
    owned = sharded["memory"]["owned_bytes"]
    steps = 4 * 21  # every parameter also has a count of steps
    assert state["replicated"] == [sharded["memory"]["expected"]["optimizer_state"] + steps] * WORLD
    assert sum(state["sharded"]) == state["replicated"][0]
    assert all(abs(s - 2 * o) <= steps for s, o in zip(state["sharded"], owned, strict=True))


def test_memory_follows_the_cost_model_before_the_step(sharded: dict[str, Any]) -> None:
    expected = sharded["memory"]["expected"]
    for arm in sharded["memory"]["arms"].values():
        moments = arm["ranks"][0]["moments"]
        for part in ("parameters", "activations"):
            assert moments["after_forward"]["parts_bytes"][part] == expected[part]
        assert moments["before_step"]["parts_bytes"]["gradients"] == expected["gradients"]


def test_optimizers_are_timed_as_a_phase_of_a_step(sharded: dict[str, Any]) -> None:
    assert set(sharded["time"]["arms"]) == {"replicated", "sharded", "torch_zero"}
    for name in ("replicated", "sharded", "torch_zero"):
        assert sharded["times"][name]["n"] == ROUNDS
        assert sharded["times"][name]["median_ms"] < sharded["times"][f"{name}_step"]["median_ms"]


class Stale(ShardedOptimizer):
    """Keeps its updates to itself."""

    def _messages(self) -> Any:
        return iter(())


def memory_with_a_stale_optimizer() -> dict[str, Any]:
    stale = {"sharded": lambda parameters: Stale(parameters, torch.optim.AdamW)}
    with patch.dict(sharded_optimizer.OPTIMIZERS, stale):
        return sharded_optimizer.measure_memory(candidates(point("sharded_optimizer"), CPU), CPU)


def test_an_optimizer_that_leaves_ranks_apart_is_failed(ranks: RankPool) -> None:
    for found in ranks.run(memory_with_a_stale_optimizer, WORLD):
        assert found["arms"]["sharded"]["status"] == "failed"
        assert "weights after a step are off" in found["arms"]["sharded"]["reason"]
        assert found["arms"]["torch_zero"]["status"] == "ok"


def test_fsdp_keeps_a_share_of_everything(fully: dict[str, Any]) -> None:
    assert {arm["status"] for arm in fully["arms"].values()} == {"ok"}
    after = {
        name: arm["ranks"][0]["moments"]["after_step"]["parts_bytes"]
        for name, arm in fully["arms"].items()
    }
    for part in ("parameters", "gradients", "optimizer_state"):
        assert after["fsdp"][part] < 0.7 * after["ddp"][part]
    assert after["ddp_sharded_optimizer"]["optimizer_state"] < 0.6 * after["ddp"]["optimizer_state"]
    assert fully["sharded_bytes"] < fully["parameter_bytes"]


def test_every_gather_is_watched_in_both_directions(fully: dict[str, Any]) -> None:
    assert len(fully["waits"]) == WORLD
    blocks = ["token_embeddings.weight", "layers.0", "layers.1", "lm_head.weight"]
    for phase, expected in (("forward", blocks), ("backward", blocks[::-1])):
        found = [row["layer"] for row in fully["waits"][0] if row["phase"] == phase]
        assert found == expected, "in the order in which they are used"
    assert all(row["wait_ms"] >= 0 for row in fully["waits"][0])


def test_fsdp_sends_a_message_a_block(fully: dict[str, Any]) -> None:
    bundles = 4
    # Gathered twice, except that what ends forward is there when backward begins, and scattered.
    expected = bundles + (bundles - 1) + bundles + 1
    assert fully["arms"]["fsdp"]["trace"]["messages_seen"] == expected


def refuse(work: Any) -> Any:
    raise RuntimeError("no such\n  mesh")


def try_arm(name: str) -> dict[str, Any]:
    work = RankWork(candidates(point("fsdp"), CPU)[0].workload, CPU)
    build = fsdp_arms.Builder(bucket_mb=1)
    with patch.object(fsdp_arms, "_torch", refuse), patch.object(fsdp_arms, "_ours", refuse):
        try:
            return fsdp_arms.alone(name, build, work)
        except RuntimeError as error:
            return {"raised": str(error)}


def test_a_fully_shard_that_does_not_run_here_says_why(ranks: RankPool) -> None:
    for arm in ranks.run(try_arm, WORLD, name="torch_fully_shard"):
        assert arm == {"status": "unsupported", "reason": "RuntimeError: no such mesh"}


def test_ours_that_does_not_run_is_a_failure_of_the_point(ranks: RankPool) -> None:
    for arm in ranks.run(try_arm, WORLD, name="fsdp"):
        assert arm["raised"].startswith("no such")


def test_losses_that_differ_are_failed() -> None:
    work = RankWork.__new__(RankWork)
    work.workload = candidates(point("fsdp"), CPU)[0].workload
    base = {"status": "ok", "reason": None, "ranks": [{"losses": [3.0, 2.0]}]}
    for losses in ([3.0, 2.1], [3.0, float("nan")]):
        off = fsdp.judged({**base, "ranks": [{"losses": losses}]}, base, work)
        assert off["status"] == "failed"
        assert "losses of two steps are off by" in off["reason"]
    assert fsdp.judged(base, base, work)["status"] == "ok"


def own_batches() -> tuple[list[int], list[int]]:
    work = candidates(point("fsdp"), CPU)[0].workload
    own, same = RankWork(work, CPU), RankWork(work, CPU, own_tokens=False)
    assert dist.get_world_size() == WORLD
    return own.tokens.flatten().tolist(), same.tokens.flatten().tolist()


def test_ranks_draw_their_own_tokens_unless_told_otherwise(ranks: RankPool) -> None:
    (one, shared), (other, shared_too) = ranks.run(own_batches, WORLD)
    assert one != other
    assert shared == shared_too


def test_twins_have_their_own_parameters_on_the_same_weights() -> None:
    model = nn.Linear(3, 2)
    other = twin(model)
    assert other.weight is not model.weight
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert other.weight.tolist() == [[7.0] * 3] * 2  # type: ignore[operator]


def test_a_missing_gradient_is_an_error_of_its_whole_length() -> None:
    expected = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert gradient_error([torch.tensor([3.0]), None], expected) == pytest.approx(0.8)
    assert gradient_error(expected, expected) == 0.0


def test_a_precision_that_a_cpu_lacks_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="tf32"):
        candidates(point("fsdp", precision="tf32"), CPU)
