"""Where a helper listens: a private directory, and a name that only equivalent processes share.

A forked job is a copy of the helper. Whatever a process inherits or reads only once must therefore
be the same in client and helper: interpreter and torch build; umask; environment variables such as
the time zone and library settings; CPUs, limits, control group and namespaces, because under Slurm
or in a container another job's helper would run the work outside the allocation. All of this is
hashed into the socket's name, together with the code of this package.

A helper runs whatever it is sent, so the directory must be owned by this user and closed to others.
"""

import hashlib
import importlib.util
import json
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path

# Prefixes: variables read only once, and the job id of Slurm, PBS, LSF or Grid Engine.
_VARIABLES = (
    *("ATEN_", "CUDA_", "DNNL_", "GLIBC_", "GLOO_", "GOMP_", "KMP_", "LANG", "LC_", "LD_"),
    *("MALLOC_", "MKL_", "NCCL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH"),
    *("TEMP", "TMP", "TORCH", "TRITON", "TZ"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"),
)


def socket_path() -> Path:
    """The socket of the helper that is equivalent to this process."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # CUDA reads it when first used, in the job
    specs = map(importlib.util.find_spec, ("torch", "triton"))
    libraries = [spec.origin for spec in specs if spec and spec.origin]
    code = [*libraries, *sorted(map(str, Path(__file__).parent.glob("*.py")))]
    os.umask(umask := os.umask(0o077))
    properties = ("/proc/sys/kernel/random/boot_id", "/proc/self/cgroup", "/proc/self/limits")
    facts = [
        *(sys.executable, sys.version, variables),
        os.getcwd(),  # entries of PYTHONPATH may be relative to it
        [(file, os.stat(file).st_mtime_ns) for file in code],
        [Path(file).read_text() for file in properties],
        [os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "mnt", "net", "pid", "user")],
        *(sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), umask),
        sorted({os.getegid(), *os.getgroups()}),
        # Signals may be ignored under nohup or in a background job.
        [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
    ]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return private_directory() / f"{digest[:16]}.sock"


def private_directory() -> Path:
    """The directory for sockets, created if necessary and accessible to this user only."""
    default = f"{tempfile.gettempdir()}/lmlab-{os.getuid()}"
    directory = Path(os.environ.get("LMLAB_RUNTIME_DIR") or default).absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()  # of a link itself: its mode is open to all, so it is refused
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{directory} is {stat.filemode(found.st_mode)} of user {found.st_uid}; "
            f"allowed: drwx------ of user {os.geteuid()}"
        )
    return directory


def connect(path: Path) -> socket.socket | None:
    """A connection to the helper at this path, or None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        return connection
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
    return None


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user id of the process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[:2]
