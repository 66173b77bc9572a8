"""Which matrices share messages: those of one block.

A message should be large enough to amortize its latency, and small enough that the gather of one
block overlaps with the computation of another. The structure of the model provides that: repeated
parts are in an `nn.ModuleList`, each is computed as a whole, and its matrices are used soon after
each other. So the matrices in one member of a list form a group, the way `fully_shard` is usually
applied; with nested lists, the innermost member counts. Every other matrix is a separate group,
as are a tied weight and a layer that is in several blocks. A group has one dtype and device, and is
trainable or frozen as a whole.

If a model calls only the layers of a block and never the block, each call gathers all of it:
correct but slow. Such a model should choose other blocks.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from torch import nn

from lmlab.parallel.fsdp_group import FSDPGroup, FSDPParam

Blocks = Callable[[nn.Module], Iterable[nn.Module]]
"""Given a model, the modules in it whose matrices are gathered together."""


def module_list_members(module: nn.Module) -> Iterator[nn.Module]:
    """The members of every ModuleList; of a ModuleDict in a list, its values."""
    for layer in module.modules():
        if isinstance(layer, nn.ModuleList):
            for member in layer:
                yield from member.values() if isinstance(member, nn.ModuleDict) else [member]


def group_by_block(
    module: nn.Module, params: Sequence[FSDPParam], blocks: Blocks
) -> list[FSDPGroup]:
    """Groups in the order of their first matrix."""
    block_of = _innermost_blocks(module, blocks)
    by_key: dict[Hashable, list[FSDPParam]] = defaultdict(list)
    for param in params:
        by_key[_key(param, block_of)].append(param)
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


def _key(param: FSDPParam, block_of: dict[nn.Module, nn.Module]) -> Hashable:
    """Equal for matrices of one group."""
    layer = param.locations[0][0]
    if len(param.locations) > 1 or layer not in block_of:
        return param
    full = param.full
    return block_of[layer], full.requires_grad, param.shard.dtype, full.dtype, full.device


def _innermost_blocks(module: nn.Module, choose: Blocks) -> dict[nn.Module, nn.Module]:
    """The block of each layer that is in exactly one."""
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
