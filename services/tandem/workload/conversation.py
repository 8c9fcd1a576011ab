"""Generate the requests of one conversation, one after the other; the same arguments give the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.ids import OPEN_TENANT, RequestId, TenantId
from tandem.core.request import Request, SamplingParams
from tandem.workload import seeded_random
from tandem.workload.lengths import Lengths, length_at
from tandem.workload.request_class import RequestClass
from tandem.workload.scheduled_request import MODEL, ScheduledRequest


@dataclass(frozen=True, slots=True)
class Conversation:
    """Generate the requests of one client: a single request, or a conversation in which each request extends the one
    before.

    `opening` returns the first request; the function in its field `follow` builds the next one. `id`: request id; in a
    conversation of several requests the number of the request, from 1, is appended. `group`: class of the requests.
    `names`: seed of the workload, followed by names that identify the client; the client's random numbers are a
    function of these. `salt`: further seed of the token ids, so that another salt gives other texts of the same
    lengths."""

    id: str
    group: RequestClass
    names: tuple[seeded_random.Name, ...]
    salt: str = ""

    def opening(self, due_s: float) -> ScheduledRequest:
        return self._turn(1, self._prefix(), due_s)

    def _prefix(self) -> tuple[int, ...]:
        """Return the tokens of the client's document, equal for all clients of the group with the same document."""
        prefix, (seed, *_) = self.group.prefix, self.names
        if prefix is None:
            return ()
        document = prefix.document_at(seeded_random.uniform(*self.names, "document"))
        document_names = (seed, "document", self.group.name, document)
        return seeded_random.tokens(
            length_at(prefix.num_tokens, seeded_random.uniform(*document_names)), *document_names, self.salt
        )

    def _turn(self, turn: int, before: tuple[int, ...], due_s: float) -> ScheduledRequest:
        group = self.group
        own = seeded_random.tokens(self._length(group.prompt, "prompt", turn), *self.names, "tokens", turn, self.salt)
        num_turns = self._length(group.turns, "turns")
        sampling = SamplingParams(
            max_tokens=self._length(group.output, "output", turn),
            seed=seeded_random.integer(0, 2**32, *self.names, "sampling", turn),
        )
        request = Request(
            id=RequestId(self.id if group.turns == (1, 1) else f"{self.id}.{turn}"),
            model=MODEL,
            prompt_tokens=before + own,
            sampling=sampling,
            tenant=TenantId(group.tenant or OPEN_TENANT),
            lane=group.lane,
            priority=group.priority,
        )
        follow = partial(self._next, turn, request.prompt_tokens) if turn < num_turns else None
        return ScheduledRequest(request, group.name, due_s, group.tenant, follow)

    def _next(self, turn: int, prompt: tuple[int, ...], answer: Sequence[int], ended_s: float) -> ScheduledRequest:
        think_s = seeded_random.exponential(self.group.think_s, *self.names, "think", turn)
        return self._turn(turn + 1, prompt + tuple(answer), ended_s + think_s)

    def _length(self, lengths: Lengths, *names: seeded_random.Name) -> int:
        return length_at(lengths, seeded_random.uniform(*self.names, *names))
