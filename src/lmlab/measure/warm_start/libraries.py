"""The libraries that the helper holds ready, and the check that it can still be forked with them.

What may be imported ahead is what only defines things. torch and triton do; so does torch._dynamo,
which the constructor of every torch optimizer imports and which takes as long as torch itself.
Inductor's modules are as harmless and as slow, but only a point that compiles needs them, so the
job says so (`preload`) and the first such job pays for all. Nothing outside these two packages is
taken, and nothing of ours.

cuInit opens the driver's device files and keeps them open. That is how the check can tell without
asking CUDA, since asking is the very thing that must not be done.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable

PACKAGES = ("torch", "triton")
_AHEAD = ("torch", "triton", "torch._dynamo")


class CudaTouchedError(RuntimeError):
    """An import used CUDA: a fork of this process could not use it any more."""


class NotPreloadableError(ValueError):
    """A module was named that the helper must not hold."""


def check_preload(names: Iterable[str]) -> None:
    """Refuse every module that is not of torch or triton."""
    for name in names:
        if name.partition(".")[0] not in PACKAGES:
            raise NotPreloadableError(
                f"preload has {name!r}: modules of {' and '.join(PACKAGES)} are allowed"
            )


def import_standard_set() -> None:
    """Import what every job needs; torch must be there, triton is not on every platform."""
    absent = {name for name in PACKAGES if importlib.util.find_spec(name) is None} - {"torch"}
    import_ahead(name for name in _AHEAD if name not in absent)


def import_ahead(names: Iterable[str]) -> None:
    """Import modules for all children to come."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        importlib.import_module(name)
    if missing:
        if _cuda_is_open():
            raise CudaTouchedError(f"CUDA is in use after importing {', '.join(missing)}")
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
