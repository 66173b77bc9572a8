"""Fully sharded data parallelism: each rank keeps a slice of every matrix, and of all that goes
with it.

    model = FSDP(module, compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters())
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

A weight is needed whole only while its own layer computes. So between uses each rank keeps 1/N of
it, and of its gradient and optimizer state, and whole weights exist for one or two blocks at a
time. The price is communication: each weight is gathered in forward and again in backward, and its
gradient scattered; half as much again as data parallelism's all-reduce. It hides behind
computation, because the next block's weights are fetched while this one's are at work.

The matrices of a block travel in one message, for a message costs a latency whatever its size.
Blocks are the members of the model's lists of modules, or what `blocks` says (`fsdp_blocks`);
matrices outside of any travel alone.

What is sharded is every matrix held by a layer that the predicate accepts: by default any layer
without children whose `weight` has two dimensions or more. The rest (norms, biases) is small,
replicated, and averaged in one message a type. Master weights are what the optimizer sees and stay
in the type of the module given, fp32 as a rule; `compute_dtype` is what is sent and computed with.

A weight may have several homes (tied weights): it is one shard, with one gradient. A sharded weight
must be read in the forward of a module that holds it or of its block. One that others read
directly (`F.linear(x, other.weight)`) must be kept out with the predicate. Freezing is read at
construction. Ranks must use the same layers, in the same order. No rank sees all gradients, so a
norm to clip by has to be summed over ranks. A backward that raised, on all ranks alike, leaves
gradients under way: `finish_gradient_synchronization` brings them in, and then they can be zeroed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lmlab.parallel.buckets import Bucket
from lmlab.parallel.collectives import Group
from lmlab.parallel.contract import check_still_frozen, refuse_assign
from lmlab.parallel.fsdp_blocks import Blocks, bundled, members_of_lists
from lmlab.parallel.fsdp_precision import follow
from lmlab.parallel.fsdp_traffic import Traffic
from lmlab.parallel.fsdp_unit import Home, Unit
from lmlab.parallel.hooks import weakly
from lmlab.parallel.messages import broadcast_from_first_rank, in_messages

Predicate = Callable[[nn.Module], bool]

PREFETCH = 1
"""Blocks fetched ahead of the one in use: one keeps the link busy, and each costs its memory."""


def holds_matrix_weight(layer: nn.Module) -> bool:
    """Linear, embedding and the like, by what they hold and not by their class."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return False  # the projection in torch's attention, whose weight is read past its forward
    weight = getattr(layer, "weight", None)
    is_leaf = next(layer.children(), None) is None
    return is_leaf and isinstance(weight, nn.Parameter) and weight.ndim >= 2


class FSDP(nn.Module):
    """A module whose matrices are sharded over the ranks of a process group."""

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        shards: Predicate = holds_matrix_weight,
        blocks: Blocks = members_of_lists,
        prefetch: int = PREFETCH,
        process_group: Group = None,
    ) -> None:
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype: {compute_dtype} is not allowed; a float type is")
        if prefetch < 0:
            raise ValueError(f"prefetch: {prefetch} is not allowed; a number from 0 up is")
        super().__init__()
        self.module = module
        self.compute_dtype = compute_dtype
        self.process_group = process_group
        broadcast_from_first_rank([*module.parameters(), *module.buffers()], process_group)
        chosen = _matrices_of_layers(module, shards)
        casts = follow(module, chosen, compute_dtype) if compute_dtype is not None else []
        self._casts = casts  # hooks hold these weakly
        self._names = [name for name, _ in module.named_parameters()]
        self._units_by_name = self._shard(chosen)
        self.units = list(dict.fromkeys(self._units_by_name.values()))
        self.bundles = bundled(module, self.units, blocks)
        self._traffic = Traffic(self.bundles, prefetch)
        self._rest = self._replicate_rest()
        self._frozen = [p for p in module.parameters() if not p.requires_grad]

    def _shard(self, chosen: set[nn.Parameter]) -> dict[str, Unit]:
        """Replace chosen parameters by shards; a unit under each name that its parameter has."""
        homes = _homes(self.module)
        units: dict[nn.Parameter, Unit] = {}
        by_name: dict[str, Unit] = {}
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            if parameter not in chosen:
                continue
            if parameter not in units:
                dtype = self.compute_dtype if parameter.is_floating_point() else None
                units[parameter] = Unit(
                    name, parameter, homes[parameter], dtype, self.process_group
                )
            by_name[name] = units[parameter]
        return by_name

    def _replicate_rest(self) -> list[Bucket]:
        """Buckets for what is trainable and not sharded, one a type."""
        shards = {unit.shard for unit in self.units}
        rest = [p for p in self.module.parameters() if p.requires_grad and p not in shards]
        buckets = [Bucket(run, self.process_group) for run in in_messages(rest, float("inf"))]
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(weakly(bucket.adopt))
        return buckets

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """What the wrapped module gives, in the compute type if there is one."""
        self._traffic.begin_forward()
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self) -> None:
        """After this every gradient is the mean over ranks; call it before the optimizer steps."""
        check_still_frozen(self._frozen)
        for bucket in self._rest:
            bucket.start()
        self._traffic.finish()
        for bucket in self._rest:
            bucket.wait()

    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name in the wrapped module; ranks call this together."""
        replicated = dict(self.module.named_parameters())
        return {
            name: self._units_by_name[name].gather_master()
            if name in self._units_by_name
            else replicated[name].detach().clone()
            for name in self._names
        }

    def state_dict(self, *positional: Any, **keywords: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped module's, with whole parameters; ranks call this together."""
        state = self.module.state_dict(*positional, **keywords)
        prefix = keywords.get("prefix", "")
        whole = {unit: unit.gather_master() for unit in self.units}
        for name, unit in self._units_by_name.items():
            state[prefix + name] = whole[unit]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a dictionary of whole parameters, as `state_dict` or the module itself gives it."""
        refuse_assign(assign)
        own = dict(state_dict)
        for name, unit in self._units_by_name.items():
            if name in own:
                if own[name].shape != unit.shape:
                    raise ValueError(
                        f"{name}: shape {tuple(own[name].shape)} does not fit; allowed is"
                        f" {tuple(unit.shape)}"
                    )
                own[name] = unit.rows_of(own[name])
        return self.module.load_state_dict(own, strict=strict)


def _matrices_of_layers(module: nn.Module, predicate: Predicate) -> set[nn.Parameter]:
    """The matrices that layers accepted by the predicate hold themselves."""
    chosen: set[nn.Parameter] = set()
    for layer in module.modules():
        if predicate(layer):
            matrices = [p for p in layer.parameters(recurse=False) if p.ndim >= 2]
            if not matrices:
                raise ValueError(
                    f"shards: {type(layer).__name__} holds no matrix; allowed are layers that do"
                )
            chosen.update(matrices)
    return chosen


def _homes(module: nn.Module) -> dict[nn.Parameter, list[Home]]:
    """Every module and attribute that holds a parameter."""
    homes: dict[nn.Parameter, list[Home]] = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            homes.setdefault(parameter, []).append((layer, name))
    return homes
