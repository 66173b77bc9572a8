"""What client and helper say to each other: JSON with its length in front, on a unix socket.

The client's three standard streams travel as file descriptors beside the first bytes of its
request, so a job writes straight into the client's pipe or terminal and nobody copies anything. A
text of the environment that is not UTF-8 survives: Python keeps such bytes as lone surrogates and
JSON writes those as escapes.
"""

import dataclasses
import json
import os
import signal
import socket
import struct
from typing import Any, Self

_LENGTH = struct.Struct("!I")
_CHUNK = 65_536
_MOST_DESCRIPTORS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a module's main, with everything that a process inherits from its parent."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    umask: int
    ignored_signals: list[int]
    """Signals that the client was told to ignore (nohup, a shell's background job)."""

    @classmethod
    def of_this_process(cls, module: str, arguments: list[str]) -> Self:
        """The job as this process would start it: its folder, environment and signals."""
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(
            module=module,
            arguments=list(arguments),
            environment=dict(os.environ),
            directory=os.getcwd(),
            umask=umask,
            ignored_signals=_ignored_signals(),
        )


def _ignored_signals() -> list[int]:
    # Python itself ignores these two in every process, and starts its children without that.
    own = {signal.SIGPIPE, signal.SIGXFSZ}
    candidates = signal.valid_signals() - own
    return sorted(int(s) for s in candidates if signal.getsignal(s) is signal.SIG_IGN)


def send(
    connection: socket.socket, message: dict[str, Any], streams: list[int] | None = None
) -> None:
    """Send one message, and with it the file descriptors given."""
    body = json.dumps(message).encode("ascii")
    head = _LENGTH.pack(len(body))
    if streams:
        socket.send_fds(connection, [head], streams)
        connection.sendall(body)
    else:
        connection.sendall(head + body)


class Inbox:
    """Puts messages together from what a connection delivers piece by piece."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = bytearray()
        self.streams: list[int] = []
        self.ended = False

    def receive(self) -> None:
        """Take what is there, once; `ended` tells that the other side is gone."""
        try:
            data, streams, _, _ = socket.recv_fds(
                self._connection, _CHUNK, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            data, streams = b"", []
        self.streams.extend(streams)
        self._bytes.extend(data)
        self.ended = not data

    def drain(self) -> None:
        """Take all that is there now, on a connection that does not block."""
        try:
            while not self.ended:
                self.receive()
        except BlockingIOError:
            return

    def next_message(self) -> dict[str, Any] | None:
        """The next whole message among the bytes received so far."""
        if len(self._bytes) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        message: dict[str, Any] = json.loads(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return message

    def wait(self) -> dict[str, Any] | None:
        """Block for the next message; None when the other side is gone without one."""
        while (message := self.next_message()) is None:
            if self.ended:
                return None
            self.receive()
        return message

    def close_streams(self) -> None:
        """Give up the descriptors received, so that nobody waits for their end because of us."""
        while self.streams:
            os.close(self.streams.pop())
