"""Arguments of the commands that work on sets of results: compare, ab and check.

The commands themselves need pandas and scipy, which `lmlab measure` should not have to import.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

AddParser = Callable[..., argparse.ArgumentParser]

COMPARE_HELP = """\
Compares two sets of results: folders, machines in results/, or either at a git revision. A ratio
above 1 means that B is faster. Faster and slower: the 95 % interval of the ratio excludes 1 and the
difference exceeds 2 %; same: the interval lies within 2 % of 1; undecided: anything else.

  lmlab compare nvidia-h200 nvidia-a100
  lmlab compare nvidia-h200:HEAD~3 nvidia-h200 --chapter attention --variant flash
  lmlab compare main-results/ results/nvidia-h200 --fail-if-slower 5%

The exit status is 0, 1 if --fail-if-slower finds something, 2 if a set or an option is wrong."""

CHECK_HELP = """\
Validates results that came from elsewhere: a folder, a machine in results/, or either at a git
revision. One line per problem: unreadable, misplaced, duplicate, impossible values, mixed versions,
missing points of the study, size.

  lmlab check results/nvidia-a100
  lmlab check nvidia-a100 --ignore missing,mixed --config study=tiny

The exit status is 0, 1 if there is a problem, 2 if an argument is wrong."""

AB_HELP = """\
Measures two revisions of the code on this machine, in turns and each time in a fresh process, and
gives the verdict by paired rounds. Each revision uses its own config.yaml.

  lmlab ab HEAD~1 HEAD -- end_to_end size=small context=128 precision=bf16 mode=train_step
  lmlab ab main my-branch --rounds 12 --fail-if-slower 3% -- attention topic=benchmark

The exit status is 0, 1 if --fail-if-slower finds something, 2 if a revision cannot be measured,
130 after Ctrl-C, which leaves nothing behind."""


def add_commands(
    add_parser: Callable[..., argparse.ArgumentParser],
) -> list[argparse.ArgumentParser]:
    """Add the parsers of all three; returns those that read config.yaml."""
    layout: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    compare = add_parser(
        "compare", help="compare two sets of results", description=COMPARE_HELP, **layout
    )
    compare.add_argument("first", metavar="A", help="the baseline")
    compare.add_argument("second", metavar="B", help="what is compared with it")
    compare.add_argument("--chapter", metavar="NAME[,NAME]", help="only these chapters")
    compare.add_argument("--variant", metavar="NAME[,NAME]", help="only these variants")
    compare.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE", help="only these: size=xl"
    )
    _add_outcome(compare, "compare")
    check = add_parser("check", help="validate a folder", description=CHECK_HELP, **layout)
    check.add_argument("folder", metavar="FOLDER")
    check.add_argument("--ignore", default="", metavar="KIND[,KIND]", help="kinds to leave out")
    check.set_defaults(command=_lazily("check"))
    ab = add_parser(
        "ab",
        help="measure two revisions in turns",
        usage="lmlab ab [-h] [--rounds N] [--json] [--fail-if-slower 5%%] REV1 REV2 -- CHAPTER "
        "[key=value ...]",
        description=AB_HELP,
        **layout,
    )
    ab.add_argument("first", metavar="REV1", help="the baseline")
    ab.add_argument("second", metavar="REV2", help="what is compared with it")
    ab.add_argument("point", nargs="+", metavar="CHAPTER", help="as for lmlab measure")
    ab.add_argument(
        "--rounds", type=_rounds, default=8, metavar="N", help="at least 2 (default: 8)"
    )
    _add_outcome(ab, "ab")
    return [check]


def _add_outcome(parser: argparse.ArgumentParser, module: str) -> None:
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    parser.add_argument(
        "--fail-if-slower", type=_share, metavar="5%%", dest="gate", help="exit 1, and name it"
    )
    parser.set_defaults(command=_lazily(module))


def _lazily(module: str) -> Callable[[argparse.Namespace], int]:
    def command(arguments: argparse.Namespace) -> int:
        status: int = import_module(f"lmlab.cli.{module}").command(arguments)
        return status

    return command


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if not match or (not match[2] and float(match[1]) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; allowed: 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: an integer of at least 2")
    return int(text)
