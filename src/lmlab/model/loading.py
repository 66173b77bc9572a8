"""Loads the model class that config.yaml names as "package.module:Class".

A user's own model takes the keyword arguments of `TransformerLM` and is called with token ids.
"""

import inspect
from typing import TYPE_CHECKING, cast

from lmlab import import_path

if TYPE_CHECKING:
    from torch import nn

DEFAULT = "lmlab.model.transformer:TransformerLM"


def load_class(path: str) -> "type[nn.Module]":
    """Import a class; raises a one-line ImportPathError if the path names none."""
    found = import_path.resolve(path)
    if not inspect.isclass(found):
        raise import_path.ImportPathError(
            f"{path!r} is not a class, it is a {type(found).__name__}"
        )
    # Need not be an nn.Module: anything that is built and called like one can be measured.
    return cast("type[nn.Module]", found)
