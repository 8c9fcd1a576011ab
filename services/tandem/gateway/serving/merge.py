"""Merge several streams of parts into one, in the order in which the parts arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

_MAX_WAITING = 64
"""Parts that wait to be read; the sources wait when there are more."""


async def merge_streams(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all generators in the order in which they arrive, until all have ended.

    Raises the first error of a generator. All generators are closed when that happens, and when the caller closes this
    one."""
    waiting: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(_MAX_WAITING)

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for part in source:
                    await waiting.put((part,))
        except Exception as error:
            await waiting.put(error)
        else:
            await waiting.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await waiting.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
