"""Generate mixed traffic: request classes with their shares and arrival processes, in order of due time.

The same arguments give the same requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import NamedTuple

from tandem.core.ids import OPEN_TENANT, RequestId, TenantId
from tandem.core.request import Request, SamplingParams
from tandem.workload import seeded_random
from tandem.workload.arrivals import Arrivals, Poisson, due_times
from tandem.workload.lengths import Lengths, length_at
from tandem.workload.request_class import RequestClass
from tandem.workload.scheduled_request import MODEL, ScheduledRequest

EXACT_AMONG = 20
"""Number of consecutive requests within which shares are exact. With independent sampling, 200 requests with 10 % of
long ones would contain between 12 and 28 of them, and seeds would differ more than the compared systems do. With a
larger number, it would take more requests until shares are exact; with a smaller one, long requests could not be close
together, as they are by chance."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Description of mixed traffic: classes of requests and how they arrive.

    `groups`: the classes. `arrivals`: arrival process of all classes that have none of their own. `rate`: requests per
    second, not counting later requests of conversations; None: the caller must give it. Raises ValueError unless the
    groups have different names and their shares add up to 1."""

    groups: tuple[RequestClass, ...]
    arrivals: Arrivals = field(default_factory=Poisson)
    rate: float | None = None

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(f"groups must have different names, got {names}")
        shares = [group.share for group in self.groups]
        if abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"shares must add up to 1, got {shares}, which makes {sum(shares):.6g}")


def scheduled_requests(
    mix: Mix, seed: int, count: int | None = None, rate: float | None = None, salt: str = ""
) -> Iterator[ScheduledRequest]:
    """Return an iterator over the requests of a mix, in order of due time.

    Of a conversation, the iterator yields only the first request; the function in a request's field `follow` builds the
    next one. `seed`: determines the content of requests and, with the rate, their times. `count`: number of requests;
    None: the iterator is endless. `rate`: requests per second, 0: all are due at 0 s; None: the mix's own rate. `salt`:
    another salt gives prompts with other tokens of the same lengths. No two prompts share a block except in their
    prefixes. Raises ValueError if neither `rate` nor the mix gives a rate."""
    rate = mix.rate if rate is None else rate
    if rate is None or not 0 <= rate < float("inf"):
        raise ValueError(f"a rate of requests per second is needed, got {rate}")
    return islice(_merged(mix, seed, rate, salt), count)


def poisson(groups: Sequence[RequestClass], seed: int, count: int, rate: float) -> Iterator[ScheduledRequest]:
    """Generate the first `count` requests of a mix of `groups` with Poisson arrivals of `rate` requests per second.

    A shorthand for `scheduled_requests`.
    """
    return scheduled_requests(Mix(tuple(groups), Poisson()), seed, count, rate)


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


class _Arrival(NamedTuple):
    due_s: float
    group: RequestClass
    names: tuple[seeded_random.Name, ...]


def _merged(mix: Mix, seed: int, rate: float, salt: str) -> Iterator[ScheduledRequest]:
    arrivals_by_time = heapq.merge(*_streams(mix, seed, rate), key=lambda arrival: arrival.due_s)
    for number, arrival in enumerate(arrivals_by_time):
        yield Conversation(f"r{number}", arrival.group, arrival.names, salt).opening(arrival.due_s)


def _streams(mix: Mix, seed: int, rate: float) -> Iterator[Iterator[_Arrival]]:
    """Yield one stream for all groups together, and one for each group with arrivals of its own, which needs a rate
    above 0."""
    shared_groups = [group for group in mix.groups if group.arrivals is None or rate == 0]
    if shared_groups:
        yield _stream(shared_groups, mix.arrivals, rate, (seed, ""))
    for group in mix.groups:
        if group.arrivals is not None and rate > 0:
            yield _stream([group], group.arrivals, rate, (seed, group.name))


def _stream(
    groups: Sequence[RequestClass], arrivals: Arrivals, rate: float, names: tuple[seeded_random.Name, ...]
) -> Iterator[_Arrival]:
    times = due_times(arrivals, rate * sum(group.share for group in groups), *names)
    for number, (due_s, group) in enumerate(zip(times, _members(groups, names), strict=True)):
        yield _Arrival(due_s, group, (*names, number))


def _members(groups: Sequence[RequestClass], names: tuple[seeded_random.Name, ...]) -> Iterator[RequestClass]:
    """Yield the group of each request: among every EXACT_AMONG requests each has its share, rounded so that it holds in
    the long run.

    Uses evenly spaced points of [0, 1), shifted randomly and shuffled.
    """
    for batch in count():
        shift = seeded_random.uniform(*names, "moved", batch)
        positions = sorted(
            range(EXACT_AMONG), key=lambda position: seeded_random.uniform(*names, "place", batch, position)
        )
        for position in positions:
            yield _group_at(groups, (position + shift) / EXACT_AMONG)


def _group_at(groups: Sequence[RequestClass], at: float) -> RequestClass:
    remaining = at * sum(group.share for group in groups)
    for group in groups:
        remaining -= group.share
        if remaining < 0:
            return group
    return groups[-1]
