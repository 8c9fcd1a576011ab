"""Answers whether this process lives and whether it can serve; never decides either."""

from __future__ import annotations

import msgspec

from tandem.gateway.asgi import Exchange
from tandem.gateway.ports import Dispatch


class Health:
    """`/health` is for whoever restarts the process, `/ready` for whoever sends it traffic."""

    __slots__ = ("_dispatch",)

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    async def health(self, exchange: Exchange) -> None:
        await exchange.send_json(200, b'{"status":"ok"}')

    async def ready(self, exchange: Exchange) -> None:
        """503 with what is missing, until requests can be served."""
        missing = self._dispatch.ready()
        if missing is None:
            await exchange.send_json(200, b'{"status":"ready"}')
        else:
            await exchange.send_json(503, msgspec.json.encode({"status": "not_ready", "reason": missing}))
