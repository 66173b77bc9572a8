"""How many messages data parallelism sends, about what, and when."""

from unittest import mock

import pytest
import torch
from torch import nn

from lmlab.parallel import BucketedDDP
from lmlab.parallel.buckets import Bucket
from tests.parallel.launcher import on_ranks
from tests.parallel.models import build
from tests.parallel.recording import Message, recorded_messages
from tests.parallel.training import SCHEMES, backward, batch_of, every_ddp, loss_of, own_part


@pytest.mark.parametrize("scheme", ["naive", "flat", "overlapped"])
@on_ranks(2)
def test_a_step_sends_every_gradient_once(scheme: str) -> None:
    wrapped = SCHEMES[scheme](build("mixed_dtypes"))
    with recorded_messages() as log:
        backward(wrapped, own_part(batch_of(0)))
    # A message has one flag per parameter, next to its gradient.
    single = [(p.dtype, p.numel() + 1) for p in wrapped.parameters()]
    by_dtype = [
        (dtype, sum(numel for d, numel in single if d == dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    expected = {"naive": single, "flat": by_dtype, "overlapped": single[::-1]}
    assert {message.kind for message in log} == {"all-reduce"}
    assert [(message.dtype, message.numel) for message in log] == expected[scheme]


def five_equal_layers() -> nn.Sequential:
    """Five matrices of 1 kB."""
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(5)])


@pytest.mark.parametrize(
    ("size_kb", "expected"),
    [(0.5, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (2.1, [3, 2]), (1024, [5])],
    ids=lambda value: "" if isinstance(value, list) else f"{value}_kB",
)
@on_ranks(2)
def test_a_bucket_is_closed_by_the_parameter_that_fills_it(
    size_kb: float, expected: list[int]
) -> None:
    wrapped = BucketedDDP(five_equal_layers(), bucket_size_mb=size_kb / 1024)
    with recorded_messages() as log:
        backward(wrapped, torch.randn(2, 16))
    assert [message.numel // 256 for message in log] == expected
    in_order = [p for bucket in wrapped.buckets for p in bucket.parameters]
    assert in_order == list(reversed(list(wrapped.parameters())))


@every_ddp
@on_ranks(2)
def test_messages_are_sent_during_backward_if_the_scheme_overlaps(scheme: str) -> None:
    wrapped = SCHEMES[scheme](five_equal_layers())
    with recorded_messages() as log:
        for number, layer in enumerate(wrapped.module):
            layer.register_full_backward_pre_hook(
                lambda _module, _gradient, number=number: log.append(f"layer {number}")
            )
        wrapped(torch.randn(2, 16)).sum().backward()
        log.append("end")
        wrapped.finish_gradient_synchronization()
    events = ["message" if isinstance(entry, Message) else entry for entry in log]
    if scheme in ("overlapped", "bucketed"):
        interleaved = [entry for n in (4, 3, 2, 1, 0) for entry in (f"layer {n}", "message")]
        assert events == [*interleaved, "end"]
    else:
        assert "message" not in events[: events.index("end")]


@every_ddp
@on_ranks(2)
def test_no_sync_sends_nothing_and_the_step_after_it_everything_once(scheme: str) -> None:
    wrapped = SCHEMES[scheme](build("layers"))
    with recorded_messages() as log:
        with wrapped.no_sync():
            for step in range(2):
                loss_of(wrapped(own_part(batch_of(step)))).backward()
        assert not log
        backward(wrapped, own_part(batch_of(2)))
    assert len(log) == len(wrapped.buckets)


@on_ranks(2)
def test_construction_broadcasts_once_per_dtype_and_dropped_wrappers_send_nothing() -> None:
    module = build("mixed_dtypes")
    SCHEMES["naive"](module)
    SCHEMES["overlapped"](module)  # hooks of dropped wrappers stay on the module
    with recorded_messages() as log:
        backward(SCHEMES["flat"](module), own_part(batch_of(0)))
    assert [message.kind for message in log] == ["broadcast"] * 2 + ["all-reduce"] * 2


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@every_ddp
@on_ranks(2)
def test_gradients_are_views_into_messages_whatever_zero_grad_does(
    scheme: str, set_to_none: bool
) -> None:
    module = build("mixed_dtypes")
    wrapped = SCHEMES[scheme](module)
    buffers = {bucket.buffer.untyped_storage().data_ptr() for bucket in wrapped.buckets}
    for step in range(3):
        module.zero_grad(set_to_none=set_to_none)
        loss_of(wrapped(own_part(batch_of(step)))).backward()
        assert {p.grad.untyped_storage().data_ptr() for p in module.parameters()} == buffers
        wrapped.finish_gradient_synchronization()
        assert {p.grad.untyped_storage().data_ptr() for p in module.parameters()} == buffers


@on_ranks(2)
def test_hooks_receive_the_parameter_and_not_the_gradient() -> None:
    wrapped = SCHEMES["naive"](build("layers"))
    received = []

    def adopt(bucket: Bucket, parameter: nn.Parameter) -> None:
        received.append((parameter, parameter.grad is not None))

    with mock.patch.object(Bucket, "adopt", adopt):
        loss_of(wrapped(own_part(batch_of(0)))).backward()
    assert {parameter for parameter, _ in received} == set(wrapped.parameters())
    assert all(has_gradient for _, has_gradient in received)
