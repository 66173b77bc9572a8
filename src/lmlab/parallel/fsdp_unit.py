"""One matrix in shards: gathered when its layer computes, freed after, its gradient scattered.

Each rank keeps some rows as a parameter of its own (`shard`, what the optimizer sees; a matrix
still, so that rules which look at the number of dimensions hold). Rows are padded to the same
number on all ranks for communication only. Since rows of a matrix lie one after the other, gathered
shards are the matrix: nothing is copied into place.

The crux is memory. Autograd saves the weight it computed with, and would keep a gathered matrix
alive from forward to backward, which is all of them at once. So there is one tensor for the whole
matrix (`full`, the leaf that autograd knows), created once, and what comes and goes is its memory:
the storage is resized to nothing after use and filled again before backward reaches the layer. To
autograd it never changed. It is written through an alias with a version counter of its own, since
for autograd's in-place check filling it again would be a modification.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel.collectives import (
    Group,
    Pending,
    start_all_gather,
    start_mean_reduce_scatter,
)
from lmlab.parallel.hooks import check_dense

Home = tuple[nn.Module, str]
"""A module that holds a parameter, and the attribute it holds it in; a tied weight has several."""


class Unit:
    """A sharded parameter and its whole, of which one at a time stands in the modules."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        homes: list[Home],
        compute_dtype: torch.dtype | None,
        group: Group,
    ) -> None:
        self.name = name
        self.homes = homes
        self.shape = parameter.shape
        self.users = 0
        """Layers that are computing with the whole right now."""
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._rows = -(-self.shape[0] // self._ranks)
        self.shard = self._cut(parameter)
        self._landing = self._room(compute_dtype or parameter.dtype)
        trainable = parameter.requires_grad
        self.full = nn.Parameter(self._landing[: self.shape[0]].data, requires_grad=trainable)
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._resize(0)
        self._install(self.shard)

    def _cut(self, whole: Tensor) -> nn.Parameter:
        """This rank's rows of a matrix, in memory of their own."""
        rows = self.rows_of(whole).detach().clone(memory_format=torch.contiguous_format)
        return nn.Parameter(rows, requires_grad=whole.requires_grad)

    def rows_of(self, whole: Tensor) -> Tensor:
        """The rows that this rank keeps; none if they run out before it."""
        first = dist.get_rank(self._group) * self._rows
        return whole[first : first + self._rows]

    @property
    def gathered(self) -> bool:
        """Whether the whole has memory, filled or being filled."""
        return self._landing.untyped_storage().nbytes() > 0

    def apart(self, output: Tensor) -> Tensor:
        """An output in memory of its own: a slice of the whole would lose its memory with it."""
        memory = self._landing.untyped_storage().data_ptr()
        return output.clone() if output.untyped_storage().data_ptr() == memory else output

    def start_gather(self) -> None:
        """Send for the other ranks' rows, unless that is done already."""
        if self.gathered:
            return
        self._check_untouched()
        self._resize(self._landing.nbytes)
        outgoing = self._outgoing(self._landing.dtype)
        self._gathering = start_all_gather(self._landing, outgoing, self._group)

    def finish_gather(self) -> None:
        """Wait for the whole and put it where layers read it."""
        self.start_gather()
        self._settle_gather()
        self._install(self.full)

    def release(self) -> None:
        """Give the whole's memory back; the shard takes its place."""
        if self.gathered:
            self._settle_gather()
            self._install(self.shard)
            self._resize(0)

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Send the whole's gradient off to be averaged; each rank gets its rows of the mean."""
        self.finish_reduce()
        gradient = self.full.grad
        assert gradient is not None, f"{self.name} has no gradient to reduce"
        self.full.grad = None
        check_dense(gradient)
        part = gradient.new_empty(self._rows, *self.shape[1:])
        self._reducing = start_mean_reduce_scatter(part, self._padded(gradient), self._group)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Add the mean, if one is under way, to the shard's gradient."""
        if self._reducing is None:
            return
        mean = self._reducing.wait()[: self.shard.shape[0]].to(self.shard.dtype)
        self._reducing = None
        if self.shard.grad is None:
            self.shard.grad = mean
        else:
            self.shard.grad.add_(mean)

    @torch.no_grad()
    def gather_master(self) -> Tensor:
        """The whole in the type of the shards, in memory of its own. All ranks take part."""
        whole = self._room(self.shard.dtype)
        start_all_gather(whole, self._outgoing(self.shard.dtype), self._group).wait()
        return whole[: self.shape[0]]

    def _outgoing(self, dtype: torch.dtype) -> Tensor:
        """The shard as it is sent: in the type asked for, padded to as many rows as the others."""
        shard = self.shard.detach()
        if shard.shape[0] == self._rows:
            return shard.to(dtype).contiguous()
        padded = shard.new_zeros((self._rows, *self.shape[1:]), dtype=dtype)
        padded[: shard.shape[0]] = shard
        return padded

    def _check_untouched(self) -> None:
        """Moving a module gives its parameters other memory, or puts others in their place."""
        module, attribute = self.homes[0]
        held = module._parameters[attribute]
        if held is not self.shard or held.device != self._landing.device:
            raise ValueError(
                f"{self.name}: was moved or replaced after it was sharded; move, cast and load a"
                " module before wrapping it"
            )

    def _padded(self, gradient: Tensor) -> Tensor:
        """A gradient with as many rows as all ranks' shards have together."""
        if gradient.shape == self._landing.shape:
            return gradient.contiguous()
        padded = gradient.new_zeros(self._landing.shape)
        padded[: self.shape[0]] = gradient
        return padded

    def _room(self, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for the padded whole."""
        shape = (self._rows * self._ranks, *self.shape[1:])
        return torch.empty(shape, dtype=dtype, device=self.shard.device)

    def _settle_gather(self) -> None:
        """Wait for a gather that is under way; memory in use by one must not be freed."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _install(self, parameter: nn.Parameter) -> None:
        """Make this the parameter that modules hold."""
        for module, attribute in self.homes:
            module._parameters[attribute] = parameter

    def _resize(self, size_bytes: int) -> None:
        """Take or give back the memory of the whole."""
        self._landing.untyped_storage().resize_(size_bytes)
