"""Owns one request's tokens on their way to one client as text; never knows the protocol that they leave by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason, PromptLogprobs, SampledToken, Token
from tandem.core.request import Request
from tandem.gateway.context.interfaces import TokenStream
from tandem.gateway.context.rate_limit_status import RateLimitStatus
from tandem.gateway.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the `index`-th tool call of a choice. `id` and `name` come once, with its first piece; `arguments` are
    pieces of one JSON text."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class Delta(NamedTuple):
    """What one event adds to a choice. `text` may be empty while characters or stop strings are incomplete.

    `offset` is where in the whole text the token's own text begins; `token` is None for text that was held back until
    the end, and for tokens that are no text (end of sequence), of which `hidden` is the id. `reasoning` and
    `tool_calls` are what a parser found in the text; they are not part of `text`.
    """

    text: str
    offset: int
    token: SampledToken | None = None
    choice: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    hidden: int | None = None

    @property
    def token_id(self) -> int | None:
        """Of the token that came, whether it is text or not."""
        return self.hidden if self.token is None else self.token.id


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The one end of a choice. `num_cached_tokens`: of the prompt's, None where no worker has told."""

    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int | None
    choice: int = 0


Part = Delta | PromptLogprobs | ChoiceEnd


class ChoiceTextStream:
    """An async context over an open stream: whatever happens inside, the stream is closed exactly once.

    Closing is not interrupted by the cancellation that so often causes it. `detokenizer` makes one for each choice.
    """

    __slots__ = ("_closed", "_detokenizers", "_hidden", "_num_cached", "_num_tokens", "_open", "_stream")

    def __init__(
        self,
        request: Request,
        stream: TokenStream,
        detokenizer: Callable[[], Detokenizer],
        *,
        show_stop_tokens: bool = False,
    ) -> None:
        self._stream = stream
        self._detokenizers = [detokenizer() for _ in range(request.num_choices)]
        self._num_tokens = [0] * request.num_choices
        self._num_cached: int | None = None
        self._open = set(range(request.num_choices))
        self._hidden = frozenset() if show_stop_tokens else request.sampling.stop_token_ids
        self._closed = False

    @property
    def path(self) -> str:
        return self._stream.path

    @property
    def num_attempts(self) -> int:
        return self._stream.num_attempts

    @property
    def workers(self) -> Sequence[str]:
        return self._stream.workers

    @property
    def reasons(self) -> Mapping[str, object]:
        return self._stream.reasons

    @property
    def standing(self) -> RateLimitStatus:
        return self._stream.standing

    @property
    def has_more(self) -> bool:
        return self._stream.has_more

    async def __aenter__(self) -> ChoiceTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await _uninterrupted(self._stream)

    async def events(self) -> AsyncIterator[Part]:
        """Deltas, one per token at once when it comes, and one Ending for each choice. Raises what the stream
        raises."""
        async for event in self._stream:
            match event:
                case Token():
                    choice = event.key.choice
                    if choice not in self._open:
                        continue
                    self._num_tokens[choice] += 1
                    if self._num_cached is None:
                        self._num_cached = event.num_cached_tokens
                    yield self._delta(choice, event.token)
                    if self._detokenizers[choice].stopped:
                        await self._stop(choice)
                        yield ChoiceEnd(FinishReason.STOP, self._num_tokens[choice], self._num_cached, choice)
                case PromptLogprobs():
                    yield event
                case Finished():
                    choice = event.key.choice
                    if choice not in self._open:
                        continue
                    self._open.discard(choice)
                    detokenizer = self._detokenizers[choice]
                    offset = detokenizer.num_chars
                    yield Delta(detokenizer.finish(), offset, choice=choice)
                    yield self._ending(event)
            if not self._open:
                return
        raise TandemError(ErrorKind.INTERNAL, "the tokens ended without an end")

    async def _stop(self, choice: int) -> None:
        """A stop string is complete: nobody needs more of this choice."""
        self._open.discard(choice)
        if self._open:
            self._stream.finish(choice)
        else:
            await self.close()

    def _delta(self, choice: int, token: SampledToken) -> Delta:
        detokenizer = self._detokenizers[choice]
        offset = detokenizer.num_chars
        if token.id in self._hidden:
            return Delta("", offset, choice=choice, hidden=token.id)
        return Delta(detokenizer.push(token.id), offset, token, choice)

    def _ending(self, finished: Finished) -> ChoiceEnd:
        if finished.reason is None:
            raise TandemError(ErrorKind.INTERNAL, "the request ended without a reason")
        choice = finished.key.choice
        reason = FinishReason.STOP if self._detokenizers[choice].stopped else finished.reason
        return ChoiceEnd(reason, finished.num_output_tokens, finished.num_cached_tokens, choice)


async def _uninterrupted(stream: TokenStream) -> None:
    closing = asyncio.ensure_future(stream.aclose())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing})
        raise
