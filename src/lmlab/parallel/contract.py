"""What the four data-parallel wrappers have in common.

    model = BucketedDDP(module, bucket_size_mb=25)
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Construction copies rank 0's parameters and buffers to all ranks. From then on equal gradients keep
the ranks equal, so that the one thing to do at each step is to average gradients. A variant is a
choice of two things: how parameters are grouped into messages, and when a message leaves.

What holds for all of them:

- Averaging a second time changes nothing: a mean that is equal on all ranks is its own mean. A
  second backward in a step adds its local gradient to the averaged one, and the mean of that is the
  sum of both means. Hence `no_sync` saves messages, and is never needed for correctness.
- A parameter is without gradient when its `.grad` is None: counted as zeros if another rank has
  one, None on all ranks if none has.
- Tied weights are one parameter, with one gradient and one place in one message. Frozen parameters
  have none. Which parameters are frozen is read once, at construction.
- The state dictionary is the wrapped module's, under its own names.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lmlab.parallel.buckets import Bucket
from lmlab.parallel.collectives import Group
from lmlab.parallel.hooks import weakly
from lmlab.parallel.messages import broadcast_from_first_rank

Parameters = Sequence[nn.Parameter]
Grouping = Callable[[Parameters], Sequence[Parameters]]
"""Says which parameters share a message, and in which order messages leave."""


class DataParallel(nn.Module, ABC):
    """Base of the variants, each of which says how gradients are grouped and when they leave."""

    def __init__(self, module: nn.Module, grouping: Grouping, process_group: Group) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        broadcast_from_first_rank([*module.parameters(), *module.buffers()], process_group)
        trainable = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.buckets = [Bucket(run, process_group) for run in grouping(trainable)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._synchronizing = True
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(weakly(self._gradient_arrived))

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Called during backward each time a parameter's gradient has been added to.

        Such a hook is handed the parameter; its `.grad` is complete by then.
        """
        self._bucket_of[parameter].adopt(parameter)

    @abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """After this every gradient is the mean over ranks; call it before the optimizer steps."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """What the wrapped module gives."""
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up gradients here: for accumulation over several batches."""
        before = self._synchronizing
        self._synchronizing = False
        try:
            yield
        finally:
            self._synchronizing = before

    def state_dict(self, *positional: Any, **keywords: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped module's."""
        return self.module.state_dict(*positional, **keywords)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the wrapped module; every rank loads the same."""
        refuse_assign(assign)
        return self.module.load_state_dict(state_dict, strict=strict)


def check_still_frozen(frozen: Parameters) -> None:
    """A parameter thawed after wrapping has no place in a message: its ranks would part."""
    if any(parameter.requires_grad for parameter in frozen):
        raise ValueError(
            "requires_grad: was set to True on a parameter after it was wrapped; set it before"
        )


def refuse_assign(assign: bool) -> None:
    """Loading by assignment would replace parameters that hooks and buffers already know."""
    if assign:
        raise ValueError("assign: True is not allowed on a wrapped module; load before wrapping")
