"""The libraries that the helper imports ahead of time, and the check that it can still be forked.

torch and triton only define things when imported. So does torch._dynamo, which every torch
optimizer imports when constructed and which takes as long as torch itself.

The compiler (inductor) costs every compiled point more than a second, so it is preloaded as well
where there is a GPU. Some versions of it ask CUDA for its devices during import; the question is
then answered without asking the driver. A fork that is thrown away tries all of this first. If it
finds no GPU, or that the import opened one, jobs import the compiler themselves.

cuInit opens the driver's device files and keeps them open, which is how the check works without
calling CUDA.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import traceback
from pathlib import Path

LIBRARIES = ("torch", "triton", "torch._dynamo")
COMPILER = ("torch._inductor.compile_fx", "torch.nn.attention.flex_attention")
DRIVER = Path("/dev/nvidiactl")


def preload() -> None:
    """Import what jobs need; children share the memory."""
    for name in LIBRARIES:
        # triton is not built for every platform.
        if name != "triton" or importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if DRIVER.exists() and _compiler_can_be_preloaded():
        _import_compiler()
    if _gpu_is_open():
        raise RuntimeError("importing the libraries opened the GPU; no fork could use it")
    gc.collect()
    gc.freeze()  # otherwise the collector writes to every object and unshares its page


def _compiler_can_be_preloaded() -> bool:
    """Try it in a fork, which may touch the GPU; an exception means no."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1] == 0
    works = False
    try:
        _import_compiler()
        works = not _gpu_is_open() and importlib.import_module("torch").cuda.is_available()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(not works)


def _import_compiler() -> None:
    """Import the compiler; it is told that there is a GPU, without asking the driver."""
    cuda = importlib.import_module("torch").cuda
    original, cuda.is_available = cuda.is_available, lambda: True
    try:
        for name in COMPILER:
            importlib.import_module(name)
    finally:
        cuda.is_available = original


def _gpu_is_open() -> bool:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
    return False
