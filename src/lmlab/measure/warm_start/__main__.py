"""`python -m lmlab.measure.warm_start [--stop]`: list this user's helpers, or stop them.

Running jobs are not interrupted.
"""

import os
import signal
import socket
import struct
import sys

from lmlab.measure.warm_start.socket_path import connect, private_directory

for path in sorted(private_directory().glob("*.sock")):
    if connection := connect(path):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _user, _group = struct.unpack("3i", credentials)
        print(f"helper {pid} at {path}")
        if sys.argv[1:] == ["--stop"]:
            path.unlink()  # first, so that new clients start another helper
            os.kill(pid, signal.SIGTERM)
