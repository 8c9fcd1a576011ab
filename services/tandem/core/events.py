"""Define the events that a worker reports to a gateway about a job, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import add
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockHash, HandoffKey, JobKey, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request_stages import JobStages


class FinishReason(Enum):
    """Why an output ended; the values are OpenAI's. Workers report STOP and LENGTH; the gateway turns a STOP whose text
    holds calls into TOOL_CALLS."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class SampledToken(NamedTuple):
    """One sampled token, with its log probability where the request sets `logprobs`.

    Log probabilities are natural logarithms, of the model's distribution at temperature 1 before penalties, biases,
    grammars and filters. `top` holds (token id, log probability) of the most likely tokens, best first; empty unless
    requested.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Pauses(NamedTuple):
    """Count how often a choice was preempted and went on, and the seconds that it waited in between."""

    num: int
    seconds: float

    @classmethod
    def sum(cls, all_pauses: Iterable[Pauses]) -> Pauses:
        found = list(all_pauses)
        return cls(sum(pauses.num for pauses in found), sum(pauses.seconds for pauses in found))


NO_PAUSES = Pauses(0, 0.0)


class LaneYield(NamedTuple):
    """Count the sequences of one lane that yielded their seats and KV blocks to a choice, and what they gave up.

    `num_tokens`: tokens that they have to compute again at most, because what is left of their blocks in the prefix
    cache is reused. `num_blocks`: blocks that they held, shared ones included.
    """

    lane: Lane
    num_sequences: int
    num_tokens: int
    num_blocks: int


def merged_yields(yields: Iterable[LaneYield]) -> tuple[LaneYield, ...]:
    """Return the sums by lane, the most urgent lane first."""
    found: dict[Lane, LaneYield] = {}
    for lane, *counts in yields:
        known = found.get(lane, LaneYield(lane, 0, 0, 0))
        found[lane] = LaneYield(lane, *map(add, known[1:], counts))
    return tuple(found[lane] for lane in sorted(found))


class Preemption(NamedTuple):
    """Report what preemption did to a choice since its last token: `pauses`, its own, and `yields`, the sequences that
    were preempted for it, by lane."""

    pauses: Pauses = NO_PAUSES
    yields: tuple[LaneYield, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """Report the output token of a choice at position `index`, counted from 0 over all attempts.

    The first token that a job samples carries two more values: `num_cached_tokens`, the prompt tokens found in the
    prefix cache of the worker that computed the prompt, and `stages`, how the job's time until then divides. A token
    that another worker sampled and this one repeats has no stages. `preemption`: what it did to the choice since its
    last token here; None where that is nothing.
    """

    key: JobKey
    index: int
    token: SampledToken
    num_cached_tokens: int | None = None
    stages: JobStages | None = None
    preemption: Preemption | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Report the log probabilities of prompt tokens from position `first_index` on, each given the tokens before it.

    The first prompt token has none, so the least index is 1. A position may be reported again, with the same value.
    """

    key: JobKey
    first_index: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Report consecutive output tokens of a choice from output position `first_index` on, as ids without log
    probabilities.

    The choice has not ended with them.
    """

    key: JobKey
    first_index: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finished:
    """Report that a choice of a job ended successfully.

    With `reason=None` only this job is done and another job ends the choice: the job is a `PrefillJob` that handed over
    its KV, or a `ResumeJob` whose source had already sampled the last token. `num_output_tokens` includes those of
    earlier attempts; `num_cached_tokens` were prefix-cache hits.
    """

    key: JobKey
    reason: FinishReason | None
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Report that a choice of a job ended with an error; the worker holds no state of the choice any more."""

    key: JobKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Report that a choice of a job ended because it was cancelled or a newer attempt replaced it."""

    key: JobKey


@dataclass(frozen=True, slots=True)
class KVReceived:
    """Report that the KV of a `ResumeJob` was received, or the part of a remote prefix that could be read. The job goes
    on.

    - `num_blocks`, `num_bytes`: what was read; `num_exposed_bytes` of it had not been read when the last announcement
      (the producer's message that blocks may be read) arrived.
    - `num_cached_tokens`: tokens that needed no reading, because they were in this worker's prefix cache.
    - `total_s`, `exposed_s`: seconds from the first and from the last announcement until the last block was checked.
    - `busy_s`: seconds with at least one read in flight.
    - `source`: the worker whose cache held a remote prefix; None for a `ResumeJob`.
    """

    key: JobKey
    num_blocks: int
    num_bytes: int
    num_cached_tokens: int
    num_exposed_bytes: int
    total_s: float
    exposed_s: float
    busy_s: float
    source: WorkerRef | None = None


@dataclass(frozen=True, slots=True)
class MigrationOffered:
    """Report that a worker offers the KV of a running or preempted choice, so that the gateway submits a `ResumeJob` to
    another worker.

    `offer` is the key of the hand-off. `is_requested`: the gateway has requested it; otherwise the worker drains. A
    running choice goes on meanwhile.
    """

    key: JobKey
    offer: HandoffKey
    is_requested: bool = False


@dataclass(frozen=True, slots=True)
class Preempted:
    """Report that a choice was preempted before its output token at position `next_index`, and waits to be computed
    again.

    No event reports that it goes on; its next token shows it.
    """

    key: JobKey
    next_index: int


JobEvent = Token | PromptLogprobs | KVReceived | MigrationOffered | Preempted | Finished | Failed | Cancelled
TerminalEvent = Finished | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Report that a KV block is in device memory and can be found by its hash.

    `parent`: hash of the block before it in the prefix, which was stored earlier; None for a first block.
    """

    hash: BlockHash
    parent: BlockHash | None


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """Report that the last copy of a KV block on this worker, in device or host memory, was evicted."""

    hash: BlockHash


@dataclass(frozen=True, slots=True)
class BlockOffloaded:
    """Report that the last copy of a KV block in device memory was evicted and a copy in host memory remains.

    A later `BlockStored` reports that the block is in device memory again.
    """

    hash: BlockHash


KVFact = BlockStored | BlockEvicted | BlockOffloaded
