"""The command line: single points (measure, status) and sets of results (compare, check, ab).

The study itself is run by the workflow (`make writeup`). Each command is a module of this package,
imported when it is called: only a measurement needs torch, only sets of results need pandas.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import lmlab
from lmlab.jobs.catalog import chapters

WRONG_USE = 2
INTERRUPTED = 130  # a shell's status for a command ended by Ctrl-C
READER_GONE = 141  # a shell's status for a command that wrote to a closed pipe

DESCRIPTION = """\
Measures or lists single points of the study in config.yaml (`make writeup` runs all of it);
compares and checks results. See COMMAND --help."""

HELP = {
    "measure": """\
Measures one point without the workflow: a table, and as the last line the result as JSON.
Other keys default to the study in config.yaml that fits this machine.

  lmlab measure end_to_end size=small context=128 precision=bf16 mode=train_step warmup=5
  lmlab measure end_to_end d_model=512 d_ff=2048 num_layers=6 num_heads=8 batch=16
  lmlab measure attention topic=benchmark sequence=4096 variants=naive,sdpa_flash,flash
  lmlab measure collectives placement=cpu world_size=2

The exit status is 0 for a result (out of memory and unsupported are results), 1 if the measured
code failed, 2 if a key or a value is wrong or --out cannot be written, 130 after Ctrl-C. Nothing
is written unless --out, keep_traces or keep_snapshots asks for it, or memory runs out while it is
recorded (snapshots/).""",
    "status": """\
Lists every point of the study on this machine: ok, oom, unsupported, failed or unreadable with its
reason, or missing; and which results are stale because code, settings or torch changed since.""",
    "compare": """\
Compares two sets of results: folders, machines in results/, or either at a git revision. A ratio
above 1 means that B is faster. Faster and slower: the 95 % interval of the ratio excludes 1 and the
difference exceeds 2 %; same: the interval lies within 2 % of 1; undecided: anything else.

  lmlab compare nvidia-h200 nvidia-a100
  lmlab compare nvidia-h200:HEAD~3 nvidia-h200 --chapter attention --variant flash
  lmlab compare main-results/ results/nvidia-h200 --fail-if-slower 5%

The exit status is 0, 1 if --fail-if-slower finds something slower or failed, 2 for wrong use.""",
    "check": """\
Validates results that came from elsewhere: a folder, a machine in results/, or either at a git
revision. One line per problem: unreadable, misplaced, duplicate, impossible values, mixed versions,
missing points of the study, size.

  lmlab check results/nvidia-a100
  lmlab check nvidia-a100 --ignore missing,mixed --config study=tiny

The exit status is 0, 1 if there is a problem, 2 if an argument is wrong.""",
    "ab": """\
Measures two revisions of the code on this machine, alternating, each time in a fresh process, and
compares them round by round. Each revision uses its own config.yaml.

  lmlab ab HEAD~1 HEAD -- end_to_end size=small context=128 precision=bf16 mode=train_step
  lmlab ab main my-branch --rounds 12 --fail-if-slower 3% -- attention topic=benchmark

The exit status is 0, 1 if --fail-if-slower finds something, 2 if a revision cannot be measured,
130 after Ctrl-C, which leaves nothing behind.""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake or interrupt ends in one line."""
    try:
        try:
            arguments = _parser().parse_args(argv)
            return import_module(f"lmlab.cli.{arguments.command}").command(arguments)
        except ValueError as error:
            print(f"lmlab: {error}", file=sys.stderr)
            return WRONG_USE
        except KeyboardInterrupt:
            print("lmlab: interrupted", file=sys.stderr)
            return INTERRUPTED
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `lmlab status | head -1` has read enough
        # Python would complain when it flushes its streams on exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return READER_GONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmlab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"lmlab {lmlab.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name: str, summary: str, usage: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            usage=usage and f"lmlab {name} [-h] {usage}",
            description=HELP[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    # --config takes every argument that follows it, so the usage shows it last.
    usage = "CHAPTER [key=value ...] [--out FILE]\n    [--configfile FILE] [--config key=value ...]"
    measure = add("measure", "measure one point, print it", usage)
    names = chapters()
    measure.add_argument("chapter", choices=names, help=", ".join(names), metavar="CHAPTER")
    measure.add_argument("settings", nargs="*", metavar="key=value", help="what to set for it")
    measure.add_argument("--out", type=Path, metavar="FILE", help="also write the result there")
    status = add("status", "list every point of the study")
    status.add_argument("--machine", help="a folder of results/ (default: this machine)")
    status.add_argument("--results", type=_folder, default=Path("results"), metavar="FOLDER")
    check = add("check", "validate a folder")
    check.add_argument("folder", metavar="FOLDER")
    check.add_argument("--ignore", default="", metavar="KIND[,KIND]", help="such as missing,mixed")
    for command in (measure, status, check):
        command.add_argument("--configfile", type=Path, metavar="FILE", help="extends config.yaml")
        about = "override keys of config.yaml, as with snakemake: study=tiny; comes last"
        command.add_argument(
            "--config", nargs="+", action="extend", default=[], metavar="key=value", help=about
        )
    compare = add("compare", "compare two sets of results")
    compare.add_argument("first", metavar="A", help="the baseline")
    compare.add_argument("second", metavar="B", help="what is compared with it")
    compare.add_argument("--chapter", metavar="NAME[,NAME]", help="only these chapters")
    compare.add_argument("--variant", metavar="NAME[,NAME]", help="only these variants")
    compare.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE", help="only these: size=xl"
    )
    usage = "[--rounds N] [--json] [--fail-if-slower 5%%] REV1 REV2 -- CHAPTER [key=value ...]"
    ab = add("ab", "measure two revisions, alternating", usage)
    ab.add_argument("first", metavar="REV1", help="the baseline")
    ab.add_argument("second", metavar="REV2", help="what is compared with it")
    ab.add_argument("point", nargs="+", metavar="CHAPTER", help="as for lmlab measure")
    ab.add_argument("--rounds", type=_rounds, default=8, metavar="N", help="2 or more (default: 8)")
    for command in (compare, ab):
        command.add_argument("--json", action="store_true", help="everything, as one JSON object")
        command.add_argument(
            "--fail-if-slower", type=_share, metavar="5%", dest="gate", help="exit 1 if anything is"
        )
    return parser


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if not match or (not match[2] and float(match[1]) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; allowed: 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: an integer of at least 2")
    return int(text)
