"""Digest of the events and steps of one actor of a simulation, in the actor's own order."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

_TIME = struct.Struct("<d")
_STEP = struct.Struct("<dqqq")


class EventDigest:
    """Own two hash chains of one actor: its events and its steps.

    There are two chains because a step may be recorded later than it ended (see `cluster.lookahead`). Each entry
    contains its time, so the two chains together determine which events happened between which steps. No entry is
    kept."""

    def __init__(self) -> None:
        self._entries = hashlib.blake2b(digest_size=16)
        self._steps = hashlib.blake2b(digest_size=16)

    def note(self, time: float, label: str) -> None:
        """Add an event that arrived at the actor, or a decision of the actor, to the event chain."""
        self._entries.update(_TIME.pack(time) + label.encode() + b"\n")

    def note_bytes(self, raw: bytes) -> None:
        """Add details of the entry that was noted last."""
        self._entries.update(raw)

    def step(self, time: float, number: int, num_tokens: int, num_free_blocks: int) -> None:
        """Add a step that ended at `time`: its number, the tokens that it computed and the blocks free after it."""
        self._steps.update(_STEP.pack(time, number, num_tokens, num_free_blocks))

    def digest(self) -> bytes:
        return self._entries.digest() + self._steps.digest()


def combined(logs: Iterable[EventDigest]) -> str:
    """Return the hex digest over the digests of all logs, in this order."""
    whole = hashlib.blake2b(digest_size=16)
    for log in logs:
        whole.update(log.digest())
    return whole.hexdigest()
