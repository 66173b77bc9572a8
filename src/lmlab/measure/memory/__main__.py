"""A kept snapshot in a terminal: its peak, and the lines whose memory was live there.

    python -m lmlab.measure.memory snapshots/nvidia-h200/.../train_step.pickle

What torch's viewer shows as a picture in a browser, as text, and for files that one would rather
not trust: the pickle is read without running anything that it names.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from lmlab.measure.memory.history import History
from lmlab.measure.memory.replay import BEFORE, Piece, replay
from lmlab.measure.memory.snapshot import SnapshotError, history_of, load
from lmlab.measure.memory.sources import source_of

MIB = 2**20
LINES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Print the peak of one device's history; 2 for a file that is no snapshot."""
    parser = argparse.ArgumentParser(prog="lmlab.measure.memory", description=__doc__)
    parser.add_argument("snapshot", type=Path, help="a pickle that torch's memory viewer opens")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    arguments = parser.parse_args(argv)
    try:
        history = read_history(arguments.snapshot, arguments.device)
    except (OSError, SnapshotError) as error:
        print(f"{arguments.snapshot}: {error}", file=sys.stderr)
        return 2
    replayed = replay(history)
    peak = replayed.peak_position(BEFORE, replayed.length)
    live = replayed.live_at(peak)
    total = sum(piece.block_bytes for piece in live)
    print(f"{total / MIB:,.1f} MiB at event {peak + 1} of {replayed.length}, {len(live)} pieces")
    for line, count in list(bytes_by_line(live).items())[:LINES]:
        print(f"{count / MIB:12,.1f} MiB  {line}")
    return 0


def read_history(path: Path, device: int) -> History:
    """What one device's allocator did, or a `SnapshotError`."""
    snapshot = load(path)
    try:
        devices = len(snapshot["device_traces"])
        if not 0 <= device < devices:
            raise SnapshotError(f"device = {device}; the file holds {devices}, from 0 on")
        return history_of(snapshot, device, max_entries=sys.maxsize)
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # plain values of any shape
        raise SnapshotError(
            f"not as torch writes a snapshot ({type(error).__name__}: {error})"
        ) from error


def bytes_by_line(live: Sequence[Piece]) -> dict[str, int]:
    """Bytes of every line, most first."""
    lines: dict[str, int] = defaultdict(int)
    for piece in live:
        source = source_of(piece.frames)
        name = "no line of the program" if source is None else f"{source.file}:{source.line}"
        lines[name] += piece.block_bytes
    return dict(sorted(lines.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main())
