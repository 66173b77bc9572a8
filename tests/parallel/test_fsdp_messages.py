"""What FSDP sends in a step, and how far ahead."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from lmlab.parallel import FSDP
from tests.parallel.launcher import RankPool
from tests.parallel.models import build
from tests.parallel.recording import Message, recorded_messages
from tests.parallel.training import backward, batch_of, own_part

every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")


def messages_of_steps(model: str, steps: int) -> tuple[list[Message], int, int]:
    ours = FSDP(build(model, seed=0))
    with recorded_messages() as log:
        for step in range(steps):
            backward(ours, own_part(batch_of(0, step)))
    replicated = sum(p.numel() + 1 for bucket in ours._rest for p in bucket.parameters)
    return log, len(ours.bundles), replicated


@every_world
@pytest.mark.parametrize(
    ("model", "bundles"), [("transformer", 3), ("torch's layers", 3), ("blocks", 5)]
)
def test_a_step_gathers_each_block_twice_and_scatters_its_gradients_once(
    ranks: RankPool, model: str, bundles: int, world_size: int
) -> None:
    log, found, replicated = ranks.run(messages_of_steps, world_size, model=model, steps=3)[0]
    assert found == bundles
    count = Counter(message.kind for message in log)
    kept = 2  # what ends forward begins backward; the first step does not know what that will be
    gathers = 2 * 3 * bundles - kept
    assert count == {"all-gather": gathers, "reduce-scatter": 3 * bundles, "all-reduce": 3}
    assert {m.numel for m in log if m.kind == "all-reduce"} == {replicated}
    assert all(message.asynchronous for message in log)


def bytes_of_a_step() -> tuple[int, int]:
    module = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)])
    ours = FSDP(module)
    with recorded_messages() as log:
        ours(torch.randn(2, 6)).sum().backward()
        ours.finish_gradient_synchronization()
    gathered = sum(m.numel for m in log if m.kind == "all-gather")
    return gathered, sum(m.numel for m in log if m.kind == "reduce-scatter")


def test_nothing_is_padded_where_ranks_divide_the_rows(ranks: RankPool) -> None:
    assert ranks.run(bytes_of_a_step, 3)[0] == (2 * 3 * 36, 3 * 36)


def tied_and_idle() -> tuple[Counter[str], Counter[str]]:
    counts = []
    for model in ("tied weights", "idle layer"):
        log, _, _ = messages_of_steps(model, steps=1)
        counts.append(Counter(message.kind for message in log))
    return counts[0], counts[1]


def test_a_tied_weight_is_gathered_at_each_use_and_scattered_once_an_idle_one_never(
    ranks: RankPool,
) -> None:
    tied, idle = ranks.run(tied_and_idle, 2)[0]
    assert tied == {"all-gather": 2 * 3, "reduce-scatter": 2, "all-reduce": 1}
    assert idle == {"all-gather": 2 * 3, "reduce-scatter": 3, "all-reduce": 1}


def evaluate() -> Counter[str]:
    ours = FSDP(build("torch's layers", seed=0))
    with recorded_messages() as log, torch.no_grad():
        ours(own_part(batch_of(0, 0)))
    assert not any(bundle.gathered for bundle in ours.bundles)
    return Counter(message.kind for message in log)


def test_a_forward_without_gradients_gathers_once(ranks: RankPool) -> None:
    assert ranks.run(evaluate, 2)[0] == {"all-gather": 3}


def layers(number: int, width: int) -> nn.Sequential:
    """Layers that differ in size, so that a message tells whose it is."""
    return nn.Sequential(*[nn.Linear(width + i, width + i + 1, bias=False) for i in range(number)])


def log_with_layers(prefetch: int, steps: int, checkpointed: bool = False) -> list[str]:
    """The last step: whose weight is sent for, between the moments at which layers compute."""
    module = layers(4, width=4)
    ours = FSDP(module, prefetch=prefetch)
    owner = {unit.whole.numel(): f"{number}" for number, unit in enumerate(ours.units)}
    with recorded_messages() as log:
        for number, layer in enumerate(module):
            layer.register_forward_pre_hook(lambda _m, _i, n=number: log.append(f"layer {n}"))
        for _ in range(steps):
            log.clear()
            x = torch.randn(2, 4, requires_grad=True)
            if checkpointed:
                ours._traffic.begin_forward()
                output = checkpoint_sequential(module, 2, x, use_reentrant=False)
            else:
                output = ours(x)
            log.append("backward")
            output.sum().backward()
            ours.finish_gradient_synchronization()
    symbols = {"all-gather": "gather", "reduce-scatter": "scatter"}
    return [m if isinstance(m, str) else f"{symbols[m.kind]} {owner[m.numel]}" for m in log]


def test_without_prefetch_a_weight_is_sent_for_when_its_layer_needs_it(ranks: RankPool) -> None:
    assert ranks.run(log_with_layers, 2, prefetch=0, steps=2)[0] == [
        *["gather 0", "layer 0", "gather 1", "layer 1"],
        *["gather 2", "layer 2", "gather 3", "layer 3"],
        "backward",
        *["scatter 3", "gather 2", "scatter 2"],  # what ended forward is still there
        *["gather 1", "scatter 1", "gather 0", "scatter 0"],
    ]


def test_the_next_weights_are_sent_for_before_a_layer_computes(ranks: RankPool) -> None:
    assert ranks.run(log_with_layers, 2, prefetch=1, steps=2)[0] == [
        *["gather 0", "gather 1", "layer 0", "gather 2", "layer 1"],
        *["gather 3", "layer 2", "layer 3"],
        "backward",
        *["gather 2", "scatter 3", "gather 1", "scatter 2"],
        *["gather 0", "scatter 1", "scatter 0"],
    ]


def test_a_recomputed_block_is_gathered_once_for_both_its_computations(ranks: RankPool) -> None:
    log = ranks.run(log_with_layers, 2, prefetch=1, steps=2, checkpointed=True)[0]
    after = log[log.index("backward") :]
    assert Counter(entry for entry in after if entry.startswith("gather")) == {
        f"gather {number}": 1 for number in range(3)
    }
    assert [entry for entry in after if entry.startswith("scatter")] == [
        "scatter 3",
        "scatter 2",
        "scatter 1",
        "scatter 0",
    ]
