"""One isolated block: what it saves for backward, operation by operation, and its gradients.

The block is taken from a one-layer model, so that the largest sizes fit at long contexts, and its
input is a random residual stream. Hooks see every tensor that autograd saves; a storage counts
once, however many operations save it, and parameters and buffers do not count. In eager mode the
observer knows which operation allocated each storage.

Records: `saved_for_backward`, `gradients` and, on a GPU, `peak_memory` (of forward and backward,
above the memory in use before) per `variant`, eager or compiled; `saved_by_operation` per
`operation` and `origin` with its `count` and `share`, eager only; from the cost model
`predicted_saved` and `expected_gradients` (four bytes per parameter of the block).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.chapters.memory.measure import shared
from lmlab.chapters.saved_tensors import saved_storages
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Workload, workload_of
from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.device import peak_memory_bytes
from lmlab.measure.memory.observer import Observer, address_of
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, value, values, without_value
from lmlab.model.activations import FP32, saved_block, widths_of
from lmlab.model.cost import parameter_count
from lmlab.study.points import Point

INPUT = "input of the block"
BACKEND = "inductor"


@dataclass(frozen=True)
class Forward:
    """A block's forward pass on a random residual stream, eager or compiled."""

    block: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    x: Tensor
    workload: Workload

    def __call__(self) -> Tensor:
        with self.workload.precision_context(self.x.device):
            return self.block(self.x)

    def backward(self) -> int:
        """Run forward and backward; return the bytes of parameter gradients, which are dropped."""
        output = self()
        output.backward(torch.ones_like(output))
        found = [p.grad.untyped_storage().nbytes() for p in self.parameters if p.grad is not None]
        for tensor in (self.x, *self.parameters):
            tensor.grad = None
        return sum(found)


def measure(point: Point, device: torch.device) -> Outcome:
    """What one block of the point's model saves, eager and, where the point asks, compiled."""
    asked = workload_of(point, mode="train_step")
    workload = replace(asked, shape=replace(asked.shape, num_layers=1))
    shape = workload.shape
    with tf32_allowed(workload.precision.tf32), collector_paused():
        model = workload.build(device)
        blocks = getattr(model, "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            raise Unsupported(f"{type(model).__name__} has no list of blocks `layers`")
        names = {address_of(p): name for name, p in blocks[0].named_parameters()}
        known = [*blocks[0].parameters(), *model.buffers()]
        x = torch.randn(shape.batch, shape.context, shape.d_model, device=device).requires_grad_()
        eager = Forward(blocks[0], list(blocks[0].parameters()), x, workload)
        observer = Observer(names)
        saved = saved_storages(eager, known, observer)
        records = [
            *by_operation(saved, observer),
            *_variant_records("eager", eager, saved, device),
            *_expected_records(workload, device),
            *shared.environment_records(),
        ]
        if point.settings["compile"]:
            compiled = replace(eager, block=torch.compile(blocks[0], backend=BACKEND))
            records += _compiled_records(compiled, known, device)
    return Outcome(measurements=records)


def by_operation(saved: dict[int, int], observer: Observer) -> Iterator[Record]:
    """Saved bytes grouped by the operation that allocated them, largest first."""
    made = {storage.address: storage for storage in observer.storages}  # the last at an address
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for address, size in saved.items():
        storage = made.get(address)
        label, origin = INPUT, "no line"
        if storage is not None:
            copies = f"{storage.type} copies of weights"
            label = storage.label() if storage.copy_of is None else copies
            origin = str(storage.source or origin)
        groups[label, origin].append(size)
    whole = sum(saved.values())
    for (label, origin), sizes in sorted(groups.items(), key=lambda item: -sum(item[1])):
        size, count = sum(sizes), len(sizes)
        labels: Any = {"operation": label, "origin": origin, "count": count, "share": size / whole}
        yield value("saved_by_operation", size, "B", **labels)


def _variant_records(
    name: str, forward: Forward, saved: Mapping[int, int], device: torch.device
) -> list[Record]:
    """Saved bytes, gradients, and the peak of both passes where the device counts it."""
    numbers = {"saved_for_backward_bytes": sum(saved.values())}
    numbers["gradients_bytes"] = forward.backward()  # also allocates kernel workspaces
    shared.empty_allocator(device)
    before = peak_memory_bytes(device)
    if before is not None:
        forward.backward()
        synchronize(device)
        numbers["peak_memory_bytes"] = int(peak_memory_bytes(device) or 0) - before
    return values(numbers, variant=name)


def _compiled_records(
    forward: Forward, known: Sequence[Tensor], device: torch.device
) -> list[Record]:
    """The same for the compiled block; a compiler failure becomes a record with the reason."""
    try:
        return _variant_records("compiled", forward, saved_storages(forward, known), device)
    except Exception as error:  # a missing compiler can fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return [without_value("saved_for_backward", "failed", reason, variant="compiled")]


def _expected_records(workload: Workload, device: torch.device) -> list[Record]:
    asked = shared.for_cost_model(workload, device)
    if asked is None:
        return []
    count = parameter_count(workload.shape)
    in_block = count.attention + count.feed_forward + 2 * workload.shape.d_model
    widths = widths_of(asked["precision"], asked["device"])
    weights = widths.weight_copy * (count.attention + count.feed_forward)
    return [
        value("predicted_saved", saved_block(workload.shape, widths) + weights, "B"),
        value("expected_gradients", FP32 * in_block, "B"),
    ]
