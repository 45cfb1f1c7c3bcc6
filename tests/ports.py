"""Ports of this machine that no other program uses."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

BELOW_OUTGOING = range(10_000, 32_000)  # the system gives outgoing connections and listeners on port 0 higher ones


def free_port(*offsets: int) -> int:
    """A port for a program that listens where its arguments say; those at ``offsets`` from it are free as well.

    The system does not give it away until the program has started, as it does with a port that was closed.
    """
    while True:
        port = random.choice(BELOW_OUTGOING)
        with ExitStack() as stack:
            try:
                for offset in (0, *offsets):
                    stack.enter_context(socket.create_server(("", port + offset)))
            except OSError:  # in use
                continue
        return port


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections, and that no one can open meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])
