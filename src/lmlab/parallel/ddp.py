"""Base class of the data-parallel wrappers.

    model = BucketedDDP(module, bucket_size_mb=25)
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The constructor copies the parameters and buffers of rank 0 to all ranks. Equal gradients then keep
the ranks equal, so a step only has to average gradients. A subclass decides which parameters share
a message and when messages are sent. Which parameters are frozen is determined in the constructor.

Averaging twice is harmless: a mean that is equal on all ranks is its own mean. A second backward in
a step adds local gradients to averaged ones, and the mean of that sum is the sum of both means. So
`no_sync` saves messages but is never needed for correctness.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lmlab.parallel.buckets import Bucket
from lmlab.parallel.checks import check_module_and_group, check_no_assign
from lmlab.parallel.coalesce import broadcast_from_rank_0
from lmlab.parallel.collectives import Group
from lmlab.parallel.hooks import weak_hook

Parameters = Sequence[nn.Parameter]
Grouping = Callable[[Parameters], Sequence[Parameters]]
"""Assigns parameters to messages, in the order in which the messages are sent."""


class DataParallel(nn.Module, ABC):
    """A module whose gradients are averaged over ranks."""

    def __init__(self, module: nn.Module, grouping: Grouping, process_group: Group) -> None:
        check_module_and_group(module, process_group)
        super().__init__()
        self.module = module
        self.process_group = process_group
        broadcast_from_rank_0([*module.parameters(), *module.buffers()], process_group)
        trainable = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.buckets = [Bucket(message, process_group) for message in grouping(trainable)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._synchronizing = True
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(weak_hook(self._gradient_ready))

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called in backward after each accumulation, with the parameter and not the gradient."""
        self._bucket_of[parameter].adopt(parameter)

    @abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over ranks; call it before the optimizer step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, without sending messages in backward."""
        before = self._synchronizing
        self._synchronizing = False
        try:
            yield
        finally:
            self._synchronizing = before

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the wrapped module; every rank must load the same."""
        check_no_assign(assign)
        return self.module.load_state_dict(state_dict, strict=strict)
