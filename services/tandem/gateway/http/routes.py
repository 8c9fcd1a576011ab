"""What a route is, to whoever calls it and to whoever reads about it; never handles an exchange."""

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
    """One method of one path. A path that ends in `{name}` takes all of the rest, slashes too.

    `reply` is the body of a 200, or where `is_list` what it is a list of, `not_ready` that of a 503 that is no error,
    `chunk` one event of a stream; where `reply` is None, a 200 is text of type `text`. `errors` are all that the
    handler may raise.
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
        """What comes before the rest that a path takes; None for an exact path."""
        head, brace, _ = self.path.partition("{")
        return head if brace else None
