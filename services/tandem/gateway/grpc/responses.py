"""Format the output of a request as the replies of inference.proto."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET

from tandem.core.events import SampledToken
from tandem.gateway.http.openai_response import LOWEST_LOGPROB, GatheredParts, OutputFormatter, join_calls, usage_reply
from tandem.gateway.http.tandem_facts import tandem_facts
from tandem.gateway.output.text_stream import Delta
from tandem.gateway.serving.completions import CompletionStream, Part
from tandem.gateway.serving.echo import ScoredPrompt
from tandem.wire.gen import inference_pb2 as pb

Reply = TypeVar("Reply", bound=pb.ChatReply | pb.CompleteReply)


class ReplyFormatter(ABC, OutputFormatter, Generic[Reply]):
    """Format the output of one request as messages of inference.proto. `answer`: the completion whose output is
    formatted. `created`: time of the response in seconds since the epoch. `reply`: class of the messages, ChatReply or
    CompleteReply."""

    def __init__(self, answer: CompletionStream, created: int, reply: type[Reply]) -> None:
        super().__init__(answer, created)
        self._make = reply
        self._begun = False
        self._num_open = answer.num_choices

    def reply(self, parts: Iterable[Part]) -> Reply | None:
        """Return one message with the next `parts` of the output; None where they would show the client nothing.

        The message in which the last choice ends also has the token usage, the path, the number of attempts and the
        preemptions, and, where the client requested them, the waits and the time of each stage. For a call that is not
        streamed, pass all parts at once."""
        gathered = GatheredParts(part for part in parts if not isinstance(part, Delta) or self._shows(part))
        if not (gathered.deltas or gathered.scored):
            return None
        reply = self._next()
        reply.prompt_logprobs.extend(self._prompt_scores(each) for each in gathered.scored)
        for choice, deltas in sorted(gathered.deltas.items()):
            self._add(reply, choice, deltas, gathered.reasons.get(choice, ""))
        self._num_open -= len(gathered.reasons)
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
        return self._make(**{name: value for name, value in self._named_fields.items() if value is not UNSET})

    def _close(self, reply: Reply) -> None:
        usage = msgspec.to_builtins(usage_reply(self._answer.usage()))
        reply.usage.CopyFrom(pb.Usage(**usage))
        facts = msgspec.to_builtins(tandem_facts(self._answer, self._answer.timing))
        reply.path, reply.attempts = facts["path"], facts["attempts"]
        reply.preemptions, reply.paused_ms = facts.get("preemptions", 0), facts.get("paused_ms", 0.0)
        for prompt, waits in enumerate(facts.get("waits", ())):
            reply.waits.extend(pb.Wait(prompt=prompt, **wait) for wait in waits)
        reply.yielded.extend(pb.YieldedSequences(**counts) for counts in facts.get("yielded", ()))
        if "timing" in facts:
            reply.timing.CopyFrom(pb.Timing(**facts["timing"]))

    def _ids(self, deltas: Sequence[Delta]) -> list[int]:
        if not self._with_token_ids:
            return []
        return [token for delta in deltas if (token := delta.token_id) is not None]

    def _logprobs(self, deltas: Sequence[Delta]) -> list[pb.TokenLogprob]:
        if not self._with_logprobs:
            return []
        return [self._entry(delta.token, delta.offset) for delta in deltas if delta.token]

    def _prompt_scores(self, scored: ScoredPrompt) -> pb.PromptLogprobs:
        return pb.PromptLogprobs(prompt=scored.prompt, tokens=[self._entry(token, 0) for token in scored.tokens])

    def _entry(self, token: SampledToken, offset: int) -> pb.TokenLogprob:
        facts = self._text.token_text(token.id)
        entry = pb.TokenLogprob(token=facts.text, bytes=facts.raw, text_offset=offset, token_id=token.id)
        if token.logprob is None:
            return entry
        entry.logprob = max(token.logprob, LOWEST_LOGPROB)
        for other, logprob in token.top:
            facts = self._text.token_text(other)
            entry.top_logprobs.add(
                token=facts.text, logprob=max(logprob, LOWEST_LOGPROB), bytes=facts.raw, token_id=other
            )
        return entry


class GrpcChatFormatter(ReplyFormatter[pb.ChatReply]):
    """Format the output of the RPCs Chat and StreamChat."""

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
        for call in join_calls(deltas):
            function = pb.FunctionCall(name=call.name, arguments=call.arguments)
            message.tool_calls.add(index=call.index, id=call.id, type="function" if call.id else "", function=function)
        if index not in self._spoken:
            self._spoken.add(index)
            message.role = "assistant"


class GrpcTextFormatter(ReplyFormatter[pb.CompleteReply]):
    """Format the output of the RPCs Complete and StreamComplete."""

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
