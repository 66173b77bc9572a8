"""A job: `main(argv)` of a module, called in a fork as a fresh interpreter would call it.

The fork first takes over what a new process would inherit from the client. All lmlab modules are
then removed from sys.modules, so that the job imports the source files as they are now. Random
number generators are not reset; a measurement seeds its own.

It ends as the interpreter does (threads are joined, atexit functions run, streams flushed) up to
the last step: tearing the interpreter down would touch, and so copy, every page shared with the
helper, which takes 0.3 s. An interrupt ends it without a traceback; the client tells the user.
"""

import atexit
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from lmlab.measure.warm_start.client import Job

_FLUSH_FAILED = 120  # the interpreter's own exit status when the last flush fails


def run_in_fork(job: Job) -> NoReturn:
    """Run the job in this process, with signals blocked on entry, and end the process."""
    stdout: Any = sys.stdout  # now the client's file, which may be a terminal
    stdout.reconfigure(line_buffering=stdout.isatty() and not stdout.write_through)
    os.chdir(job.directory)
    os.umask(job.umask)
    os.environ.clear()
    os.environ.update(job.environment)
    time.tzset()
    tempfile.tempdir = None  # cached from the helper's environment
    for name in [name for name in sys.modules if name.split(".")[0] == "lmlab"]:
        del sys.modules[name]
    if not job.environment.get("PYTHONSAFEPATH"):
        sys.path.insert(0, job.directory)  # as `python -m` does
    importlib.invalidate_caches()
    _reset_signals(job.ignored_signals)
    status = _status(job)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    getattr(threading, "_shutdown")()  # noqa: B009 - what the interpreter does first
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):  # a full disk, or a stream that the job has closed
        status = status or _FLUSH_FAILED
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def _reset_signals(ignored: Sequence[int]) -> None:
    """The signal handlers of an interpreter that has just been started."""
    for number in map(int, signal.valid_signals()):
        if number in (*ignored, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _status(job: Job) -> int:
    """Exit status of the job as the interpreter would report it; negative for a signal."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        sys.exit(_call(job.module, job.arguments))
    except KeyboardInterrupt:
        return -signal.SIGINT
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return (request.code or 0) & 0xFF
        print(request.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return 1


def _call(name: str, arguments: list[str]) -> Any:
    """Import the module and call its main.

    The module is also `__main__`, under its own name: what it pickles can be found again, and a
    process that multiprocessing spawns imports the job and not the code around it.
    """
    sys.argv = [name, *arguments]
    module = importlib.import_module(name)
    sys.modules["__main__"] = module
    sys.argv[0] = module.__file__ or name
    if not callable(getattr(module, "main", None)):
        raise ValueError(f"module {name!r} cannot be run: it has no function main(argv)")
    return module.main(list(arguments))
