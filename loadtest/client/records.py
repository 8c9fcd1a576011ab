"""Define the measurements as frozen values that serialize as JSON.

Times are seconds. All times of one run count from its own beginning.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement of one request, as its client saw it.

    `due_s` is when the schedule required it to be sent, `sent_s` when it was sent. `stamps_s` holds one time per token;
    tokens that arrived together have equal times. `tokens` is None where the endpoint reports no ids. `error` is empty
    when the answer was complete; `error_kind` is the category under which the failure is counted.
    """

    name: str
    group: str
    num_prompt_tokens: int
    num_requested_tokens: int
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
        """Return how many seconds later than due the client sent the request; TTFT includes this delay of the
        client."""
        return max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_s(self) -> float:
        """Return the time from when the request was due to its first token.

        Counting from the due time keeps a client or server that falls behind from hiding it (wrk2's correction of
        coordinated omission).
        """
        return self.stamps_s[0] - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Return the seconds between consecutive arrivals; tokens that arrived together are one arrival."""
        arrivals = sorted(set(self.stamps_s))
        return tuple(after - before for before, after in pairwise(arrivals))

    @property
    def e2e_s(self) -> float:
        """Return the time from when the request was due to its last token."""
        return self.stamps_s[-1] - self.due_s

    @property
    def decode_s(self) -> float:
        """Return the time from the first to the last token."""
        return self.stamps_s[-1] - self.stamps_s[0]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of one engine step of an offline run, in seconds.

    The parts follow one another. `model_s` and `batch_s` make up the execution: `model_s` is inside the model,
    `batch_s` builds the batch, samples and updates state.
    """

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
    """Speed of the machine at one moment: float32 matrix products in GFLOP/s, memory reads in GB/s."""

    gflops: float
    read_gbs: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload on a system.

    `began` orders runs: seconds of the bench's own clock.
    """

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
        """Return the mean GFLOP/s of the machine probes before and after the run; None unless both exist."""
        if self.before is None or self.after is None:
            return None
        return (self.before.gflops + self.after.gflops) / 2

    @property
    def failures(self) -> list[str]:
        """Return the reasons why this run must not be used in comparisons; empty when it may."""
        return [f"{record.name}: {record.error}" for record in self.records if record.error]


def encode(value: Any) -> bytes:
    """Return the value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def decode_run(raw: bytes) -> Run:
    return msgspec.json.decode(raw, type=Run)
