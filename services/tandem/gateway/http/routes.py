"""Describe one route: its handler, and the types and errors by which openapi.json documents it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from tandem.core.errors import ErrorKind
from tandem.gateway.http.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]

OF_EVERY_REQUEST = (ErrorKind.INVALID_REQUEST, ErrorKind.UNAUTHENTICATED, ErrorKind.DRAINING, ErrorKind.INTERNAL)
OF_BODIES = (*OF_EVERY_REQUEST, ErrorKind.BODY_TOO_LARGE, ErrorKind.MODEL_NOT_FOUND, ErrorKind.NO_WORKER)
OF_COMPLETIONS = tuple(kind for kind in ErrorKind if kind is not ErrorKind.METHOD_NOT_ALLOWED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path. A path that ends in `{name}` matches all of the rest, slashes included.

    `body`: type of the request's body. `reply`: type of the body of a 200, or of its items where `is_list`. `text`:
    media type of a 200 where `reply` is None. `not_ready`: type of the body of a 503 that is no error. `chunk`: type of
    one event of a stream. `errors`: all kinds that the handler may raise.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    not_ready: type[msgspec.Struct] | None = None
    is_list: bool = False
    text: str = ""
    errors: tuple[ErrorKind, ...] = ()

    @property
    def prefix(self) -> str | None:
        """Return the part of the path before `{name}`; None for an exact path."""
        head, brace, _ = self.path.partition("{")
        return head if brace else None
