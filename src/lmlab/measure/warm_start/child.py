"""The life of a forked job: from a copy of the helper to what looks like a fresh interpreter.

What a new process would have from its caller is put in place first: session, streams, folder,
environment, signals, search path. Then everything of ours leaves sys.modules, so that the job's
imports read the files as they are now. Random number generators are left as they are: a measurement
seeds its own.

The end is the interpreter's own up to its last step: threads are joined, atexit functions run (they
stop the worker processes of multiprocessing, remove temporary folders, close logs), streams are
flushed. Then `os._exit` instead of taking the interpreter apart, which would touch, and so copy,
every page shared with the helper only to free it.
"""

import atexit
import importlib
import io
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import Any, NoReturn

from lmlab.measure.warm_start.job import call
from lmlab.measure.warm_start.libraries import search_path
from lmlab.measure.warm_start.messages import Job
from lmlab.measure.warm_start.processes import die_with_parent

_STREAM_NAMES = ("stdin", "stdout", "stderr")
_FLUSH_FAILED = 120  # the interpreter's own exit status when the last flush fails


def live(job: Job, streams: list[int], helper: int, library_path: list[str]) -> NoReturn:
    """Do the job and end the process; called in the child right after the fork, signals blocked."""
    status = 1
    try:
        _take_streams(streams)
        os.setsid()
        die_with_parent(helper)
        _take_surroundings(job)
        _renew_interpreter(job, library_path)
        status = _do(job)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _take_streams(streams: list[int]) -> None:
    for target, received in enumerate(streams):
        os.dup2(received, target)
        os.close(received)
    for descriptor, name in enumerate(_STREAM_NAMES):
        setattr(sys, name, _text_stream(descriptor, getattr(sys, name)))
        setattr(sys, f"__{name}__", getattr(sys, name))


def _text_stream(descriptor: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream as the interpreter makes it at its start; the old one knows the helper's file."""
    reads, unbuffered = descriptor == 0, old.write_through
    raw: Any = io.FileIO(descriptor, "r" if reads else "w", closefd=False)
    raw.name = old.name
    stream: Any = io.TextIOWrapper(
        _buffered(raw, reads, unbuffered),
        encoding=old.encoding,
        errors=old.errors,
        newline=None if reads else "\n",
        line_buffering=not unbuffered and (descriptor == 2 or os.isatty(descriptor)),
        write_through=unbuffered,
    )
    stream.mode = "r" if reads else "w"
    renewed: io.TextIOWrapper = stream
    return renewed


def _buffered(raw: io.FileIO, reads: bool, unbuffered: bool) -> Any:
    if reads:
        return io.BufferedReader(raw)
    return raw if unbuffered else io.BufferedWriter(raw)


def _take_surroundings(job: Job) -> None:
    os.chdir(job.directory)
    os.umask(job.umask)
    os.environ.clear()
    os.environ.update(job.environment)
    time.tzset()
    tempfile.tempdir = None  # looked up again, in the job's own environment
    _reset_signals(job.ignored_signals)


def _reset_signals(ignored: list[int]) -> None:
    """The handlers of a Python process that has just started."""
    changeable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    for changed in (s for s in changeable if signal.getsignal(s) not in (signal.SIG_DFL, None)):
        signal.signal(changed, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *ignored):
        signal.signal(number, signal.SIG_IGN)


def _renew_interpreter(job: Job, library_path: list[str]) -> None:
    own = __name__.partition(".")[0]
    for name in list(sys.modules):
        if name == own or name.startswith(f"{own}."):
            del sys.modules[name]
    sys.path[:] = search_path(job.environment, job.directory, library_path)
    importlib.invalidate_caches()


def _do(job: Job) -> int:
    """Call the job and finish as the interpreter would; negative for a signal."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        status = _exit_status(call(job.module, job.arguments))
    except SystemExit as request:
        status = _exit_status(request.code)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    # What the interpreter does first when it ends, and offers no public name for.
    getattr(threading, "_shutdown")()  # noqa: B009
    atexit._run_exitfuncs()
    return status


def _exit_status(code: object) -> int:
    """What `sys.exit(code)` makes of its argument."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end(status: int) -> NoReturn:
    if not _flush() and status == 0:
        status = _FLUSH_FAILED
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _flush() -> bool:
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        return False
    return True
