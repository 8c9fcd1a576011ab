"""Share the entries by which ranks find each other, over channels that the caller has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

Publish = Callable[[str, bytes], None]
"""Function that passes an entry, key and value, on to the stores of all other ranks."""


class SharedStore(Store):
    """Store of one rank, with which it joins one process group: what a rank sets is published to the stores of the
    others, so that all reads are local.

    `publish` passes on what this rank sets; it must be assigned before the store is used. Entries of others come in by
    `receive`, on any thread. Only `set` changes entries, since a change that depends on their state would need one
    owner.
    """

    publish: Publish

    def __init__(self) -> None:
        super().__init__()
        self._entries: Any = dist.HashStore()  # type: ignore[attr-defined]  # its stubs know no bytes

    def receive(self, key: str, value: bytes) -> None:
        """Take over an entry that another rank has set."""
        self._entries.set(key, value)

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self._entries.set(key, content)
        self.publish(key, content)

    def get(self, key: str) -> bytes:
        """Wait for an entry and return its value. Raises an error of torch when it is not set in time."""
        found: bytes = self._entries.get(key)
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._entries.wait(keys, *([] if timeout is None else [timeout]))

    def check(self, keys: list[str]) -> bool:
        return bool(self._entries.check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        self._entries.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False
