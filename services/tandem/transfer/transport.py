"""What the carrier needs of a transport beyond the engine's port; owns no implementation."""

from __future__ import annotations

from typing import Protocol

from tandem.engine.ports import KVTransport
from tandem.transfer.memory_pool import MemoryPool


class Transport(KVTransport, Protocol):
    """A KVTransport that keeps more promises.

    `disconnect` may be called again until it returns True: while a read's end is unproven, the peer lingers, can not
    be posted to, and its reads go on being progressed. `poll` raises PeerError when a read ended badly without proof
    that it touches our memory no more. After `close` returns, nothing of the transport touches our memory.
    """

    @property
    def pool(self) -> MemoryPool:
        """Where reads end: all blocks, and of each the heads of this rank."""
        ...

    def enter_thread(self) -> None:
        """The first call of the thread that uses the transport from then on, which may be another than made it."""
        ...

    def post_self_test(self) -> int:
        """Start to move a few bytes of the transport's own memory, never of the pool, through itself.

        The handle is polled like a read's; FAILED when the bytes did not arrive intact. Raises PeerError.
        """
        ...
