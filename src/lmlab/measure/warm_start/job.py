"""A job: `main(argv)` of a module, called in a fork or in a fresh interpreter with equal results.

A fork first takes over what a new process would inherit from the client. All lmlab modules are then
removed from sys.modules, so that the job imports the source files as they are now. Random number
generators are not reset; a measurement seeds its own.

A fork ends as the interpreter does (threads are joined, atexit functions run, streams flushed) up
to the last step: tearing the interpreter down would touch, and so copy, every page shared with the
helper, which takes 0.3 s.
"""

import atexit
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn

from lmlab.measure.warm_start.client import Job

_FLUSH_FAILED = 120  # the interpreter's own exit status when the last flush fails


def run_in_fork(job: Job) -> NoReturn:
    """Run the job in a fork of the helper, with signals blocked on entry, and end the process."""
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
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does when it starts
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in job.ignored_signals:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _exit(_status(job))


def _status(job: Job) -> int:
    """Exit status of the job as the interpreter would report it; negative for a signal."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        status = _status_of(call(job.module, job.arguments))
    except SystemExit as request:
        status = _status_of(request.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # What the interpreter does first when it ends.
    getattr(threading, "_shutdown")()  # noqa: B009
    atexit._run_exitfuncs()
    return status


def _status_of(code: object) -> int:
    """What `sys.exit(code)` makes of its argument."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _exit(status: int) -> NoReturn:
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            if not stream.closed:
                stream.flush()
    except OSError:
        status = status or _FLUSH_FAILED
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def call(name: str, arguments: list[str]) -> Any:
    """Import the module, call its main, and return the result, an argument for `sys.exit`.

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


if __name__ == "__main__":
    sys.exit(call(sys.argv[1], sys.argv[2:]))
