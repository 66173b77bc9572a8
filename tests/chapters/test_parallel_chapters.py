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
from lmlab.chapters.data_parallel import variants as data_parallel_variants
from lmlab.chapters.data_parallel.variants import gradient_error, share_weights
from lmlab.chapters.fsdp import measure as fsdp
from lmlab.chapters.fsdp import variants as fsdp_variants
from lmlab.chapters.sharded_optimizer import measure as sharded_optimizer
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.rank_work import RankWork, candidates
from lmlab.measure.records import Record
from lmlab.parallel.ddp_flat import FlatDDP
from lmlab.parallel.ddp_overlapped import BucketedDDP
from lmlab.parallel.sharded_optimizer import ShardedOptimizer
from lmlab.study.points import Point
from lmlab.study.results import SIZE_LIMIT_BYTES
from tests.parallel.launcher import RankPool

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WORLD, ROUNDS, PARAMETERS = 2, 3, 21
CHAPTERS = {"data_parallel": data_parallel, "sharded_optimizer": sharded_optimizer, "fsdp": fsdp}


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


class Measured:
    """The outcome of one point."""

    def __init__(self, records: list[Record], data: dict[str, Any]) -> None:
        self.records, self.data = records, data

    def of(self, quantity: str, **labels: Any) -> list[Record]:
        return [
            record
            for record in self.records
            if record["quantity"] == quantity and labels.items() <= record["labels"].items()
        ]

    def value(self, quantity: str, **labels: Any) -> Any:
        (record,) = self.of(quantity, **labels)
        return record["value"]

    def by(self, label: str, quantity: str, **labels: Any) -> dict[Any, Any]:
        return {r["labels"][label]: r["value"] for r in self.of(quantity, **labels)}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()


def measure_here(chapter: str) -> tuple[list[Record], dict[str, Any]]:
    """What a rank returns, as a result would hold it."""
    outcome: Outcome = CHAPTERS[chapter].measure(point(chapter), CPU)
    found: tuple[list[Record], dict[str, Any]] = tuple(
        json.loads(json.dumps([list(outcome.measurements), dict(outcome.data)], allow_nan=False))
    )
    return found


@pytest.fixture(scope="module")
def measured(ranks: RankPool) -> dict[str, Measured]:
    return {name: Measured(*ranks.run(measure_here, WORLD, chapter=name)[0]) for name in CHAPTERS}


@pytest.fixture
def dp(measured: dict[str, Measured]) -> Measured:
    return measured["data_parallel"]


@pytest.fixture
def sharded(measured: dict[str, Measured]) -> Measured:
    return measured["sharded_optimizer"]


@pytest.fixture
def fully(measured: dict[str, Measured]) -> Measured:
    return measured["fsdp"]


@pytest.mark.parametrize(
    ("chapter", "variants", "phases"),
    [
        (
            "data_parallel",
            ["alone", "naive", "flat", "overlapped", "bucketed_0.005", "bucketed_1", "torch_ddp"],
            ["total"],
        ),
        ("sharded_optimizer", ["replicated", "sharded", "torch_zero"], ["optimizer", "total"]),
        ("fsdp", ["ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"], ["total"]),
    ],
)
def test_all_variants_are_timed_in_the_same_rounds(
    measured: dict[str, Measured], chapter: str, variants: list[str], phases: list[str]
) -> None:
    found = measured[chapter]
    for phase in phases:
        assert list(found.by("variant", "time", phase=phase)) == variants
        for variant in variants:
            (slowest,) = found.of("time", variant=variant, phase=phase)
            own = [
                record["samples"] for record in found.of("rank_time", variant=variant, phase=phase)
            ]
            assert [len(samples) for samples in own] == [ROUNDS] * WORLD
            assert slowest["samples"] == [max(times) for times in zip(*own, strict=True)]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_chapter_says_what_it_ran(measured: dict[str, Measured], chapter: str) -> None:
    found = measured[chapter]
    assert set(found.by("purpose", "size").values()) == {"slim"}
    assert found.value("optimizer") == "torch.optim.AdamW"
    assert found.value("tokens") == 2 * 8
    assert len(json.dumps([found.records, found.data])) < SIZE_LIMIT_BYTES / 2


def test_messages_are_counted(dp: Measured) -> None:
    messages = dp.by("variant", "messages")
    assert messages["alone"] == 0
    assert messages["flat"] == messages["bucketed_1"] == 1
    assert messages["naive"] == messages["overlapped"] == PARAMETERS
    assert 1 < messages["bucketed_0.005"] < PARAMETERS
    flags = 4 * PARAMETERS
    assert dp.value("message_bytes", variant="flat") == dp.value("gradient_bytes") + flags


def test_profiles_show_what_was_sent(dp: Measured) -> None:
    seen, sent = dp.by("variant", "messages_seen"), dp.by("variant", "messages")
    communication = dp.by("variant", "profiled_time", activity="communication")
    assert seen["alone"] == communication["alone"] == 0
    for name in ("naive", "flat", "overlapped", "bucketed_0.005"):
        assert seen[name] == sent[name]
        assert communication[name] > 0
    assert set(dp.by("rank", "overlapped_share", variant="flat").values()) == {0}
    assert set(dp.data["intervals_ms"]) == set(seen)


def test_a_step_without_communication_is_timed_by_phase(dp: Measured) -> None:
    assert set(dp.by("phase", "phase_time")) == {"forward", "backward", "optimizer", "total"}


class Wrong(FlatDDP):
    """Changes the last averaged gradient."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        list(self.module.parameters())[-1].grad.mul_(1.5)  # type: ignore[union-attr]


def check_with_a_wrong_variant() -> dict[str, Record]:
    asked = point("data_parallel")
    work = RankWork(candidates(asked, CPU)[0].workload, CPU)
    model = work.model()
    with patch.object(data_parallel_variants, "FlatDDP", Wrong):
        variants = data_parallel.make_variants(asked, work, model)
    return data_parallel.check(variants, work, model)


def test_a_variant_with_wrong_gradients_fails(ranks: RankPool) -> None:
    for found in ranks.run(check_with_a_wrong_variant, WORLD):
        assert (found["flat"]["quantity"], found["flat"]["status"]) == ("time", "failed")
        assert found["naive"]["quantity"] == "gradient_error"
        assert found["naive"]["value"] < 1e-5


def held_bytes() -> dict[str, tuple[int, int]]:
    """Bytes of each variant's gradient buffers outside and inside of a step."""
    asked = point("data_parallel")
    work = RankWork(candidates(asked, CPU)[0].workload, CPU)
    found = {}
    for name, variant in data_parallel.make_variants(asked, work, work.model()).items():
        sizes = []
        for _ in range(2):  # a second step finds its buffers again
            outside = _bytes_of(variant)
            with variant.allocated():
                variant.backward()
                sizes.append((outside, _bytes_of(variant)))
        assert sizes[0] == sizes[1]
        found[name] = sizes[0]
    return found


def _bytes_of(variant: Any) -> int:
    return sum(buffer.untyped_storage().nbytes() for buffer in variant._buffers)


def test_gradient_buffers_exist_only_during_a_step(ranks: RankPool) -> None:
    for found in ranks.run(held_bytes, WORLD):
        assert {outside for outside, _ in found.values()} == {0}
        assert found["flat"][1] == found["overlapped"][1] > 0


def owned_and_shared() -> dict[str, tuple[int, bool]]:
    """How many parameters each optimizer has state for, and whether that is the plain one's."""
    work = RankWork(candidates(point("sharded_optimizer"), CPU)[0].workload, CPU)
    model = BucketedDDP(work.model(), 1)
    makers = sharded_optimizer.OPTIMIZERS
    optimizers = {name: make(model.module.parameters()) for name, make in makers.items()}
    sharded_optimizer.share_state(optimizers, model, work)
    plain = optimizers["replicated"].state
    states = {n: sharded_optimizer.local_optimizer(o).state for n, o in optimizers.items()}
    return {
        name: (len(state), all(state[p] is plain[p] for p in state))
        for name, state in states.items()
    }


def test_timed_optimizers_share_one_state(ranks: RankPool) -> None:
    one, other = ranks.run(owned_and_shared, WORLD)
    assert one["replicated"] == other["replicated"] == (PARAMETERS, True)
    for name in ("sharded", "torch_zero"):
        assert one[name][0] + other[name][0] == PARAMETERS
        assert one[name][1]
        assert other[name][1]


def test_the_sharded_optimizer_keeps_only_its_share(sharded: Measured) -> None:
    after = {"stage": "after_step", "category": "optimizer_state"}
    state = sharded.by("variant", "memory", **after)
    whole = sharded.value("expected_memory", category="optimizer_state")
    steps = 4 * PARAMETERS  # every parameter also has a step counter
    assert state["replicated"] == whole + steps
    owned = max(sharded.by("rank", "owned_bytes").values())
    assert abs(state["sharded"] - 2 * owned) <= steps
    allocated = sharded.by("rank", "allocated", variant="sharded", stage="after_step")
    assert list(allocated) == list(range(WORLD))


def test_memory_follows_the_cost_model_before_the_step(sharded: Measured) -> None:
    expected = sharded.by("category", "expected_memory")
    for variant in ("replicated", "sharded", "torch_zero"):
        forward = sharded.by("category", "memory", variant=variant, stage="after_forward")
        before = sharded.by("category", "memory", variant=variant, stage="before_step")
        assert {forward[name] - expected[name] for name in ("parameters", "activations")} == {0}
        assert before["gradients"] == expected["gradients"]


class Stale(ShardedOptimizer):
    """Keeps its updates to itself."""

    def _messages(self) -> Any:
        return iter(())


def memory_with_a_stale_optimizer() -> dict[str, str]:
    stale = {"sharded": lambda parameters: Stale(parameters, torch.optim.AdamW)}
    with patch.dict(sharded_optimizer.OPTIMIZERS, stale):
        sizes = candidates(point("sharded_optimizer"), CPU)
        return sharded_optimizer.measure_memory(sizes, CPU)[1]


def test_an_optimizer_that_lets_ranks_diverge_fails(ranks: RankPool) -> None:
    for failed in ranks.run(memory_with_a_stale_optimizer, WORLD):
        assert list(failed) == ["sharded"]


def test_fsdp_keeps_a_share_of_everything(fully: Measured) -> None:
    def after(variant: str, category: str) -> int:
        return int(fully.value("memory", variant=variant, stage="after_step", category=category))

    for category in ("parameters", "gradients", "optimizer_state"):
        assert after("fsdp", category) < 0.7 * after("ddp", category)
    state = "optimizer_state"
    assert after("ddp_sharded_optimizer", state) < 0.6 * after("ddp", state)
    assert fully.value("sharded_bytes") < fully.value("parameter_bytes")


def test_every_gather_is_watched_in_both_directions(fully: Measured) -> None:
    blocks = ["token_embeddings.weight", "layers.0", "layers.1", "lm_head.weight"]
    waits = fully.data["waits_ms"]
    for phase, expected in (("forward", blocks), ("backward", blocks[::-1])):
        mine = [row for row in waits if row["phase"] == phase]
        assert [row["layer"] for row in mine] == expected, "in the order in which they are used"
        assert all(len(row["ms"]) == WORLD for row in mine)
        for rank, total in fully.by("rank", "gather_wait", phase=phase).items():
            assert total == pytest.approx(sum(row["ms"][rank] for row in mine))


def test_fsdp_sends_one_message_per_block(fully: Measured) -> None:
    blocks = 4
    # Gathered twice, except for the block that ends forward and begins backward; scattered once.
    expected = blocks + (blocks - 1) + blocks + 1
    assert fully.value("messages_seen", variant="fsdp") == expected


def refuse(work: Any) -> Any:
    raise RuntimeError("no such\n  mesh")


def try_variant(name: str) -> Any:
    work = RankWork(candidates(point("fsdp"), CPU)[0].workload, CPU)
    with (
        patch.object(fsdp_variants, "_torch", refuse),
        patch.object(fsdp_variants, "_ours", refuse),
    ):
        try:
            return fsdp_variants.two_steps_alone(name, fsdp_variants.builder(1), work)
        except RuntimeError as error:
            return {"raised": str(error)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch_fully_shard", "RuntimeError: no such mesh"),
        ("fsdp", {"raised": "no such\n  mesh"}),
    ],
    ids=["PyTorch's has a reason", "ours fails the point"],
)
def test_a_variant_that_does_not_run_here(ranks: RankPool, name: str, expected: Any) -> None:
    assert ranks.run(try_variant, WORLD, name=name) == [expected] * WORLD


@pytest.mark.parametrize(
    ("losses", "statuses"),
    [([3.0, 2.0], []), ([3.0, 2.1], ["failed"]), ([3.0, float("nan")], ["failed"])],
)
def test_losses_must_be_those_of_data_parallelism(losses: list[float], statuses: Any) -> None:
    def alone(found: list[float]) -> list[dict[str, Any]]:
        return [{"losses": found, "stages": {}, "peaks": {}}]

    records, correct = fsdp.check({"ddp": alone([3.0, 2.0]), "fsdp": alone(losses)}, 1e-4)
    assert [r["status"] for r in records if r["quantity"] == "time"] == statuses
    assert correct == (["ddp"] if statuses else ["ddp", "fsdp"])


def test_a_refusal_is_a_record() -> None:
    records, correct = fsdp.check({"torch_fully_shard": "no mesh"}, 1e-4)
    assert [(r["status"], r["reason"]) for r in records] == [("unsupported", "no mesh")]
    assert correct == []


def own_batches() -> tuple[list[int], list[int]]:
    work = candidates(point("fsdp"), CPU)[0].workload
    own, same = RankWork(work, CPU), RankWork(work, CPU, own_tokens=False)
    assert dist.get_world_size() == WORLD
    return own.tokens.flatten().tolist(), same.tokens.flatten().tolist()


def test_ranks_draw_their_own_tokens_unless_asked_not_to(ranks: RankPool) -> None:
    (one, shared), (other, shared_too) = ranks.run(own_batches, WORLD)
    assert one != other
    assert shared == shared_too


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


def test_a_precision_that_a_cpu_lacks_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="tf32"):
        candidates(point("fsdp", precision="tf32"), CPU)
