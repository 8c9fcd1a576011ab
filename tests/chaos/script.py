"""Generate the script of faults from a seed: kind, victim and duration of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill prefill", "kill decode", "kill gateway", "stop prefill", "stop decode", "kill redis", "cut gateways",
    "cut peers", "blackhole gateways", "blackhole peers", "drain decode", "drain all",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Fault:
    """`victim` among workers is 0 for the one of its pool with the most to do, 1 for the other; `pool` is that of the
    worker whose connections are cut. It strikes `pause_s` after the cluster could bear it, and lasts `lasts_s` at least
    where it does not end by itself."""

    kind: Kind
    pool: Literal["prefill", "decode"]
    victim: int
    pause_s: float
    lasts_s: float

    def __str__(self) -> str:
        where = f" of {self.pool}" if self.kind.startswith(("cut", "blackhole")) else ""
        return f"{self.kind}{where} {self.victim}, {self.pause_s:.1f} s later, for {self.lasts_s:.1f} s"


def script(seed: int, number: int, kinds: Sequence[Kind] = KINDS) -> list[Fault]:
    """Return `number` faults; every kind is used, in random order, before any is repeated."""
    rng = random.Random(f"faults {seed}")
    out: list[Fault] = []
    while len(out) < number:
        out += [_random_fault(rng, kind) for kind in rng.sample(kinds, len(kinds))]
    return out[:number]


def _random_fault(rng: random.Random, kind: Kind) -> Fault:
    # Links are mended before and after a worker counts as lost, which takes 2 to 3 s.
    lasts_s = rng.choice([0.3, 1.0, 4.0])
    return Fault(kind, rng.choice(("prefill", "decode")), rng.choice([0, 0, 0, 1]), rng.uniform(0.2, 1.0), lasts_s)
