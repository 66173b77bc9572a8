"""The helper, its supervisors and their jobs: three generations of forks.

The helper must stay forkable. It runs no torch operation: OpenMP's threads do not survive a fork,
and the child's first parallel operation would wait for them forever. It never calls CUDA, not even
to ask whether a GPU exists: after cuInit every CUDA call in a forked child fails. Importing the
compiler (inductor) would cost every compiled point more than a second, so on a GPU machine it is
preloaded too, after a trial in a fork has shown that the import does not open the GPU.

When the job ends, or the client closes its connection (the kernel does that for a killed client),
the supervisor kills all processes of the job. If the supervisor is killed, the kernel kills the job
and the helper kills the rest. If the helper is killed, supervisors and jobs carry on.

A job calls a module's `main(argv)` as a fresh interpreter would, with everything that a new process
would inherit from the client and with the current source files of lmlab.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lmlab.measure.warm_start import processes

LIBRARIES = ("torch", "triton", "torch._dynamo", "fastjsonschema", "jsonschema", "psutil")
COMPILER = ("torch._inductor.compile_fx", "torch.nn.attention.flex_attention")
DRIVER = Path("/dev/nvidiactl")
IDLE_S = 300.0  # how long a helper waits for another job before it ends


def main(descriptor: int) -> None:
    """Serve clients of an inherited listening socket, or the one client of a socket pair."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit statuses would be lost
    with socket.socket(fileno=descriptor) as inherited:
        if not (path := inherited.getsockname()):
            supervise(inherited)
            return
        if os.fork():  # daemonize
            os._exit(0)
        os.chdir(Path(path).parent)
        processes.adopt_orphans()
        inherited.listen()  # again, so that SO_PEERCRED reports this process
        preload()
        sys.stdout.flush()  # or each fork would write the buffer again
        serve(inherited, IDLE_S)
        Path(path).unlink(missing_ok=True)


def preload() -> None:
    """Import what jobs need; children share the memory."""
    # Skip missing ones: triton is not built for every platform.
    for name in filter(importlib.util.find_spec, LIBRARIES):
        importlib.import_module(name)
    if DRIVER.exists() and os.waitpid(_fork(_try_compiler), 0)[1] == 0:
        _import_compiler()
    if _gpu_is_open():
        raise RuntimeError("importing the libraries opened the GPU; no fork could use it")
    gc.collect()
    gc.freeze()  # otherwise the collector writes to every object and unshares its page


def _try_compiler() -> None:
    """Exit with status 0 if the compiler can be preloaded; for a fork, which may open the GPU."""
    _import_compiler()
    if not _gpu_is_open() and importlib.import_module("torch").cuda.is_available():
        os._exit(0)


def _import_compiler() -> None:
    """Import the compiler with `cuda.is_available` stubbed: some versions call it on import."""
    cuda = importlib.import_module("torch").cuda
    original, cuda.is_available = cuda.is_available, lambda: True
    for name in COMPILER:
        importlib.import_module(name)
    cuda.is_available = original


def _gpu_is_open() -> bool:
    """Whether cuInit was called: it opens the driver's device files."""
    opened = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return any(file.startswith("/dev/nvidia") for file in opened)


def serve(listener: socket.socket, idle_s: float) -> None:
    """Fork a supervisor per client; return after `idle_s` without clients or supervisors."""
    signal.signal(signal.SIGCHLD, lambda *_: _clean_up())
    listener.settimeout(idle_s)
    while True:
        try:
            client, _ = listener.accept()
        except TimeoutError:
            if os.getpid() not in (parent for parent, _ in processes.all_processes().values()):
                return
            continue
        with client, contextlib.suppress(OSError):  # fork failed: the client sees EOF
            # The fork closes the listener, or clients of a killed helper would wait for an answer.
            _fork(partial(supervise, client), listener)


def _clean_up() -> None:
    """Reap supervisors and kill orphans, which unlike supervisors are in a job's session."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    for pid, (parent, session) in processes.all_processes().items():
        if parent == os.getpid() and session != os.getsid(0):
            processes.kill_family(pid)


def _fork(do: Callable[[], None], *closed: socket.socket) -> int:
    """Fork a child that closes the given sockets, runs `do` and exits with 1; returns its pid."""
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in closed:
            each.close()
        do()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def supervise(client: socket.socket) -> None:
    """Run the job that the client asks for, unless the client is gone."""
    with contextlib.suppress(ConnectionError):
        client.sendall(b"\n")
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        with client.makefile() as lines:
            if not (job := lines.readline()):
                return
        processes.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = _fork(partial(_run_as_job, job, streams, os.getpid()), client)
        for stream in streams:  # their readers see EOF only when every copy is closed
            os.close(stream)
        try:
            client.sendall(f"{pid}\n".encode())
            threading.Thread(target=_kill_without_client, args=(client,), daemon=True).start()
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        finally:
            processes.kill_family(os.getpid())
        # Reaped last: until then the client may signal the job, and its pid must not be reused.
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        client.sendall(f"{status}\n".encode())


def _kill_without_client(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        client.recv(1)  # a client sends nothing more, so this returns when it is gone
    processes.kill_family(os.getpid())


def _run_as_job(job: str, streams: Sequence[int], supervisor: int) -> NoReturn:
    """Turn this fork, in which signals are blocked, into the job."""
    module, arguments, environment, directory = json.loads(job)
    os.setsid()
    processes.die_with_parent(supervisor)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    stdout: Any = sys.stdout  # now the client's file, which may be a terminal
    stdout.reconfigure(line_buffering=stdout.isatty() and not stdout.write_through)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.split(".")[0] == "lmlab"]:
        del sys.modules[name]
    if not environment.get("PYTHONSAFEPATH"):
        sys.path.insert(0, directory)  # as `python -m` does
    importlib.invalidate_caches()
    _exit(_status(module, arguments))


def _status(name: str, arguments: list[str]) -> int:
    """Run the job; its exit status as the interpreter would report it, negative for a signal."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        module = importlib.import_module(name)
        # The job's module becomes `__main__` but keeps its name: its pickles can be loaded, and a
        # process that multiprocessing spawns imports the job and not the code around it.
        sys.modules["__main__"] = module
        sys.argv = [str(module.__file__), *arguments]
        sys.exit(module.main(arguments))
    except KeyboardInterrupt:  # without a traceback; the client reports it
        return -signal.SIGINT
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return (request.code or 0) & 0xFF
        print(request.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return 1


def _exit(status: int) -> NoReturn:
    """Exit like the interpreter, but skip its teardown, which would unshare all pages (0.3 s)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    getattr(threading, "_shutdown")()  # noqa: B009 - what the interpreter does first
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk, or a stream that the job has closed
        status = status or 120  # the interpreter's exit status for this
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)
