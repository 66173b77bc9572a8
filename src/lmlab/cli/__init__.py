"""The command line: single points (measure, status) and sets of results (compare, check, ab).

The study itself is run by the workflow (`make writeup`). Only a measurement imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import lmlab
from lmlab.cli import measure, sets, status
from lmlab.jobs.catalog import chapters

WRONG_USE = 2
INTERRUPTED = 130  # a shell's status for a command ended by Ctrl-C
READER_GONE = 141  # a shell's status for a command that wrote to a closed pipe

DESCRIPTION = """\
Measures or lists single points of the study in config.yaml (`make writeup` runs all of it);
compares and checks results. See COMMAND --help."""

MEASURE_HELP = """\
Measures one point without the workflow: a table, and as the last line the result as JSON.
Other keys default to the study in config.yaml that fits this machine.

  lmlab measure end_to_end size=small context=128 precision=bf16 mode=train_step warmup=5
  lmlab measure end_to_end d_model=512 d_ff=2048 num_layers=6 num_heads=8 batch=16
  lmlab measure attention topic=benchmark sequence=4096 variants=naive,sdpa_flash,flash
  lmlab measure collectives placement=cpu world_size=2

The exit status is 0 for a result (out of memory and unsupported are results), 1 if the measured
code failed, 2 if a key or a value is wrong or --out cannot be written, 130 after Ctrl-C. Nothing
is written unless --out, keep_traces or keep_snapshots asks for it."""

STATUS_HELP = """\
Lists every point of the study on this machine: ok, oom, unsupported or failed with its reason, or
missing; and which results are stale because code, settings or torch changed since."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake or interrupt ends in one line."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `lmlab status | head -1` has read enough
        # Python would complain when it flushes its streams on exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return READER_GONE


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        status_code: int = arguments.command(arguments)
    except ValueError as error:
        print(f"lmlab: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("lmlab: interrupted, nothing is written", file=sys.stderr)
        return INTERRUPTED
    return status_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmlab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"lmlab {lmlab.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # --config takes every argument that follows it, so the usage shows it last.
    shared = "[--configfile FILE]\n        [--config key=value ...]"
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    one = commands.add_parser(
        "measure",
        help="measure one point, print it",
        usage=f"lmlab measure [-h] CHAPTER [key=value ...] [--out FILE] {shared}",
        description=MEASURE_HELP,
        **layout,  # type: ignore[arg-type]
    )
    names = ", ".join(chapters())
    one.add_argument("chapter", choices=chapters(), help=names, metavar="CHAPTER")
    one.add_argument("settings", nargs="*", metavar="key=value", help="what to set for it")
    one.add_argument("--out", type=Path, metavar="FILE", help="also write the result to this file")
    one.set_defaults(command=measure.command)
    every = commands.add_parser(
        "status",
        help="list every point of the study",
        usage=f"lmlab status [-h] [--machine MACHINE] [--results FOLDER] {shared}",
        description=STATUS_HELP,
        **layout,  # type: ignore[arg-type]
    )
    every.add_argument("--machine", help="a folder of results/ (default: this machine)")
    every.add_argument("--results", type=_folder, default=Path("results"), metavar="FOLDER")
    every.set_defaults(command=status.command)
    for command in (one, every, *sets.add_commands(commands.add_parser)):
        command.add_argument("--configfile", type=Path, metavar="FILE", help="default: config.yaml")
        command.add_argument(
            "--config",
            nargs="+",
            action="extend",
            default=[],
            metavar="key=value",
            help="override keys of config.yaml, as with snakemake: study=tiny; comes last",
        )
    return parser


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)
