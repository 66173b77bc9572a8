"""Machine-wide device locks: one measurement at a time on a device, whoever starts it.

Within a workflow the scheduler separates measurements, but nothing stops a second workflow, another
user or a measurement started by hand. The lock is the address of a Unix socket in Linux's abstract
namespace, named after the device: a GPU's UUID, or the CPU. Only one process can bind it. It needs
no directory, works across users, and is released by the kernel when its holder dies. A waiter
connects to the holder's socket and wakes up when it closes. Containers with their own network
namespace have separate locks, and so do processes with different values of LMLAB_LOCK_DOMAIN.
"""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator

from lmlab.measure.nvml import nvml_session, visible_gpus
from lmlab.measure.warm_start.socket_path import peer

_SILENT_WAIT_S = 1.0
_PAUSE_S = 0.01


@contextlib.contextmanager
def exclusive(device: str, count: int = 1) -> Iterator[None]:
    """Lock the CPU (`cpu`) or the first `count` visible GPUs (`cuda`); wait for other holders."""
    with contextlib.ExitStack() as locks:
        for name in sorted(lock_names(device, count)):  # sorted, to rule out deadlock
            locks.enter_context(_bind(name))
        yield


def lock_names(device: str, count: int) -> list[str]:
    """Lock names of the devices, the same in all processes of a machine."""
    if device != "cuda":
        return [device]
    with nvml_session() as nvml:
        gpus = visible_gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")) if nvml else []
        return [gpu.uuid for gpu in gpus[:count]] or [device]


def _bind(name: str) -> socket.socket:
    address = f"\0lmlab-{os.environ.get('LMLAB_LOCK_DOMAIN', '')}-{name}"
    while True:
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(address)
            lock.listen()
            return lock
        except OSError as error:
            lock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        with contextlib.suppress(ConnectionError):
            _wait_for_holder(address, name)
        time.sleep(_PAUSE_S)  # the holder may be about to listen, or to close


def _wait_for_holder(address: str, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(address)
        waiting.settimeout(_SILENT_WAIT_S)
        with contextlib.suppress(TimeoutError):
            waiting.recv(1)  # nothing is ever sent
            return
        pid, user = peer(waiting)
        holder = f"another measurement on {name} (process {pid} of user {user})"
        print(f"waiting for {holder} to finish", file=sys.stderr, flush=True)
        waiting.settimeout(None)
        waiting.recv(1)
