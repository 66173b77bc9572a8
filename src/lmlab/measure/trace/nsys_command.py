"""The nsys program: where it is, its version, and its options.

Versions older than `OLDEST` have different options and report formats. `--capture-range-end=stop`
is explicit because the default ends the program together with the recording. If nsys is missing,
too old or does not run, `NsysUnavailable` is raised with a one-line reason. Importing this module
does not import torch: the workflow uses it while it is parsed.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

UNDER_NSYS = "LMLAB_UNDER_NSYS"
"""Environment variable: set for a program that nsys records, which then opens the capture."""
NSYS_UNAVAILABLE = "LMLAB_NSYS_UNAVAILABLE"
"""Environment variable: why nsys was not used; recorded in the result."""

OLDEST = (2021, 4)

_VERSION = re.compile(r"version\s+((\d{4})\.(\d+)[\d.]*)")
_TIMEOUT_S = 30.0


class NsysUnavailable(Exception):
    """Why there is no usable nsys, in one line."""


@dataclass(frozen=True)
class Nsys:
    """A usable nsys."""

    path: str
    version: str  # as it prints it: 2025.3.1.90


def profile_options(more: Iterable[str] = (), *, marked: bool = True) -> list[str]:
    """Options of `nsys profile` to record the marked part of a program, or all of it."""
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--kill=none"]
    return [
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        *(capture if marked else []),
        "--force-overwrite=true",
        *more,
    ]


def find_nsys() -> Nsys:
    """The nsys on the PATH, or `NsysUnavailable`."""
    path = shutil.which("nsys")
    if path is None:
        raise NsysUnavailable("nsys is not on the PATH")
    command = [path, "--version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NsysUnavailable(f"{path} cannot be run: {error}") from None
    output = (done.stdout + done.stderr).strip()
    found = _VERSION.search(output)
    if done.returncode or found is None:
        first_line = output.partition("\n")[0]
        reason = f"{path} --version exits with {done.returncode} and prints {first_line!r}"
        raise NsysUnavailable(reason)
    if (int(found[2]), int(found[3])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NsysUnavailable(f"{path} is version {found[1]}, older than {oldest}")
    return Nsys(path, found[1])
