"""The bodies and chunks of OpenAI's responses as JSON bytes; never waits for a token or sends one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tandem.core.events import SampledToken
from tandem.gateway.completion import Delta, Ending
from tandem.gateway.text import TextModel

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None


class TandemFacts(msgspec.Struct):
    """Our own addition to the last chunk and to whole bodies."""

    path: str


class Reply(msgspec.Struct, kw_only=True):
    """A chunk or a whole body. `usage` is unset where the client did not ask for it, null where it comes later."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | UnsetType | None = UNSET
    tandem: TandemFacts | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every chunk of one response repeats. `created` in seconds since the epoch."""

    id: str
    created: int
    model: str
    num_prompt_tokens: int
    include_usage: bool
    with_logprobs: bool
    with_token_ids: bool
    text: TextModel


class Form(Protocol):
    """How one of OpenAI's two endpoints writes the same completion."""

    def opening(self) -> list[bytes]:
        """Chunks that come before any text."""
        ...

    def chunk(self, delta: Delta) -> bytes | None:
        """None when a client would see nothing in it."""
        ...

    def closing(self, ending: Ending, path: str) -> list[bytes]:
        """The chunk with the finish reason, then the usage if it was asked for; `path` rides on the last."""
        ...

    def body(self, deltas: Sequence[Delta], ending: Ending, path: str) -> bytes:
        """The whole response at once."""
        ...


class _Replies:
    """The part of a form that the two endpoints share."""

    def __init__(self, heading: Heading, kind: str) -> None:
        self._heading = heading
        self._kind = kind

    def _reply(self, choices: list[dict[str, Any]], **facts: Any) -> bytes:
        heading = self._heading
        reply = Reply(
            id=heading.id,
            object=self._kind,
            created=heading.created,
            model=heading.model,
            choices=choices,
            **facts,
        )
        return msgspec.json.encode(reply)

    def _shows(self, delta: Delta) -> bool:
        tells_token = self._heading.with_logprobs or self._heading.with_token_ids
        return bool(delta.text) or (tells_token and delta.token is not None)

    def _ids(self, deltas: Sequence[Delta]) -> dict[str, list[int]]:
        """The field `token_ids` that vLLM adds to a choice; nothing where it was not asked for."""
        if not self._heading.with_token_ids:
            return {}
        return {"token_ids": [delta.token.id for delta in deltas if delta.token is not None]}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._reply([choice], usage=None if self._heading.include_usage else UNSET)

    def _last(self, choice: dict[str, Any], ending: Ending, path: str) -> list[bytes]:
        facts = TandemFacts(path)
        if not self._heading.include_usage:
            return [self._reply([choice], tandem=facts)]
        return [self._chunk(choice), self._reply([], usage=self._usage(ending), tandem=facts)]

    def _usage(self, ending: Ending) -> Usage:
        prompt, output, cached = self._heading.num_prompt_tokens, ending.num_output_tokens, ending.num_cached_tokens
        return Usage(prompt, output, prompt + output, None if cached is None else {"cached_tokens": cached})


class ChatForm(_Replies):
    """/v1/chat/completions."""

    def __init__(self, heading: Heading, *, stream: bool) -> None:
        super().__init__(heading, "chat.completion.chunk" if stream else "chat.completion")

    def opening(self) -> list[bytes]:
        return [self._chunk(self._choice({"role": "assistant", "content": ""}))]

    def chunk(self, delta: Delta) -> bytes | None:
        if not self._shows(delta):
            return None
        choice = self._choice({"content": delta.text}, logprobs=self._logprobs([delta]))
        return self._chunk({**choice, **self._ids([delta])})

    def closing(self, ending: Ending, path: str) -> list[bytes]:
        return self._last(self._choice({}, reason=ending.reason.value), ending, path)

    def body(self, deltas: Sequence[Delta], ending: Ending, path: str) -> bytes:
        message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(deltas),
            "finish_reason": ending.reason.value,
            **self._ids(deltas),
        }
        return self._reply([choice], usage=self._usage(ending), tandem=TandemFacts(path))

    def _choice(
        self, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self._heading.with_logprobs:
            return None
        return {"content": [self._entry(delta.token) for delta in deltas if delta.token], "refusal": None}

    def _entry(self, token: SampledToken) -> dict[str, Any]:
        top = [self._token(other, logprob) for other, logprob in token.top]
        return {**self._token(token.id, token.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        facts = self._heading.text.token_text(token)
        return {"token": facts.text, "logprob": _finite(logprob), "bytes": list(facts.raw)}


class TextForm(_Replies):
    """/v1/completions."""

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading, "text_completion")

    def opening(self) -> list[bytes]:
        return []

    def chunk(self, delta: Delta) -> bytes | None:
        if not self._shows(delta):
            return None
        return self._chunk(self._choice([delta], None))

    def closing(self, ending: Ending, path: str) -> list[bytes]:
        return self._last(self._choice([], ending.reason.value), ending, path)

    def body(self, deltas: Sequence[Delta], ending: Ending, path: str) -> bytes:
        choice = self._choice(deltas, ending.reason.value)
        return self._reply([choice], usage=self._usage(ending), tandem=TandemFacts(path))

    def _choice(self, deltas: Sequence[Delta], reason: str | None) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        choice = {"index": 0, "text": text, "logprobs": self._logprobs(deltas), "finish_reason": reason}
        return {**choice, **self._ids(deltas)}

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        placed = [(delta.token, delta.offset) for delta in deltas if delta.token]
        if not self._heading.with_logprobs or not placed:
            return None
        return {
            "tokens": [self._name(token.id) for token, _ in placed],
            "token_logprobs": [_finite(token.logprob) for token, _ in placed],
            "top_logprobs": [self._top(token) for token, _ in placed],
            "text_offset": [offset for _, offset in placed],
        }

    def _top(self, token: SampledToken) -> dict[str, float]:
        """The alternatives and the token itself, which need not be among them."""
        return {self._name(other): _finite(logprob) for other, logprob in (*token.top, (token.id, token.logprob))}

    def _name(self, token: int) -> str:
        """As OpenAI does, so that two tokens that are no text on their own keep different names."""
        facts = self._heading.text.token_text(token)
        if "\ufffd" not in facts.text:
            return facts.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in facts.raw)


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
