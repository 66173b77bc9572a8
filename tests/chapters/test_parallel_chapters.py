"""The chapters that train on several ranks, measured for real on two small ones."""

import json
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from lmlab.chapters.data_parallel import measure as data_parallel
from lmlab.chapters.data_parallel.measure import gradient_error, share_weights
from lmlab.chapters.fsdp import measure as fsdp
from lmlab.chapters.sharded_optimizer import measure as sharded_optimizer
from lmlab.jobs.memory_stages import local_optimizer
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import RankWork, candidates
from lmlab.measure.across_ranks import gather
from lmlab.parallel.ddp import BucketedDDP, FlatDDP
from lmlab.parallel.sharded_optimizer import ShardedOptimizer
from lmlab.study.points import Point
from lmlab.study.results import SIZE_LIMIT_BYTES
from tests.chapters.pages import by, found, value_of
from tests.jobs.points import rank_point
from tests.parallel.launcher import RankPool, on_ranks

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WORLD, ROUNDS, PARAMETERS = 2, 3, 21
CHAPTERS = {"data_parallel": data_parallel, "sharded_optimizer": sharded_optimizer, "fsdp": fsdp}


def point(chapter: str) -> Point:
    limits = {"step_limit_s": 5.0, "warmup": 1, "rounds": ROUNDS, "time_cap_s": 20.0}
    buckets = {"bucket_sizes_mb": [0.005, 1], "torch_bucket_mb": 1, "bucket_mb": 0.005}
    return rank_point(chapter, {"slim": 16}, **limits, **buckets)


def work_of(chapter: str) -> RankWork:
    return RankWork(candidates(point(chapter))["slim"], CPU)


def measure_here(chapter: str) -> Any:
    """What a rank returns, as a result would hold it."""
    outcome: Outcome = CHAPTERS[chapter].measure(point(chapter), CPU)
    stored = {"measurements": list(outcome.measurements), "data": dict(outcome.data)}
    return json.loads(json.dumps(stored, allow_nan=False))


@pytest.fixture(scope="module")
def measured(ranks: RankPool) -> dict[str, Outcome]:
    return {n: Outcome(**ranks.run(measure_here, WORLD, chapter=n)[0]) for n in CHAPTERS}


VARIANTS = {
    "data_parallel": (
        *("alone", "naive", "flat", "overlapped", "bucketed_0.005", "bucketed_1", "torch_ddp"),
    ),
    "sharded_optimizer": ("replicated", "sharded", "torch_zero"),
    "fsdp": ("ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"),
}


@pytest.mark.parametrize(
    ("chapter", "phase"),
    [*((chapter, "total") for chapter in CHAPTERS), ("sharded_optimizer", "optimizer")],
)
def test_variants_share_rounds(measured: dict[str, Outcome], chapter: str, phase: str) -> None:
    outcome = measured[chapter]
    assert tuple(by(outcome, "variant", "time", phase=phase)) == VARIANTS[chapter]
    for variant in VARIANTS[chapter]:
        (slowest,) = found(outcome, "time", variant=variant, phase=phase)
        own = [r["samples"] for r in found(outcome, "rank_time", variant=variant, phase=phase)]
        assert [len(samples) for samples in own] == [ROUNDS] * WORLD
        assert slowest["samples"] == [max(times) for times in zip(*own, strict=True)]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_chapter_records_what_it_ran(measured: dict[str, Outcome], chapter: str) -> None:
    outcome = measured[chapter]
    assert set(by(outcome, "purpose", "size").values()) == {"slim"}
    assert value_of(outcome, "optimizer") == "torch.optim.AdamW"
    assert value_of(outcome, "tokens") == 2 * 8
    assert len(json.dumps([outcome.measurements, outcome.data])) < SIZE_LIMIT_BYTES / 2


def test_messages_are_counted_and_profiles_show_them(measured: dict[str, Outcome]) -> None:
    dp = measured["data_parallel"]
    messages = by(dp, "variant", "messages")
    assert messages["alone"] == 0
    assert messages["flat"] == messages["bucketed_1"] == 1
    assert messages["naive"] == messages["overlapped"] == PARAMETERS
    assert 1 < messages["bucketed_0.005"] < PARAMETERS
    flags = 4 * PARAMETERS
    assert value_of(dp, "message_bytes", variant="flat") == value_of(dp, "gradient_bytes") + flags
    seen = by(dp, "variant", "messages_seen")
    communication = by(dp, "variant", "profiled_time", activity="communication")
    assert seen["alone"] == communication["alone"] == 0
    for name in ("naive", "flat", "overlapped", "bucketed_0.005"):
        assert seen[name] == messages[name]
        assert communication[name] > 0
    assert set(by(dp, "rank", "overlapped_share", variant="flat").values()) == {0}
    assert set(dp.data["intervals_ms"]) == set(seen)
    assert set(by(dp, "phase", "phase_time")) == {"forward", "backward", "optimizer", "total"}


class Wrong(FlatDDP):
    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        list(self.module.parameters())[-1].grad.mul_(1.5)  # type: ignore[union-attr]


@on_ranks(WORLD)
def test_a_variant_with_wrong_gradients_fails() -> None:
    work = work_of("data_parallel")
    model = work.model()
    with patch.object(data_parallel, "FlatDDP", Wrong):
        variants = data_parallel.make_variants(point("data_parallel"), work, model)
    checks = data_parallel.check(variants, work, model)
    assert (checks["flat"]["quantity"], checks["flat"]["status"]) == ("time", "failed")
    assert checks["naive"]["quantity"] == "gradient_error"
    assert checks["naive"]["value"] < 1e-5


@on_ranks(WORLD)
def test_gradient_buffers_exist_only_during_a_step() -> None:
    work = work_of("data_parallel")
    model = work.model()
    model.buckets = 3  # a user's own model may have such an attribute
    variants = data_parallel.make_variants(point("data_parallel"), work, model)

    def bytes_of(variant: Any) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in variant._buffers)

    for _ in range(2):  # a second step finds its buffers again
        assert {bytes_of(variant) for variant in variants.values()} == {0}
        inside = {}
        for name, variant in variants.items():
            with variant.allocated():
                variant.backward()
                inside[name] = bytes_of(variant)
        assert inside["flat"] == inside["overlapped"] > 0


@on_ranks(WORLD)
def test_timed_optimizers_share_one_state() -> None:
    work = work_of("sharded_optimizer")
    model = BucketedDDP(work.model(), 1)
    makers = sharded_optimizer.OPTIMIZERS
    optimizers = {name: make(model.module.parameters()) for name, make in makers.items()}
    sharded_optimizer.share_state(optimizers, model, work)
    plain = optimizers["replicated"].state
    assert len(plain) == PARAMETERS
    for name in ("sharded", "torch_zero"):
        state = local_optimizer(optimizers[name]).state
        assert all(state[parameter] is plain[parameter] for parameter in plain)


def test_the_sharded_optimizer_has_its_share_as_predicted(measured: dict[str, Outcome]) -> None:
    sharded = measured["sharded_optimizer"]
    after = {"stage": "after_step", "category": "optimizer_state"}
    state = by(sharded, "variant", "memory", **after)
    whole = value_of(sharded, "expected_memory", category="optimizer_state")
    steps = 4 * PARAMETERS  # every parameter also has a step counter
    assert state["replicated"] == whole + steps
    owned = max(by(sharded, "rank", "owned_bytes").values())
    assert abs(state["sharded"] - 2 * owned) <= steps
    allocated = by(sharded, "rank", "allocated", variant="sharded", stage="after_step")
    assert list(allocated) == list(range(WORLD))
    expected = by(sharded, "category", "expected_memory")
    for variant in ("replicated", "sharded", "torch_zero"):
        forward = by(sharded, "category", "memory", variant=variant, stage="after_forward")
        before = by(sharded, "category", "memory", variant=variant, stage="before_step")
        assert {forward[name] - expected[name] for name in ("parameters", "activations")} == {0}
        assert before["gradients"] == expected["gradients"]


class Stale(ShardedOptimizer):
    def _messages(self) -> Any:
        return iter(())


@on_ranks(WORLD)
def test_an_optimizer_that_lets_ranks_diverge_fails() -> None:
    stale = {"sharded": lambda parameters: Stale(parameters, torch.optim.AdamW)}
    with patch.dict(sharded_optimizer.OPTIMIZERS, stale):
        _, correct = sharded_optimizer.measure_memory(point("sharded_optimizer"), CPU)
    assert correct == ["replicated", "torch_zero"]


def test_fsdp_keeps_a_share_of_everything(measured: dict[str, Outcome]) -> None:
    fully = measured["fsdp"]
    for category in ("parameters", "gradients", "optimizer_state"):
        after = by(fully, "variant", "memory", stage="after_step", category=category)
        assert after["fsdp"] < 0.7 * after["ddp"]
    assert after["ddp_sharded_optimizer"] < 0.6 * after["ddp"]
    assert value_of(fully, "sharded_bytes") < value_of(fully, "parameter_bytes")


def test_every_gather_is_watched_and_sent_as_one_message(measured: dict[str, Outcome]) -> None:
    fully = measured["fsdp"]
    blocks = ["token_embeddings.weight", "layers.0", "layers.1", "lm_head.weight"]
    waits = fully.data["waits_ms"]
    for phase, expected in (("forward", blocks), ("backward", blocks[::-1])):
        mine = [row for row in waits if row["phase"] == phase]
        assert [row["layer"] for row in mine] == expected, "in the order in which they are used"
        assert all(len(row["ms"]) == WORLD for row in mine)
        for rank, total in by(fully, "rank", "gather_wait", phase=phase).items():
            assert total == pytest.approx(sum(row["ms"][rank] for row in mine))
    # Gathered twice, except for the block that ends forward and begins backward; scattered once.
    messages = len(blocks) + (len(blocks) - 1) + len(blocks) + 1
    assert value_of(fully, "messages_seen", variant="fsdp") == messages


@on_ranks(WORLD)
def test_pytorchs_variant_may_not_run_here_but_ours_must() -> None:
    work, refuse = work_of("fsdp"), Mock(side_effect=RuntimeError("no such\n  mesh"))
    with patch.multiple(fsdp, torch_fully_shard=refuse, FSDP=refuse):
        build = fsdp.builders_of(1)
        reason = fsdp.two_steps_alone("torch_fully_shard", build["torch_fully_shard"], work)
        with pytest.raises(RuntimeError, match="no such"):
            fsdp.two_steps_alone("fsdp", build["fsdp"], work)
    assert reason == "RuntimeError: no such mesh"


@pytest.mark.parametrize(
    ("losses", "statuses"),
    [
        ([3.0, 2.0], []),
        ([3.0, 2.1], ["failed"]),
        ([3.0, float("nan")], ["failed"]),
        ("no mesh", ["unsupported"]),
    ],
)
def test_only_variants_with_equal_losses_are_timed(losses: Any, statuses: list[str]) -> None:
    def alone(own: list[float]) -> list[dict[str, Any]]:
        return [{"losses": own, "stages": {}, "peaks": {}}]

    ours = losses if isinstance(losses, str) else alone(losses)
    records, correct = fsdp.check({"ddp": alone([3.0, 2.0]), "fsdp": ours}, 1e-4)
    assert [r["status"] for r in records if r["quantity"] == "time"] == statuses
    assert correct == (["ddp"] if statuses else ["ddp", "fsdp"])


@on_ranks(WORLD)
def test_ranks_draw_their_own_tokens_unless_asked_not_to() -> None:
    own = work_of("fsdp")
    same = RankWork(own.workload, CPU, own_tokens=False)
    for work, batches in ((own, WORLD), (same, 1)):
        assert len(set(gather(str(work.tokens.tolist())))) == batches


def test_models_that_share_weights_have_their_own_parameters() -> None:
    model = nn.Linear(3, 2)
    other = share_weights(model)
    assert other.weight is not model.weight
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert other.weight.tolist() == [[7.0] * 3] * 2  # type: ignore[operator]


def test_a_missing_gradient_counts_with_its_whole_norm() -> None:
    expected = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert gradient_error([torch.tensor([3.0]), None], expected) == pytest.approx(0.8)
    assert gradient_error(expected, expected) == 0.0
