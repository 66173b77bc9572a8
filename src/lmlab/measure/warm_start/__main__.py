"""List this user's helpers, or stop them; running jobs are not interrupted."""

import argparse
import os
import signal

from lmlab.measure.warm_start.socket_path import connect, peer, private_directory

parser = argparse.ArgumentParser(prog="python -m lmlab.measure.warm_start", description=__doc__)
parser.add_argument("--stop", action="store_true", help="stop the helpers")
stop = parser.parse_args().stop
for path in sorted(private_directory().glob("*.sock")):
    if connection := connect(path):
        pid, _user = peer(connection)
        print(f"helper {pid} at {path}")
        if stop:
            path.unlink()  # first, so that new clients start another helper
            os.kill(pid, signal.SIGTERM)
