"""Serve the console: its page, the page's assets and the state that it shows.

Its exchanges do not count as requests in metrics, and it keeps no text of prompts or outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tandem.core.clock import Clock
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.console.assets import GUARDS, PAGE, load_assets
from tandem.gateway.console.history import ConsoleState
from tandem.gateway.console.view import GatewaySnapshot, view
from tandem.gateway.context.interfaces import Authenticator
from tandem.gateway.http.exchange import Exchange
from tandem.gateway.http.routes import Route
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.gateway.tenants.authenticator import api_key_from_headers

PATH = "/console"
_ASSETS = PATH + "/"
_MAX_QUERY = 256


class Console:
    """RequestObserver that shows its history on a page. `snapshot` returns the current state of the gateway."""

    __slots__ = ("_assets", "_authenticator", "_clock", "_snapshot", "_state")

    def __init__(self, snapshot: Callable[[], GatewaySnapshot], authenticator: Authenticator, clock: Clock) -> None:
        self._snapshot = snapshot
        self._authenticator = authenticator
        self._clock = clock
        self._state = ConsoleState()
        self._assets = load_assets()

    def answered(self, records: Sequence[RequestRecord]) -> None:
        self._state.add(records, self._clock.now())

    def routes(self) -> list[Route]:
        """List the routes. Only the state needs an API key; the page and its assets hold no data."""
        return [
            Route(method="GET", path=PATH, handler=self._show_page, summary="Console page"),
            Route(method="GET", path=_ASSETS, handler=self._redirect, summary="Console page (redirect)"),
            Route(method="GET", path=_ASSETS + "state", handler=self._show_state, summary="State for the console"),
            Route(method="GET", path=_ASSETS + "{file}", handler=self._show_file, summary="Asset of the console"),
        ]

    async def _show_page(self, exchange: Exchange) -> None:
        await self._send(exchange, PAGE)

    async def _redirect(self, exchange: Exchange) -> None:
        """Redirect `/console/` to `/console`, because the page's relative links would not resolve there."""
        exchange.is_counted = False
        await exchange.start(308, [(b"location", b"../console"), (b"content-length", b"0")])
        await exchange.write(b"", more=False)

    async def _show_file(self, exchange: Exchange) -> None:
        name = str(exchange.scope["path"]).removeprefix(_ASSETS)
        if name == PAGE or name not in self._assets:
            raise TandemError(ErrorKind.NOT_FOUND, f"there is nothing at {exchange.scope['path']}")
        await self._send(exchange, name)

    async def _send(self, exchange: Exchange, name: str) -> None:
        exchange.is_counted = False
        asset = self._assets[name]
        if asset.is_known(exchange.header(b"if-none-match")):
            await exchange.start(304, asset.headers)
            await exchange.write(b"", more=False)
            return
        length = (b"content-length", str(len(asset.content)).encode())
        await exchange.start(200, [(b"content-type", asset.kind), length, *asset.headers])
        await exchange.write(asset.content, more=False)

    async def _show_state(self, exchange: Exchange) -> None:
        exchange.is_counted = False
        authorization, x_api_key = (
            None if (given := exchange.header(name)) is None else given.decode("latin-1")
            for name in (b"authorization", b"x-api-key")
        )
        viewer = self._authenticator.identify(api_key_from_headers(authorization, x_api_key))
        snapshot = self._snapshot()
        body = msgspec.json.encode(view(snapshot, self._state, viewer, _since(exchange, snapshot.life)))
        await exchange.send_json(200, body, [(b"cache-control", b"no-store"), *GUARDS])


def _since(exchange: Exchange, life: str) -> int:
    """Return the number of the last request that the client knows, from the query `?life=...&since=N`. It is 0, so that
    everything is sent, where the query has none or names another life of the gateway. Raises INVALID_REQUEST for a
    `since` that is no such number."""
    query = bytes(exchange.scope.get("query_string", b""))[:_MAX_QUERY].decode("latin-1")
    given = dict(part.partition("=")[::2] for part in query.split("&"))
    since = given.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) <= 18):
        raise TandemError(ErrorKind.INVALID_REQUEST, "since must be a number from 0 on", param="since")
    return int(since) if given.get("life") == life else 0
