"""The command line: `lmlab measure` takes one point by hand, `lmlab status` tells how all stand.

The study itself is run by the workflow (`make writeup`); these two are for looking closer. torch is
imported by a measurement and by nothing else here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import lmlab
from lmlab.cli import measure, status
from lmlab.jobs.catalog import chapters

WRONG_USE = 2
INTERRUPTED = 130  # as a shell says that a command ended by Ctrl-C
READER_GONE = 141  # as a shell says that a command wrote to a pipe that nobody reads

# --config takes every word that follows it, so it stands last.
MEASURE_USAGE = """\
lmlab measure [-h] CHAPTER [key=value ...] [--out FILE] [--configfile FILE]
                     [--config key=value ...]"""
STATUS_USAGE = """\
lmlab status [-h] [--machine MACHINE] [--results FOLDER] [--configfile FILE]
                    [--config key=value ...]"""

DESCRIPTION = """\
Looks closer at the study of config.yaml, all of which `make writeup` runs. COMMAND --help says
more."""

MEASURE_HELP = """\
Measures one point without the workflow: a table, and as the last line the result as JSON.
What is not given is taken from the study of config.yaml that fits this machine.

  lmlab measure end_to_end size=small context=128 precision=bf16 mode=train_step warmup=5
  lmlab measure end_to_end d_model=512 d_ff=2048 num_layers=6 num_heads=8 batch=16
  lmlab measure precision topic=autocast dtype=fp16
  lmlab measure machine quick=true
  lmlab measure collectives placement=cpu world_size=2

The exit status is 0 for a result (out of memory and unsupported are results), 1 if the measured
code failed, 2 if a key or a value is wrong or --out cannot be written, 130 after Ctrl-C. Nothing
is written unless --out, keep_traces or keep_snapshots asks for it."""

STATUS_HELP = """\
Lists every point of the study on this machine: ok, oom, unsupported or failed with its reason, or
missing; and those made by other code, other settings or another torch than the present."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake or interrupt ends in one line, a reader that left in none."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `lmlab status | head -1` has read enough
        _write_no_more()
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


def _write_no_more() -> None:
    """Python writes what it still holds when it ends, and would complain that nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmlab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"lmlab {lmlab.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_measure(commands)
    _add_status(commands)
    return parser


def _add_measure(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(
        commands, "measure", "measure one point, print it", MEASURE_HELP, MEASURE_USAGE
    )
    command.add_argument(
        "chapter", choices=chapters(), help=", ".join(chapters()), metavar="CHAPTER"
    )
    command.add_argument(
        "settings", nargs="*", default=[], metavar="key=value", help="what to set for it"
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the result to this file"
    )
    command.set_defaults(command=measure.command)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(
        commands, "status", "how every point of the study stands", STATUS_HELP, STATUS_USAGE
    )
    command.add_argument(
        "--machine", metavar="MACHINE", help="a folder of results/ (default: this machine)"
    )
    command.add_argument(
        "--results",
        type=_folder,
        default=Path("results"),
        metavar="FOLDER",
        help="default: results",
    )
    command.set_defaults(command=status.command)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    usage: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--configfile", type=Path, metavar="FILE", help="default: config.yaml")
    command.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=value",
        help="override keys of config.yaml, as with snakemake: study=tiny; stands last",
    )
    return command
