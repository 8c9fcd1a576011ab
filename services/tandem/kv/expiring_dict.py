"""Keep values by key for a fixed time, on the caller's clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ExpiringDict(Generic[K, V]):
    """Map keys to values that expire `memory_s` seconds after they were put, by the caller's clock.

    An expired entry stays readable until the next `forget`. The clock must not go back. The cost of a `forget` is
    proportional to the number of entries that it drops.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def put(self, key: K, value: V, now: float) -> None:
        """Store `value` under `key` at time `now` in seconds; replacing an entry starts its lifetime of `memory_s`
        again."""
        self._entries[key] = (value, now + self._memory_s)
        self._entries.move_to_end(key)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[0]

    def forget(self, now: float) -> None:
        """Drop the entries whose lifetime has ended at time `now`."""
        while self._entries:
            key, (_, expires_at) = next(iter(self._entries.items()))
            if expires_at > now:
                return
            del self._entries[key]

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
