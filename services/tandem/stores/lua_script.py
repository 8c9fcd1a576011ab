"""Call Lua scripts on a Redis server by their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from tandem.stores.redis_client import RedisClient

Argument = str | bytes | int


class Script:
    """Run one of the Lua scripts in `lua/` on the Redis server: awaiting a call returns the script's reply.

    `client`: the client that sends the calls. `name`: file name of the script without `.lua`. A call sends the script's
    hash; where the server does not know it, as after a restart, the call then sends the text. All `keys` of one call
    must be in one hash slot. Calls raise StoreUnavailable.
    """

    def __init__(self, client: RedisClient, name: str) -> None:
        self._client = client
        self.text = (files("tandem.stores") / "lua" / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        redis = self._client.redis
        async with self._client.command_scope("EVALSHA"):
            try:
                return await redis.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
            except NoScriptError:
                return await redis.execute_command("EVAL", self.text, len(keys), *keys, *args)
