"""Format the output of a request as the replies of inference.proto."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from msgspec import UNSET

from tandem.core.events import SampledToken
from tandem.gateway.http.openai_response import LOWEST_LOGPROB, ChunkHeader
from tandem.gateway.http.server_timing import timing_ms
from tandem.gateway.output.text_stream import ChoiceEnd, Delta, ToolCallDelta
from tandem.gateway.serving.completions import CompletionStream, Part
from tandem.gateway.serving.echo import Echo, ScoredPrompt
from tandem.wire.gen import inference_pb2 as pb

Reply = TypeVar("Reply", bound=pb.ChatReply | pb.CompleteReply)


class ReplyFormatter(ABC, Generic[Reply]):
    """Format the output of a request as one of the two types of replies. `created`: in seconds since the epoch."""

    def __init__(self, answer: CompletionStream, created: int, reply: type[Reply]) -> None:
        self._answer = answer
        self._header = ChunkHeader.of(answer, created)
        self._make = reply
        self._begun = False
        self._num_open = answer.num_choices

    def reply(self, parts: Iterable[Part]) -> Reply | None:
        """Make one message of the next `parts`; None where it would show the client nothing. All parts of the output
        given at once make the reply of a call that is not streamed."""
        scored: list[ScoredPrompt] = []
        deltas: dict[int, list[Delta]] = {}
        reasons: dict[int, str] = {}
        for part in parts:
            match part:
                case Delta():
                    if self._header.shows(part):
                        deltas.setdefault(part.choice, []).append(part)
                case Echo():
                    deltas.setdefault(part.choice, []).extend(part.deltas)
                case ScoredPrompt():
                    scored.append(part)
                case ChoiceEnd():
                    reasons[part.choice] = part.reason.value
        if not (deltas or reasons or scored):
            return None
        reply = self._next()
        reply.prompt_logprobs.extend(self._prompt_scores(each) for each in scored)
        for choice in sorted(deltas.keys() | reasons.keys()):
            self._add(reply, choice, deltas.get(choice, ()), reasons.get(choice, ""))
        self._num_open -= len(reasons)
        if not self._num_open:
            self._close(reply)
        return reply

    @abstractmethod
    def _add(self, reply: Reply, index: int, deltas: Sequence[Delta], reason: str) -> None:
        """Add a choice to the message, with its next deltas and, if it has ended, its finish reason."""

    def _next(self) -> Reply:
        if self._begun:
            return self._make()
        self._begun = True
        header = self._header
        tier = "" if header.service_tier is UNSET else header.service_tier
        return self._make(id=header.id, created=header.created, model=header.model, service_tier=tier)

    def _close(self, reply: Reply) -> None:
        tokens = self._answer.usage()
        usage = reply.usage
        usage.prompt_tokens = tokens.num_prompt
        usage.completion_tokens = tokens.num_output
        usage.total_tokens = tokens.num_prompt + tokens.num_output
        if tokens.num_cached is not None:
            usage.prompt_tokens_details.cached_tokens = tokens.num_cached
        reply.path = self._answer.path
        reply.attempts = self._answer.num_attempts
        if (timing := self._answer.timing) is not None:
            reply.timing.CopyFrom(pb.Timing(**timing_ms(timing)))

    def _ids(self, deltas: Sequence[Delta]) -> list[int]:
        if not self._header.with_token_ids:
            return []
        return [token for delta in deltas if (token := delta.token_id) is not None]

    def _logprobs(self, deltas: Sequence[Delta]) -> list[pb.TokenLogprob]:
        if not self._header.with_logprobs:
            return []
        return [self._entry(delta.token, delta.offset) for delta in deltas if delta.token]

    def _prompt_scores(self, scored: ScoredPrompt) -> pb.PromptLogprobs:
        return pb.PromptLogprobs(prompt=scored.prompt, tokens=[self._entry(token, 0) for token in scored.tokens])

    def _entry(self, token: SampledToken, offset: int) -> pb.TokenLogprob:
        text = self._header.text
        facts = text.token_text(token.id)
        entry = pb.TokenLogprob(token=facts.text, bytes=facts.raw, text_offset=offset, token_id=token.id)
        if token.logprob is None:
            return entry
        entry.logprob = max(token.logprob, LOWEST_LOGPROB)
        for other, logprob in token.top:
            facts = text.token_text(other)
            entry.top_logprobs.add(
                token=facts.text, logprob=max(logprob, LOWEST_LOGPROB), bytes=facts.raw, token_id=other
            )
        return entry


class GrpcChatFormatter(ReplyFormatter[pb.ChatReply]):
    """ReplyFormatter of Chat and StreamChat."""

    def __init__(self, answer: CompletionStream, created: int) -> None:
        super().__init__(answer, created, pb.ChatReply)
        self._spoken: set[int] = set()

    def _add(self, reply: pb.ChatReply, index: int, deltas: Sequence[Delta], reason: str) -> None:
        choice = reply.choices.add(
            index=index, finish_reason=reason, logprobs=self._logprobs(deltas), token_ids=self._ids(deltas)
        )
        message = choice.message
        message.content = "".join(delta.text for delta in deltas)
        message.reasoning_content = "".join(delta.reasoning for delta in deltas)
        message.tool_calls.extend(_tool_calls([call for delta in deltas for call in delta.tool_calls]))
        if index not in self._spoken:
            self._spoken.add(index)
            message.role = "assistant"


class GrpcTextFormatter(ReplyFormatter[pb.CompleteReply]):
    """ReplyFormatter of Complete and StreamComplete."""

    def __init__(self, answer: CompletionStream, created: int) -> None:
        super().__init__(answer, created, pb.CompleteReply)

    def _add(self, reply: pb.CompleteReply, index: int, deltas: Sequence[Delta], reason: str) -> None:
        reply.choices.add(
            index=index,
            text="".join(delta.text for delta in deltas),
            finish_reason=reason,
            logprobs=self._logprobs(deltas),
            token_ids=self._ids(deltas),
        )


def _tool_calls(pieces: Sequence[ToolCallDelta]) -> list[pb.ToolCall]:
    """Join the pieces of each tool call, sorted by its index."""
    calls: dict[int, pb.ToolCall] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, pb.ToolCall(index=piece.index))
        if piece.id:
            call.id, call.type = piece.id, "function"
        call.function.name += piece.name
        call.function.arguments += piece.arguments
    return [calls[index] for index in sorted(calls)]
