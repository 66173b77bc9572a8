"""Ranges around a model's layers and the parts of its attention, added from outside.

The model's code carries no marks. Inside the block, hooks open a range around each member of the
model's module lists, named like the module (`layers.3`), and attention functions held by modules
are wrapped in a range called `attention`:

    with annotated(model, attention_in_parts=True):
        profile(step, device=device)

Only attention that computes its formula operation by operation has parts (`attention_parts`); a
fused or compiled one does not, and must not be asked for them.

This module knows nothing about particular models or attention functions. A hook is Python and costs
microseconds, so annotate for profiling and never for timing. Compiled modules are skipped: Dynamo
guards on what a module holds, and a replaced function would make it recompile during the profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lmlab.measure.trace.attention_parts import with_part_ranges
from lmlab.measure.trace.ranges import in_range, named

ATTENTION = "attention"
"""The range around an attention function, and the attribute under which a module holds one."""


@contextmanager
def annotated(model: nn.Module, *, attention_in_parts: bool = False) -> Iterator[None]:
    """Mark the layers and the attention of `model` for the block, then restore it."""
    with ExitStack() as undo:
        _mark("", model, attention_in_parts, undo)
        yield


def _mark(name: str, module: nn.Module, parts: bool, undo: ExitStack) -> None:
    """Mark a module and everything below it that is not compiled."""
    if _is_compiled(module):
        return
    _mark_attention(module, parts, undo)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        if isinstance(module, nn.ModuleList) and not _is_compiled(child):
            _mark_layer(path, child, undo)
        _mark(path, child, parts, undo)


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is the result of `torch.compile(module)` or `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _mark_layer(name: str, layer: nn.Module, undo: ExitStack) -> None:
    """A range around each forward pass of the layer, closed even if it raises."""
    open_ranges: list[AbstractContextManager[None]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        entered = named(name)
        entered.__enter__()
        open_ranges.append(entered)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    # First in, last out: the range encloses the layer's other hooks.
    undo.callback(layer.register_forward_pre_hook(before, prepend=True).remove)
    undo.callback(layer.register_forward_hook(after, always_call=True).remove)


def _mark_attention(module: nn.Module, parts: bool, undo: ExitStack) -> None:
    """Wrap a function that the module holds as `attention`; a submodule gets hooks instead."""
    function = vars(module).get(ATTENTION)
    if callable(function):
        wrapped = with_part_ranges(function) if parts else function
        setattr(module, ATTENTION, in_range(ATTENTION, wrapped))
        undo.callback(setattr, module, ATTENTION, function)
