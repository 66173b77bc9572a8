"""torch.compile, set up so that the compiled code asked for is what gets timed.

The compiler is reset first, so that Dynamo never reaches the recompile limit, beyond which it
silently runs eager code. Recompiling a function is an error: times before and after would be of
different code. Where backward is timed alone its graph is retained, so compiled backward must not
reuse the memory of saved tensors, as it otherwise may.

`cold` gives the compiler empty caches, so that a compile time is never a cache hit from an earlier
run. Otherwise caches are shared, and Triton's stays where our kernels look for it.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from lmlab.measure.clock import synchronize
from lmlab.measure.time_spent import measuring

# Variants that compile themselves, once per shape.
COMPILES = frozenset({"compiled", "flex", "flash_compiled_backward"})


@contextmanager
def compiler(
    *, cold: bool = False, in_parallel: bool = False, retain_graphs: bool = False
) -> Iterator[None]:
    """Set up the compiler, and restore every setting afterwards. `in_parallel` compiles kernels in
    one process per core; starting them takes seconds, which pays off only for a large model."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with ExitStack() as stack:
        stack.enter_context(_cold_caches() if cold else _own_triton_cache())
        stack.enter_context(torch._dynamo.config.patch(error_on_recompile=True))
        if retain_graphs:
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        if not in_parallel:
            stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        yield
    torch._dynamo.reset()


def compiler_for(
    names: Iterable[str], *, cold: bool = False, retain_graphs: bool = False
) -> AbstractContextManager[None]:
    """Set up the compiler only if a variant needs it; loading it takes a second."""
    if not COMPILES & set(names):
        return nullcontext()
    return compiler(cold=cold, retain_graphs=retain_graphs)


@measuring()
def call_ms(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call."""
    synchronize(device)
    before = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - before)


def attention_replaced() -> int:
    """How often the compiler replaced the formula with PyTorch's fused attention: it matches some
    spellings of softmax(Q K^T) V, and a "compiled" time would then be SDPA's."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fuse_attention"])


@contextmanager
def _cold_caches() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="lmlab-compile-", ignore_cleanup_errors=True) as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "TRITON_CACHE_DIR": str(Path(folder, "triton")),
        }
        with patch.dict(os.environ, caches):
            yield


def _own_triton_cache() -> AbstractContextManager[object]:
    """Pin Triton's cache: PyTorch's compiler would move it for the whole process."""
    home = os.environ.get("TRITON_HOME", str(Path.home()))
    folder = os.environ.get("TRITON_CACHE_DIR", str(Path(home, ".triton", "cache")))
    return patch.dict(os.environ, {"TRITON_CACHE_DIR": folder})
