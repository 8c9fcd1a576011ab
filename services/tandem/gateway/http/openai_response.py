"""Format the output of a request as OpenAI's response bodies and stream chunks, in JSON bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tandem.core.events import SampledToken
from tandem.core.lane import Lane
from tandem.gateway.http import openai_schema as reply
from tandem.gateway.output.text_stream import ChoiceEnd, Delta, ToolCallDelta
from tandem.gateway.serving.completions import CompletionStream, Part
from tandem.gateway.serving.echo import Echo, ScoredPrompt
from tandem.gateway.telemetry.usage import Usage

LOWEST_LOGPROB = -9999.0
"""Number written for a log probability of minus infinity, which JSON cannot express; OpenAI writes the same."""
_ENCODER = msgspec.json.Encoder()
_CUT = "\0"
C = TypeVar("C")
_TIERS = {Lane.INTERACTIVE: "priority", Lane.STANDARD: "default", Lane.BATCH: "flex"}


class GatheredParts:
    """Sort parts of a response by choice.

    `scored`: the prompts with log probabilities. `deltas`: the deltas of each choice in order, those of the echoed
    prompt first, by choice index. `reasons`: the finish reason of each choice that ended, by choice index; each of
    these choices has an entry in `deltas`.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.scored: list[ScoredPrompt] = []
        self.deltas: dict[int, list[Delta]] = {}
        self.reasons: dict[int, str] = {}
        for part in parts:
            match part:
                case ScoredPrompt():
                    self.scored.append(part)
                case ChoiceEnd():
                    self.reasons[part.choice] = part.reason.value
                    self.deltas.setdefault(part.choice, [])
                case Echo():
                    self.deltas.setdefault(part.choice, []).extend(part.deltas)
                case Delta():
                    self.deltas.setdefault(part.choice, []).append(part)

    def endings(self) -> list[tuple[int, str]]:
        """Return (index, finish reason) of each choice that ended, sorted by index."""
        return sorted(self.reasons.items())


class OutputFormatter:
    """Hold what the formatters of HTTP and gRPC share: the fields that all messages of one response have in common, and
    which optional fields the client requested.

    `answer`: the completion whose output is formatted. `created`: time of the response in seconds since the epoch.
    """

    def __init__(self, answer: CompletionStream, created: int) -> None:
        params = answer.params
        self._answer = answer
        self._text = answer.served.text
        self._with_logprobs = params.logprobs is not None
        self._with_token_ids = bool(params.body.return_token_ids)
        self._named_fields: dict[str, Any] = {
            "id": answer.id,
            "created": created,
            "model": answer.model,
            "service_tier": UNSET if params.body.service_tier is None else _TIERS[answer.jobs[0].lane],
        }

    def _shows(self, delta: Delta) -> bool:
        """Return whether a chunk of this delta would show the client anything."""
        if delta.text or delta.reasoning or delta.tool_calls:
            return True
        return (self._with_logprobs and delta.token is not None) or (
            self._with_token_ids and delta.token_id is not None
        )


class ResponseFormatter(ABC, OutputFormatter, Generic[C]):
    """Format the output of a request as JSON for one of OpenAI's two endpoints: as chunks of a stream (`opening`,
    `chunk`, `closing`) or as one whole `body`.

    `make_chunk`: makes the struct of a chunk from its fields. `C`: type of a choice in a chunk."""

    def __init__(self, answer: CompletionStream, created: int, make_chunk: Callable[..., msgspec.Struct]) -> None:
        super().__init__(answer, created)
        self._make_chunk = make_chunk
        options = answer.params.body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = options is not None and bool(options.include_usage and options.continuous_usage_stats)

    @abstractmethod
    def opening(self, choice: int) -> list[bytes]:
        """Return the encoded chunks that precede any text of a choice; empty for plain completions."""

    @abstractmethod
    def chunk(self, part: Delta | Echo) -> list[bytes]:
        """Return the encoded chunks of one part of the output; empty where they would show the client nothing."""

    @abstractmethod
    def body(self, parts: Iterable[Part], facts: reply.TandemFacts) -> bytes:
        """Return the whole encoded body of a response that is not streamed. `parts`: all parts of the output. `facts`:
        the content of the field `tandem`."""

    @abstractmethod
    def _end(self, ending: ChoiceEnd) -> C: ...

    def closing(self, ending: ChoiceEnd, facts: reply.TandemFacts | None) -> list[bytes]:
        """Return the encoded chunk with the finish reason of a choice, followed after the last choice by a chunk with
        the token usage if the client requested it.

        `facts`: the content of the field `tandem` for the last choice that ends; None for the others."""
        if facts is None or not self._include_usage:
            return [self._chunk(self._end(ending), facts)]
        return [self._chunk(self._end(ending)), self._chunk(None, facts)]

    def _chunk(self, choice: C | None, facts: reply.TandemFacts | None = None) -> bytes:
        """Encode a chunk with one choice, or with None the last chunk, which has only the usage."""
        usage: reply.UsageReply | UnsetType | None = None if self._include_usage else UNSET
        if choice is None or self._continuous_usage:
            usage = usage_reply(self._answer.usage())
        chunk = self._make_chunk(
            **self._named_fields,
            choices=[] if choice is None else [choice],
            usage=usage,
            tandem=UNSET if facts is None else facts,
        )
        return msgspec.json.encode(chunk)

    def _ids(self, deltas: Iterable[Delta]) -> list[int] | UnsetType:
        """Make the field `token_ids`, which vLLM adds to a choice."""
        if not self._with_token_ids:
            return UNSET
        return [token for delta in deltas if (token := delta.token_id) is not None]

    def _prompt_scores(self, scored: ScoredPrompt) -> reply.PromptLogprobs:
        return [None if token.logprob is None else self._scores(token) for token in scored.tokens]

    def _scores(self, token: SampledToken) -> dict[str, reply.PromptLogprob]:
        ranked = {other: rank for rank, (other, _) in enumerate(token.top, start=1)}
        known = {token.id: token.logprob, **dict(token.top)}
        return {
            str(other): reply.PromptLogprob(_finite(logprob), ranked.get(other), self._text.token_text(other).text)
            for other, logprob in known.items()
        }


class ChatFormatter(ResponseFormatter[reply.ChatChunkChoice]):
    """Format the output of /v1/chat/completions."""

    def __init__(self, answer: CompletionStream, created: int) -> None:
        super().__init__(answer, created, reply.ChatChunk)
        self._is_plain = not (self._with_logprobs or self._with_token_ids or self._continuous_usage)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, choice: int) -> list[bytes]:
        return [self._chunk(reply.ChatChunkChoice(choice, reply.ChatDelta(role="assistant", content="")))]

    def chunk(self, part: Delta | Echo) -> list[bytes]:
        if isinstance(part, Echo) or not self._shows(part):
            return []
        if self._is_plain and not part.reasoning and not part.tool_calls:
            before, after = self._around.get(part.choice) or self._cut(part.choice)
            return [before + _ENCODER.encode(part.text) + after]
        delta = reply.ChatDelta(
            content=part.text if part.text or not (part.reasoning or part.tool_calls) else UNSET,
            reasoning_content=part.reasoning or UNSET,
            reasoning=part.reasoning or UNSET,
            tool_calls=[_call_piece(call) for call in part.tool_calls] or UNSET,
        )
        logprobs, ids = self._logprobs([part]), self._ids([part])
        return [self._chunk(reply.ChatChunkChoice(part.choice, delta, logprobs, token_ids=ids))]

    def _cut(self, choice: int) -> tuple[bytes, bytes]:
        """Return and cache the bytes that surround the text in those chunks of a choice that hold nothing but text.
        Encoding the whole chunk for every token was a tenth of the cost of a token."""
        whole = self._chunk(reply.ChatChunkChoice(choice, reply.ChatDelta(content=_CUT)))
        # The last occurrence is the content: the name of the model precedes it and may hold anything.
        before, _, after = whole.rpartition(_ENCODER.encode(_CUT))
        self._around[choice] = before, after
        return before, after

    def _end(self, ending: ChoiceEnd) -> reply.ChatChunkChoice:
        return reply.ChatChunkChoice(ending.choice, reply.ChatDelta(), finish_reason=ending.reason.value)

    def body(self, parts: Iterable[Part], facts: reply.TandemFacts) -> bytes:
        gathered = GatheredParts(parts)
        whole = reply.ChatCompletion(
            **self._named_fields,
            choices=[self._choice(index, gathered.deltas[index], reason) for index, reason in gathered.endings()],
            usage=usage_reply(self._answer.usage()),
            prompt_logprobs=self._prompt_scores(gathered.scored[0]) if gathered.scored else UNSET,
            tandem=facts,
        )
        return msgspec.json.encode(whole)

    def _choice(self, index: int, deltas: Sequence[Delta], reason: str) -> reply.ChatChoice:
        joined = join_calls(deltas)
        calls = [reply.ToolCall(call.id, reply.FunctionCall(call.arguments, call.name)) for call in joined]
        content = "".join(delta.text for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas) or UNSET
        message = reply.AssistantMessage(
            "assistant",
            content if content or not calls else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )
        return reply.ChatChoice(index, message, self._logprobs(deltas), reason, self._ids(deltas))

    def _logprobs(self, deltas: Iterable[Delta]) -> reply.ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return reply.ChatLogprobs([self._entry(delta.token) for delta in deltas if delta.token])

    def _entry(self, token: SampledToken) -> reply.TokenLogprob:
        top = [reply.Logprob(*self._named(other, logprob)) for other, logprob in token.top]
        return reply.TokenLogprob(*self._named(token.id, token.logprob), top_logprobs=top)

    def _named(self, token: int, logprob: float | None) -> tuple[str, float, list[int]]:
        facts = self._text.token_text(token)
        return facts.text, _finite(logprob), list(facts.raw)


class CompletionFormatter(ResponseFormatter[reply.TextChoice]):
    """Format the output of /v1/completions."""

    def __init__(self, answer: CompletionStream, created: int) -> None:
        super().__init__(answer, created, reply.TextChunk)

    def opening(self, choice: int) -> list[bytes]:
        return []

    def chunk(self, part: Delta | Echo) -> list[bytes]:
        if isinstance(part, Delta) and not self._shows(part):
            return []
        deltas = part.deltas if isinstance(part, Echo) else [part]
        return [self._chunk(self._choice(part.choice, deltas, None))]

    def _end(self, ending: ChoiceEnd) -> reply.TextChoice:
        return self._choice(ending.choice, [], ending.reason.value)

    def body(self, parts: Iterable[Part], facts: reply.TandemFacts) -> bytes:
        gathered = GatheredParts(parts)
        choices = [self._choice(index, gathered.deltas[index], reason) for index, reason in gathered.endings()]
        for scored in gathered.scored:
            per_prompt = len(choices) // len(gathered.scored)
            for choice in choices[scored.prompt * per_prompt : (scored.prompt + 1) * per_prompt]:
                choice.prompt_logprobs = self._prompt_scores(scored)
        whole = reply.TextCompletion(
            **self._named_fields,
            choices=choices,
            usage=usage_reply(self._answer.usage()),
            tandem=facts,
        )
        return msgspec.json.encode(whole)

    def _choice(self, index: int, deltas: Sequence[Delta], reason: str | None) -> reply.TextChoice:
        text = "".join(delta.text for delta in deltas)
        return reply.TextChoice(index, text, self._logprobs(deltas), reason, self._ids(deltas))

    def _logprobs(self, deltas: Iterable[Delta]) -> reply.TextLogprobs | None:
        placed = [(delta.token, delta.offset) for delta in deltas if delta.token]
        if not self._with_logprobs or not placed:
            return None
        return reply.TextLogprobs(
            tokens=[self._name(token.id) for token, _ in placed],
            token_logprobs=[None if token.logprob is None else _finite(token.logprob) for token, _ in placed],
            top_logprobs=[None if token.logprob is None else self._top(token) for token, _ in placed],
            text_offset=[offset for _, offset in placed],
        )

    def _top(self, token: SampledToken) -> dict[str, float]:
        """Return the log probabilities of the alternatives and of the token itself, which need not be among them."""
        return {self._name(other): _finite(logprob) for other, logprob in (*token.top, (token.id, token.logprob))}

    def _name(self, token: int) -> str:
        """Return a token's text, or `bytes:\\x..` for bytes that are no UTF-8 on their own. As at OpenAI, two such
        tokens keep different names."""
        facts = self._text.token_text(token)
        if "\ufffd" not in facts.text:
            return facts.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in facts.raw)


def _call_piece(call: ToolCallDelta) -> reply.ToolCallPiece:
    function = reply.FunctionCall(call.arguments, call.name or UNSET)
    return reply.ToolCallPiece(call.index, function, call.id or UNSET, "function" if call.id else UNSET)


def join_calls(deltas: Iterable[Delta]) -> list[ToolCallDelta]:
    """Join the pieces of each tool call in one choice's deltas; return the whole calls, sorted by their index."""
    calls: dict[int, ToolCallDelta] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        call = calls.get(piece.index, ToolCallDelta(piece.index))
        arguments = call.arguments + piece.arguments
        calls[piece.index] = ToolCallDelta(piece.index, arguments, call.id or piece.id, call.name + piece.name)
    return [calls[index] for index in sorted(calls)]


def usage_reply(usage: Usage) -> reply.UsageReply:
    """Convert a token usage to OpenAI's field `usage`; its details are null while the number of cached tokens is
    unknown."""
    cached = None if usage.num_cached is None else reply.PromptTokensDetails(usage.num_cached)
    return reply.UsageReply(usage.num_prompt, usage.num_output, usage.num_prompt + usage.num_output, cached)


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
