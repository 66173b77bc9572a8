"""Prints a saved memory snapshot: its peak, and the lines whose memory was live there.

    python -m lmlab.measure.memory snapshots/nvidia-h200/.../train_step.pickle

The same as torch's viewer shows in a browser, as text, and safe for files from elsewhere: nothing
that the pickle names is executed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lmlab.measure.memory.history import History, active_bytes, live_at, replay
from lmlab.measure.memory.observer import source_of
from lmlab.measure.memory.snapshot import SnapshotError, history_of, load

MIB = 2**20
MAX_LINES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Print the peak of one device's history; exit status 2 if the file is not a snapshot."""
    parser = argparse.ArgumentParser(prog="lmlab.measure.memory", description=__doc__)
    parser.add_argument("snapshot", type=Path, help="a pickle that torch's memory viewer opens")
    parser.add_argument("--device", type=int, default=0, help="GPU index")
    arguments = parser.parse_args(argv)
    try:
        history = read_history(arguments.snapshot, arguments.device)
    except (OSError, SnapshotError) as error:
        print(f"{arguments.snapshot}: {error}", file=sys.stderr)
        return 2
    allocations, events = replay(history), len(history.events)
    peak = int(active_bytes(allocations, events).argmax())
    live = live_at(allocations, peak)
    bytes_by_line: Counter[str] = Counter()
    for frames, size in zip(live["frames"], live["block_bytes"], strict=True):
        bytes_by_line[str(source_of(frames) or "no source")] += size
    total = bytes_by_line.total()
    print(f"{total / MIB:,.1f} MiB at event {peak} of {events}, {len(live)} blocks")
    for line, count in bytes_by_line.most_common(MAX_LINES):
        print(f"{count / MIB:12,.1f} MiB  {line}")
    return 0


def read_history(path: Path, device: int) -> History:
    """What one device's allocator did, or a `SnapshotError`."""
    snapshot = load(path)
    try:
        devices = len(snapshot["device_traces"])
        if not 0 <= device < devices:
            raise SnapshotError(
                f"device = {device}; the file has {devices} devices, numbered from 0"
            )
        return history_of(snapshot, device, max_entries=sys.maxsize)
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # plain values of any shape
        raise SnapshotError(
            f"not a torch memory snapshot ({type(error).__name__}: {error})"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
