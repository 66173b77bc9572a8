"""torch.compile held to its word while it is measured.

- **Nothing stale.** The compiler is reset first, so that what is compiled is compiled for the shape
  at hand and no limit on the number of shapes is met.
- **Nothing eager in disguise.** A second compilation of the same function, for whatever reason, is
  an error: times before and after it would be times of different code.
- **Nothing torn.** Where backward is timed alone its graph is kept, which forbids that backward
  overwrite what forward has saved, as it otherwise may.

`cold` puts the compiler's caches into a folder of its own, so that a compile time is the time of
compiling and not of finding what an earlier run has left. Otherwise caches are shared, Triton's own
kept apart from PyTorch's, where our kernels find theirs again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from lmlab.measure.clock import synchronize

# Variants that compile by themselves, anew for every shape.
COMPILES = frozenset({"compiled", "flex"})


@contextmanager
def compiler(
    *, cold: bool = False, in_parallel: bool = False, graphs_kept: bool = False
) -> Iterator[None]:
    """The compiler, set up to be measured; every setting is as before afterwards.

    `in_parallel` compiles kernels in as many processes as there are cores: they take seconds to
    start, which only a large model is worth.
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with ExitStack() as stack:
        stack.enter_context(_cold_caches() if cold else _own_triton_cache())
        stack.enter_context(torch._dynamo.config.patch(error_on_recompile=True))
        if graphs_kept:
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        if not in_parallel:
            stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        yield
    torch._dynamo.reset()


def compiler_for(
    names: Iterable[str], *, cold: bool = False, graphs_kept: bool = False
) -> AbstractContextManager[None]:
    """The compiler if one of the variants needs it; loading it takes a second."""
    if not COMPILES & set(names):
        return nullcontext()
    return compiler(cold=cold, graphs_kept=graphs_kept)


def first_call_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call that compiles on its way."""
    synchronize(device)
    before = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - before


def attention_replaced() -> int:
    """How often the compiler has put PyTorch's fused attention in place of the formula.

    It looks for a few spellings of softmax(Q K^T) V; a "compiled" time would then be another's.
    """
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fuse_attention"])


@contextmanager
def _cold_caches() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="lmlab-compile-", ignore_cleanup_errors=True) as folder,
        _environment(
            TORCHINDUCTOR_CACHE_DIR=str(Path(folder, "inductor")),
            TRITON_CACHE_DIR=str(Path(folder, "triton")),
        ),
    ):
        yield


@contextmanager
def _own_triton_cache() -> Iterator[None]:
    """Where Triton keeps kernels anyway: PyTorch's compiler would move it for the whole process."""
    home = os.environ.get("TRITON_HOME", str(Path.home()))
    usual = str(Path(home, ".triton", "cache"))
    with _environment(TRITON_CACHE_DIR=os.environ.get("TRITON_CACHE_DIR", usual)):
        yield


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
