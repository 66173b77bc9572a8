"""`python -m lmlab.measure.warm_start --status | --stop`: list or stop this user's helpers.

There is one for each interpreter, environment and control group that needed one.
"""

import argparse
import contextlib
import os
import signal
import socket
import struct
import sys

from lmlab.measure.warm_start.client import PATIENCE_S
from lmlab.measure.warm_start.socket_path import connect, private_directory


def main() -> None:
    """Print each helper, and stop it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m lmlab.measure.warm_start", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--status", action="store_true", help="list the helpers")
    action.add_argument("--stop", action="store_true", help="stop them and the jobs they run")
    stop = parser.parse_args().stop
    for path in sorted(private_directory().glob("*.sock")):
        if connection := connect(path):
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, _uid, _gid = struct.unpack("3i", credentials)
            print(f"helper {pid} at {path}")
            if stop:
                os.kill(pid, signal.SIGTERM)
                connection.settimeout(PATIENCE_S)
                with contextlib.suppress(ConnectionError):
                    while connection.recv(1):  # until the helper closes the connection
                        pass


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"warm start: {error}")
