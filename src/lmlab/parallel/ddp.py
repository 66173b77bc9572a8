"""Data parallelism: every rank has the whole model, and gradients are averaged.

    model = BucketedDDP(module, bucket_size_mb=25)
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The constructor broadcasts parameters and buffers from rank 0. Equal gradients then keep the ranks
equal, so a step only has to average gradients. Which parameters are frozen is also fixed in the
constructor.

`NaiveDDP` sends one message per parameter after backward, `FlatDDP` one in total (one per dtype).
Both send the same bytes, so their difference in time is the latency of the extra messages.

`OverlappedDDP` and `BucketedDDP` send while backward still runs. Backward reaches the last layers
first, so their gradients can be sent while the others are computed. One message per parameter
starts earliest but pays one latency each; larger buckets pay fewer latencies but start later. The
last bucket, complete only when backward ends, is never hidden.

All ranks must send the same messages in the same order, although they may differ in which
parameters have gradients. So buckets are sent strictly in reverse parameter order. An incomplete
bucket holds back all later ones until backward ends; then all are sent, with zeros for missing
gradients. Every backward sends each bucket exactly once on every rank. If another backward starts
while a bucket is in flight, a hook waits for it just before autograd accumulates into the bucket.

Averaging twice is harmless: a mean that is equal on all ranks is its own mean. A second backward in
a step adds local gradients to averaged ones, and the mean of that sum is the sum of both means.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.parallel.hooks import weak_hook
from lmlab.parallel.messages import Bucket, broadcast_from_rank_0, check_still_frozen, in_buckets

BYTES_PER_MB = 2**20
"""As in torch's DistributedDataParallel."""


class DataParallel(nn.Module):
    """A module whose gradients are averaged over ranks in buckets of about `limit_bytes`."""

    def __init__(self, module: nn.Module, limit_bytes: float) -> None:
        super().__init__()
        self.module = module
        broadcast_from_rank_0([*module.parameters(), *module.buffers()])
        trainable = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.buckets = [Bucket(each) for each in in_buckets(trainable, limit_bytes)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(weak_hook(self._gradient_ready))

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called in backward after each accumulation, with the parameter and not the gradient."""
        self._bucket_of[parameter].adopt(parameter)

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over ranks; call it before the optimizer step."""
        check_still_frozen(self._frozen)
        for bucket in self.buckets:
            bucket.start()
            bucket.wait()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """Load into the wrapped module; every rank must load the same. There is no `assign`, which
        would replace parameters that hooks and buckets refer to."""
        return self.module.load_state_dict(state_dict, strict=strict)


class NaiveDDP(DataParallel):
    """One all-reduce per parameter."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 0)


class FlatDDP(DataParallel):
    """One all-reduce for all gradients of one dtype."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, float("inf"))


class _DuringBackward(DataParallel):
    """Starts each bucket's all-reduce from the hook of the gradient that completes it."""

    def __init__(self, module: nn.Module, limit_bytes: float) -> None:
        super().__init__(module, limit_bytes)
        self._backward_id = -1
        self._missing: dict[Bucket, int] = {}
        self._started = 0
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_hook(weak_hook(self._before_accumulation, index))

    def _before_accumulation(self, index: int, gradient: Tensor) -> None:
        self.buckets[index].wait()

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        super()._gradient_ready(parameter)
        self._track_backward()
        self._missing[self._bucket_of[parameter]] -= 1
        self._start_complete()

    def _track_backward(self) -> None:
        """On the first gradient of a backward, reset counts and queue a callback for its end."""
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

    def finish_gradient_synchronization(self) -> None:
        """Wait for buckets in flight; if no backward has sent all of them, send all first."""
        check_still_frozen(self._frozen)
        if self._started < len(self.buckets):
            self._started = 0
            self._start_rest()
        for bucket in self.buckets:
            bucket.wait()
        self._started = 0


class OverlappedDDP(_DuringBackward):
    """One all-reduce per parameter, started as soon as its gradient is ready."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 0)


class BucketedDDP(_DuringBackward):
    """One all-reduce per bucket of gradients, started as soon as the bucket is complete."""

    def __init__(self, module: nn.Module, bucket_size_mb: float) -> None:
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be a positive number, got {bucket_size_mb}")
        super().__init__(module, bucket_size_mb * BYTES_PER_MB)
