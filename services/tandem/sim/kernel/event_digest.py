"""What one party of a simulation did and met, in its own order, as a digest; never keeps an entry."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

_TIME = struct.Struct("<d")
_STEP = struct.Struct("<dqqq")


class EventDigest:
    """Two chains of entries, what came and the steps that were taken, so that steps may be written down later than
    they ended. Each entry holds its time, so the two together say what was between which steps."""

    def __init__(self) -> None:
        self._came = hashlib.blake2b(digest_size=16)
        self._steps = hashlib.blake2b(digest_size=16)

    def note(self, time: float, label: str) -> None:
        """Something came or was decided."""
        self._came.update(_TIME.pack(time) + label.encode() + b"\n")

    def note_bytes(self, raw: bytes) -> None:
        """More about what was noted last."""
        self._came.update(raw)

    def step(self, time: float, number: int, num_tokens: int, num_free_blocks: int) -> None:
        """A step ended: what it computed and how many blocks were free after it."""
        self._steps.update(_STEP.pack(time, number, num_tokens, num_free_blocks))

    def digest(self) -> bytes:
        return self._came.digest() + self._steps.digest()


def combined(logs: Iterable[EventDigest]) -> str:
    """Of all of them, in this order."""
    whole = hashlib.blake2b(digest_size=16)
    for log in logs:
        whole.update(log.digest())
    return whole.hexdigest()
