"""Finds ports for servers that must know theirs before they listen; never listens."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below those that kernels give to clients: one of these could take a port before its server listens, or while that is
stopped."""
_next = itertools.count(os.getpid() * 32)


def free_port() -> int:
    """One on which nobody listens, and that this process and others of one test run have not given out before."""
    for number in itertools.islice(_next, NUM_PORTS):
        port = FIRST_PORT + number % NUM_PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("every port is taken")
