"""Hooks that do not keep their target alive.

Parameters and modules keep hooks for life. A hook with a strong reference to a wrapper would keep
the wrapper and its buffers alive, and active alongside a second wrapper of the same module.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def weak_hook(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A hook that calls a bound method, with `first` before the hook's own arguments."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        target = reference()
        return None if target is None else target(*first, *args)

    return hook


def in_backward() -> bool:
    """Whether autograd is running on this thread; a forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def differentiable_tensors(nested: Any) -> list[Tensor]:
    """The tensors that require a gradient in the arguments or outputs of a module."""
    return [t for t in tree_leaves(nested) if isinstance(t, Tensor) and t.requires_grad]
