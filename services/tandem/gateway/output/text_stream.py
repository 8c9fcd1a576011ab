"""Turn the sampled tokens of one choice into text deltas for its client, independent of the API protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason, SampledToken
from tandem.gateway.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Piece of a tool call in the output of a choice. `index`: number of the call within the choice, from 0 on.

    `id` and `name` are set in the call's first piece only; the `arguments` of all pieces concatenate to one JSON
    text."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class Delta(NamedTuple):
    """Hold what one token, or the end of a choice, adds to the choice's output.

    `text`: may be empty while a character or a possible stop string is incomplete. `offset`: the index in the choice's
    whole text of the character at which the token's own text begins. `token`: the sampled token; None for text that was
    held back until the end, and for a token without text (end of sequence), whose id is then `hidden`. `reasoning`,
    `tool_calls`: what the transforms found in the text; `text` does not contain them.
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
        """Return the id of the token behind this delta, with or without text; None where there is no token."""
        return self.hidden if self.token is None else self.token.id


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """End of a choice, sent exactly once. `num_cached_tokens`: prompt tokens whose KV a worker took from a cache; None
    where no worker has reported the number."""

    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int | None
    choice: int = 0


DeltaTransform = Callable[[Delta, bool], Delta]
"""Function of a delta and whether it is the choice's last one. It returns the delta with its text split into reasoning,
plain text and tool calls. It may hold text back, which the last delta then contains."""


class ChoiceText:
    """Turn the sampled tokens of one choice into deltas: detokenize them, and apply the transforms in order.

    `choice`: index of the choice in the response. `hidden`: ids of tokens that have no text. `num_echoed`: characters
    of the echoed prompt before the choice's own text. `is_open`: neither `stop` nor `finish` was called."""

    __slots__ = (
        "_choice",
        "_detokenizer",
        "_has_calls",
        "_hidden",
        "_num_echoed",
        "_num_tokens",
        "_transforms",
        "is_open",
    )

    def __init__(
        self,
        choice: int,
        detokenizer: Detokenizer,
        transforms: Sequence[DeltaTransform] = (),
        hidden: Set[int] = frozenset(),
        num_echoed: int = 0,
    ) -> None:
        self._choice = choice
        self._detokenizer = detokenizer
        self._transforms = transforms
        self._hidden = hidden
        self._num_echoed = num_echoed
        self._num_tokens = 0
        self._has_calls = False
        self.is_open = True

    @property
    def is_stopped(self) -> bool:
        """Return whether the text has reached a stop string, so that the worker need not generate more of the
        choice."""
        return self._detokenizer.stopped

    def push(self, token: SampledToken) -> Delta:
        """Add the next token and return its delta."""
        self._num_tokens += 1
        detokenizer = self._detokenizer
        offset = self._num_echoed + detokenizer.num_chars
        if token.id in self._hidden:
            delta = Delta("", offset, None, self._choice, hidden=token.id)
        else:
            delta = Delta(detokenizer.push(token.id), offset, token, self._choice)
        return self._transform(delta, is_last=False) if self._transforms else delta

    def stop(self, num_cached_tokens: int | None) -> list[Delta | ChoiceEnd]:
        """End the choice at its stop string; returns the same as `finish`. `num_cached_tokens`: as in ChoiceEnd."""
        return self._end(FinishReason.STOP, self._num_tokens, num_cached_tokens)

    def finish(self, finished: Finished) -> list[Delta | ChoiceEnd]:
        """End the choice by the worker's event `finished`; return the ChoiceEnd, after a Delta with the text held back,
        if any.

        Raises INTERNAL where the event has no reason.
        """
        if finished.reason is None:
            raise TandemError(ErrorKind.INTERNAL, "the stream of tokens ended without a finish reason")
        return self._end(finished.reason, finished.num_output_tokens, finished.num_cached_tokens)

    def _end(self, reason: FinishReason, num_tokens: int, num_cached_tokens: int | None) -> list[Delta | ChoiceEnd]:
        self.is_open = False
        offset = self._num_echoed + self._detokenizer.num_chars
        rest = self._transform(Delta(self._detokenizer.finish(), offset, None, self._choice), is_last=True)
        if self.is_stopped:
            reason = FinishReason.STOP
        if self._has_calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        ending = ChoiceEnd(reason, num_tokens, num_cached_tokens, self._choice)
        return [rest, ending] if rest.text or rest.reasoning or rest.tool_calls else [ending]

    def _transform(self, delta: Delta, *, is_last: bool) -> Delta:
        for transform in self._transforms:
            delta = transform(delta, is_last)
        if delta.tool_calls:
            self._has_calls = True
        return delta
