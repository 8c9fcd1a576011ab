"""Call Lua scripts on a Redis server by their hash: one call at a time (`Script`), or many in a pipeline
(`ScriptPipeline`)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from contextvars import Context
from importlib.resources import files
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from tandem.stores.redis_client import RedisClient, StoreUnavailable

Argument = str | bytes | int
MAX_CALLS = 256
"""Largest number of calls in one pipeline: a few milliseconds of the server's time, so that other clients are not
delayed for long."""
log = logging.getLogger(__name__)


class Script:
    """Run one of the Lua scripts in `lua/` on the Redis server: awaiting a call returns the script's reply.

    `client`: the client that sends the calls. `name`: file name of the script without `.lua`. A call sends the script's
    hash; where the server does not know it, as after a restart, the call then sends the text. All `keys` of one call
    must be in one hash slot. Each script counts as a command of its own in the client's `RedisHealth`. Calls raise
    StoreUnavailable.
    """

    def __init__(self, client: RedisClient, name: str) -> None:
        self._client = client
        self._command = f"EVALSHA {name}"
        self.text = (files("tandem.stores") / "lua" / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        redis = self._client.redis
        async with self._client.command_scope(self._command):
            try:
                return await redis.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
            except NoScriptError:
                return await redis.execute_command("EVAL", self.text, len(keys), *keys, *args)


class _Call(NamedTuple):
    keys: Sequence[str]
    arguments: Sequence[Argument]
    answer: asyncio.Future[Any]


class ScriptPipeline:
    """Send concurrent calls of one Lua script over one connection, many in a pipeline, in the order in which they were
    made, including calls whose result nobody awaits.

    All waiting calls are sent in one pipeline; the next pipeline is sent when its replies have arrived. So a thousand
    simultaneous requests cost one connection and a few round trips, not a thousand.

    `redis`: the client to use, which the pipeline owns and closes in `close`. `script`: name of the script in `lua/`. A
    failed pipeline also fails all calls that wait behind it, so no call waits longer than one command may take.
    """

    def __init__(self, redis: RedisClient, script: str) -> None:
        self._redis = redis
        self._name = script
        self._script = Script(redis, script)
        self._waiting: list[_Call] = []
        self._sender: asyncio.Task[None] | None = None

    def call(self, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """Enqueue a call and return a future of its reply, which raises StoreUnavailable where there is none.

        The call is sent even if the future is cancelled. All `keys` must be in one hash slot.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(keys, arguments, answer))
        if self._sender is None:
            # The task serves all callers, so it must not inherit the context of the first.
            self._sender = asyncio.create_task(self._send(), context=Context())
        return answer

    async def close(self) -> None:
        """Wait until all enqueued calls were answered or have failed, then close the connection."""
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
                    # Fail the waiting calls at any exception: they would wait for ever otherwise.
                    if not isinstance(error, StoreUnavailable):
                        log.exception("%d calls of the Redis script %s failed", len(calls), self._name)
                        error = StoreUnavailable(f"{type(error).__name__}: {error}")
                    calls, self._waiting = calls + self._waiting, []
                    answers = [error] * len(calls)
                for call, answer in zip(calls, answers, strict=True):
                    _resolve(call.answer, answer)
        finally:
            self._sender = None

    async def _answers(self, calls: Sequence[_Call]) -> list[Any]:
        """Return one reply for each call, or a StoreUnavailable in its place."""
        async with self._redis.command_scope("EVALSHA") as replies:
            answers = await self._round_trip("EVALSHA", self._script.sha, calls)
            unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if unknown:
                # The server has lost its scripts in a restart or failover. It has not executed these calls: resend
                # them.
                again = await self._round_trip("EVAL", self._script.text, [calls[index] for index in unknown])
                for index, answer in zip(unknown, again, strict=True):
                    answers[index] = answer
            replies += answers
        return replies

    async def _round_trip(self, command: str, script: str, calls: Sequence[_Call]) -> list[Any]:
        async with self._redis.redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(command, script, len(call.keys), *call.keys, *call.arguments)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        return answers


def _resolve(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():
        return
    if isinstance(answer, StoreUnavailable):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)
