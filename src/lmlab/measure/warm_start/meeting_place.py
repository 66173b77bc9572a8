"""Where a client and its helper find each other, and why two clients may not share one.

A forked child is the helper's copy, so whatever a process takes from its start and cannot be handed
over later must be the same for the client: the interpreter and torch's build; environment variables
that libraries read when they are loaded (OpenMP fixes its thread count then); the CPUs it may run
on, its limits, its control group and its namespaces, since under Slurm or in a container the helper
of another job would run the work outside of the job's own allocation. All of it is hashed into the
socket's name. CUDA_VISIBLE_DEVICES is left out: CUDA reads it when it is first used, in the child.

The helper runs what it is told, so only its owner may reach it: the folder must belong to this user
and be closed to everyone else.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import resource
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_READ_AT_IMPORT = (
    *(
        "ATEN_",
        "CUDA_",
        "DNNL_",
        "GLIBC_",
        "GLOO_",
        "GOMP_",
        "KMP_",
        "LANG",
        "LC_",
        "LD_",
        "MALLOC_",
    ),
    *("MKL_", "NCCL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH", "TORCH"),
    *("TRITON", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_READ_LATER = {"CUDA_VISIBLE_DEVICES"}
_LONGEST_ADDRESS = 107  # sun_path holds 108 bytes, the last of them zero


class WarmStartUnavailable(RuntimeError):
    """The helper cannot be had here; the job can still run in a fresh process."""


@dataclass(frozen=True)
class MeetingPlace:
    """The files of one helper."""

    directory: Path
    name: str

    @property
    def socket(self) -> Path:
        return self.directory / f"{self.name}.sock"

    @property
    def lock(self) -> Path:
        return self.directory / f"{self.name}.lock"

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"


def meeting_place() -> MeetingPlace:
    """The place of the helper that would be a true stand-in for this process."""
    facts = json.dumps([_interpreter(), _environment(), _inherited()], sort_keys=True)
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return MeetingPlace(private_directory(), digest[:16])


def runtime_directory() -> Path:
    """The folder for sockets, whether it is there yet or not."""
    if chosen := os.environ.get("LMLAB_RUNTIME_DIR"):
        return Path(chosen).absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "lmlab"
    return Path(tempfile.gettempdir()) / f"lmlab-{os.getuid()}"


def private_directory() -> Path:
    """The folder for sockets, made if need be; refused unless it is this user's alone."""
    directory = runtime_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise WarmStartUnavailable(f"{directory} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise WarmStartUnavailable(f"{directory} is not a folder")
    if found.st_uid != os.geteuid():
        raise WarmStartUnavailable(
            f"{directory} belongs to user {found.st_uid}, not to user {os.geteuid()}"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise WarmStartUnavailable(f"{directory} is open to others (mode {mode:o}, must be 700)")
    return directory


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """A socket address for the path, which unlike the path may not be long."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _interpreter() -> list[str]:
    """Python, torch, triton, and the helper's own code: an edited helper is another helper."""
    own_files = sorted(Path(__file__).parent.glob("*.py"))
    own_code = hashlib.sha256(b"".join(file.read_bytes() for file in own_files)).hexdigest()
    return [
        *(sys.executable, sys.version, os.path.realpath(sys.prefix), __file__, own_code),
        *(_build(name) for name in ("torch", "triton")),
    ]


def _build(package: str) -> str:
    """The version and build of a package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "absent"
    # torch keeps its version, commit and CUDA version in a file of their own.
    version = Path(spec.origin).with_name("version.py")
    source = version if version.exists() else Path(spec.origin)
    return f"{source} {hashlib.sha256(source.read_bytes()).hexdigest()}"


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def _inherited() -> list[object]:
    """What this process got from its parent and cannot hand to another process."""
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return [
        _text("/proc/sys/kernel/random/boot_id"),
        _text("/proc/self/cgroup"),
        [_link(f"/proc/self/ns/{kind}") for kind in ("ipc", "mnt", "net", "pid", "user")],
        sorted(os.sched_getaffinity(0)),
        os.getpriority(os.PRIO_PROCESS, 0),
        sorted({os.getegid(), *os.getgroups()}),
        [resource.getrlimit(getattr(resource, name)) for name in limits],
    ]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return "unknown"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "unknown"
