"""Python imports this first: whatever a process asks of another host is written to a file.

It sees Python's own sockets. Ranks of torch connect in C++, to the address that they are given.
"""

import ipaddress
import os
import socket
import sys

HERE = {None, "", "localhost", socket.gethostname()}


def _is_here(host: object) -> bool:
    try:
        return host in HERE or ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def _watch(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if not _is_here(host):
        with open(os.environ["LMLAB_NETWORK_LOG"], "a") as log:
            print(event, host, sys.argv, file=log)


if "LMLAB_NETWORK_LOG" in os.environ:
    sys.addaudithook(_watch)
