"""Import paths ("package.module:attribute"), resolved lazily.

A registry that imported every variant it lists would tie each measurement to all of them: editing
one kernel would make every other kernel's results stale. So registries and the configuration hold
strings, and `split` imports nothing, so the workflow can locate a file before any job starts.
"""

import importlib
from typing import Any


class ImportPathError(ValueError):
    """An import path that does not resolve to an object; the message is one line for the user."""


def split(path: str) -> tuple[str, str]:
    """Module and attribute of "package.module:attribute"; imports nothing."""
    module, colon, attribute = path.partition(":")
    parts = [*module.split("."), attribute]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ImportPathError(
            f"{path!r} is not an import path; allowed: 'package.module:name', with one colon"
        )
    return module, attribute


def resolve(path: str) -> Any:
    """The object that "package.module:attribute" names."""
    module_name, attribute = split(path)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        # Either the module does not exist, or one of its own imports does not: the original
        # message names the missing module and so distinguishes the two.
        raise ImportPathError(f"{path!r} cannot be imported: {error}") from error
    except SystemExit as error:
        raise ImportPathError(f"{path!r} cannot be imported: it exits ({error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ImportPathError(
            f"{path!r}: module {module_name} has no attribute {attribute!r}"
        ) from None
