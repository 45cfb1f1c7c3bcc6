"""Tells connections of other users of this machine apart, whom a loopback address does not keep out.

It is sent along to hosts: the standard library only.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # a program that uses IPv6 sockets for everything is in the second


def may_connect(connection: Any) -> bool:
    """Whether the other end of ``connection``, a TCP socket over IPv4 loopback, is a process of this user or of root.

    True on systems that do not tell (without /proc/net). False for a connection that its other end has closed already,
    where the system does not tell any more whose it was.
    """
    if not os.path.exists(TABLES[0]):
        return True
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return False
    return any(owner in {os.geteuid(), 0} for owner in _owners(_address(*there), _address(*here)))


def _owners(local: str, remote: str) -> Iterator[int]:
    """The user of each socket between two addresses. One that no process has, and so no inode, may only seem root's."""
    for table in TABLES:
        if os.path.exists(table):
            with open(table, encoding="ascii") as lines:
                for line in lines:
                    fields = line.split()
                    if fields[1].endswith(local) and fields[2].endswith(remote) and fields[7:10:2] != ["0", "0"]:
                        yield int(fields[7])


def _address(host: str, port: int) -> str:
    """As the tables write it: the bytes of the address as a number of this machine. IPv6 has others before them."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
