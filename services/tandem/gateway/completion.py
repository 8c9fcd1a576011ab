"""Owns one request's tokens on their way to one client as text; never knows the protocol that they leave by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason, SampledToken, Token
from tandem.core.request import Request
from tandem.gateway.detokenize import Detokenizer
from tandem.gateway.ports import TokenStream


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds. `text` may be empty while characters or stop strings are incomplete.

    `offset` is where in the whole text the token's own text begins; `token` is None for text that was held back until
    the end, and for tokens that are no text (end of sequence).
    """

    text: str
    offset: int
    token: SampledToken | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """The one end of a completion. `num_cached_tokens` is None when a stop string ended it before the worker did."""

    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int | None


class Completion:
    """An async context over an open stream: whatever happens inside, the stream is closed exactly once.

    Closing is not interrupted by the cancellation that so often causes it.
    """

    __slots__ = ("_closed", "_detokenizer", "_hidden", "_stream")

    def __init__(self, request: Request, stream: TokenStream, detokenizer: Detokenizer) -> None:
        self._stream = stream
        self._detokenizer = detokenizer
        self._hidden = request.sampling.stop_token_ids
        self._closed = False

    @property
    def path(self) -> str:
        return self._stream.path

    async def __aenter__(self) -> Completion:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await _uninterrupted(self._stream)

    async def events(self) -> AsyncIterator[Delta | Ending]:
        """Deltas, one per token at once when it comes, then one Ending. Raises what the stream raises."""
        num_tokens = 0
        async for event in self._stream:
            match event:
                case Token(token=token):
                    num_tokens += 1
                    yield self._delta(token)
                    if self._detokenizer.stopped:
                        await self.close()
                        yield Ending(FinishReason.STOP, num_tokens, None)
                        return
                case Finished():
                    offset = self._detokenizer.num_chars
                    yield Delta(self._detokenizer.finish(), offset)
                    yield self._ending(event)
                    return
        raise TandemError(ErrorKind.INTERNAL, "the tokens ended without an end")

    def _delta(self, token: SampledToken) -> Delta:
        offset = self._detokenizer.num_chars
        if token.id in self._hidden:
            return Delta("", offset)
        return Delta(self._detokenizer.push(token.id), offset, token)

    def _ending(self, finished: Finished) -> Ending:
        if finished.reason is None:
            raise TandemError(ErrorKind.INTERNAL, "the request ended without a reason")
        reason = FinishReason.STOP if self._detokenizer.stopped else finished.reason
        return Ending(reason, finished.num_output_tokens, finished.num_cached_tokens)


async def _uninterrupted(stream: TokenStream) -> None:
    closing = asyncio.ensure_future(stream.aclose())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing})
        raise
