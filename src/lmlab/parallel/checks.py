"""Argument checks: errors are one line with the argument, its value and what is allowed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

VALUE_CHARACTERS = 60


def check_argument(
    name: str,
    value: object,
    types: Any,
    allowed: str,
    is_valid: Callable[[Any], bool] = lambda value: True,
) -> None:
    """TypeError if `value` is of none of the types, ValueError if it is not valid."""
    has_type = isinstance(value, types) and not isinstance(value, bool)  # bool is an int in Python
    if not has_type or not is_valid(value):
        text = " ".join(repr(value).split())  # the repr of a module has many lines
        if len(text) > VALUE_CHARACTERS:
            text = f"{text[:VALUE_CHARACTERS]}..."
        message = f"{name} must be {allowed}, got {text} ({type(value).__name__})"
        raise (ValueError if has_type else TypeError)(message)


def check_module_and_group(module: object, process_group: object) -> None:
    """The two arguments that every wrapper has."""
    check_argument("module", module, nn.Module, "an nn.Module")
    check_group(process_group)


def check_group(process_group: object) -> None:
    """A process group that this process is a member of, or None."""
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group must contain this process, got a group without it")
    types = (dist.ProcessGroup, type(None))
    check_argument("process_group", process_group, types, "a ProcessGroup or None")


def check_still_frozen(frozen: Iterable[nn.Parameter]) -> None:
    """A parameter unfrozen after wrapping is in no message, so ranks would diverge."""
    if any(parameter.requires_grad for parameter in frozen):
        raise ValueError(
            "requires_grad must be set before wrapping, got True on a parameter that was frozen"
        )


def check_no_assign(assign: bool) -> None:
    """Loading by assignment would replace parameters that hooks and buffers refer to."""
    if assign:
        raise ValueError("assign must be False on a wrapped module, got True; load before wrapping")


def check_dense(gradient: Tensor) -> None:
    """Flat buffers hold dense gradients only."""
    if gradient.is_sparse:
        raise ValueError(
            f"gradient must be dense, got a sparse one of shape {tuple(gradient.shape)};"
            " use Embedding(sparse=False)"
        )
