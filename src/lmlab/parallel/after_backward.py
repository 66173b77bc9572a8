"""Data parallelism that talks after backward: one message a parameter, or one for all.

Nothing overlaps here, so a step takes its computation plus its communication. The pair shows what
the number of messages costs: the bytes are the same, the latencies are not. With n parameters,
`NaiveDDP` pays n of them, `FlatDDP` one (one for each type of parameter there is).

Both average what `.grad` holds when backward is over, so backward itself needs nothing from them
but that gradients are placed where the message will be sent from. `no_sync` is then a matter of
not calling `finish_gradient_synchronization`; it is there because a training loop that was written
for a variant that overlaps must run on these two as well.
"""

from collections.abc import Sequence

from torch import nn

from lmlab.parallel.collectives import Group
from lmlab.parallel.contract import DataParallel, Parameters, check_still_frozen
from lmlab.parallel.messages import in_messages


class _AfterBackward(DataParallel):
    """Sends one message after the other, each waited for, once backward is over."""

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients now."""
        check_still_frozen(self._frozen)
        for bucket in self.buckets:
            bucket.start()
            bucket.wait()


class NaiveDDP(_AfterBackward):
    """One all-reduce for each parameter, in their order."""

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__(module, _each_alone, process_group)


class FlatDDP(_AfterBackward):
    """One all-reduce for all gradients of one type."""

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__(module, _all_together, process_group)


def _each_alone(parameters: Parameters) -> Sequence[Parameters]:
    return [[parameter] for parameter in parameters]


def _all_together(parameters: Parameters) -> Sequence[Parameters]:
    return in_messages(parameters, limit_bytes=float("inf"))
