"""`python -m lmlab.measure.warm_start [--stop]`: list or stop this user's helpers.

There is one for each interpreter, environment and control group that needed one. A job that is
running goes on to its end.
"""

import argparse
import os
import signal

from lmlab.measure.warm_start.socket_path import connect, peer, private_directory


def main() -> None:
    """Print each helper, and stop it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m lmlab.measure.warm_start", description=__doc__)
    parser.add_argument("--stop", action="store_true", help="stop them")
    stop = parser.parse_args().stop
    for path in sorted(private_directory().glob("*.sock")):
        if connection := connect(path):
            print(f"helper {peer(connection)} at {path}")
            if stop:
                path.unlink()  # first, so that new clients start another helper
                os.kill(peer(connection), signal.SIGTERM)


if __name__ == "__main__":
    main()
