"""The model of a study is a name in config.yaml, so that a user can put an own one in its place.

An own model is "package.module:Class". It is built with the keyword arguments that
`TransformerLM` takes and called with token ids, so the experiments need not know whose it is.
"""

import inspect
from typing import TYPE_CHECKING, cast

from lmlab import import_path

if TYPE_CHECKING:
    from torch import nn

DEFAULT = "lmlab.model.transformer:TransformerLM"
"""The model measured unless the configuration names another."""


def load_class(path: str) -> "type[nn.Module]":
    """The class that "package.module:Class" names; an ImportPathError of one line if it is none."""
    found = import_path.resolve(path)
    if not inspect.isclass(found):
        raise import_path.ImportPathError(
            f"{path!r} is not a class, it is a {type(found).__name__}"
        )
    # Not checked against nn.Module: whatever is built and called like one can be measured.
    return cast("type[nn.Module]", found)
