"""The parts of an answer as inference.proto's replies; never waits for a part or sends a reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from tandem.core.events import PromptScored, SampledToken
from tandem.gateway.answers import Answer
from tandem.gateway.completion import Delta, Ending, Part, ToolCallDelta
from tandem.gateway.openai_response import LOWEST_LOGPROB
from tandem.wire.gen import inference_pb2 as pb

Reply = TypeVar("Reply", bound=pb.ChatReply | pb.CompleteReply)


class Form(Generic[Reply]):
    """How one of the two kinds of replies says the same. `created` is in seconds since the epoch."""

    def __init__(self, answer: Answer, created: int, reply: type[Reply]) -> None:
        ask = answer.ask
        self._answer = answer
        self._created = created
        self._make = reply
        self._text = answer.served.text
        self._with_logprobs = ask.logprobs is not None
        self._with_token_ids = bool(ask.body.return_token_ids)
        self._endings: list[Ending] = []
        self._begun = False

    def reply(self, parts: Iterable[Part]) -> Reply | None:
        """What `parts`, the next ones, come to in one message; None where a client would see nothing in it. All parts
        of an answer at once are the whole of it."""
        deltas: dict[int, list[Delta]] = {}
        reasons: dict[int, str] = {}
        for part in parts:
            match part:
                case Delta():
                    if self._shows(part):
                        deltas.setdefault(part.choice, []).append(part)
                case PromptScored():
                    pass
                case Ending():
                    reasons[part.choice] = part.reason.value
                    self._endings.append(part)
        if not deltas and not reasons:
            return None
        reply = self._next()
        for choice in sorted(deltas.keys() | reasons.keys()):
            self._add(reply, choice, deltas.get(choice, ()), reasons.get(choice, ""))
        if reasons and len(self._endings) == self._answer.job.num_choices:
            self._close(reply)
        return reply

    def _add(self, reply: Reply, index: int, deltas: Sequence[Delta], reason: str) -> None:
        raise NotImplementedError

    def _next(self) -> Reply:
        if self._begun:
            return self._make()
        self._begun = True
        return self._make(id=self._answer.job.id, created=self._created, model=self._answer.served.name)

    def _close(self, reply: Reply) -> None:
        prompt = len(self._answer.job.prompt_tokens)
        output = sum(ending.num_output_tokens for ending in self._endings)
        usage = pb.Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)
        cached = [n for ending in self._endings if (n := ending.num_cached_tokens) is not None]
        if cached:
            usage.prompt_tokens_details.cached_tokens = max(cached)
        reply.usage.CopyFrom(usage)
        reply.path = self._answer.path

    def _shows(self, delta: Delta) -> bool:
        tells_token = self._with_logprobs or self._with_token_ids
        return bool(delta.text or delta.reasoning or delta.tool_calls) or (tells_token and delta.token is not None)

    def _ids(self, deltas: Sequence[Delta]) -> list[int]:
        return [delta.token.id for delta in deltas if delta.token] if self._with_token_ids else []

    def _logprobs(self, deltas: Sequence[Delta]) -> list[pb.TokenLogprob]:
        if not self._with_logprobs:
            return []
        return [self._entry(delta.token, delta.offset) for delta in deltas if delta.token]

    def _entry(self, token: SampledToken, offset: int) -> pb.TokenLogprob:
        facts = self._text.token_text(token.id)
        entry = pb.TokenLogprob(
            token=facts.text, logprob=_finite(token.logprob), bytes=facts.raw, text_offset=offset, token_id=token.id
        )
        for other, logprob in token.top:
            facts = self._text.token_text(other)
            entry.top_logprobs.add(token=facts.text, logprob=_finite(logprob), bytes=facts.raw, token_id=other)
        return entry


class ChatForm(Form[pb.ChatReply]):
    """Of Chat and StreamChat."""

    def __init__(self, answer: Answer, created: int) -> None:
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


class TextForm(Form[pb.CompleteReply]):
    """Of Complete and StreamComplete."""

    def __init__(self, answer: Answer, created: int) -> None:
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
    """The pieces of each call put together, by index."""
    calls: dict[int, pb.ToolCall] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, pb.ToolCall(index=piece.index))
        if piece.id:
            call.id, call.type = piece.id, "function"
        call.function.name += piece.name
        call.function.arguments += piece.arguments
    return [calls[index] for index in sorted(calls)]


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
