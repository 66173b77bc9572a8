"""What autograd saves for backward, observed with saved-tensor hooks."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lmlab.measure.memory.observer import address_of


def saved_storages(
    call: Callable[[], object],
    known: Iterable[Tensor],
    during: AbstractContextManager[object] | None = None,
) -> dict[int, int]:
    """Sizes in bytes, by address, of the storages that a call saves. Each counts once, however many
    operations save it; `known` tensors exist anyway and are excluded."""
    excluded = {address_of(tensor) for tensor in known}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if address_of(tensor) not in excluded:
            saved[address_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor), during or nullcontext():
        call()
    return saved
