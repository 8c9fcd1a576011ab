"""Define the events that a worker reports to a gateway about a job, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockHash, HandoffKey, JobKey, WorkerRef
from tandem.core.request_stages import JobStages


class FinishReason(Enum):
    """Why an output ended; the values are OpenAI's. Workers report STOP and LENGTH; the gateway turns a STOP whose text
    holds calls into TOOL_CALLS."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class SampledToken(NamedTuple):
    """One sampled token. Log probabilities are natural logarithms, of the model's distribution at temperature 1 before
    penalties, biases, grammars and filters.

    `top` holds (token id, log probability) of the most likely tokens, best first; empty unless requested.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """The `index`-th output token of a choice, counted from 0 over all attempts.

    The first token that a job samples carries `num_cached_tokens`, the prompt tokens found in the prefix cache of the
    worker that computed the prompt, and `stages`, the times of the job until then. A token that another worker sampled
    and this one repeats has no stages.
    """

    key: JobKey
    index: int
    token: SampledToken
    num_cached_tokens: int | None = None
    stages: JobStages | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt tokens from index `first_index` on, each given the tokens before it.

    The first prompt token has none, so the first index is 1. An index may be reported again, with the same value.
    """

    key: JobKey
    first_index: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive output tokens of a choice from index `first_index` on, as bare ids of consecutive steps; none is the
    final token."""

    key: JobKey
    first_index: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job ended successfully. With `reason=None` only this job's part is done and another job ends the request: a
    `PrefillJob` that handed over its KV, or a `ResumeJob` whose source already sampled the last token."""

    key: JobKey
    reason: FinishReason | None
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A job ended with an error; the reporting worker holds no state of the job any more."""

    key: JobKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A job ended because it was cancelled or fenced by a newer attempt."""

    key: JobKey


@dataclass(frozen=True, slots=True)
class KVReceived:
    """The KV of a `ResumeJob` was received, or as much of a remote prefix as could be read from the cache of `source`.
    Not terminal.

    `num_exposed_bytes` were unread when the last announcement was received. `total_s` and `exposed_s` are seconds from
    the first and from the last announcement to the last checked block; `busy_s` are the seconds with at least one read
    in flight.
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
    """A draining worker offers the KV of a running choice under `offer`, so that another worker continues the choice.
    Not terminal: the worker keeps sampling tokens meanwhile."""

    key: JobKey
    offer: HandoffKey


JobEvent = Token | PromptLogprobs | KVReceived | MigrationOffered | Finished | Failed | Cancelled
TerminalEvent = Finished | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be found by its hash; its parent (None at the root) was stored before it."""

    hash: BlockHash
    parent: BlockHash | None


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """The last copy of a block was evicted."""

    hash: BlockHash


@dataclass(frozen=True, slots=True)
class BlockOffloaded:
    """The last copy of a block in device memory was evicted and a copy in host memory remains. A later `BlockStored`
    reports that the block is in device memory again."""

    hash: BlockHash


KVFact = BlockStored | BlockEvicted | BlockOffloaded
