"""Callbacks from autograd and from modules, and what they are handed.

Parameters and modules keep their hooks for life, and a hook that held on to a wrapper would keep
its buffers for as long: a second wrapper around the same module would find the first one still at
work, and gigabytes would wait for the garbage collector. So hooks here hold their object weakly,
and one whose object is gone does nothing.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method as a hook, with `first` before what the hook is handed."""
    reference = weakref.WeakMethod(method)

    def hook(*handed: Any) -> Any:
        living = reference()
        return None if living is None else living(*first, *handed)

    return hook


def in_backward() -> bool:
    """Whether autograd is running on this thread: a forward then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def map_tensors(function: Callable[[Tensor], Tensor], nested: Any) -> Any:
    """Whatever a module takes or gives, with each tensor in it replaced."""
    if isinstance(nested, Tensor):
        return function(nested)
    if isinstance(nested, dict):
        return {key: map_tensors(function, value) for key, value in nested.items()}
    if type(nested) in (list, tuple):
        return type(nested)(map_tensors(function, value) for value in nested)
    return nested


def differentiable_tensors(nested: Any) -> list[Tensor]:
    """The tensors that require a gradient in whatever a module takes or gives."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(look, nested)
    return found


def check_dense(gradient: Tensor) -> None:
    """A ValueError of one line for a gradient that cannot lie in a flat buffer."""
    if gradient.is_sparse:
        raise ValueError(
            f"gradient: a sparse one of shape {tuple(gradient.shape)} cannot be averaged; only"
            " dense ones can (Embedding(sparse=False))"
        )
