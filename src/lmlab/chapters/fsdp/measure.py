"""FSDP: what sharding parameters, gradients and optimizer state saves and costs.

Four variants: data parallelism with a plain optimizer, the same with a sharded optimizer, our FSDP,
and PyTorch's `fully_shard`. Each first runs two steps alone, with memory read at the stages of the
first and at the peak of the second. Both losses must match those of data parallelism on every rank:
the first shows that forward uses the right weights, the second that gradients and update were
right; a wrong variant is not timed. Then the variants are timed in interleaved rounds: each is
built, runs one step that allocates its state and then the timed one, and is freed, so a job needs
the memory of one variant. After that each gather of our FSDP is timed, and finally one step of each
variant is profiled.

If `fully_shard` does not run on a backend or device, its error becomes the variant's reason and the
others continue. All ranks must agree on that, or some would wait in a collective for the others.

Records, besides those of `autosize`, `memory_stages` and `rank_work`: `parameter_bytes`,
`sharded_bytes` (of the parameters that FSDP shards); `gather_wait`: the sum of all waits for
weights in a step, per phase and rank. `data.waits_ms`: the median wait of each block per phase, one
number per rank. `data.intervals_ms`: rank 0's timeline per variant.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lmlab.jobs import rank_work
from lmlab.jobs.autosize import choose
from lmlab.jobs.memory_stages import Training, expected_records, memory_records, two_steps
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_work import RankWork, Ready
from lmlab.measure import across_ranks
from lmlab.measure.clock import synchronize
from lmlab.measure.device import is_out_of_memory
from lmlab.measure.precision import precision_named, tf32_allowed
from lmlab.measure.records import Record, value, without_value
from lmlab.parallel.ddp import BucketedDDP
from lmlab.parallel.fsdp import FSDP, chosen_matrices, has_matrix_weight
from lmlab.parallel.fsdp_group import FSDPGroup
from lmlab.parallel.hooks import in_backward
from lmlab.parallel.sharded_optimizer import ShardedOptimizer
from lmlab.study.points import Point

DDP, SHARDED, OURS, TORCH = "ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"
WATCHED_STEPS = 3
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}

Build = Callable[[RankWork], Training]
Alone = Mapping[str, list[dict[str, Any]] | str]


def measure(point: Point, device: torch.device) -> Outcome:
    """Memory, time, waits and overlap of every variant; called on every rank."""
    builders = builders_of(point.settings["bucket_mb"])
    with tf32_allowed(precision_named(str(point.parameters["precision"])).tf32):
        workload, choice = choose(
            point,
            device,
            purpose="memory and time",
            limit_s=point.settings["step_limit_s"],
            messages=1.5,  # two gathers and a scatter, each half of an all-reduce
            trial=lambda work: partial(builders[OURS](work).step, work),
        )
        work = RankWork(workload, device)
        alone = {name: two_steps_alone(name, build, work) for name, build in builders.items()}
        checks, correct = check(alone, TOLERANCE[workload.precision.name])
        ready = {name: partial(warm_training, builders[name], work) for name in correct}
        steps = {name: rank_work.timed_step(each) for name, each in ready.items()}
        rounds = rank_work.take_turns(steps, point, device)
        waits = watch_gathers(ready[OURS], device) if OURS in ready else []
        overlap, intervals = rank_work.overlap_records(ready, device)
        whole = work.model()
        sharded = chosen_matrices(whole, has_matrix_weight)
        records = [
            *rank_work.round_records(rounds),
            *wait_records(waits),
            *overlap,
            value("parameter_bytes", sum(p.nbytes for p in whole.parameters()), "B"),
            value("sharded_bytes", sum(p.nbytes for p in sharded), "B"),
            *rank_work.work_records(work, whole),
            *checks,
            *choice,
            *expected_records(workload, device),
        ]
    return Outcome(measurements=records, data={"waits_ms": waits, "intervals_ms": intervals})


def builders_of(bucket_mb: float) -> dict[str, Build]:
    """The variants by name; data parallelism uses buckets of this size."""
    bucketed = partial(BucketedDDP, bucket_size_mb=bucket_mb)
    plain: Any = torch.optim.AdamW
    return {
        DDP: partial(build, bucketed, plain),
        SHARDED: partial(build, bucketed, partial(ShardedOptimizer, optimizer_cls=plain)),
        OURS: partial(build, FSDP, plain),
        TORCH: partial(build, torch_fully_shard, plain),
    }


def build(
    wrap: Callable[[nn.Module], nn.Module],
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    work: RankWork,
) -> Training:
    """A variant, ready for its first step."""
    model = wrap(work.model())
    return Training(model, make_optimizer(model.parameters()))


def torch_fully_shard(model: nn.Module) -> nn.Module:
    """Apply PyTorch's `fully_shard` to the members of module lists, then to the rest."""
    group = dist.group.WORLD
    assert group is not None, "a rank measures within a process group"
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for modules in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for block in modules:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def two_steps_alone(name: str, build: Build, work: RankWork) -> list[dict[str, Any]] | str:
    """Memory and losses of a variant's two steps on every rank, or why it does not run here."""
    rank_work.release(work.device)
    own: dict[str, Any] = {}
    reason = None
    try:
        own = two_steps(build(work), work)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        if name != TORCH or is_out_of_memory(error):
            raise  # ours must run everywhere: an error fails the whole point
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    reasons = [each for each in across_ranks.gather(reason) if each]
    rank_work.release(work.device)
    return reasons[0] if reasons else across_ranks.gather(own)


def check(alone: Alone, allowed: float) -> tuple[list[Record], list[str]]:
    """Memory records or reasons, and the variants whose losses match data parallelism."""
    records: list[Record] = []
    correct = []
    baseline: Any = alone[DDP]
    for name, ranks in alone.items():
        if isinstance(ranks, str):
            labels = {"variant": name, "phase": "total"}
            records.append(without_value("time", "unsupported", ranks, **labels))
            continue
        records += memory_records(name, ranks)
        pairs = zip(ranks, baseline, strict=True)
        errors = (rank_work.relative_error(own["losses"], right["losses"]) for own, right in pairs)
        error = across_ranks.max_error(errors)
        wrong = rank_work.why_wrong(name, "losses of two steps", error, allowed)
        records += wrong
        correct += [] if wrong else [name]
    return records, correct


@contextmanager
def warm_training(build: Build, work: RankWork) -> Iterator[Callable[[], Tensor]]:
    """Yield the step of a variant that has already run one; the variant exists only inside."""
    rank_work.release(work.device)
    training = build(work)
    training.step(work)
    yield partial(training.step, work)


def watch_gathers(ready: Ready, device: torch.device) -> list[dict[str, Any]]:
    """How long each block waits for its weights, by phase, in the order in which blocks are used.

    A block is what one message gathers; a gather that ends before its block needs the weights costs
    nothing. The wait is in `FSDPGroup.finish_gather`, called when the first layer of a block runs.
    On a GPU, two CUDA events on the compute stream around the call cover a waiting host, a waiting
    stream, and the copy of each matrix out of the message; on a CPU, the host's clock is read. The
    block that ends forward and begins backward keeps its weights.
    """
    original = FSDPGroup.finish_gather
    waits: dict[tuple[str, str], list[tuple[Any, Any]]] = defaultdict(list)

    def watched(group: FSDPGroup) -> None:
        before = _now(device)
        original(group)
        phase = "backward" if in_backward() else "forward"
        waits[phase, group.name].append((before, _now(device)))

    with ready() as step, patch.object(FSDPGroup, "finish_gather", watched):
        for _ in range(WATCHED_STEPS):
            dist.barrier()
            step()
            synchronize(device)  # events can be read once the device has passed them
    medians = {key: statistics.median(map(_elapsed_ms, edges)) for key, edges in waits.items()}
    ranks = across_ranks.gather(medians)
    return [
        {"phase": phase, "layer": layer, "ms": [round(own[phase, layer], 6) for own in ranks]}
        for phase, layer in ranks[0]
    ]


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(edges: tuple[Any, Any]) -> float:
    before, after = edges
    on_gpu = isinstance(before, torch.cuda.Event)
    return float(before.elapsed_time(after) if on_gpu else (after - before) * 1e3)


def wait_records(waits: list[dict[str, Any]]) -> list[Record]:
    """The total wait of a step, per phase and rank."""
    records = []
    for phase in ("forward", "backward"):
        blocks = [row["ms"] for row in waits if row["phase"] == phase]
        sums = map(sum, zip(*blocks, strict=True))
        records += rank_work.per_rank("gather_wait", sums, "ms", phase=phase)
    return records
