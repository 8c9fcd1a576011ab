"""Fills in OpenAI's response bodies and chunks as JSON bytes; never waits for a token or sends one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tandem.core.events import SampledToken
from tandem.core.lane import Lane
from tandem.gateway.http import openai_schema as reply
from tandem.gateway.output.text_stream import ChoiceEnd, Delta, ToolCallDelta
from tandem.gateway.serving.completions import CompletionStream, Part
from tandem.gateway.serving.echo import Echo, ScoredPrompt
from tandem.gateway.telemetry.usage import Usage
from tandem.gateway.text.text_model import TextModel

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""
_ENCODER = msgspec.json.Encoder()
_CUT = "\0"
_TIERS = {Lane.INTERACTIVE: "priority", Lane.STANDARD: "default", Lane.BATCH: "flex"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """What every chunk of one response repeats. `created` in seconds since the epoch."""

    id: str
    created: int
    model: str
    service_tier: str | UnsetType
    include_usage: bool
    continuous_usage: bool
    with_logprobs: bool
    with_token_ids: bool
    text: TextModel

    @classmethod
    def of(cls, answer: CompletionStream, created: int) -> ChunkHeader:
        ask = answer.params
        return cls(
            id=answer.id,
            created=created,
            model=answer.model,
            service_tier=UNSET if ask.body.service_tier is None else _TIERS[answer.jobs[0].lane],
            include_usage=ask.include_usage,
            continuous_usage=ask.continuous_usage,
            with_logprobs=ask.logprobs is not None,
            with_token_ids=bool(ask.body.return_token_ids),
            text=answer.served.text,
        )

    def shows(self, delta: Delta) -> bool:
        """A client would see something in it."""
        if delta.text or delta.reasoning or delta.tool_calls:
            return True
        return (self.with_logprobs and delta.token is not None) or (self.with_token_ids and delta.token_id is not None)


Count = Callable[[], Usage]


class ResponseFormatter(Protocol):
    """How one of OpenAI's two endpoints writes the same answer. `usage` tells that of the answer up to now, to forms
    that write it."""

    def opening(self, choice: int, usage: Count) -> list[bytes]:
        """Chunks that come before any text of a choice."""
        ...

    def chunk(self, part: Delta | Echo, usage: Count) -> list[bytes]:
        """Empty when a client would see nothing in it."""
        ...

    def closing(self, ending: ChoiceEnd, usage: Count, facts: reply.TandemFacts | None) -> list[bytes]:
        """The chunk with the finish reason. With the last choice, which has the `facts`, also the usage if it was asked
        for."""
        ...

    def body(self, parts: Sequence[Part], usage: Usage, facts: reply.TandemFacts) -> bytes:
        """The whole response at once."""
        ...


C = TypeVar("C")


class _Chunks(ABC, Generic[C]):
    """The part of a form that the two endpoints share. `C` is a choice in a chunk."""

    def __init__(self, heading: ChunkHeader, make_chunk: Callable[..., msgspec.Struct]) -> None:
        self._heading = heading
        self._make_chunk = make_chunk
        self._named_fields: dict[str, Any] = {
            name: getattr(heading, name) for name in ("id", "created", "model", "service_tier")
        }

    @abstractmethod
    def _end(self, ending: ChoiceEnd) -> C: ...

    def _chunk(self, choice: C | None, usage: Count, facts: reply.TandemFacts | None = None) -> bytes:
        """Without a choice: the one that has only the usage."""
        chunk = self._make_chunk(
            **self._named_fields,
            choices=[] if choice is None else [choice],
            usage=_usage_reply(usage()) if choice is None else self._usage(usage),
            tandem=UNSET if facts is None else facts,
        )
        return msgspec.json.encode(chunk)

    def closing(self, ending: ChoiceEnd, usage: Count, facts: reply.TandemFacts | None) -> list[bytes]:
        if facts is None or not self._heading.include_usage:
            return [self._chunk(self._end(ending), usage, facts)]
        return [self._chunk(self._end(ending), usage), self._chunk(None, usage, facts)]

    def _ids(self, deltas: Iterable[Delta]) -> list[int] | UnsetType:
        """The field `token_ids` that vLLM adds to a choice."""
        if not self._heading.with_token_ids:
            return UNSET
        return [token for delta in deltas if (token := delta.token_id) is not None]

    def _usage(self, usage: Count) -> reply.UsageReply | UnsetType | None:
        """In a chunk that is not the last one."""
        if self._heading.continuous_usage:
            return _usage_reply(usage())
        return None if self._heading.include_usage else UNSET

    def _prompt_scores(self, scored: ScoredPrompt) -> reply.PromptLogprobs:
        return [None if token.logprob is None else self._scores(token) for token in scored.tokens]

    def _scores(self, token: SampledToken) -> dict[str, reply.PromptLogprob]:
        ranked = {other: rank for rank, (other, _) in enumerate(token.top, start=1)}
        known = {token.id: token.logprob, **dict(token.top)}
        return {
            str(other): reply.PromptLogprob(
                _finite(logprob), ranked.get(other), self._heading.text.token_text(other).text
            )
            for other, logprob in known.items()
        }


class ChatFormatter(_Chunks[reply.ChatChunkChoice]):
    """/v1/chat/completions."""

    def __init__(self, heading: ChunkHeader) -> None:
        super().__init__(heading, reply.ChatChunk)
        self._is_plain = not (heading.with_logprobs or heading.with_token_ids or heading.continuous_usage)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, choice: int, usage: Count) -> list[bytes]:
        return [self._chunk(reply.ChatChunkChoice(choice, reply.ChatDelta(role="assistant", content="")), usage)]

    def chunk(self, part: Delta | Echo, usage: Count) -> list[bytes]:
        if isinstance(part, Echo) or not self._heading.shows(part):
            return []
        if self._is_plain and not part.reasoning and not part.tool_calls:
            before, after = self._around.get(part.choice) or self._cut(part.choice, usage)
            return [before + _ENCODER.encode(part.text) + after]
        delta = reply.ChatDelta(
            content=part.text if part.text or not (part.reasoning or part.tool_calls) else UNSET,
            reasoning_content=part.reasoning or UNSET,
            reasoning=part.reasoning or UNSET,
            tool_calls=[_call_piece(call) for call in part.tool_calls] or UNSET,
        )
        logprobs, ids = self._logprobs([part]), self._ids([part])
        return [self._chunk(reply.ChatChunkChoice(part.choice, delta, logprobs, token_ids=ids), usage)]

    def _cut(self, choice: int, usage: Count) -> tuple[bytes, bytes]:
        """What is written before and after the text in each chunk of a choice that tells nothing else; filled in anew
        for every token it was a tenth of what one costs."""
        whole = self._chunk(reply.ChatChunkChoice(choice, reply.ChatDelta(content=_CUT)), usage)
        # The last one: a model may have any name.
        before, _, after = whole.rpartition(_ENCODER.encode(_CUT))
        self._around[choice] = before, after
        return before, after

    def _end(self, ending: ChoiceEnd) -> reply.ChatChunkChoice:
        return reply.ChatChunkChoice(ending.choice, reply.ChatDelta(), finish_reason=ending.reason.value)

    def body(self, parts: Sequence[Part], usage: Usage, facts: reply.TandemFacts) -> bytes:
        gathered = _Gathered(parts)
        whole = reply.ChatCompletion(
            **self._named_fields,
            choices=[self._choice(ending, gathered.deltas[ending.choice]) for ending in gathered.endings()],
            usage=_usage_reply(usage),
            prompt_logprobs=self._prompt_scores(gathered.scored[0]) if gathered.scored else UNSET,
            tandem=facts,
        )
        return msgspec.json.encode(whole)

    def _choice(self, ending: ChoiceEnd, deltas: Sequence[Delta]) -> reply.ChatChoice:
        calls = _whole_calls([call for delta in deltas for call in delta.tool_calls])
        content = "".join(delta.text for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas) or UNSET
        message = reply.AssistantMessage(
            "assistant",
            content if content or not calls else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )
        return reply.ChatChoice(ending.choice, message, self._logprobs(deltas), ending.reason.value, self._ids(deltas))

    def _logprobs(self, deltas: Iterable[Delta]) -> reply.ChatLogprobs | None:
        if not self._heading.with_logprobs:
            return None
        return reply.ChatLogprobs([self._entry(delta.token) for delta in deltas if delta.token])

    def _entry(self, token: SampledToken) -> reply.TokenLogprob:
        top = [reply.Logprob(*self._named(other, logprob)) for other, logprob in token.top]
        return reply.TokenLogprob(*self._named(token.id, token.logprob), top_logprobs=top)

    def _named(self, token: int, logprob: float | None) -> tuple[str, float, list[int]]:
        facts = self._heading.text.token_text(token)
        return facts.text, _finite(logprob), list(facts.raw)


class CompletionFormatter(_Chunks[reply.TextChoice]):
    """/v1/completions."""

    def __init__(self, heading: ChunkHeader) -> None:
        super().__init__(heading, reply.TextChunk)

    def opening(self, choice: int, usage: Count) -> list[bytes]:
        return []

    def chunk(self, part: Delta | Echo, usage: Count) -> list[bytes]:
        if isinstance(part, Delta) and not self._heading.shows(part):
            return []
        deltas = part.deltas if isinstance(part, Echo) else [part]
        return [self._chunk(self._choice(part.choice, deltas, None), usage)]

    def _end(self, ending: ChoiceEnd) -> reply.TextChoice:
        return self._choice(ending.choice, [], ending.reason.value)

    def body(self, parts: Sequence[Part], usage: Usage, facts: reply.TandemFacts) -> bytes:
        gathered = _Gathered(parts)
        endings = gathered.endings()
        choices = [self._choice(end.choice, gathered.deltas[end.choice], end.reason.value) for end in endings]
        for scored in gathered.scored:
            per_prompt = len(choices) // len(gathered.scored)
            for choice in choices[scored.prompt * per_prompt : (scored.prompt + 1) * per_prompt]:
                choice.prompt_logprobs = self._prompt_scores(scored)
        whole = reply.TextCompletion(
            **self._named_fields,
            choices=choices,
            usage=_usage_reply(usage),
            tandem=facts,
        )
        return msgspec.json.encode(whole)

    def _choice(self, index: int, deltas: Sequence[Delta], reason: str | None) -> reply.TextChoice:
        text = "".join(delta.text for delta in deltas)
        return reply.TextChoice(index, text, self._logprobs(deltas), reason, self._ids(deltas))

    def _logprobs(self, deltas: Iterable[Delta]) -> reply.TextLogprobs | None:
        placed = [(delta.token, delta.offset) for delta in deltas if delta.token]
        if not self._heading.with_logprobs or not placed:
            return None
        return reply.TextLogprobs(
            tokens=[self._name(token.id) for token, _ in placed],
            token_logprobs=[None if token.logprob is None else _finite(token.logprob) for token, _ in placed],
            top_logprobs=[None if token.logprob is None else self._top(token) for token, _ in placed],
            text_offset=[offset for _, offset in placed],
        )

    def _top(self, token: SampledToken) -> dict[str, float]:
        """The alternatives and the token itself, which need not be among them."""
        return {self._name(other): _finite(logprob) for other, logprob in (*token.top, (token.id, token.logprob))}

    def _name(self, token: int) -> str:
        """As OpenAI does, so that two tokens that are no text on their own keep different names."""
        facts = self._heading.text.token_text(token)
        if "\ufffd" not in facts.text:
            return facts.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in facts.raw)


class _Gathered:
    """The parts of a whole answer, by choice."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.scored: list[ScoredPrompt] = []
        self.deltas: dict[int, list[Delta]] = {}
        self._endings: list[ChoiceEnd] = []
        for part in parts:
            match part:
                case ScoredPrompt():
                    self.scored.append(part)
                case ChoiceEnd():
                    self._endings.append(part)
                    self.deltas.setdefault(part.choice, [])
                case Echo():
                    self.deltas.setdefault(part.choice, []).extend(part.deltas)
                case Delta():
                    self.deltas.setdefault(part.choice, []).append(part)

    def endings(self) -> list[ChoiceEnd]:
        return sorted(self._endings, key=lambda ending: ending.choice)


def _call_piece(call: ToolCallDelta) -> reply.ToolCallPiece:
    function = reply.FunctionCall(call.arguments, call.name or UNSET)
    return reply.ToolCallPiece(call.index, function, call.id or UNSET, "function" if call.id else UNSET)


def _whole_calls(pieces: Iterable[ToolCallDelta]) -> list[reply.ToolCall]:
    calls: dict[int, reply.ToolCall] = {}
    for piece in pieces:
        if piece.index not in calls:
            calls[piece.index] = reply.ToolCall(piece.id, reply.FunctionCall("", piece.name))
        calls[piece.index].function.arguments += piece.arguments
    return list(calls.values())


def _usage_reply(usage: Usage) -> reply.UsageReply:
    cached = None if usage.num_cached is None else reply.PromptTokensDetails(usage.num_cached)
    return reply.UsageReply(usage.num_prompt, usage.num_output, usage.num_prompt + usage.num_output, cached)


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
