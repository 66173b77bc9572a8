"""Messages: collectives, coalescing, ownership, and what data parallelism sends and when."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lmlab.parallel import BucketedDDP
from lmlab.parallel.collectives import start_mean_all_reduce, start_mean_reduce_scatter
from lmlab.parallel.messages import IN_FLIGHT, broadcast_coalesced, coalesce
from lmlab.parallel.sharded_optimizer import Ownership
from tests.parallel import training
from tests.parallel.launcher import on_ranks
from tests.parallel.models import build
from tests.parallel.training import SCHEMES, backward, batch_of, own_part, recorded_messages

DTYPES = {True: torch.float64, False: torch.float32}


@on_ranks(3)
def test_means_are_over_ranks() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pending = start_mean_all_reduce(torch.full((4,), 3.0 * rank))
    for _ in range(2):  # a sum is divided once
        assert pending.wait().tolist() == [3.0] * 4
    pieces = torch.arange(2.0 * world_size) + rank
    scattered = start_mean_reduce_scatter(torch.empty(2), pieces)
    assert scattered.wait().tolist() == [2.0 * rank + 1, 2.0 * rank + 2]
    assert scattered.source is None, "what was sent is released"


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans())), st.integers(1, 300))
def test_messages_contain_each_tensor_once(sizes: list[tuple[int, bool]], limit_bytes: int) -> None:
    tensors = [torch.empty(size, dtype=DTYPES[wide]) for size, wide in sizes]
    messages = coalesce(tensors, limit_bytes)
    for dtype in DTYPES.values():
        of_dtype = [message for message in messages if message[0].dtype == dtype]
        sent = [tensor for message in of_dtype for tensor in message]
        assert [id(t) for t in sent] == [id(t) for t in tensors if t.dtype == dtype]
        for message in of_dtype:
            assert len(message) == 1 or sum(t.nbytes for t in message) <= limit_bytes
        for message, following in pairwise(of_dtype):
            assert sum(t.nbytes for t in message) + following[0].nbytes > limit_bytes


def messages_of(rank: int) -> list[list[Tensor]]:
    """More messages than may be in flight: packed, single and transposed tensors."""
    numbers = torch.arange(6.0).view(2, 3) + 10 * rank
    messages = [[numbers + i, numbers.flatten() - i] for i in range(IN_FLIGHT)]
    return [*messages, [numbers.clone()], [numbers.t()], [numbers.bool(), numbers[:0].bool()]]


@on_ranks(3)
def test_broadcasts_from_several_ranks_arrive() -> None:
    own = messages_of(dist.get_rank())
    sources = [i % dist.get_world_size() for i in range(len(own))]
    broadcast_coalesced(zip(own, sources, strict=True))
    for i, source in enumerate(sources):
        for received, sent in zip(own[i], messages_of(source)[i], strict=True):
            assert torch.equal(received, sent)


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1), st.integers(1, 8))
def test_ranks_own_about_the_same_bytes(sizes: list[tuple[int, bool]], world_size: int) -> None:
    parameters = [nn.Parameter(torch.empty(size, dtype=DTYPES[wide])) for size, wide in sizes]
    ownership = Ownership(world_size)
    ownership.add(parameters)
    owned = [ownership.owned_by(rank) for rank in range(world_size)]
    assert {p for rank in owned for p in rank} == set(parameters)
    loads = [sum(parameter.nbytes for parameter in rank) for rank in owned]
    assert ownership.bytes_by_rank == loads
    assert max(loads) - min(loads) <= max(parameter.nbytes for parameter in parameters)


def test_frozen_parameters_do_not_affect_the_balance_of_trainable_ones() -> None:
    frozen = nn.Parameter(torch.empty(100), requires_grad=False)
    trainable = [nn.Parameter(torch.empty(3)) for _ in range(2)]
    ownership = Ownership(world_size=2)
    ownership.add([frozen, *trainable])
    assert {ownership.owner[parameter] for parameter in trainable} == {0, 1}


@pytest.mark.parametrize("scheme", ["naive", "flat", "overlapped"])
@on_ranks(2)
def test_a_step_sends_every_gradient_once(scheme: str) -> None:
    wrapped = SCHEMES[scheme](build("mixed_dtypes"))
    with recorded_messages() as log:
        backward(wrapped, own_part(batch_of(0)))
    # A message has one flag per parameter, next to its gradient.
    single = [(p.dtype, p.numel() + 1) for p in reversed(list(wrapped.parameters()))]
    by_dtype = [
        (dtype, sum(numel for d, numel in single if d == dtype))
        for dtype in (torch.float64, torch.float32)  # in the order of their last gradients
    ]
    assert {message.kind for message in log} == {"all-reduce"}
    assert [(message.dtype, message.numel) for message in log] == (
        by_dtype if scheme == "flat" else single
    )


def five_equal_layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(5)])


@pytest.mark.parametrize(
    ("size_kb", "expected"),
    [(0.5, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (2.1, [3, 2]), (1024, [5])],
    ids=lambda value: "" if isinstance(value, list) else f"{value}_kB",
)
@on_ranks(2)
def test_a_bucket_is_closed_when_full(size_kb: float, expected: list[int]) -> None:
    wrapped = BucketedDDP(five_equal_layers(), bucket_size_mb=size_kb / 1024)
    with recorded_messages() as log:
        backward(wrapped, torch.randn(2, 16))
    assert [message.numel // 256 for message in log] == expected
    in_order = [p for bucket in wrapped.buckets for p in bucket.parameters]
    assert in_order == list(reversed(list(wrapped.parameters())))


@training.every_ddp
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
    events = ["message" if isinstance(entry, training.Message) else entry for entry in log]
    if scheme in ("overlapped", "bucketed"):
        interleaved = [entry for n in (4, 3, 2, 1, 0) for entry in (f"layer {n}", "message")]
        assert events == [*interleaved, "end"]
    else:
        assert "message" not in events[: events.index("end")]


@on_ranks(2)
def test_construction_broadcasts_once_per_dtype_and_dropped_wrappers_send_nothing() -> None:
    module = build("mixed_dtypes")
    SCHEMES["naive"](module)
    SCHEMES["overlapped"](module)  # hooks of dropped wrappers stay on the module
    with recorded_messages() as log:
        backward(SCHEMES["flat"](module), own_part(batch_of(0)))
    assert [message.kind for message in log] == ["broadcast"] * 2 + ["all-reduce"] * 2


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@training.every_ddp
@on_ranks(2)
def test_gradients_are_views_into_messages(scheme: str, set_to_none: bool) -> None:
    module = build("mixed_dtypes")
    wrapped = SCHEMES[scheme](module)
    buffers = {bucket.buffer.untyped_storage().data_ptr() for bucket in wrapped.buckets}
    for step in range(3):
        module.zero_grad(set_to_none=set_to_none)
        training.loss_of(wrapped(own_part(batch_of(step)))).backward()
        assert {p.grad.untyped_storage().data_ptr() for p in module.parameters()} == buffers
        wrapped.finish_gradient_synchronization()
        assert {p.grad.untyped_storage().data_ptr() for p in module.parameters()} == buffers
