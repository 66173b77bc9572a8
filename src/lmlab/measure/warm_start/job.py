"""A job is a module's `main(argv)`: called here the same way in a fork and in a fresh process.

Run as a program this is the plain way, without the helper: `python -m` of this module with the pid
of the caller, the module to call, and its arguments.
"""

import importlib
import sys
from typing import Any

from lmlab.measure.warm_start.processes import die_with_parent


class NotAJobError(ValueError):
    """The module named has nothing to call."""


def call(name: str, arguments: list[str]) -> Any:
    """Import the module, call its main, and return what that gives, as for `sys.exit`.

    The module also stands as `__main__`, under its own name: what it pickles can be found again,
    and a process that multiprocessing spawns imports the job and not the machinery around it.
    """
    sys.argv = [name, *arguments]
    module = importlib.import_module(name)
    sys.modules["__main__"] = module
    sys.argv[0] = module.__file__ or name
    main = getattr(module, "main", None)
    if not callable(main):
        raise NotAJobError(f"module {name!r} cannot be run: it has no function main(argv)")
    return main(list(arguments))


def main(argv: list[str]) -> Any:
    """The plain way: tie this fresh process to its caller, then call."""
    caller, name, *arguments = argv
    die_with_parent(int(caller))
    return call(name, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
