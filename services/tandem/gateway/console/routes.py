"""Serve the console: its page, the page's assets and the state that the page shows.

Requests for the console do not count in metrics, and the console keeps no text of prompts or outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from starlette.responses import Response

from tandem.core.clock import Clock
from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.gateway.console.history import ConsoleState
from tandem.gateway.console.view import GatewaySnapshot, view
from tandem.gateway.context.interfaces import Authenticator
from tandem.gateway.http.exchange import Exchange, json_response
from tandem.gateway.http.page_headers import page_headers
from tandem.gateway.http.routes import Operation
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.gateway.tenants.authenticator import api_keys

PATH = "/console"
_ASSETS = PATH + "/"
PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """Hold one file of the console for HTTP responses. `content`: its bytes. `kind`: its media type. `tag`: its ETag
    (RFC 9110, 8.8.3), including the quotes."""

    content: bytes
    kind: str
    tag: str

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of a response with this file, except for `content-type`."""
        return {"etag": self.tag, "cache-control": "no-cache", **page_headers()}

    def is_known(self, if_none_match: str) -> bool:
        """Return whether the browser has this version of the file already, so that the response is 304.

        `if_none_match`: the request's header If-None-Match, empty where it is absent. It must list `tag`, compared
        weakly (RFC 9110, 13.1.2), or be `*`."""
        tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
        return self.tag in tags or tags == ["*"]


def load_assets() -> Mapping[str, Asset]:
    """Read all assets from the package and return them by file name."""
    folder = resources.files("tandem.gateway") / "console"
    found: dict[str, Asset] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


class Console:
    """Serve the console over HTTP, and keep the records of ended requests that it shows, as a RequestObserver.

    `snapshot`: function that returns the current state of the gateway. `authenticator`: finds the tenant that views the
    console. `clock`: the gateway's clock.
    """

    def __init__(self, snapshot: Callable[[], GatewaySnapshot], authenticator: Authenticator, clock: Clock) -> None:
        self._snapshot = snapshot
        self._authenticator = authenticator
        self._clock = clock
        self._state = ConsoleState()
        self._assets = load_assets()

    def answered(self, record: RequestRecord) -> None:
        """Add the record of a request that has ended to the history."""
        self._state.add(record, self._clock.now())

    @Operation("GET", PATH, "Console page")
    async def _show_page(self, exchange: Exchange) -> Response:
        return self._asset(exchange, PAGE)

    @Operation("GET", "/", "Console page (redirect)")
    async def _redirect_root(self, exchange: Exchange) -> Response:
        """Redirect `/`, the path that browsers open first, to the console page."""
        exchange.is_counted = False
        return Response(b"", 307, {"location": "console"})

    @Operation("GET", _ASSETS, "Console page (redirect)")
    async def _redirect(self, exchange: Exchange) -> Response:
        """Redirect `/console/` to `/console`, because the page's relative links would not resolve there."""
        exchange.is_counted = False
        return Response(b"", 308, {"location": "../console"})

    @Operation("GET", _ASSETS + "state", "State for the console")
    async def _show_state(self, exchange: Exchange) -> Response:
        """Send the state as JSON. It is the only part of the console that requires an API key, because the page and its
        assets hold no data."""
        exchange.is_counted = False
        viewer = self._authenticator.identify(api_keys(exchange.header_items))
        snapshot = self._snapshot()
        state = view(snapshot, self._state, viewer, _since(exchange, snapshot.life))
        return json_response(state, headers={"cache-control": "no-store", **page_headers()})

    @Operation("GET", _ASSETS + "{file:path}", "Asset of the console")
    async def _show_file(self, exchange: Exchange) -> Response:
        name = exchange.path_params["file"]
        if name == PAGE or name not in self._assets:
            raise TandemError(
                ErrorKind.NOT_FOUND, f"the console has no page {exchange.scope['path']}; it begins at /console"
            )
        return self._asset(exchange, name)

    def _asset(self, exchange: Exchange, name: str) -> Response:
        exchange.is_counted = False
        asset = self._assets[name]
        if asset.is_known(exchange.fields.get("if-none-match", "")):
            return Response(b"", 304, asset.headers)
        return Response(asset.content, headers={"content-type": asset.kind, **asset.headers})


def _since(exchange: Exchange, life: str) -> int:
    """Return N of the query `?life=...&since=N`, the number of the last ended request that the client knows.

    Returns 0, so that everything is sent, where the query has no `since`, or where its `life` is another one than the
    `life` of this run of the gateway. Raises INVALID_REQUEST for a `since` that is no whole number."""
    given = exchange.query_params
    since = given.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) <= 18):
        raise invalid_request("since must be a number from 0 on", "since")
    return int(since) if given.get("life") == life else 0
