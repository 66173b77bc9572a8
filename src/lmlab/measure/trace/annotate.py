"""Ranges around the layers of a model and the parts of its attention, put on from outside.

The model's code carries no marks. For the time of a block, hooks open a range around each member of
the model's module lists, named as the module is (`layers.3`), and the attention functions that its
modules hold are replaced by ones that open a range called `attention`:

    with annotated(model, attention_in_parts=True):
        profile(step, device=device)

Attention that runs its formula operation by operation has parts inside (`attention_parts`); a fused
or compiled one does not, and must not be asked for them.

Nothing is known here of which models and attention functions there are. A hook is Python and costs
microseconds, so an annotated model is for profiling and never for timing. What is compiled is left
alone: Dynamo guards what a module holds, and a changed function would make it compile once more in
the middle of the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lmlab.measure.trace.attention_parts import in_parts
from lmlab.measure.trace.ranges import marked, named

AttentionFunction = Callable[..., torch.Tensor]

ATTENTION = "attention"
"""The range around an attention function, and the attribute by which a module holds one."""


@contextmanager
def annotated(model: nn.Module, *, attention_in_parts: bool = False) -> Iterator[None]:
    """Mark the layers and the attention of `model` while the block runs, then leave no trace."""
    with ExitStack() as undo:
        _mark("", model, attention_in_parts, undo)
        yield


def _mark(name: str, module: nn.Module, parts: bool, undo: ExitStack) -> None:
    """Mark a module and all below it that is not compiled; `undo` takes everything back."""
    if _is_compiled(module):
        return
    _mark_attention(module, parts, undo)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        if isinstance(module, nn.ModuleList) and not _is_compiled(child):
            _mark_layer(path, child, undo)
        _mark(path, child, parts, undo)


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` made it."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _mark_layer(name: str, layer: nn.Module, undo: ExitStack) -> None:
    """A range around each forward pass of the layer, closed also when it raises."""
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

    # First in, last out: the range is around the other hooks of the layer.
    undo.callback(layer.register_forward_pre_hook(before, prepend=True).remove)
    undo.callback(layer.register_forward_hook(after, always_call=True).remove)


def _mark_attention(module: nn.Module, parts: bool, undo: ExitStack) -> None:
    """Replace a function that the module holds as `attention`; a submodule has hooks instead."""
    function: AttentionFunction | None = vars(module).get(ATTENTION)
    if callable(function):
        setattr(module, ATTENTION, marked(ATTENTION, in_parts(function) if parts else function))
        undo.callback(setattr, module, ATTENTION, function)
