"""Data parallelism without overlap: gradients are averaged after backward.

A step takes its computation plus its communication. `NaiveDDP` sends one message per parameter,
`FlatDDP` one in total (one per dtype). Both send the same bytes, so the difference between them is
what the latency of many messages costs.
"""

from torch import nn

from lmlab.parallel.checks import check_still_frozen
from lmlab.parallel.coalesce import coalesce
from lmlab.parallel.collectives import Group
from lmlab.parallel.ddp import DataParallel


class _AfterBackward(DataParallel):
    def finish_gradient_synchronization(self) -> None:
        """Send one message after the other, waiting for each."""
        check_still_frozen(self._frozen)
        for bucket in self.buckets:
            bucket.start()
            bucket.wait()


class NaiveDDP(_AfterBackward):
    """One all-reduce per parameter, in order."""

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__(module, lambda parameters: [[p] for p in parameters], process_group)


class FlatDDP(_AfterBackward):
    """One all-reduce for all gradients of one dtype."""

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__(module, lambda p: coalesce(p, float("inf")), process_group)
