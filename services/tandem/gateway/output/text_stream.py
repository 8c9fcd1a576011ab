"""Turn the sampled tokens of one request into text deltas for its client, independent of the API protocol."""

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
    """Piece of the `index`-th tool call of a choice.

    `id` and `name` are set in the call's first piece only; the `arguments` of all pieces concatenate to one JSON text.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class Delta(NamedTuple):
    """What one event adds to a choice. `text` may be empty while a character or a possible stop string is incomplete.

    `offset` is where the token's own text begins in the whole text of the choice, in characters. `token` is None for
    text that was held back until the end, and for tokens without text (end of sequence), whose id is `hidden`.
    `reasoning` and `tool_calls` are what an OutputParser found in the text; `text` does not contain them."""

    text: str
    offset: int
    token: SampledToken | None = None
    choice: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    hidden: int | None = None

    @property
    def token_id(self) -> int | None:
        """Return the id of the token behind this delta, with or without text; None where there is no token."""
        return self.hidden if self.token is None else self.token.id


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """End of a choice, sent exactly once. `num_cached_tokens` counts the prompt's prefix hits; None where no worker
    reported."""

    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int | None
    choice: int = 0


Part = Delta | PromptLogprobs | ChoiceEnd


class ChoiceTextStream:
    """Own one open token stream and detokenize each of its choices; an async context that closes the stream exactly
    once.

    Cancellation of the caller does not interrupt the closing. `detokenizer` is called once per choice."""

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
    def rate_limits(self) -> RateLimitStatus:
        return self._stream.rate_limits

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
        """Yield one Delta per token as soon as the token arrives, and one ChoiceEnd per choice. Raises what the stream
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
                    yield self._choice_end(event)
            if not self._open:
                return
        raise TandemError(ErrorKind.INTERNAL, "the token stream ended before the choices did")

    async def _stop(self, choice: int) -> None:
        """End a choice whose stop string is complete: its worker need not generate more of it."""
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

    def _choice_end(self, finished: Finished) -> ChoiceEnd:
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
