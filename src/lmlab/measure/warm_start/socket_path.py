"""Where a helper listens: a private directory, and a name that only equivalent processes share.

A forked job is a copy of the helper. What a process receives at its start and cannot change later
must therefore be the same in client and helper: interpreter and build of torch; environment
variables that libraries read when loaded; CPUs, limits, control group and namespaces, because under
Slurm or in a container another job's helper would run the work outside of the allocation. All of
this is hashed into the socket's name, together with the code of this package. CUDA_VISIBLE_DEVICES
is left out: CUDA reads it when first used, in the job.

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

_READ_AT_IMPORT = (
    *("ATEN_", "CUDA_", "DNNL_", "GLIBC_", "GLOO_", "GOMP_", "KMP_", "LANG", "LC_", "LD_"),
    *("MALLOC_", "MKL_", "NCCL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH"),
    *("TORCH", "TRITON"),
)
# The allocation of a batch system: Slurm, PBS, LSF, Grid Engine.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def socket_path() -> Path:
    """The socket of the helper that is equivalent to this process."""
    facts = json.dumps([_code(), _environment(), _inherited()], sort_keys=True)
    return private_directory() / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.sock"


def private_directory() -> Path:
    """The directory for sockets, created if necessary and accessible to this user only."""
    default = f"{tempfile.gettempdir()}/lmlab-{os.getuid()}"
    directory = Path(os.environ.get("LMLAB_RUNTIME_DIR") or default).absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if found.st_uid != os.geteuid() or not is_private:
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


def peer(connection: socket.socket) -> int:
    """The pid of the process that listens at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[0])


def _environment() -> dict[str, str]:
    variables = {k: v for k, v in os.environ.items() if k.startswith(_READ_AT_IMPORT + _JOB)}
    folders = variables.get("PYTHONPATH", "").split(os.pathsep)
    variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # read later
    return variables


def _code() -> list[object]:
    """The interpreter, and the files that identify the versions of libraries and of this code."""
    specs = filter(None, map(importlib.util.find_spec, ("torch", "triton")))
    libraries = [Path(spec.origin) for spec in specs if spec.origin]
    files = [*libraries, *sorted(Path(__file__).parent.glob("*.py"))]
    return [sys.executable, sys.version, *((str(file), file.stat().st_mtime_ns) for file in files)]


def _inherited() -> list[object]:
    """Inherited properties of this process that it cannot pass to another process."""
    return [
        Path("/proc/sys/kernel/random/boot_id").read_text(),
        Path("/proc/self/cgroup").read_text(),
        [os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "mnt", "net", "pid", "user")],
        sorted(os.sched_getaffinity(0)),
        os.getpriority(os.PRIO_PROCESS, 0),
        sorted({os.getegid(), *os.getgroups()}),
        Path("/proc/self/limits").read_text(),
        # Ignored under nohup or in a shell's background.
        [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
    ]
