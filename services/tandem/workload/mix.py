"""Requests and when they come, as functions of a seed; never sends one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.core.ids import RequestId
from tandem.core.request import Request, SamplingParams
from tandem.workload import chance
from tandem.workload.ask import MODEL, Ask


@dataclass(frozen=True, slots=True)
class Group:
    """A class of requests: its share of all, and the least and most tokens of its prompts and outputs, each length in
    between as likely as any other."""

    name: str
    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]


MIX = (
    Group("short", 0.7, (64, 200), (32, 64)),
    Group("medium", 0.2, (550, 650), (32, 64)),
    Group("long", 0.1, (2400, 2600), (32, 64)),
)


def poisson(groups: Sequence[Group], seed: int, count: int, rate: float) -> Iterator[Ask]:
    """`count` requests in the order in which they are due, `rate` per second on average with exponential times between
    them; all at 0 s where `rate` is 0. No two prompts share a block. Raises ValueError unless the groups' shares add up
    to 1."""
    if abs(sum(group.share for group in groups) - 1) > 1e-9:
        raise ValueError(f"shares must add up to 1, got {[group.share for group in groups]}")
    return _asks(groups, seed, count, rate)


def _asks(groups: Sequence[Group], seed: int, count: int, rate: float) -> Iterator[Ask]:
    due_s = 0.0
    for number in range(count):
        due_s += chance.exponential(1 / rate, seed, "wait", number) if rate else 0.0
        group = _drawn(groups, chance.uniform(seed, "group", number))
        num_prompt = chance.integer(*group.prompt, seed, "prompt length", number)
        sampling = SamplingParams(
            max_tokens=chance.integer(*group.output, seed, "output length", number),
            seed=chance.integer(0, 2**32, seed, "sampling", number),
        )
        prompt = chance.tokens(num_prompt, seed, "prompt", number)
        request = Request(id=RequestId(f"r{number}"), model=MODEL, prompt_tokens=prompt, sampling=sampling)
        yield Ask(request, group.name, due_s)


def _drawn(groups: Sequence[Group], at: float) -> Group:
    for group in groups:
        at -= group.share
        if at < 0:
            return group
    return groups[-1]
