"""The libraries that the helper holds ready, and the check that it can still be forked with them.

What may be imported ahead is what only defines things. torch and triton do; so does torch._dynamo,
which the constructor of every torch optimizer imports and which takes as long as torch itself.
Inductor's modules would save a point that compiles some seconds more, but are not among them: on a
machine with a GPU, `torch._inductor.ir` asks CUDA for its devices while it is being imported.

cuInit opens the driver's device files and keeps them open. That is how the check can tell without
asking CUDA, since asking is the very thing that must not be done.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys

_AHEAD = ("torch", "triton", "torch._dynamo")
_OPTIONAL = {"triton"}  # not built for every platform


class CudaTouchedError(RuntimeError):
    """An import used CUDA: a fork of this process could not use it any more."""


def import_ahead() -> None:
    """Import what every job needs, once for all children to come."""
    for name in _AHEAD:
        if name not in _OPTIONAL or importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
            if _cuda_is_open():
                raise CudaTouchedError(
                    f"importing {name} opened the GPU, after which no fork works"
                )
    gc.collect()
    gc.freeze()  # else the collector writes to every object's header, and unshares its page


def _cuda_is_open() -> bool:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
    return False


def library_path() -> list[str]:
    """This process's search path without what its caller's PYTHONPATH and folder put there."""
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    from_the_caller = {"", *(os.path.abspath(entry) for entry in python_path)}
    return [entry for entry in sys.path if entry not in from_the_caller]


def search_path(environment: dict[str, str], directory: str, libraries: list[str]) -> list[str]:
    """The path of `python -m` in that folder: the folder, PYTHONPATH, then the libraries."""
    here = [] if environment.get("PYTHONSAFEPATH") else [directory]
    added = environment.get("PYTHONPATH", "")
    chosen = added.split(os.pathsep) if added else []
    absolute = [os.path.normpath(os.path.join(directory, entry)) for entry in chosen]
    return [*here, *dict.fromkeys([*absolute, *libraries])]
