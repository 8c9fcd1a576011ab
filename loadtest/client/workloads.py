"""Generate the requests of each workload from its name, size, seed and turn.

Lengths and arrivals follow from the seed, the prompts' tokens from seed and turn: two turns request the same amount of
work, and no prefix cache helps the later one, since no two prompts share a first block. Prompts are random token ids
unless the workload is about copying text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from loadtest.client.edit_prompts import passages
from tandem.workload.seeded_random import HIGHEST_TOKEN, LOWEST_TOKEN

MIX_RATE = 0.35
"""Requests per second; loads the best peer of the development machine to 83 %."""
_MIX = (("short", 16, 64, 200), ("medium", 5, 550, 650), ("long", 3, 2_400, 2_600))
"""Class, its count in 24 requests, and the range of its prompts' tokens.

The counts are 70 %, 20 % and 10 %, rounded. Rate and lengths are those of the mix `mix`, whose shares hold in the long
run; with 24 requests a bench needs exact numbers, and the published figures were measured with these.
"""


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a bench, due `due_s` seconds after the beginning.

    It has the token ids `prompt`, and its answer has exactly `max_tokens` tokens.
    """

    name: str
    group: str
    prompt: tuple[int, ...]
    max_tokens: int
    due_s: float = 0.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one run.

    With `is_sequential` each request is sent when the request before it has ended, and `due_s` is ignored. Otherwise
    each is sent when it is due.
    """

    name: str
    seed: int
    turn: int
    requests: tuple[BenchRequest, ...]
    is_sequential: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


Encode = Callable[[str], list[int]]
"""Converts text to token ids of the served model."""


def sequence_workload(name: str, seed: int, turn: int, count: int, num_prompt: int, num_output: int) -> Workload:
    """Make `count` requests of equal length, to be sent one at a time."""
    sizes = [_Size("single", num_prompt, num_output)] * count
    return Workload(name=name, seed=seed, turn=turn, requests=_requests(name, seed, turn, sizes), is_sequential=True)


def throughput_workload(seed: int, turn: int, count: int, num_prompt: int = 256, num_output: int = 64) -> Workload:
    """Make `count` requests that are all due at once, as a batch job sends them."""
    sizes = [_Size("batch", num_prompt, num_output)] * count
    return Workload(name="throughput", seed=seed, turn=turn, requests=_requests("throughput", seed, turn, sizes))


def mix_workload(seed: int, turn: int, count: int, rate: float = MIX_RATE) -> Workload:
    """Make Poisson arrivals of prompts of three classes, with answers of 32 to 64 tokens; all are due at 0 if `rate` is
    0."""
    rng = random.Random(f"mix {seed}")
    kinds = [kind for kind, number in zip(_MIX, _shares(count), strict=True) for _ in range(number)]
    rng.shuffle(kinds)
    sizes, due = [], 0.0
    for group, _, low, high in kinds:
        sizes.append(_Size(group, rng.randint(low, high), rng.randint(32, 64), due))
        due += rng.expovariate(rate) if rate else 0.0
    name = "mix" if rate else "mix-burst"
    return Workload(name=name, seed=seed, turn=turn, requests=_requests(name, seed, turn, sizes))


def edit_workload(seed: int, turn: int, encode: Encode, count: int, num_output: int = 160) -> Workload:
    """Make requests to edit real texts, to be sent one at a time.

    The answer copies long spans of the prompt, which drafting by prompt lookup can predict.
    """
    texts = list(passages())
    random.Random(f"edit {seed}").shuffle(texts)
    number = random.Random(f"edit {seed} {turn}").randrange(10**5)
    requests = []
    for index in range(count):
        # The number is the first word of the prompt, so that first blocks differ.
        prompt = encode(texts[index % len(texts)].prompt(number * 100 + index))
        requests.append(BenchRequest(name=f"edit-{index}", group="edit", prompt=tuple(prompt), max_tokens=num_output))
    return Workload(name="edit", seed=seed, turn=turn, requests=tuple(requests), is_sequential=True)


def warm_up(seed: int) -> Workload:
    """Make two requests to warm a server up, one of which takes several chunks; they are not timed."""
    sizes = [_Size("warm", 320, 2), _Size("warm", 40, 12)]
    return Workload(
        name="warm-up", seed=seed, turn=0, requests=_requests("warm-up", seed, 0, sizes), is_sequential=True
    )


class _Size(NamedTuple):
    group: str
    num_prompt: int
    num_output: int
    due_s: float = 0.0


def _requests(name: str, seed: int, turn: int, sizes: Sequence[_Size]) -> tuple[BenchRequest, ...]:
    rng = random.Random(f"{name} {seed} {turn} tokens")
    return tuple(
        BenchRequest(
            name=f"{size.group}-{index}",
            group=size.group,
            prompt=tuple(rng.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(size.num_prompt)),
            max_tokens=size.num_output,
            due_s=size.due_s,
        )
        for index, size in enumerate(sizes)
    )


def _shares(count: int) -> tuple[int, ...]:
    """Divide `count` in the proportions of `_MIX`, by largest remainders."""
    whole = sum(number for _, number, _, _ in _MIX)
    exact = [count * number / whole for _, number, _, _ in _MIX]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for place in by_remainder[: count - sum(shares)]:
        shares[place] += 1
    return tuple(shares)


def workload(name: str, seed: int, turn: int, encode: Encode, scale: float = 1.0) -> Workload:
    """Return the named workload with `scale` times its usual number of requests. Raises KeyError."""

    def sized(count: int) -> int:
        return max(1, round(count * scale))

    if name == "edit":
        return edit_workload(seed, turn, encode, sized(4))
    return _WORKLOADS[name](seed, turn, sized)


_Sized = Callable[[int], int]
_WORKLOADS: dict[str, Callable[[int, int, _Sized], Workload]] = {
    "decode": lambda seed, turn, sized: sequence_workload("decode", seed, turn, sized(5), 128, 64),
    "prefill-128": lambda seed, turn, sized: sequence_workload("prefill-128", seed, turn, sized(5), 128, 1),
    "prefill-512": lambda seed, turn, sized: sequence_workload("prefill-512", seed, turn, sized(5), 512, 1),
    "prefill-2048": lambda seed, turn, sized: sequence_workload("prefill-2048", seed, turn, sized(3), 2048, 1),
    "throughput": lambda seed, turn, sized: throughput_workload(seed, turn, sized(32)),
    "mix": lambda seed, turn, sized: mix_workload(seed, turn, sized(24)),
    "mix-burst": lambda seed, turn, sized: mix_workload(seed, turn, sized(24), rate=0.0),
}

NAMES = (*_WORKLOADS, "edit")
"""All workloads, in the order in which they are run."""
