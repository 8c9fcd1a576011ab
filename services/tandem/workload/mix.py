"""Mixed traffic: groups, their shares and how they come, and its requests in the order in which they are due; never
sends one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

from tandem.workload import seeded_random
from tandem.workload.arrivals import Arrivals, Poisson, due_times
from tandem.workload.ask import ScheduledRequest
from tandem.workload.conversation import Conversation
from tandem.workload.request_class import RequestClass

EXACT_AMONG = 20
"""Requests among which shares are exact. Plainly drawn, 200 requests with 10 % of long ones would hold 12 of these or
28, and seeds would differ by their luck more than systems do by their merit. Among more, it would take more requests
until shares hold; among fewer, long requests could not come close together, as by chance they do."""


@dataclass(frozen=True, slots=True)
class Mix:
    """`rate`: requests per second that come by themselves, unless whoever asks for them names another. Raises
    ValueError unless the groups have different names and their shares add up to 1."""

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


def asks(
    mix: Mix, seed: int, count: int | None = None, rate: float | None = None, salt: str = ""
) -> Iterator[ScheduledRequest]:
    """The first `count` that come by themselves, or all, without end; later turns of conversations are beside these.
    `rate` per second, else the mix's; all at 0 s where it is 0. What a group asks depends on the seed alone, the rate
    says when. No two prompts share a block but for their prefixes. Raises ValueError where there is no rate."""
    rate = mix.rate if rate is None else rate
    if rate is None or not 0 <= rate < float("inf"):
        raise ValueError(f"a rate of requests per second is needed, got {rate}")
    return islice(_merged(mix, seed, rate, salt), count)


def poisson(groups: Sequence[RequestClass], seed: int, count: int, rate: float) -> Iterator[ScheduledRequest]:
    """Those of a mix of `groups` that come by chance."""
    return asks(Mix(tuple(groups), Poisson()), seed, count, rate)


class _Coming(NamedTuple):
    due_s: float
    group: RequestClass
    names: tuple[seeded_random.Name, ...]


def _merged(mix: Mix, seed: int, rate: float, salt: str) -> Iterator[ScheduledRequest]:
    coming = heapq.merge(*_streams(mix, seed, rate), key=lambda one: one.due_s)
    for number, one in enumerate(coming):
        yield Conversation(f"r{number}", one.group, one.names, salt).opening(one.due_s)


def _streams(mix: Mix, seed: int, rate: float) -> Iterator[Iterator[_Coming]]:
    """One of all groups together, and one of each that comes in its own way, which says nothing without time."""
    together = [group for group in mix.groups if group.arrivals is None or rate == 0]
    if together:
        yield _stream(together, mix.arrivals, rate, (seed, ""))
    for group in mix.groups:
        if group.arrivals is not None and rate > 0:
            yield _stream([group], group.arrivals, rate, (seed, group.name))


def _stream(
    groups: Sequence[RequestClass], arrivals: Arrivals, rate: float, names: tuple[seeded_random.Name, ...]
) -> Iterator[_Coming]:
    times = due_times(arrivals, rate * sum(group.share for group in groups), *names)
    for number, (due_s, group) in enumerate(zip(times, _members(groups, names), strict=True)):
        yield _Coming(due_s, group, (*names, number))


def _members(groups: Sequence[RequestClass], names: tuple[seeded_random.Name, ...]) -> Iterator[RequestClass]:
    """Among every EXACT_AMONG as many of a group as its share asks for, rounded either way so that in the long run it
    holds: evenly spaced points of [0, 1), moved by chance and shuffled."""
    for batch in count():
        moved = seeded_random.uniform(*names, "moved", batch)
        places = sorted(range(EXACT_AMONG), key=lambda place: seeded_random.uniform(*names, "place", batch, place))
        for place in places:
            yield _group_at(groups, (place + moved) / EXACT_AMONG)


def _group_at(groups: Sequence[RequestClass], at: float) -> RequestClass:
    left = at * sum(group.share for group in groups)
    for group in groups:
        left -= group.share
        if left < 0:
            return group
    return groups[-1]
