"""The nsys program: where it is, its version, and the options that version understands.

Options changed names over the years, and nsys rejects what it does not know:

    before 2021.4   --stop-on-range-end=true, reports end in .qdrep
    from 2021.4     --capture-range-end=stop, reports end in .nsys-rep

`stop` is explicit because the newer option's default ends the program together with the recording.
If nsys is missing, too old or does not run, that is an `NsysUnavailable` with a one-line reason.
Importing this module does not import torch: the workflow uses it while it is parsed.
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

OLDEST = (2020, 3)  # exports the tables that are read, knows every option below
RENAMED = (2021, 4)

_VERSION = re.compile(r"version\s+((\d{4})\.(\d+)[\d.]*)")
_TIMEOUT_S = 30.0


class NsysUnavailable(Exception):
    """Why there is no usable nsys, in one line."""


@dataclass(frozen=True)
class Nsys:
    """A usable nsys."""

    path: str
    version: str  # as it prints it: 2025.3.1.90
    release: tuple[int, int]  # year and number of the release: (2025, 3)

    def profile_options(self, more: Iterable[str] = (), *, marked: bool = True) -> list[str]:
        """Options of `nsys profile` that record what a program marks, or all of it."""
        stop = "--capture-range-end=stop" if self.release >= RENAMED else "--stop-on-range-end=true"
        return [
            "--trace=cuda,nvtx",
            "--sample=none",
            "--cpuctxsw=none",
            *(["--capture-range=cudaProfilerApi", stop, "--kill=none"] if marked else []),
            "--force-overwrite=true",
            *more,
        ]

    def export_options(self) -> list[str]:
        """Options of `nsys export`."""
        return ["--type=sqlite", "--force-overwrite=true"]

    @property
    def report_suffix(self) -> str:
        """File name extension of a report."""
        return ".nsys-rep" if self.release >= RENAMED else ".qdrep"


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
    except subprocess.TimeoutExpired:
        raise NsysUnavailable(f"{path} --version does not return") from None
    except OSError as error:
        raise NsysUnavailable(f"{path} cannot be run: {error.strerror}") from None
    output = (done.stderr or done.stdout if done.returncode else done.stdout).strip()
    first_line = output.partition("\n")[0] or "no output"
    if done.returncode:
        raise NsysUnavailable(f"{path} --version exits with {done.returncode}: {first_line}")
    found = _VERSION.search(output)
    if found is None:
        raise NsysUnavailable(f"{path} --version prints no version: {first_line}")
    release = int(found[2]), int(found[3])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NsysUnavailable(f"{path} is version {found[1]}, older than {oldest}")
    return Nsys(path, found[1], release)
