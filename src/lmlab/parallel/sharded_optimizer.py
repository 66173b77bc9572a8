"""An optimizer whose state is sharded over ranks (ZeRO stage 1).

AdamW stores 8 bytes per weight, and under data parallelism every rank stores the same. Here each
parameter has one owner, which alone stores its state and computes and broadcasts its update. State
and update time shrink by the number of ranks; in return every updated parameter is broadcast once
per step, many of them in one message.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

Parameters are not split, because an optimizer may treat them as matrices, so assigning them is bin
packing. Largest first, each to the rank with the least so far, is within 4/3 of the optimum, and
close to it for a Transformer with its dozens of parameters of equal size. The result depends on
sizes and order only, so all ranks compute the same one without communication.

This optimizer has all parameters, so that `zero_grad`, schedulers and gradient scalers work as
usual; `local` has this rank's parameters and does the arithmetic. Settings such as `lr` are copied
to `local` before a step and back after it. Gradients must be equal on all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_map_only

from lmlab.parallel.messages import broadcast_coalesced, coalesce

NOT_SETTINGS = {"params", "param_names"}
"""Entries of a parameter group that differ between this optimizer and `local`."""


class Ownership:
    """The rank that owns each parameter; all have about the same number of bytes."""

    def __init__(self, world_size: int) -> None:
        self.owner: dict[Tensor, int] = {}
        self.bytes_by_rank = [0] * world_size

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Assign more parameters; trainable ones first, because frozen ones have no state."""
        for parameter in sorted(parameters, key=lambda p: (not p.requires_grad, -p.nbytes)):
            rank = self.bytes_by_rank.index(min(self.bytes_by_rank))
            self.owner[parameter] = rank
            self.bytes_by_rank[rank] += parameter.nbytes

    def owned_by(self, rank: int) -> list[Tensor]:
        """The parameters of one rank, in the order of assignment."""
        return [parameter for parameter, owner in self.owner.items() if owner == rank]


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)`, with state only for the parameters that this rank owns."""

    def __init__(self, params: ParamsT, optimizer_cls: type[Optimizer], **kwargs: Any) -> None:
        if issubclass(optimizer_cls, LBFGS):
            raise ValueError("optimizer_cls must update each parameter independently, got LBFGS")
        self.rank = dist.get_rank()
        self.ownership = Ownership(dist.get_world_size())
        self.local: Optimizer | None = None
        super().__init__(params, kwargs)
        self.ownership.add(self._parameters())
        self.local = optimizer_cls([self._own(group) for group in self.param_groups], **kwargs)
        self.defaults = self.local.defaults
        self.state = self.local.state
        _copy_settings(self.local, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, and assign its parameters to ranks."""
        if not isinstance(param_group["params"], Tensor | set):
            # A tied weight listed under each of its names is one parameter.
            param_group["params"] = list(dict.fromkeys(param_group["params"]))
        if self.local is not None:
            _copy_settings(self, self.local)  # a scheduler may have changed them
        super().add_param_group(param_group)
        if self.local is not None:
            self.ownership.add(param_group["params"])
            self.local.add_param_group(self._own(param_group))
            _copy_settings(self.local, self)

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's parameters and exchange; arguments go to the wrapped optimizer."""
        assert self.local is not None
        _copy_settings(self, self.local)
        loss = self.local.step(closure, **kwargs)
        _copy_settings(self.local, self)
        with torch.no_grad():
            broadcast_coalesced(self._messages())
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the unsharded optimizer, in host memory; ranks call this together.

        It can be loaded with any number of ranks, or into the unsharded optimizer. Owners send the
        state of one parameter at a time, because NCCL sends pickled objects from device memory.
        """
        local = super().state_dict()
        states = {}
        for index, parameter in enumerate(self._parameters()):
            own = tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), local["state"].get(index))
            sent = [own]
            dist.broadcast_object_list(sent, self.ownership.owner[parameter])
            if sent[0] is not None:
                states[index] = sent[0]
        return {**local, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of an unsharded state dict."""
        assert self.local is not None
        own = {
            index: state_dict["state"][index]
            for index, parameter in enumerate(self._parameters())
            if self.ownership.owner[parameter] == self.rank and index in state_dict["state"]
        }
        super().load_state_dict({**state_dict, "state": own})
        _copy_settings(self, self.local)
        self.local.__setstate__({"state": self.state, "param_groups": self.local.param_groups})

    def _parameters(self) -> Iterator[Tensor]:
        """All parameters, in state dict order."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter group with only the parameters of this rank, possibly none."""
        own = [p for p in group["params"] if self.ownership.owner[p] == self.rank]
        return {**_settings(group), "params": own}

    def _messages(self) -> Iterator[tuple[list[Tensor], int]]:
        """What is sent after a step, alternating between owners to use all links at once."""
        ranks = range(dist.get_world_size())
        if len(ranks) == 1:
            return
        owned = [[p for p in self.ownership.owned_by(rank) if p.requires_grad] for rank in ranks]
        for turn in zip_longest(*(coalesce(parameters) for parameters in owned)):
            yield from ((message, rank) for rank, message in enumerate(turn) if message)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


def _copy_settings(source: Optimizer, target: Optimizer) -> None:
    for given, taken in zip(source.param_groups, target.param_groups, strict=True):
        taken.update(_settings(given))
