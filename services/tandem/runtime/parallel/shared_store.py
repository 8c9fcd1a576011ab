"""Let ranks exchange the addresses at which they connect, through channels that the caller has between them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

Publish = Callable[[str, bytes], None]
"""Function that passes an entry, key and value, on to the stores of all other ranks."""


class SharedStore(Store):
    """Store of torch.distributed for one rank in one process group: every entry that a rank sets is copied to the
    stores of all other ranks, so that all reads are local.

    `publish`: function that sends an entry of this rank to the others; it must be assigned before the store is used.
    The caller passes entries of other ranks to `receive`, on any thread. Methods of torch's store that change an entry
    depending on its value, such as `add`, are not supported.
    """

    publish: Publish

    def __init__(self) -> None:
        super().__init__()
        self._entries: Any = dist.HashStore()  # type: ignore[attr-defined]  # its stubs know no bytes

    def receive(self, key: str, value: bytes) -> None:
        """Store the entry `key` that another rank has set. May be called on any thread."""
        self._entries.set(key, value)

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self._entries.set(key, content)
        self.publish(key, content)

    def get(self, key: str) -> bytes:
        """Block until any rank has set the entry `key`, and return its value.

        Raises an error of torch if the store's timeout passes first."""
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
