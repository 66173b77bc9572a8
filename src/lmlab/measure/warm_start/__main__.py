"""`python -m lmlab.measure.warm_start [--stop]`: list this user's helpers, or stop them.

There is one for each interpreter, environment and control group that needed one. A job that is
running goes on to its end.
"""

import os
import signal
import sys

from lmlab.measure.warm_start.socket_path import connect, peer, private_directory

for path in sorted(private_directory().glob("*.sock")):
    if connection := connect(path):
        print(f"helper {peer(connection)} at {path}")
        if sys.argv[1:] == ["--stop"]:
            path.unlink()  # first, so that new clients start another helper
            os.kill(peer(connection), signal.SIGTERM)
