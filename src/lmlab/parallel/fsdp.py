"""Fully sharded data parallelism: every matrix, its gradient and its optimizer state are sharded.

    model = FSDP(module, compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters())
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

A weight is needed in full only while its layer computes. Between uses each rank keeps 1/N of it,
and of its gradient and optimizer state; only one or two blocks are in memory in full. The price is
communication: weights are gathered in forward and again in backward, and gradients are
reduce-scattered: 1.5 times the bytes of data parallelism, overlapped with computation.

In layers that `shards` accepts, every matrix is sharded; by default these are leaf modules whose
`weight` has two or more dimensions. The rest (norms, biases) is small; it is replicated, and its
gradients are averaged in one message per dtype.

The matrices of a block share messages, which should be large enough to amortize their latency, and
small enough that the gather of one block overlaps with the computation of another. By default the
members of each `nn.ModuleList` are blocks (with nested lists, the innermost), the way `fully_shard`
is usually applied. Every other matrix is a separate group, as are a tied weight and a layer that is
in several blocks. A group has one dtype and device, and is trainable or frozen as a whole. If a
model calls only the layers of a block and never the block itself, each call gathers the whole
block: correct but slow, so pass other `blocks` for such a model.

The optimizer sees master weights in the dtype of the given module, usually fp32; communication and
computation use `compute_dtype`. The inputs and replicated parameters (a bias) of a sharded layer
are cast to it while the layer runs, differentiably, so that the gradient of an fp32 bias is fp32.
Other layers, mostly norms, compute in their own dtype, which is better numerically, and return the
compute dtype. Saved activations are thus in the compute dtype.

Restrictions: a sharded weight must be read in the forward of a module that holds it or of its
block; one that is read elsewhere (`F.linear(x, other.weight)`) must be excluded with `shards`.
Which parameters are frozen is fixed in the constructor. All ranks must use the same layers in the
same order. No rank has all gradients, so a norm for clipping must be reduced over ranks. After a
backward that raised (on all ranks), `finish_gradient_synchronization` must precede `zero_grad`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._pytree import tree_map_only

from lmlab.parallel.fsdp_group import FSDPGroup, FSDPParam, Location
from lmlab.parallel.fsdp_scheduler import Scheduler
from lmlab.parallel.hooks import weak_hook
from lmlab.parallel.messages import Bucket, broadcast_from_rank_0, check_still_frozen, coalesce

Predicate = Callable[[nn.Module], bool]
Blocks = Callable[[nn.Module], Iterable[nn.Module]]
"""Given a model, the modules in it whose matrices are gathered together."""


def has_matrix_weight(layer: nn.Module) -> bool:
    """Whether a layer is linear, an embedding or similar, judged by its weight, not its class."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return False  # the output projection of nn.MultiheadAttention, which bypasses its forward
    weight = getattr(layer, "weight", None)
    is_leaf = next(layer.children(), None) is None
    return is_leaf and isinstance(weight, nn.Parameter) and weight.ndim >= 2


def module_list_members(module: nn.Module) -> Iterator[nn.Module]:
    """The members of every ModuleList; a ModuleDict in a list is replaced by its values."""
    for layer in module.modules():
        if isinstance(layer, nn.ModuleList):
            for member in layer:
                yield from member.values() if isinstance(member, nn.ModuleDict) else [member]


class FSDP(nn.Module):
    """A module whose matrices are sharded over all ranks."""

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        shards: Predicate = has_matrix_weight,
        blocks: Blocks = module_list_members,
    ) -> None:
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype must be a floating-point type, got {compute_dtype}")
        super().__init__()
        self.module = module
        self.compute_dtype = compute_dtype
        broadcast_from_rank_0([*module.parameters(), *module.buffers()])
        chosen = chosen_matrices(module, shards)
        # Hooks refer to the casts weakly.
        self._casts = cast_layers(module, chosen, compute_dtype) if compute_dtype else []
        self._param_by_name = self._shard(chosen)
        self.sharded_params = list(dict.fromkeys(self._param_by_name.values()))
        self.groups = group_by_block(module, self.sharded_params, blocks)
        self._scheduler = Scheduler(self.groups)
        self.replicated_buckets = self._replicate_rest()
        self._frozen = [p for p in module.parameters() if not p.requires_grad]

    def _shard(self, chosen: set[nn.Parameter]) -> dict[str, FSDPParam]:
        """Replace parameters by shards; a tied one is listed under each of its names."""
        locations: dict[nn.Parameter, list[Location]] = defaultdict(list)
        for layer in self.module.modules():
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
                locations[parameter].append((layer, name))
        named = list(self.module.named_parameters(remove_duplicate=False))
        sharded: dict[nn.Parameter, FSDPParam] = {}
        for name, parameter in named:
            if parameter in chosen and parameter not in sharded:
                sharded[parameter] = FSDPParam(
                    name, parameter, locations[parameter], self.compute_dtype
                )
        return {name: sharded[parameter] for name, parameter in named if parameter in sharded}

    def _replicate_rest(self) -> list[Bucket]:
        """Buckets for trainable parameters that are not sharded, one per dtype."""
        shards = {param.shard for param in self.sharded_params}
        rest = [p for p in self.module.parameters() if p.requires_grad and p not in shards]
        buckets = [Bucket(run) for run in coalesce(rest, float("inf"))]
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(weak_hook(bucket.adopt))
        return buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._scheduler.begin_forward()
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over ranks; call it before the optimizer step."""
        check_still_frozen(self._frozen)
        for bucket in self.replicated_buckets:
            bucket.start()
        self._scheduler.finish()
        for bucket in self.replicated_buckets:
            bucket.wait()

    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Full parameters by their name in the wrapped module; all ranks must call this."""
        return {
            name: self._param_by_name[name].gather()
            if name in self._param_by_name
            else parameter.detach().clone()
            for name, parameter in self.module.named_parameters()
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The unsharded state dict of the wrapped module; all ranks must call this."""
        state = self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        full = {param: param.gather() for param in self.sharded_params}
        state.update({prefix + name: full[param] for name, param in self._param_by_name.items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """Load an unsharded state dict. There is no `assign`, which would replace the shards."""
        own = dict(state_dict)
        for name, param in self._param_by_name.items():
            if name in own:
                if own[name].shape != param.shape:
                    raise ValueError(
                        f"{name} must have shape {tuple(param.shape)}, got {tuple(own[name].shape)}"
                    )
                own[name] = param.shard_of(own[name])
        return self.module.load_state_dict(own, strict=strict)


def chosen_matrices(module: nn.Module, predicate: Predicate) -> set[nn.Parameter]:
    """The matrices held directly by layers that the predicate accepts."""
    layers = filter(predicate, module.modules())
    return {p for layer in layers for p in layer.parameters(recurse=False) if p.ndim >= 2}


def group_by_block(
    module: nn.Module, params: Sequence[FSDPParam], blocks: Blocks
) -> list[FSDPGroup]:
    """Group matrices by block, in the order of each group's first matrix."""
    block_of = _innermost_blocks(module, blocks)
    by_key: dict[Hashable, list[FSDPParam]] = defaultdict(list)
    for param in params:
        layer, full = param.locations[0][0], param.full
        alone = len(param.locations) > 1 or layer not in block_of
        kind = full.requires_grad, param.shard.dtype, full.dtype, full.device
        by_key[param if alone else (block_of[layer], *kind)].append(param)
    names = {layer: name for name, layer in module.named_modules()}
    groups = []
    for members in by_key.values():
        if len(members) == 1:
            groups.append(FSDPGroup(members[0].name, members))
        else:
            block = block_of[members[0].locations[0][0]]
            groups.append(FSDPGroup(names[block] or "model", members, block))
    uses = Counter(group.name for group in groups)
    for group in groups:
        if uses[group.name] > 1:  # a block with several dtypes, or partly frozen
            group.name += f" from {group.params[0].name}"
    return groups


def _innermost_blocks(module: nn.Module, choose: Blocks) -> dict[nn.Module, nn.Module]:
    """Map each layer that is in exactly one block to that block, the innermost if nested."""
    chosen = set(choose(module))
    unknown = chosen - set(module.modules())
    if unknown:
        raise ValueError(
            f"blocks must return modules of the model, got another {type(unknown.pop()).__name__}"
        )
    at_path: dict[str, nn.Module | None] = {}
    found: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
    for path, layer in module.named_modules(remove_duplicate=False):
        at_path[path] = layer if layer in chosen else at_path.get(path.rpartition(".")[0])
        found[layer].add(at_path[path])
    single = {layer: blocks.pop() for layer, blocks in found.items() if len(blocks) == 1}
    return {layer: block for layer, block in single.items() if block is not None}


def cast(nested: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors, wherever they are nested."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, nested)


class LayerCast:
    """Casts a layer's inputs and the named parameters while it runs, and then its outputs."""

    def __init__(
        self,
        layer: nn.Module,
        dtype: torch.dtype,
        parameter_names: Iterable[str] = (),
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self._output_dtype = output_dtype
        self._parameters = {name: layer._parameters[name] for name in parameter_names}
        layer.register_forward_pre_hook(weak_hook(self._before), with_kwargs=True)
        layer.register_forward_hook(weak_hook(self._after), always_call=True)

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for name, parameter in self._parameters.items():
            layer._parameters[name] = cast(parameter, self._dtype)
        return cast(args, self._dtype), cast(kwargs, self._dtype)

    def _after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        layer._parameters.update(self._parameters)
        return output if self._output_dtype is None else cast(output, self._output_dtype)


def cast_layers(
    module: nn.Module, sharded: set[nn.Parameter], compute_dtype: torch.dtype
) -> list[LayerCast]:
    """Attach casts to every layer with parameters; they are active while the list is alive."""
    casts = []
    for layer in module.modules():
        own = {n: p for n, p in layer.named_parameters(recurse=False) if p.is_floating_point()}
        replicated = [name for name, parameter in own.items() if parameter not in sharded]
        if len(replicated) < len(own):
            casts.append(LayerCast(layer, compute_dtype, replicated))
        elif own:
            dtype = next(iter(own.values())).dtype
            casts.append(LayerCast(layer, dtype, output_dtype=compute_dtype))
    return casts
