"""The libraries that the helper holds ready, and the check that it can still be forked with them.

What may be imported ahead is what only defines things. torch and triton do; so does torch._dynamo,
which the constructor of every torch optimizer imports and which takes as long as torch itself.

The compiler's modules are a second and more of every point that compiles. Where there is a GPU,
and points compile a lot, they are imported ahead too, though some versions of them ask CUDA for its
devices while they are imported: a fork that is thrown away asks first, and its answer stands in for
the question. In torch 2.11 it chooses how kernels are timed on a GPU and nothing else, which a job
that hides the GPUs from itself does not meet. Should another version open the GPU in another way, a
second fork finds out, and the points go on importing the compiler by themselves.

cuInit opens the driver's device files and keeps them open. That is how the check can tell without
asking CUDA, since asking is the very thing that must not be done.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable

_AHEAD = ("torch", "triton", "torch._dynamo")
_OPTIONAL = {"triton"}  # not built for every platform
_COMPILER = ("torch._inductor.compile_fx", "torch.nn.attention.flex_attention")


class CudaTouchedError(RuntimeError):
    """An import used CUDA: a fork of this process could not use it any more."""


def import_ahead() -> None:
    """Import what every job needs, once for all children to come."""
    for name in _AHEAD:
        if name not in _OPTIONAL or importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
            _refuse_an_open_gpu(name)
    if _in_a_fork(_sees_a_gpu) and _in_a_fork(_compiler_leaves_the_gpu_alone):
        _import_compiler()
        _refuse_an_open_gpu("the compiler")
    gc.collect()
    gc.freeze()  # else the collector writes to every object's header, and unshares its page


def _refuse_an_open_gpu(name: str) -> None:
    if _cuda_is_open():
        raise CudaTouchedError(f"importing {name} opened the GPU, after which no fork works")


def quiet_fork() -> int:
    """Fork; Python 3.12 warns of threads, but OpenBLAS puts away those it has around a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _in_a_fork(question: Callable[[], bool]) -> bool:
    """Yes or no from a copy of this process, which may touch what this one must not."""
    fork = quiet_fork()
    if fork == 0:
        answer = False
        try:
            answer = question()
        except Exception:
            traceback.print_exc()  # into the helper's log; what cannot be told is a no
        finally:
            os._exit(0 if answer else 1)
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0


def _sees_a_gpu() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


def _compiler_leaves_the_gpu_alone() -> bool:
    _import_compiler()
    return not _cuda_is_open()


def _import_compiler() -> None:
    """Import torch's compiler on a machine that is known to have a GPU."""
    cuda = importlib.import_module("torch").cuda
    asks_the_driver, cuda.is_available = cuda.is_available, lambda: True
    try:
        for name in _COMPILER:
            importlib.import_module(name)
    finally:
        cuda.is_available = asks_the_driver


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
