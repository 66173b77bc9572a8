"""Data parallelism that talks during backward, while earlier layers still compute.

Backward reaches the last layers first, so their gradients can travel while the rest is computed. A
message leaves as soon as the gradients in it are complete. One parameter a message leaves soonest
and pays a latency each; larger buckets pay fewer and leave later. The best size lies between, and
the tail that nothing can hide is the last bucket's, whose gradients come at the very end.

All ranks must send the same messages in the same order, or they would add unlike things. Yet ranks
may differ in which parameters got a gradient. So messages leave strictly in the order of buckets,
reverse order of parameters, and a bucket that stays incomplete holds back those behind it until
that backward ends; then the rest leave, gaps counted as zeros. Every backward outside `no_sync`
sends each bucket once, on every rank.

A message that is under way owns its buffer. Should another backward come before it is back, its
gradients are waited for just before autograd adds to them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lmlab.parallel.buckets import Bucket
from lmlab.parallel.collectives import Group
from lmlab.parallel.contract import DataParallel, Grouping, Parameters, check_still_frozen
from lmlab.parallel.hooks import weakly
from lmlab.parallel.messages import by_kind

BYTES_PER_MB = 2**20
"""As torch's DistributedDataParallel counts."""


class _DuringBackward(DataParallel):
    """Starts each bucket from the hook of the gradient that completes it."""

    def __init__(self, module: nn.Module, grouping: Grouping, process_group: Group) -> None:
        super().__init__(module, grouping, process_group)
        self._backward_id = -1
        self._missing: dict[Bucket, int] = {}
        self._started = 0
        self._all_sent = False
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_hook(weakly(self._before_accumulation, index))

    def _before_accumulation(self, index: int, gradient: Tensor) -> None:
        """Keep autograd from adding to a gradient that is being averaged."""
        self.buckets[index].wait()

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        super()._gradient_arrived(parameter)
        if self._synchronizing:
            self._join_backward()
            self._missing[self._bucket_of[parameter]] -= 1
            self._start_complete()

    def _join_backward(self) -> None:
        """At the first gradient of a backward: count anew, and ask to be called at its end."""
        # Told apart by id and not by a flag, which a backward that raised would leave standing.
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            self._missing = {bucket: len(bucket.parameters) for bucket in self.buckets}
            self._started = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._start_rest)

    def _start_complete(self) -> None:
        """Start buckets as far as they are complete, in order."""
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            if self._missing[bucket] > 0:
                return
            bucket.start()
            self._started += 1

    def _start_rest(self) -> None:
        """Start what has not been, complete or not."""
        for bucket in self.buckets[self._started :]:
            bucket.start()
        self._started = len(self.buckets)
        self._all_sent = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up gradients here: for accumulation over several batches."""
        with super().no_sync():
            yield
        self._all_sent = False

    def finish_gradient_synchronization(self) -> None:
        """Wait for what is under way, and send what no backward outside `no_sync` has sent."""
        check_still_frozen(self._frozen)
        if not self._all_sent:
            self._started = 0
            self._start_rest()
        for bucket in self.buckets:
            bucket.wait()
        self._all_sent = False


class OverlappedDDP(_DuringBackward):
    """One all-reduce for each parameter, started as soon as its gradient is there."""

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__(module, _each_alone_from_the_end, process_group)


class BucketedDDP(_DuringBackward):
    """One all-reduce for each bucket of gradients, started as soon as the bucket is complete."""

    def __init__(
        self, module: nn.Module, bucket_size_mb: float, process_group: Group = None
    ) -> None:
        if not bucket_size_mb > 0:
            raise ValueError(
                f"bucket_size_mb: {bucket_size_mb!r} is not allowed; a number above 0 is"
            )
        limit_bytes = bucket_size_mb * BYTES_PER_MB
        super().__init__(
            module, lambda parameters: in_buckets(parameters, limit_bytes), process_group
        )


def in_buckets(parameters: Parameters, limit_bytes: float) -> Sequence[Parameters]:
    """Parameters from the last to the first, cut into buckets, in the order in which they fill.

    The parameter with which a bucket reaches its size is its last, so it may be larger than that by
    one parameter: as in torch's DistributedDataParallel, so that equal settings mean equal buckets.
    """
    backwards = list(reversed(parameters))
    arrival = {parameter: turn for turn, parameter in enumerate(backwards)}
    buckets = [bucket for kind in by_kind(backwards) for bucket in _filled(kind, limit_bytes)]
    # With several types, buckets of each fill side by side; the one filled first goes first.
    return sorted(buckets, key=lambda bucket: arrival[bucket[-1]])


def _filled(parameters: Parameters, limit_bytes: float) -> Iterator[Parameters]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(held.nbytes for held in bucket) >= limit_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _each_alone_from_the_end(parameters: Parameters) -> Sequence[Parameters]:
    return [[parameter] for parameter in reversed(parameters)]
