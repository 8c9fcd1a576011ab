"""Write the head of a response together with the first part of its body."""

from __future__ import annotations

import weakref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class HeadJoiner:
    """Replace `cycle.transport` until the body of a response begins: keep the head, and write it together with the
    first part of the body, which may be empty.

    `cycle`: uvicorn's object for one request and its response. Uvicorn writes a head at once, which costs a system
    call, a packet and a wake-up of the client. Not for the method HEAD: uvicorn writes nothing for such a body, so the
    head would never be written."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.proxy(cycle)  # the cycle refers to this object
        self._transport = cycle.transport
        self._head = b""

    def write(self, part: bytes) -> None:
        if not self._cycle.response_started:  # "100 Continue"
            self._transport.write(part)
        elif not self._head:
            self._head = part
        else:
            self._cycle.transport = self._transport
            if part:  # asyncio's own transport of Python 3.12 spins over an empty part
                self._transport.writelines((self._head, part))
            else:
                self._transport.write(self._head)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
