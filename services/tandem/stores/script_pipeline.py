"""Many calls of one Lua script over one connection; never knows what the script does.

All calls that wait go in one pipeline, and the next one leaves when its answers are here. So a thousand requests that
come at once cost a round trip or two and one connection, not a thousand, and calls run in the order in which they were
made, also those that nobody waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError, RedisError

from tandem.stores.lua_script import Argument, Script
from tandem.stores.redis_client import Client

MAX_CALLS = 256
"""In one pipeline: some milliseconds of the server's time, in which it answers nobody else's long wait."""
log = logging.getLogger(__name__)


class StoreUnavailable(Exception):
    """Redis does not answer, or refuses; whether the call was carried out is unknown."""


class _Call(NamedTuple):
    keys: Sequence[str]
    arguments: Sequence[Argument]
    answer: asyncio.Future[Any]


class ScriptPipeline:
    """Owns `redis` and closes it. No call waits longer than a command of `redis` may: what stands in line behind calls
    that got no answer has none either."""

    def __init__(self, redis: Client, script: str) -> None:
        self._redis = redis
        self._script = Script(redis, script)
        self._waiting: list[_Call] = []
        self._sender: asyncio.Task[None] | None = None

    def call(self, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """The script's answer to be, or StoreUnavailable. The call is made even if nobody waits for it any more."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(keys, arguments, answer))
        if self._sender is None:
            # For all who call, so without the context of the first.
            self._sender = asyncio.create_task(self._send(), context=Context())
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
                try:
                    answers = await self._answers(calls)
                except Exception as error:
                    # Whatever it is: those who wait are told, or they would wait for ever.
                    if not isinstance(error, RedisError | OSError):
                        log.exception("calls of a script failed")
                    calls, self._waiting = calls + self._waiting, []
                    answers = [error] * len(calls)
                for call, answer in zip(calls, answers, strict=True):
                    _tell(call.answer, answer)
        finally:
            self._sender = None

    async def _answers(self, calls: Sequence[_Call]) -> list[Any]:
        """One for each call; an exception where there is none."""
        async with self._redis.command_scope("EVALSHA") as told:
            answers = await self._round_trip("EVALSHA", self._script.sha, calls)
            unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if unknown:
                # A server that is new here, or was started again. What it has not run may be run now.
                again = await self._round_trip("EVAL", self._script.text, [calls[index] for index in unknown])
                for index, answer in zip(unknown, again, strict=True):
                    answers[index] = answer
            told += answers
        return told

    async def _round_trip(self, command: str, script: str, calls: Sequence[_Call]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(command, script, len(call.keys), *call.keys, *call.arguments)
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
