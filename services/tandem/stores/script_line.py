"""Many calls of one Lua script over one connection; never knows what the script does.

All calls that wait go in one pipeline, and the next one leaves when its answers are here. So a thousand requests that
come at once cost a round trip or two and one connection, not a thousand, and calls run in the order in which they were
made, also those that nobody waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

MAX_CALLS = 256
"""In one pipeline: some milliseconds of the server's time, in which it answers nobody else's long wait."""
log = logging.getLogger(__name__)
Argument = str | bytes | int


class StoreUnavailable(Exception):
    """Redis does not answer, or refuses; whether the call was carried out is unknown."""


class _Call(NamedTuple):
    keys: Sequence[str]
    arguments: Sequence[Argument]
    answer: asyncio.Future[Any]


class ScriptLine:
    """Owns `redis` and closes it."""

    def __init__(self, redis: Redis, script: str) -> None:
        self._redis = redis
        self._script = script
        self._sha: str | None = None
        self._waiting: list[_Call] = []
        self._sender: asyncio.Task[None] | None = None

    def call(self, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """The script's answer to be, or StoreUnavailable. The call is made even if nobody waits for it any more."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(keys, arguments, answer))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())
        return answer

    async def close(self) -> None:
        """Wait for the calls that were made, then close the connection."""
        if self._sender is not None:
            await asyncio.wait({self._sender})
        await self._redis.aclose()

    async def _send(self) -> None:
        try:
            while self._waiting:
                calls, self._waiting = self._waiting[:MAX_CALLS], self._waiting[MAX_CALLS:]
                for call, answer in zip(calls, await self._answers(calls), strict=True):
                    _tell(call.answer, answer)
        finally:
            self._sender = None

    async def _answers(self, calls: Sequence[_Call]) -> list[Any]:
        """One for each call; an exception where there is none."""
        try:
            answers = await self._round_trip(calls)
            unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if unknown:
                # A server that is new here, or was started again. What it has not run may be run now.
                self._sha = None
                again = await self._round_trip([calls[index] for index in unknown])
                for index, answer in zip(unknown, again, strict=True):
                    answers[index] = answer
        except Exception as error:
            # Whatever it is: those who wait are told, or they would wait for ever.
            if not isinstance(error, RedisError | OSError):
                log.exception("calls of a script failed")
            answers = [error] * len(calls)
        return answers

    async def _round_trip(self, calls: Sequence[_Call]) -> list[Any]:
        if self._sha is None:
            self._sha = str(await self._redis.script_load(self._script))
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command("EVALSHA", self._sha, len(call.keys), *call.keys, *call.arguments)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        return answers


def _tell(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():
        return
    if isinstance(answer, Exception):
        error = StoreUnavailable(f"{type(answer).__name__}: {answer}")
        error.__cause__ = answer
        waiting.set_exception(error)
    else:
        waiting.set_result(answer)
