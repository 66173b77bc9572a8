"""How many messages data parallelism sends, about what, and when."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lmlab.parallel import BucketedDDP
from lmlab.parallel.buckets import Bucket
from tests.parallel.launcher import RankPool
from tests.parallel.models import build
from tests.parallel.recording import Message, recorded_messages
from tests.parallel.training import SCHEMES, batch_of, every_ddp, loss_of, own_part


def messages_of_step(scheme: str, model: str) -> list[tuple[torch.dtype, int]]:
    wrapped = SCHEMES[scheme](build(model))
    with recorded_messages() as log:
        loss_of(wrapped(own_part(batch_of(0)))).backward()
        wrapped.finish_gradient_synchronization()
    assert {message.kind for message in log} == {"all-reduce"}
    return [(message.dtype, message.numel) for message in log]


def test_a_step_sends_every_gradient_once(ranks: RankPool) -> None:
    parameters = list(build("mixed_dtypes").parameters())
    # A message has one flag per parameter, next to its gradient.
    single = [(p.dtype, p.numel() + 1) for p in parameters]
    by_dtype = [
        (dtype, sum(numel for d, numel in single if d == dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    for scheme, expected in (("naive", single), ("flat", by_dtype), ("overlapped", single[::-1])):
        sent = ranks.run(messages_of_step, 2, scheme=scheme, model="mixed_dtypes")
        assert sent == [expected] * 2, scheme
    assert len(ranks.run(messages_of_step, 2, scheme="flat", model="layers")[0]) == 1


def five_equal_layers() -> nn.Sequential:
    """Five matrices of 1 kB."""
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(5)])


def layers_per_message(size_kb: float) -> list[int]:
    wrapped = BucketedDDP(five_equal_layers(), bucket_size_mb=size_kb / 1024)
    with recorded_messages() as log:
        wrapped(torch.randn(2, 16)).sum().backward()
        wrapped.finish_gradient_synchronization()
    in_order = [p for bucket in wrapped.buckets for p in bucket.parameters]
    assert in_order == list(reversed(list(wrapped.parameters())))
    return [message.numel // 256 for message in log]


@pytest.mark.parametrize(
    ("size_kb", "expected"),
    [(0.5, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (2.1, [3, 2]), (1024, [5])],
    ids=lambda value: str(value) if isinstance(value, float | int) else "",
)
def test_a_bucket_is_closed_by_the_parameter_that_fills_it(
    ranks: RankPool, size_kb: float, expected: list[int]
) -> None:
    assert ranks.run(layers_per_message, 2, size_kb=size_kb) == [expected] * 2


def log_with_layers(scheme: str) -> list[str]:
    """Messages, and when layers begin their backward."""
    module = five_equal_layers()
    wrapped = SCHEMES[scheme](module)
    with recorded_messages() as log:
        for number, layer in enumerate(module):
            layer.register_full_backward_pre_hook(
                lambda _module, _gradient, number=number: log.append(f"layer {number}")
            )
        wrapped(torch.randn(2, 16)).sum().backward()
        log.append("end")
        wrapped.finish_gradient_synchronization()
    return ["message" if isinstance(entry, Message) else entry for entry in log]


@every_ddp
def test_messages_are_sent_during_backward_if_the_scheme_overlaps(
    ranks: RankPool, scheme: str
) -> None:
    log = ranks.run(log_with_layers, 2, scheme=scheme)[0]
    if scheme in ("overlapped", "bucketed"):
        interleaved = [entry for n in (4, 3, 2, 1, 0) for entry in (f"layer {n}", "message")]
        assert log == [*interleaved, "end"]
    else:
        assert "message" not in log[: log.index("end")]


def count_in_accumulation(scheme: str) -> tuple[int, int]:
    wrapped = SCHEMES[scheme](build("layers"))
    with recorded_messages() as log:
        with wrapped.no_sync():
            for step in range(2):
                loss_of(wrapped(own_part(batch_of(step)))).backward()
        silent = len(log)
        loss_of(wrapped(own_part(batch_of(2)))).backward()
        wrapped.finish_gradient_synchronization()
    return silent, len(log) - len(wrapped.buckets)


@every_ddp
def test_no_sync_sends_nothing_and_the_step_after_it_everything_once(
    ranks: RankPool, scheme: str
) -> None:
    assert ranks.run(count_in_accumulation, 2, scheme=scheme) == [(0, 0)] * 2


def messages_around_wrapping(scheme: str) -> list[Any]:
    module = build("mixed_dtypes")
    SCHEMES["naive"](module)
    SCHEMES["overlapped"](module)  # hooks of dropped wrappers stay on the module
    with recorded_messages() as log:
        wrapped = SCHEMES[scheme](module)
        log.append("constructed")
        loss_of(wrapped(own_part(batch_of(0)))).backward()
        wrapped.finish_gradient_synchronization()
    return [entry.kind if isinstance(entry, Message) else entry for entry in log]


def test_construction_broadcasts_once_per_dtype_and_dropped_wrappers_send_nothing(
    ranks: RankPool,
) -> None:
    log = ["broadcast"] * 2 + ["constructed"] + ["all-reduce"] * 2
    assert ranks.run(messages_around_wrapping, 2, scheme="flat") == [log] * 2


def where_gradients_are(scheme: str, set_to_none: bool) -> None:
    module = build("mixed_dtypes")
    wrapped = SCHEMES[scheme](module)
    buffers = {bucket.buffer.untyped_storage().data_ptr() for bucket in wrapped.buckets}
    for step in range(3):
        module.zero_grad(set_to_none=set_to_none)
        loss_of(wrapped(own_part(batch_of(step)))).backward()
        in_backward = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        wrapped.finish_gradient_synchronization()
        after = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        assert in_backward == after == buffers


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@every_ddp
def test_gradients_are_views_into_messages_whatever_zero_grad_does(
    ranks: RankPool, scheme: str, set_to_none: bool
) -> None:
    ranks.run(where_gradients_are, 2, scheme=scheme, set_to_none=set_to_none)


def received_by_hooks(scheme: str) -> None:
    module = build("layers")
    wrapped = SCHEMES[scheme](module)
    received = []

    def adopt(bucket: Bucket, parameter: nn.Parameter) -> None:
        received.append((parameter, parameter.grad is not None))

    with mock.patch.object(Bucket, "adopt", adopt):
        loss_of(wrapped(own_part(batch_of(0)))).backward()
    assert {parameter for parameter, _ in received} == set(module.parameters())
    assert all(has_gradient for _, has_gradient in received)


def test_hooks_receive_the_parameter_and_not_the_gradient(ranks: RankPool) -> None:
    ranks.run(received_by_hooks, 2, scheme="naive")
