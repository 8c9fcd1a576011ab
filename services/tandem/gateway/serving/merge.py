"""Several streams of parts as one, in the order in which parts come; never looks into a part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

_MAX_WAITING = 64
"""Parts that nobody has taken yet; the streams wait when there are more."""


async def merge_streams(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Ends when all sources have. The first error of one is raised, and then, as when this is left early, all are
    closed."""
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
