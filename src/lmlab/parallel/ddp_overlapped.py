"""Data parallelism with overlap: gradients are averaged while backward still runs.

Backward reaches the last layers first, so their gradients can be sent while the others are
computed. One message per parameter starts earliest but pays a latency each; larger buckets pay
fewer latencies and start later. The last bucket, complete only when backward ends, is never hidden.

All ranks must send the same messages in the same order, although they may differ in which
parameters have gradients. So buckets are sent strictly in reverse parameter order. An incomplete
bucket holds back those after it until backward ends; then all are sent, with zeros for what is
missing. Every backward outside `no_sync` sends each bucket exactly once on every rank.

If another backward starts while a bucket is in flight, a hook waits for the bucket just before
autograd accumulates into it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lmlab.parallel.buckets import Bucket
from lmlab.parallel.checks import check_argument, check_still_frozen
from lmlab.parallel.coalesce import by_dtype_and_device
from lmlab.parallel.collectives import Group
from lmlab.parallel.ddp import DataParallel, Parameters
from lmlab.parallel.hooks import weak_hook

BYTES_PER_MB = 2**20
"""As in torch's DistributedDataParallel."""


class _DuringBackward(DataParallel):
    """Sends each bucket from the hook of the gradient that completes it."""

    def __init__(self, module: nn.Module, limit_bytes: float, process_group: Group) -> None:
        super().__init__(module, lambda p: in_buckets(p, limit_bytes), process_group)
        self._backward_id = -1
        self._missing: dict[Bucket, int] = {}
        self._started = 0
        self._all_sent = False
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_hook(weak_hook(self._before_accumulation, index))

    def _before_accumulation(self, index: int, gradient: Tensor) -> None:
        self.buckets[index].wait()

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        super()._gradient_ready(parameter)
        if self._synchronizing:
            self._track_backward()
            self._missing[self._bucket_of[parameter]] -= 1
            self._start_complete()

    def _track_backward(self) -> None:
        """On the first gradient of a backward: reset the counts and register for its end."""
        # An id and not a flag: a backward that raises would leave the flag set.
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            self._missing = {bucket: len(bucket.parameters) for bucket in self.buckets}
            self._started = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._start_rest)

    def _start_complete(self) -> None:
        """Start buckets in order, up to the first incomplete one."""
        for bucket in self.buckets[self._started :]:
            if self._missing[bucket] > 0:
                return
            bucket.start()
            self._started += 1

    def _start_rest(self) -> None:
        """Start all remaining buckets, complete or not."""
        for bucket in self.buckets[self._started :]:
            bucket.start()
        self._started = len(self.buckets)
        self._all_sent = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self._all_sent = False

    def finish_gradient_synchronization(self) -> None:
        """Wait for messages in flight, and send what no backward outside `no_sync` has sent."""
        check_still_frozen(self._frozen)
        if not self._all_sent:
            self._started = 0
            self._start_rest()
        for bucket in self.buckets:
            bucket.wait()
        self._all_sent = False


class OverlappedDDP(_DuringBackward):
    """One all-reduce per parameter, started as soon as its gradient is ready."""

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__(module, 0, process_group)


class BucketedDDP(_DuringBackward):
    """One all-reduce per bucket of gradients, started as soon as the bucket is complete."""

    def __init__(
        self, module: nn.Module, bucket_size_mb: float, process_group: Group = None
    ) -> None:
        check_argument(
            "bucket_size_mb", bucket_size_mb, (int, float), "a positive number", lambda mb: mb > 0
        )
        super().__init__(module, bucket_size_mb * BYTES_PER_MB, process_group)


def in_buckets(parameters: Parameters, limit_bytes: float) -> Sequence[Parameters]:
    """Split parameters, last to first, into buckets in the order in which they are completed.

    As in torch's DistributedDataParallel, a bucket is closed by the parameter with which it reaches
    the limit, so it may exceed the limit by less than one parameter.
    """
    backwards = list(reversed(parameters))
    ready_order = {parameter: index for index, parameter in enumerate(backwards)}
    kinds = by_dtype_and_device(backwards)
    buckets = [bucket for kind in kinds for bucket in _closed_at(kind, limit_bytes)]
    return sorted(buckets, key=lambda bucket: ready_order[bucket[-1]])


def _closed_at(parameters: Parameters, limit_bytes: float) -> Iterator[Parameters]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(held.nbytes for held in bucket) >= limit_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
