"""What is remembered for a while after it was said, and then no more; never reads a clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ExpiringDict(Generic[K, V]):
    """Entries are kept for `memory_s` seconds of the caller's clock, which must not go back, and until a `forget`
    after that: its cost is that of what it forgets."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def put(self, key: K, value: V, now: float) -> None:
        """Remember from now on, for the whole time again."""
        self._entries[key] = (value, now + self._memory_s)
        self._entries.move_to_end(key)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[0]

    def forget(self, now: float) -> None:
        """Drop what is older."""
        while self._entries:
            key, (_, until) = next(iter(self._entries.items()))
            if until > now:
                return
            del self._entries[key]

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
