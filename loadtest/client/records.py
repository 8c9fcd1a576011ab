"""What was measured, as frozen values that travel as JSON; never measures or sums anything up itself.

Times are seconds. All times of one run count from its own beginning.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `due_s` is when it was to be sent by its schedule, `sent_s` when it was.

    `stamps_s` holds one time per token, equal ones for tokens that came together. `tokens` is None where the endpoint
    tells no ids. `error` is empty when the answer came whole; `error_kind` is what is counted of it.
    """

    name: str
    group: str
    num_prompt_tokens: int
    num_asked_tokens: int
    due_s: float
    sent_s: float
    ended_s: float = 0.0
    tenant: str = ""
    stamps_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] | None = None
    text: str = ""
    num_output_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    error_kind: str = ""

    @property
    def lateness_s(self) -> float:
        """How much later than due the client sent it: the client's own fault, which its TTFT includes."""
        return max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_s(self) -> float:
        """From the time it was due, so that a client or server that falls behind cannot hide it (wrk2's correction of
        coordinated omission)."""
        return self.stamps_s[0] - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between arrivals after the first one; tokens that came together are one arrival."""
        arrivals = sorted(set(self.stamps_s))
        return tuple(after - before for before, after in pairwise(arrivals))

    @property
    def e2e_s(self) -> float:
        """From the time it was due to its last token."""
        return self.stamps_s[-1] - self.due_s

    @property
    def decode_s(self) -> float:
        """From the first to the last token."""
        return self.stamps_s[-1] - self.stamps_s[0]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step of an offline run. The parts follow one another; `model_s` and `batch_s` make up the execution:
    `model_s` is inside the model, `batch_s` builds the batch, samples and remembers."""

    num_decodes: int
    num_prefill_tokens: int
    plan_s: float
    model_s: float
    batch_s: float
    commit_s: float
    stream_s: float

    @property
    def total_s(self) -> float:
        return self.plan_s + self.model_s + self.batch_s + self.commit_s + self.stream_s

    @property
    def overhead_s(self) -> float:
        return self.total_s - self.model_s


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the machine was at that moment: fp32 GEMM in GFLOP/s, reading memory in GB/s."""

    gflops: float
    read_gbs: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One workload at one system once. `began` orders runs: seconds of the bench's own clock."""

    system: str
    workload: str
    seed: int
    turn: int
    records: tuple[Record, ...]
    began: float = 0.0
    wall_s: float = 0.0
    steps: tuple[Step, ...] = ()
    before: Probe | None = None
    after: Probe | None = None

    @property
    def speed(self) -> float | None:
        """GFLOP/s of the probes around it, their mean; None without both."""
        if self.before is None or self.after is None:
            return None
        return (self.before.gflops + self.after.gflops) / 2

    @property
    def failures(self) -> list[str]:
        """Why this run counts for nothing; empty when it counts."""
        return [f"{record.name}: {record.error}" for record in self.records if record.error]


def encode(value: Any) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def decode_run(raw: bytes) -> Run:
    return msgspec.json.decode(raw, type=Run)
