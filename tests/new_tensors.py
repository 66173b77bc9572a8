"""Observe the tensors that a block of code creates."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewTensors(TorchDispatchMode):
    """Within the context, calls a function with every tensor that an operator returns."""

    def __init__(self, seen: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.seen(leaf)
        return result
