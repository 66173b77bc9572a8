"""Why a variant cannot be measured on some inputs on this machine: None or a one-line reason.

A variant with limits defines `why_unsupported` in its module; one without it (`naive`, `tiled`, a
user's own) runs everywhere. What counts is whether timing is meaningful: a variant that is correct
on a CPU but interpreted or unfused there is unsupported, and so never timed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lmlab import import_path
from lmlab.attention import registry

if TYPE_CHECKING:
    import torch


def why_unsupported(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why the variant is not measured on such inputs here; None if it is."""
    module_name, function = import_path.split(registry.path_of(name))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return f"{name} cannot be imported: {error}"
    judge = getattr(module, "why_unsupported", None)
    return judge(function, device=device, dtype=dtype, head_dim=head_dim) if judge else None
