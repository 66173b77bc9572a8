"""An optimizer whose state is sharded over ranks (ZeRO stage 1).

AdamW stores 8 bytes per weight, and under data parallelism every rank stores the same. Here each
parameter has one owner, which alone stores its state and computes and broadcasts its update. State
and update time shrink by the number of ranks; in return every updated parameter is broadcast once
per step, many of them in one message.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

Parameters are not split, because an optimizer may treat them as matrices, so assigning them is bin
packing. Assigning the largest first, each to the least loaded rank, is within 4/3 of the optimum,
and close to it for a Transformer with its dozens of parameters of equal size. The result depends
only on sizes and order, so all ranks compute the same one without communication.

The wrapped optimizer has all parameters, so that `zero_grad`, schedulers and gradient scalers work
as usual. During a step, gradients of other ranks' parameters are hidden from it: an optimizer skips
a parameter without a gradient, and creates no state for it. Gradients must be equal on all ranks.
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


class Ownership:
    """The rank that owns each parameter, balanced by bytes."""

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
        self.optimizer = optimizer_cls(params, **kwargs)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.ownership.add(self._parameters())
        for parameter in self._others():  # some optimizers create state in their constructor
            self.state.pop(parameter, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, and assign its parameters to ranks."""
        if any(param_group is known for known in self.optimizer.param_groups):
            return  # added by the constructor, which assigns all parameters at once
        self.optimizer.add_param_group(param_group)
        self.ownership.add(param_group["params"])

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's parameters and broadcast; `kwargs` go to the wrapped optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hidden = {parameter: parameter.grad for parameter in self._others()}
        for parameter in hidden:
            parameter.grad = None
        try:
            self.optimizer.step(**kwargs)
        finally:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient
        with torch.no_grad():
            broadcast_coalesced(self._messages())
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the unsharded optimizer, in host memory; all ranks must call this.

        It can be loaded with any number of ranks, or into the unsharded optimizer. Owners send one
        parameter's state at a time, because NCCL sends pickled objects from device memory.
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
        own = {
            index: state_dict["state"][index]
            for index, parameter in enumerate(self._parameters())
            if self.ownership.owner[parameter] == self.rank and index in state_dict["state"]
        }
        self.optimizer.load_state_dict({**state_dict, "state": own})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def _parameters(self) -> Iterator[Tensor]:
        """All parameters, in state dict order."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _others(self) -> list[Tensor]:
        """The parameters of other ranks."""
        return [p for p in self._parameters() if self.ownership.owner[p] != self.rank]

    def _messages(self) -> Iterator[tuple[list[Tensor], int]]:
        """The broadcasts after a step, alternating between owners to use all links at once."""
        ranks = range(dist.get_world_size())
        if len(ranks) == 1:
            return
        owned = [[p for p in self.ownership.owned_by(rank) if p.requires_grad] for rank in ranks]
        for turn in zip_longest(*(coalesce(parameters) for parameters in owned)):
            yield from ((message, rank) for rank, message in enumerate(turn) if message)
