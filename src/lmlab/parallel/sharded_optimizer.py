"""An optimizer whose state is split over ranks (stage 1 of ZeRO).

AdamW remembers two numbers a weight: 8 bytes beside 4 of weight and 4 of gradient. In data
parallelism every rank remembers the same ones. Here each parameter has one owner, which alone keeps
its state and computes its update; then owners send the updated parameters to all. State and update
time fall by the number of ranks, at the price of sending each parameter once a step.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

Two optimizers share the work. This one has all parameters, so that `zero_grad`, schedulers and
gradient scalers see what they expect; `local` has the own shard and does the arithmetic. Settings
(`lr`, say) are copied from here to there before a step and back after it.

Any optimizer will do that treats parameters one by one. Gradients must be the same on all ranks,
as data parallelism leaves them.
"""

from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import ParamsT

from lmlab.parallel.collectives import Group
from lmlab.parallel.messages import broadcast_all, in_messages
from lmlab.parallel.optimizer_state import gather_states
from lmlab.parallel.shards import Ownership

NOT_SETTINGS = {"params", "param_names"}
"""Entries of a parameter group that differ between all parameters and the own shard."""


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)`, with state only for the parameters that this rank owns."""

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[Optimizer],
        *,
        process_group: Group = None,
        **kwargs: Any,
    ) -> None:
        if issubclass(optimizer_cls, LBFGS):
            raise ValueError(
                "optimizer_cls: LBFGS treats all parameters as one vector; allowed is any optimizer"
                " that updates each parameter by itself"
            )
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.ownership = Ownership(dist.get_world_size(process_group))
        self.local: Optimizer | None = None
        super().__init__(params, kwargs)
        self.ownership.add(self._parameters())
        self.local = optimizer_cls([self._own(group) for group in self.param_groups], **kwargs)
        self.defaults = self.local.defaults
        self.state = self.local.state
        self._copy_settings(self.local.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Deal out more parameters, with settings of their own."""
        if not isinstance(param_group["params"], Tensor | set):
            # A tied weight listed under each of its names is one parameter.
            param_group["params"] = list(dict.fromkeys(param_group["params"]))
        super().add_param_group(param_group)
        if self.local is not None:
            self.ownership.add(param_group["params"])
            self.local.add_param_group(self._own(param_group))
            self._copy_settings(self.local.param_groups, self.param_groups)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the own shard and exchange; returns what `closure`, if given, returns."""
        assert self.local is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_settings(self.param_groups, self.local.param_groups)
        self.local.step()
        self._copy_settings(self.local.param_groups, self.param_groups)
        with torch.no_grad():
            broadcast_all(self._messages(), self.process_group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, as the optimizer without shards would give it, in host memory.

        Ranks must call this together. It loads at any number of ranks, or into that optimizer.
        """
        local = super().state_dict()
        device = next(self._parameters()).device
        return {**local, "state": gather_states(local["state"], device, self.process_group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep of a whole state what belongs to this rank."""
        assert self.local is not None
        own = {
            index: state_dict["state"][index]
            for index, parameter in enumerate(self._parameters())
            if self.ownership.owner(parameter) == self.rank and index in state_dict["state"]
        }
        super().load_state_dict({**state_dict, "state": own})
        self._copy_settings(self.param_groups, self.local.param_groups)
        local_groups = self.local.param_groups
        self.local.__setstate__({"state": self.state, "param_groups": local_groups})

    def _parameters(self) -> Iterator[Tensor]:
        """All parameters, in the order that gives them their index in a state dictionary."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter group cut down to what this rank owns; it may be left with no parameter."""
        settings = {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        own = [p for p in group["params"] if self.ownership.owner(p) == self.rank]
        return {**settings, "params": own}

    def _messages(self) -> Iterator[tuple[list[Tensor], int]]:
        """What is sent after a step, owners in turn so that no one's link waits for another's."""
        ranks = range(dist.get_world_size(self.process_group))
        runs = [[(run, rank) for run in in_messages(self._trainable_of(rank))] for rank in ranks]
        rounds = zip_longest(*runs) if len(ranks) > 1 else ()
        return (message for turn in rounds for message in turn if message is not None)

    def _trainable_of(self, rank: int) -> Iterator[Tensor]:
        """The parameters of an owner that a step may have changed."""
        return (p for p in self.ownership.owned_by(rank) if p.requires_grad)

    @staticmethod
    def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Settings of each parameter group, from one optimizer to the other."""
        for given, taken in zip(source, target, strict=True):
            taken.update({key: value for key, value in given.items() if key not in NOT_SETTINGS})
