"""Which matrices share a message: those of one block.

A message should be large enough that its latency is small beside its bytes, and small enough that
few matrices are whole at a time and that sending one block hides behind computing another. No
number of bytes says that for every model and link, but the model does: its repeated parts are
written as a list, each is computed as a whole, and its matrices are used one soon after the other.
So matrices below one member of an `nn.ModuleList` travel together, which is how `fully_shard` is
applied by hand; where lists are nested, the innermost member decides. Every other matrix travels
alone: an embedding and a head are far apart in a step, and large enough.

A block's matrices are whole from when its forward begins to when it ends, so it must be called, not
only its layers. Layers called past their block fetch it all each time: right, and slow. Whoever has
such a model, or wants other messages, says which modules are blocks.

A tied weight, and a layer that stands in several blocks, are used far apart, and travel alone. A
message is of one type, on one device, and trainable or frozen as a whole.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from torch import nn

from lmlab.parallel.fsdp_bundle import Bundle
from lmlab.parallel.fsdp_unit import Unit

Blocks = Callable[[nn.Module], Iterable[nn.Module]]
"""Given a model, the modules in it whose matrices travel together."""


def members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    """The members of every list of modules; those of a dictionary in a list count as its own."""
    for layer in module.modules():
        if isinstance(layer, nn.ModuleList):
            for member in layer:
                yield from member.values() if isinstance(member, nn.ModuleDict) else [member]


def each_alone(module: nn.Module) -> Iterator[nn.Module]:
    """No blocks: every matrix is a message by itself."""
    yield from ()


def bundled(module: nn.Module, units: Sequence[Unit], blocks: Blocks) -> list[Bundle]:
    """Units in bundles, in the order of the first unit of each."""
    block_of = _innermost(module, blocks)
    names = {layer: name for name, layer in module.named_modules()}
    runs: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        runs[_key(unit, block_of)].append(unit)
    bundles = [_bundle(run, block_of, names) for run in runs.values()]
    taken = Counter(bundle.name for bundle in bundles)
    for bundle in bundles:
        if taken[bundle.name] > 1:  # a block of several types, or partly frozen
            bundle.name += f" from {bundle.units[0].name}"
    return bundles


def _key(unit: Unit, block_of: dict[nn.Module, nn.Module]) -> Hashable:
    """Equal for units that travel together."""
    home = unit.homes[0][0]
    if len(unit.homes) > 1 or home not in block_of:
        return unit
    types = unit.shard.dtype, unit.full.dtype, unit.full.device
    return block_of[home], unit.full.requires_grad, types


def _bundle(
    run: list[Unit], block_of: dict[nn.Module, nn.Module], names: dict[nn.Module, str]
) -> Bundle:
    """Named after its block, or after its one matrix, which needs no more than its own layer."""
    if len(run) == 1:
        return Bundle(run[0].name, run)
    block = block_of[run[0].homes[0][0]]
    return Bundle(names[block] or "model", run, block)


def _innermost(module: nn.Module, blocks: Blocks) -> dict[nn.Module, nn.Module]:
    """The block that a layer belongs to, for layers that belong to one."""
    chosen = set(blocks(module))
    unknown = chosen - set(module.modules())
    if unknown:
        raise ValueError(
            f"blocks: {type(unknown.pop()).__name__} is not allowed; modules of the model are"
        )
    owners: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
    for layer, block in _with_blocks(module, chosen, None):
        owners[layer].add(block)
    single = {layer: found.pop() for layer, found in owners.items() if len(found) == 1}
    return {layer: block for layer, block in single.items() if block is not None}


def _with_blocks(
    layer: nn.Module, chosen: set[nn.Module], block: nn.Module | None
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """A layer and all below it, each with the innermost of the chosen that it is reached through.

    No closure that calls itself: that is a cycle, which would keep the model until it is collected.
    """
    block = layer if layer in chosen else block
    yield layer, block
    for child in layer.children():
        yield from _with_blocks(child, chosen, block)
