"""What a worker tells a gateway about a job, as frozen values; never says how it is carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockHash, HandoffKey, JobKey, WorkerRef
from tandem.core.request_stages import JobStages


class FinishReason(Enum):
    """The values are OpenAI's. A worker knows the first two; TOOL_CALLS is a STOP in whose text there are calls."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class SampledToken(NamedTuple):
    """One drawn token. Log probabilities are natural, of the distribution that the model gives at temperature 1, before
    penalties, biases, grammars and filters.

    `top` holds (token id, log probability) of the most likely tokens, best first; empty unless asked for.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """The `index`-th output token of a choice, counted from 0 over all attempts. The first one that a job draws tells
    how many of the prompt's tokens were in the prefix cache where that was computed, and where its time went; one that
    another worker drew and this one only repeats tells no stages."""

    key: JobKey
    index: int
    token: SampledToken
    num_cached_tokens: int | None = None
    stages: JobStages | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The prompt's tokens from the `first_index`-th on, each with its log probability after those before it. The first
    token of a prompt has none, so the first score is of index 1. An index may come again, with the same score."""

    key: JobKey
    first_index: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive output tokens of a choice from the `first_index`-th on, as bare ids, drawn one step after another;
    none of them is the last."""

    key: JobKey
    first_index: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job ended well. With `reason=None` its part is done and another job's end is the request's: a `Prefill` that
    handed over its KV, or a `Resume` whose source drew the last token already."""

    key: JobKey
    reason: FinishReason | None
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A job ended badly; nothing of it is left on the worker that says so."""

    key: JobKey
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A job ended because somebody cancelled it or a newer attempt fenced it."""

    key: JobKey


@dataclass(frozen=True, slots=True)
class KVReceived:
    """The KV of a `Resume` has arrived, or as much of a prefix as could be read from the cache of `source`. Not an end.

    `num_exposed_bytes` were unread when the last announcement came. Seconds: from the first and from the last
    announcement to the last checked block, and those in which at least one read was under way.
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
    """A worker that drains wants a running choice to go on elsewhere, and offers its KV under `offer` while it goes on
    drawing tokens itself. Not an end."""

    key: JobKey
    offer: HandoffKey


JobEvent = Token | PromptLogprobs | KVReceived | MigrationOffered | Finished | Failed | Cancelled
TerminalEvent = Finished | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block became findable by its hash; its parent (None at the root) was findable before it."""

    hash: BlockHash
    parent: BlockHash | None


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """The last copy of a block is gone."""

    hash: BlockHash


@dataclass(frozen=True, slots=True)
class BlockOffloaded:
    """The last copy of a block in device memory is gone, one in host memory is left. Stored again, it is back."""

    hash: BlockHash


KVFact = BlockStored | BlockEvicted | BlockOffloaded
