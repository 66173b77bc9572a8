"""Matrices that travel together: gathered in one message, their gradients scattered in one.

A message costs a latency before its first byte. Where that is as long as sending a few megabytes
takes, a Transformer sent matrix by matrix waits for latencies most of the time. So matrices that
are used one soon after the other share a message:

    gather     shards side by side into one part; the parts of all ranks land one after the other;
               each matrix is then copied out of them, since its rows lie there rank by rank with
               those of the others in between
    scatter    gradients side by side, rank by rank, into one buffer; a rank gets its rows of all

A matrix alone is sent from and to where it lies, without a copy.

Copies and messages follow each other on one stream. The landing is filled by a stream of the
backend's own; `Pending.wait` orders what the current stream does next behind that, so the copy out
of it, queued there, reads what has arrived, and the landing may be let go as soon as the copy is
queued: its memory is handed out again behind it on that stream. The matrices get memory only then,
so that a bundle on its way is in memory once and not twice. Memory that a message still writes to
is never given back: `release` waits for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmlab.parallel.collectives import Pending, start_all_gather, start_mean_reduce_scatter
from lmlab.parallel.fsdp_unit import Unit


class Bundle:
    """Units of one type on one device, all trainable or all frozen, whole at the same time."""

    users: set[nn.Module]
    """Modules that are computing with the wholes right now."""
    in_place: bool
    """Whether modules hold the wholes; else they hold shards."""

    def __init__(self, name: str, units: Sequence[Unit], block: nn.Module | None = None) -> None:
        self.name = name
        self.units = list(units)
        self._units_of: dict[nn.Module, list[Unit]] = {}
        for unit in units:
            for module, _ in unit.homes:
                self._units_of.setdefault(module, []).append(unit)
        if block is not None:
            self._units_of[block] = self.units
        self.users = set()
        self.in_place = False
        self._sizes = [unit.part_size for unit in units]
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._sent: list[Unit] = []

    @property
    def modules(self) -> list[nn.Module]:
        """Those that compute with the wholes: layers, and the block that holds all of them."""
        return list(self._units_of)

    @property
    def trainable(self) -> bool:
        """Whether gradients will come."""
        return self.units[0].full.requires_grad

    @property
    def tied(self) -> bool:
        """Whether a weight stands in several places, which backward may reach far apart."""
        return any(len(unit.homes) > 1 for unit in self.units)

    @property
    def gathered(self) -> bool:
        """Whether the wholes are there or on their way."""
        return self._gathering is not None or any(unit.gathered for unit in self.units)

    @property
    def with_gradient(self) -> list[Unit]:
        """Units whose gradient has come and has not been sent."""
        return [unit for unit in self.units if unit.full.grad is not None]

    def apart(self, module: nn.Module, output: Tensor) -> Tensor:
        """An output in memory of its own: a slice of a whole would lose its memory with it."""
        lent = any(unit.lends(output) for unit in self._units_of[module])
        return output.clone() if lent else output

    @torch.no_grad()
    def start_gather(self) -> None:
        """Send for the other ranks' rows, unless that is done already."""
        if self.gathered:
            return
        for unit in self.units:
            unit.check_untouched()
        first = self.units[0]
        if len(self.units) == 1:
            first.take_memory()
            landing, outgoing = first.whole, first.outgoing(first.whole.dtype)
        else:
            outgoing = self._packed_shards()
            landing = outgoing.new_empty(first.ranks * outgoing.numel())
        self._gathering = start_all_gather(landing, outgoing, first.group)

    def finish_gather(self) -> None:
        """Wait for the wholes and put them where layers read them."""
        self.start_gather()
        if self._gathering is not None:
            self._unpack(self._gathering.wait())
            self._gathering = None
        for unit in self.units:
            unit.install(unit.full)
        self.in_place = True

    def stand_aside(self) -> None:
        """Put shards back where layers read them, and keep the wholes: they are needed next."""
        for unit in self.units:
            unit.install(unit.shard)
        self.in_place = False

    def release(self) -> None:
        """Give the wholes' memory back; shards take their place."""
        if not self.gathered:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.stand_aside()
        for unit in self.units:
            unit.free_memory()

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Send the gradients that are there to be averaged; each rank gets its rows of the mean."""
        self.finish_reduce()
        self._sent = self.with_gradient
        gradients = [unit.take_gradient().view(unit.ranks, -1) for unit in self._sent]
        packed = gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1)
        del gradients  # else they would be in memory for as long as the message is under way
        part = packed.new_empty(packed.shape[1])
        self._reducing = start_mean_reduce_scatter(part, packed.view(-1), self.units[0].group)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Add the means, if any are under way, to the shards' gradients."""
        if self._reducing is None:
            return
        # Cast all at once. What is left of a part is the gradient of a shard: nothing is copied.
        mean = self._reducing.wait().to(self.units[0].shard.dtype)
        self._reducing = None
        parts = mean.split([unit.part_size for unit in self._sent])
        for unit, part in zip(self._sent, parts, strict=True):
            own = unit.own_part(part)
            unit.shard.grad = own if unit.shard.grad is None else unit.shard.grad.add_(own)

    def _packed_shards(self) -> Tensor:
        """What this rank sends: its shards, in the compute type, one after the other."""
        wholes = self.units[0].whole
        if any(unit.is_padded for unit in self.units):
            return torch.cat([unit.outgoing(wholes.dtype).view(-1) for unit in self.units])
        shards = [unit.shard.detach() for unit in self.units]
        packed = wholes.new_empty(sum(self._sizes))
        rooms = [
            room.view(shard.shape)
            for room, shard in zip(packed.split(self._sizes), shards, strict=True)
        ]
        torch._foreach_copy_(rooms, shards)
        return packed

    @torch.no_grad()
    def _unpack(self, landing: Tensor) -> None:
        """Copy each matrix out of what has arrived, unless it has arrived in place."""
        if len(self.units) == 1:
            return
        for unit in self.units:
            unit.take_memory()
        rooms = [unit.whole.view(unit.ranks, -1) for unit in self.units]
        by_rank = landing.view(self.units[0].ranks, -1)
        torch.split_with_sizes_copy(by_rank, self._sizes, dim=1, out=rooms)
