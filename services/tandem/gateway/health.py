"""Answers whether this process lives and whether it can serve; never decides either."""

from __future__ import annotations

import msgspec

from tandem.gateway.asgi import Exchange
from tandem.gateway.ports import Dispatch, Doorkeeper


class Health:
    """`/health` is for whoever restarts the process, `/ready` for whoever sends it traffic."""

    __slots__ = ("_dispatch", "_doorkeeper")

    def __init__(self, dispatch: Dispatch, doorkeeper: Doorkeeper) -> None:
        self._dispatch = dispatch
        self._doorkeeper = doorkeeper

    async def health(self, exchange: Exchange) -> None:
        await exchange.send_json(200, b'{"status":"ok"}')

    async def ready(self, exchange: Exchange) -> None:
        """503 with what is missing, until requests can be served. What is wrong and stops nobody is a warning."""
        missing, problem = self._dispatch.ready(), self._doorkeeper.problem()
        if missing is None:
            warning = {} if problem is None else {"warning": problem}
            await exchange.send_json(200, msgspec.json.encode({"status": "ready", **warning}))
        else:
            await exchange.send_json(503, msgspec.json.encode({"status": "not_ready", "reason": missing}))
