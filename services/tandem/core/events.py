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
    """Why an output ended; the values are OpenAI's.

    Workers report STOP and LENGTH. The gateway replaces STOP by TOOL_CALLS where the text of the output contains tool
    calls.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class SampledToken(NamedTuple):
    """Describe one sampled token, with its log probability where the request sets `logprobs`.

    Log probabilities are natural logarithms, of the model's distribution at temperature 1 before penalties, biases,
    grammars and filters. `top` holds (token id, log probability) of the most likely tokens, best first; empty unless
    requested.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Pauses(NamedTuple):
    """Count in `num` how often a choice was preempted and then went on, and in `seconds` how long it waited in all."""

    num: int
    seconds: float

    @classmethod
    def sum(cls, all_pauses: Iterable[Pauses]) -> Pauses:
        found = [pauses for pauses in all_pauses if pauses.num]
        return cls(sum(pauses.num for pauses in found), sum(pauses.seconds for pauses in found)) if found else NO_PAUSES


NO_PAUSES = Pauses(0, 0.0)


class LaneYield(NamedTuple):
    """Report how many sequences of one lane were preempted so that a choice got their seats and KV blocks, and what
    they gave up.

    `num_tokens`: upper bound of the number of tokens that they have to compute again. The number is smaller where their
    blocks are still in the prefix cache. `num_blocks`: number of blocks that they held, shared ones included.
    """

    lane: Lane
    num_sequences: int
    num_tokens: int
    num_blocks: int


def merged_yields(yields: Iterable[LaneYield]) -> tuple[LaneYield, ...]:
    """Add up yields by lane; return one `LaneYield` for each lane, the most urgent lane first."""
    found: dict[Lane, LaneYield] = {}
    for lane, *counts in yields:
        known = found.get(lane, LaneYield(lane, 0, 0, 0))
        found[lane] = LaneYield(lane, *map(add, known[1:], counts))
    return tuple(found[lane] for lane in sorted(found))


class Preemption(NamedTuple):
    """Report how preemption affected a choice since its last token.

    `pauses`: how often and how long the choice itself was paused. `yields`: other sequences that were preempted to make
    room for this choice, added up by lane.
    """

    pauses: Pauses = NO_PAUSES
    yields: tuple[LaneYield, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """Report the output token of a choice at position `index`, counted from 0 over all attempts.

    The first token that a job samples carries two more values. `num_cached_tokens`: number of prompt tokens found in
    the prefix cache of the worker that computed the prompt. `stages`: how the time of the job before this token divides
    into stages; None if another worker sampled the token and this one repeats it. `preemption`: pauses of the choice
    since its last token from this worker, and sequences that were preempted to make room for it in this time; None
    where there were none.
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
    its KV, or a `ResumeJob` whose source had already sampled the last token. `num_output_tokens`: number of output
    tokens, those of earlier attempts included. `num_cached_tokens`: number of tokens that were prefix-cache hits.
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

    An announcement is the producer's message that blocks may be read.

    - `num_blocks`, `num_bytes`: how much was read. `num_exposed_bytes`: how much of it had not been read yet when the
      last announcement arrived.
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
    """Report that a worker offers the KV of a running or preempted choice. The gateway is to submit a `ResumeJob` for
    it to another worker; a running choice goes on meanwhile.

    `offer`: the key of the hand-off. `is_requested`: whether the worker offers the KV because the gateway asked for it;
    if False, the worker drains.
    """

    key: JobKey
    offer: HandoffKey
    is_requested: bool = False


@dataclass(frozen=True, slots=True)
class Preempted:
    """Report that a choice was preempted before its output token at position `next_index`, and waits to be computed
    again.

    No event reports that the choice goes on; its next token shows it.
    """

    key: JobKey
    next_index: int


JobEvent = Token | PromptLogprobs | KVReceived | MigrationOffered | Preempted | Finished | Failed | Cancelled
TerminalEvent = Finished | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Report that a KV block is in device memory and can be found by its hash.

    `parent`: hash of the block before it in the same prefix, which was stored earlier; None for the first block of a
    prefix.
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
