"""Checks of arguments and use: errors are one line with what must hold and what was found."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn


def check_group(process_group: dist.ProcessGroup | None) -> None:
    """Collectives of a group that this process is not a member of return without a result."""
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group must contain this process, got a group without it")


def check_still_frozen(frozen: Iterable[nn.Parameter]) -> None:
    """A parameter unfrozen after wrapping is in no message, so ranks would diverge."""
    if any(parameter.requires_grad for parameter in frozen):
        raise ValueError(
            "requires_grad must be set before wrapping, got True on a parameter that was frozen"
        )


def check_dense(gradient: Tensor) -> None:
    """Flat buffers hold dense gradients only."""
    if gradient.is_sparse:
        raise ValueError(
            f"gradient must be dense, got a sparse one of shape {tuple(gradient.shape)};"
            " use Embedding(sparse=False)"
        )
