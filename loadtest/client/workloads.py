"""The requests of each workload, a function of its name, size, seed and turn; never sends any.

Lengths and arrivals follow from the seed, the prompts' tokens from seed and turn: two turns ask equally much of a
system, and no prefix cache helps the later one, since no two prompts share a first block. Prompts are random token ids
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
"""Class, how many of 24, and the range of its prompts' tokens: 70 %, 20 % and 10 %, rounded. Rate and lengths are those
of the mix `mix`, whose shares hold in the long run; with 24 requests a bench needs exact numbers, and published figures
have these."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request: `prompt` token ids, exactly `max_tokens` out, to be sent `due_s` after the beginning."""

    name: str
    group: str
    prompt: tuple[int, ...]
    max_tokens: int
    due_s: float = 0.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`is_sequential`: each request waits for the one before, and `due_s` says nothing. Otherwise they are sent when
    they are due, whatever became of earlier ones."""

    name: str
    seed: int
    turn: int
    asks: tuple[Ask, ...]
    is_sequential: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for ask in self.asks)


Encode = Callable[[str], list[int]]
"""Text to token ids of the model that is served."""


def sequence_workload(name: str, seed: int, turn: int, count: int, num_prompt: int, num_output: int) -> Workload:
    """Equally long requests, one at a time."""
    sizes = [_Size("single", num_prompt, num_output)] * count
    return Workload(name=name, seed=seed, turn=turn, asks=_asks(name, seed, turn, sizes), is_sequential=True)


def throughput_workload(seed: int, turn: int, count: int, num_prompt: int = 256, num_output: int = 64) -> Workload:
    """All at once: what a batch job is."""
    sizes = [_Size("batch", num_prompt, num_output)] * count
    return Workload(name="throughput", seed=seed, turn=turn, asks=_asks("throughput", seed, turn, sizes))


def mix_workload(seed: int, turn: int, count: int, rate: float = MIX_RATE) -> Workload:
    """Poisson arrivals of prompts of three classes, 32 to 64 tokens out; all at t=0 where `rate` is 0."""
    chance = random.Random(f"mix {seed}")
    kinds = [kind for kind, number in zip(_MIX, _shares(count), strict=True) for _ in range(number)]
    chance.shuffle(kinds)
    sizes, due = [], 0.0
    for group, _, low, high in kinds:
        sizes.append(_Size(group, chance.randint(low, high), chance.randint(32, 64), due))
        due += chance.expovariate(rate) if rate else 0.0
    name = "mix" if rate else "mix-burst"
    return Workload(name=name, seed=seed, turn=turn, asks=_asks(name, seed, turn, sizes))


def edit_workload(seed: int, turn: int, encode: Encode, count: int, num_output: int = 160) -> Workload:
    """Edits of real texts, one request at a time: the answer copies long spans of the prompt. What lookup drafts."""
    texts = list(passages())
    random.Random(f"edit {seed}").shuffle(texts)
    number = random.Random(f"edit {seed} {turn}").randrange(10**5)
    asks = []
    for index in range(count):
        # The number comes before all else, so that first blocks differ.
        prompt = encode(texts[index % len(texts)].prompt(number * 100 + index))
        asks.append(Ask(name=f"edit-{index}", group="edit", prompt=tuple(prompt), max_tokens=num_output))
    return Workload(name="edit", seed=seed, turn=turn, asks=tuple(asks), is_sequential=True)


def warm_up(seed: int) -> Workload:
    """Two untimed requests, one of several chunks."""
    sizes = [_Size("warm", 320, 2), _Size("warm", 40, 12)]
    return Workload(name="warm-up", seed=seed, turn=0, asks=_asks("warm-up", seed, 0, sizes), is_sequential=True)


class _Size(NamedTuple):
    group: str
    num_prompt: int
    num_output: int
    due_s: float = 0.0


def _asks(name: str, seed: int, turn: int, sizes: Sequence[_Size]) -> tuple[Ask, ...]:
    chance = random.Random(f"{name} {seed} {turn} tokens")
    return tuple(
        Ask(
            name=f"{size.group}-{index}",
            group=size.group,
            prompt=tuple(chance.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(size.num_prompt)),
            max_tokens=size.num_output,
            due_s=size.due_s,
        )
        for index, size in enumerate(sizes)
    )


def _shares(count: int) -> tuple[int, ...]:
    """`count` divided as `_MIX` is, by largest remainders."""
    whole = sum(number for _, number, _, _ in _MIX)
    exact = [count * number / whole for _, number, _, _ in _MIX]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for place in by_remainder[: count - sum(shares)]:
        shares[place] += 1
    return tuple(shares)


def workload(name: str, seed: int, turn: int, encode: Encode, scale: float = 1.0) -> Workload:
    """The workload of that name with `scale` times its usual requests. Raises KeyError."""

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
"""All of them, in the order in which they are run."""
