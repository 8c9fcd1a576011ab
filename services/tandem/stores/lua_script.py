"""Call Lua scripts on a Redis server by their hash. All keys of one call must share a hash slot."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from tandem.stores.redis_client import Client

Argument = str | bytes | int


class Script:
    """Callable Lua script. If the server does not have it (after a restart or failover), the call sends its text."""

    def __init__(self, client: Client, text: str) -> None:
        self._client = client
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        try:
            return await self._send("EVALSHA", self.sha, keys, args)
        except NoScriptError:
            return await self._send("EVAL", self.text, keys, args)

    def _send(self, command: str, script: str, keys: Sequence[str], args: Sequence[Argument]) -> Awaitable[Any]:
        return self._client.execute_command(command, script, len(keys), *keys, *args)


def read_script(name: str) -> str:
    return (files("tandem.stores") / "lua" / f"{name}.lua").read_text()
