"""How often data-parallel ranks talk, about what, and when."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lmlab.parallel import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from tests.parallel.launcher import RankPool
from tests.parallel.models import build
from tests.parallel.recording import Message, recorded_messages
from tests.parallel.training import WRAPPERS, batch_of, loss_of, own_part

every_variant = pytest.mark.parametrize("variant", WRAPPERS)


def messages_of_a_step(wrap: Callable[[nn.Module], Any], model: str) -> list[Message]:
    ours = wrap(build(model, seed=0))
    with recorded_messages() as log:
        loss_of(ours(own_part(batch_of(0, 0)))).backward()
        ours.finish_gradient_synchronization()
    return log


def sizes(parameters: list[nn.Parameter]) -> int:
    """Numbers in a message: gradients, and one each that says whether there is one."""
    return sum(parameter.numel() + 1 for parameter in parameters)


def check_naive() -> None:
    parameters = list(build("two types", seed=0).parameters())
    sent = messages_of_a_step(NaiveDDP, "two types")
    assert [message.numel for message in sent] == [sizes([p]) for p in parameters]
    assert [message.dtype for message in sent] == [p.dtype for p in parameters]


def test_naive_sends_one_message_a_parameter(ranks: RankPool) -> None:
    ranks.run(check_naive, 2)


def check_flat() -> None:
    parameters = list(build("two types", seed=0).parameters())
    sent = messages_of_a_step(FlatDDP, "two types")
    assert {message.dtype: message.numel for message in sent} == {
        dtype: sizes([p for p in parameters if p.dtype == dtype])
        for dtype in (torch.float32, torch.float64)
    }
    assert len(sent) == 2
    assert len(messages_of_a_step(FlatDDP, "torch's layers")) == 1


def test_flat_sends_one_message_a_type(ranks: RankPool) -> None:
    ranks.run(check_flat, 2)


def check_overlapped() -> None:
    parameters = list(build("two types", seed=0).parameters())
    sent = messages_of_a_step(OverlappedDDP, "two types")
    assert [message.numel for message in sent] == [sizes([p]) for p in reversed(parameters)]


def test_overlapped_sends_one_message_a_parameter_from_the_last_to_the_first(
    ranks: RankPool,
) -> None:
    ranks.run(check_overlapped, 2)


def five_equal_layers() -> nn.Sequential:
    """Each a matrix of 1 kB."""
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(5)])


def sent_in_buckets(size_kb: float) -> list[int]:
    ours = BucketedDDP(five_equal_layers(), bucket_size_mb=size_kb / 1024)
    with recorded_messages() as log:
        ours(torch.randn(2, 16)).sum().backward()
        ours.finish_gradient_synchronization()
    assert [bucket.parameters[0].shape for bucket in ours.buckets] == [(16, 16)] * len(log)
    in_order = [p for bucket in ours.buckets for p in bucket.parameters]
    assert in_order == list(reversed(list(ours.parameters())))
    return [(message.numel) // 256 for message in log]


@pytest.mark.parametrize(
    ("size_kb", "layers_in_buckets"),
    [
        pytest.param(0.5, [1, 1, 1, 1, 1], id="smaller than a parameter: one each"),
        pytest.param(1, [1, 1, 1, 1, 1], id="one parameter"),
        pytest.param(2, [2, 2, 1], id="two parameters, from the last"),
        pytest.param(2.1, [3, 2], id="the parameter that fills a bucket is its last"),
        pytest.param(1024, [5], id="larger than the model"),
    ],
)
def test_bucketed_sends_one_message_a_bucket(
    ranks: RankPool, size_kb: float, layers_in_buckets: list[int]
) -> None:
    assert ranks.run(sent_in_buckets, 2, size_kb=size_kb) == [layers_in_buckets] * 2


def log_with_layers(variant: str) -> list[str]:
    """Messages between the moments at which layers begin their backward."""
    module = five_equal_layers()
    ours = WRAPPERS[variant](module)
    with recorded_messages() as log:
        for number, layer in enumerate(module):
            layer.register_full_backward_pre_hook(
                lambda _module, _gradient, number=number: log.append(f"layer {number}")
            )
        ours(torch.randn(2, 16)).sum().backward()
        log.append("backward over")
        ours.finish_gradient_synchronization()
    return [m if isinstance(m, str) else "message" for m in log]


@pytest.mark.parametrize("variant", ["overlapped", "bucketed"])
def test_messages_leave_while_earlier_layers_are_still_to_come(
    ranks: RankPool, variant: str
) -> None:
    expected = ["layer 4"]
    for number in (3, 2, 1, 0):
        expected += ["message", f"layer {number}"]
    assert ranks.run(log_with_layers, 2, variant=variant)[0] == [
        *expected,
        "message",
        "backward over",
    ]


@pytest.mark.parametrize("variant", ["naive", "flat"])
def test_messages_leave_after_backward(ranks: RankPool, variant: str) -> None:
    log = ranks.run(log_with_layers, 2, variant=variant)[0]
    assert "message" not in log[: log.index("backward over")]


def count_in_accumulation(variant: str, batches: int) -> tuple[int, int]:
    ours = WRAPPERS[variant](build("torch's layers", seed=0))
    with recorded_messages() as log:
        with ours.no_sync():
            for step in range(batches - 1):
                loss_of(ours(own_part(batch_of(0, step)))).backward()
        silent = len(log)
        loss_of(ours(own_part(batch_of(0, batches)))).backward()
        ours.finish_gradient_synchronization()
    return silent, len(log) - len(ours.buckets)


@every_variant
def test_no_sync_sends_nothing_and_the_step_after_it_everything_once(
    ranks: RankPool, variant: str
) -> None:
    assert ranks.run(count_in_accumulation, 2, variant=variant, batches=3) == [(0, 0)] * 2


def broadcasts_at_construction(variant: str) -> Counter[str]:
    module = build("two types", seed=0)
    with recorded_messages() as log:
        WRAPPERS[variant](module)
    return Counter(message.kind for message in log)


@every_variant
def test_construction_sends_one_message_a_type(ranks: RankPool, variant: str) -> None:
    assert ranks.run(broadcasts_at_construction, 2, variant=variant)[0] == {"broadcast": 2}


def old_wrapper_is_gone() -> int:
    module = build("torch's layers", seed=0)
    NaiveDDP(module)
    OverlappedDDP(module)
    ours = FlatDDP(module)
    with recorded_messages() as log:
        loss_of(ours(own_part(batch_of(0, 0)))).backward()
        ours.finish_gradient_synchronization()
    return len(log)


def test_a_wrapper_that_is_gone_sends_nothing_more(ranks: RankPool) -> None:
    assert ranks.run(old_wrapper_is_gone, 2) == [1, 1]
