"""How many bytes of new tensors a block of code holds at once, counted after every operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Counts storages that are made inside the block as long as somebody holds them."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._given = {x.untyped_storage()._cdata for x in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        held = sum(size for storage, size in self._made.values() if not storage.expired())
        self.peak_bytes = max(self.peak_bytes, held)
        return result
