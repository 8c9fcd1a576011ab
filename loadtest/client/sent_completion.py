"""Send one completion at once and keep what arrives, with what Tandem says of it."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from loadtest.client.client import Answer, Refused, SseParser
from tandem.core.clock import wall_ns

MAX_TOKEN = 250
"""Prompts of `random_body` consist of token ids below, which every model has."""


def random_body(num_prompt: int, seed: int, num_output: int) -> dict[str, Any]:
    """Return the body of a greedy completion, without its model: a prompt of random tokens, and `num_output` tokens of
    output that are streamed with their ids."""
    draw = random.Random(seed)
    return {
        "prompt": [draw.randrange(3, MAX_TOKEN) for _ in range(num_prompt)],
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


class Facts(msgspec.Struct, frozen=True):
    """Hold the field `tandem` of the last chunk of a stream; fields that are not listed are ignored."""

    attempts: int = 1
    path: str = ""
    preemptions: int = 0
    paused_ms: float = 0.0


class _Chunk(msgspec.Struct):
    tandem: Facts | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class SentCompletion:
    """Send one request at once and keep what arrives. `task` ends with the answer, and raises Refused where
    that is not complete. Times are seconds since the epoch. `facts`: those of the last chunk that had any."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.trace = secrets.token_hex(16)
        self.answer = Answer()
        self.facts = Facts()
        self.sent_at = wall_ns() / 1e9
        self._num_requested: int = body["max_tokens"]
        own = {"traceparent": f"00-{self.trace}-{secrets.token_hex(8)}-01", "content-type": "application/json"}
        request = session.post(url, data=msgspec.json.encode(body), headers=own | dict(headers))
        self.task = asyncio.create_task(self._run(request))

    @property
    def ttft_s(self) -> float:
        """Return the seconds from the request to its first token."""
        return self.answer.stamps_s[0] - self.sent_at

    async def _run(self, request: Any) -> None:
        parser = SseParser()
        async with request as response:
            if response.status != 200:
                raise Refused(await response.text(), response.status)
            async for data in response.content.iter_any():
                now = wall_ns() / 1e9
                for event in parser.feed(data):
                    self.answer.take(event, now)
                    facts = None if event == b"[DONE]" else _CHUNK.decode(event).tandem
                    self.facts = facts or self.facts
        _, problem = self.answer.problem(self._num_requested)
        if problem:
            raise Refused(f"the answer is incomplete: {problem}")
