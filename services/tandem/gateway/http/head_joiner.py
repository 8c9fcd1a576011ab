"""Write the head of a response together with the first part of its body."""

from __future__ import annotations

import weakref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class HeadJoiner:
    """Stand in for the transport of one response, as uvicorn's cycle uses it, until the body begins.

    Uvicorn writes a head at once, which costs a system call, a packet and a wake-up of the client. ASGI lets a server
    wait for the first part of the body. A response to HEAD has no such part and must not be joined."""

    __slots__ = ("_cycle", "_head", "_transport", "is_closing")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.proxy(cycle)
        self._transport = cycle.transport
        self._head = b""
        self.is_closing = cycle.transport.is_closing

    def write(self, part: bytes) -> None:
        if not self._cycle.response_started:  # "100 Continue"
            self._transport.write(part)
        elif not self._head:
            self._head = part
        else:
            self._end(part)

    def close(self) -> None:
        self._end(b"")
        self._transport.close()

    def _end(self, part: bytes) -> None:
        self._cycle.transport = self._transport
        self._transport.writelines((self._head, part))
