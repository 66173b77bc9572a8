"""Nsight Systems as a program: found, asked for its version, told in its own words what to record.

Its options changed names over the years, and a version rejects what it does not know, so the words
follow the version that is found:

    before 2021.4   --stop-on-range-end=true, reports end in .qdrep
    from 2021.4     --capture-range-end=stop, reports end in .nsys-rep

`stop` is said because the default of the newer option ends the program together with the recording.
What is not there, or does not even tell its version, is a `NsysTrouble` with one line that says so.
Importing this imports no torch: the workflow asks while it is parsed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

UNDER_NSYS = "LMLAB_UNDER_NSYS"
"""Environment variable: set for a program that nsys records, which then opens the capture."""
TROUBLE = "LMLAB_NSYS_TROUBLE"
"""Environment variable: why nsys was not used, for the result to say."""

OLDEST = (2020, 3)  # exports the tables that are read, knows every option below
NEW_NAMES = (2021, 4)

_VERSION = re.compile(r"version\s+((\d{4})\.(\d+)[\d.]*)")
_PATIENCE_S = 30.0


class NsysTrouble(Exception):
    """Why there is no nsys to record with, in one line."""


@dataclass(frozen=True)
class Nsys:
    """An nsys that answers."""

    path: str
    version: str
    """As it says it: 2025.3.1.90."""
    release: tuple[int, int]
    """Year and number of the release: (2025, 3)."""

    def profile_options(self) -> list[str]:
        """Words behind `nsys profile` that record what a program marks, and nothing else."""
        stop = (
            "--capture-range-end=stop" if self.release >= NEW_NAMES else "--stop-on-range-end=true"
        )
        return [
            "--trace=cuda,nvtx",
            "--sample=none",
            "--cpuctxsw=none",
            "--capture-range=cudaProfilerApi",
            stop,
            "--kill=none",
            "--force-overwrite=true",
        ]

    def export_options(self) -> list[str]:
        """Words behind `nsys export`."""
        return ["--type=sqlite", "--force-overwrite=true"]

    @property
    def report_suffix(self) -> str:
        """How the name of a report ends."""
        return ".nsys-rep" if self.release >= NEW_NAMES else ".qdrep"


def find_nsys() -> Nsys:
    """The nsys on the PATH, or `NsysTrouble`."""
    path = shutil.which("nsys")
    if path is None:
        raise NsysTrouble("nsys is not on the PATH")
    said = _version_text(path)
    found = _VERSION.search(said)
    if found is None:
        raise NsysTrouble(f"{path} does not tell its version: {_first_line(said)}")
    release = int(found[2]), int(found[3])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NsysTrouble(f"{path} is version {found[1]}, older than {oldest}")
    return Nsys(path, found[1], release)


def _version_text(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NsysTrouble(f"{path} --version does not answer") from None
    except OSError as error:
        raise NsysTrouble(f"{path} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = _first_line(done.stderr or done.stdout)
        raise NsysTrouble(f"{path} --version ends with {done.returncode}: {said}")
    return done.stdout


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it says nothing")
