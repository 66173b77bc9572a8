"""A fake nsys for the PATH: accepts its own options only, and exports `three_modes`."""

import sys
from pathlib import Path

from lmlab.study.files import ROOT

OPTIONS = (
    *("--trace", "--sample", "--cpuctxsw", "--capture-range", "--capture-range-end", "--kill"),
    *("--force-overwrite", "--cuda-memory-usage", "--output"),
)

PROGRAM = '''#!{python}
"""The parts of nsys that a test needs."""
import os, subprocess, sys

sys.path.insert(0, {root!r})
VERSION, SUFFIX, FAULT = {version!r}, ".nsys-rep", {fault!r}
KNOWN = {{"profile": {profile!r}, "export": ("--type", "--output", "--force-overwrite")}}


def refuse(text):
    print(text, file=sys.stderr)
    sys.exit(1)


def options(command, arguments):
    found = {{}}
    while arguments and arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        if name not in KNOWN[command]:
            refuse("unrecognised option '" + name + "'")
        found[name] = value
    return found


def profile(arguments):
    asked = options("profile", arguments)
    marked = asked.get("--capture-range") == "cudaProfilerApi"
    if marked != (asked.get("--capture-range-end") == "stop"):
        refuse("nothing would be captured")
    if FAULT == "cannot record":
        refuse("The target application could not be launched.")
    status = subprocess.run(arguments).returncode
    with open(asked["--output"] + SUFFIX, "w") as report:
        report.write("a report of " + VERSION)
    sys.exit(status)


def export(arguments):
    asked = options("export", arguments)
    if not arguments[0].endswith(SUFFIX) or not os.path.exists(arguments[0]):
        refuse("no such report: " + arguments[0])
    from pathlib import Path
    from tests.measure.trace.export_builder import ExportBuilder
    from tests.measure.trace.three_modes import write_export

    if FAULT == "records nothing":
        with ExportBuilder(Path(asked["--output"])):
            return
    write_export(Path(asked["--output"]))


command, *rest = sys.argv[1:]
if command == "--version":
    if FAULT == "broken":
        refuse("error while loading shared libraries: libnsys.so")
    version = "NVIDIA Nsight Systems version " + VERSION + ".97-31v0"
    print("silence" if FAULT == "no version" else version)
else:
    {{"profile": profile, "export": export}}[command](rest)
'''


def install(folder: Path, version: str = "2026.3.1", fault: str = "") -> Path:
    """Put a fake nsys of that version, perhaps with a fault, into a folder of the PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nsys"
    known = {"python": sys.executable, "root": str(ROOT), "profile": OPTIONS}
    file.write_text(PROGRAM.format(**known, version=version, fault=fault))
    file.chmod(0o755)
    return file
