"""A request and the jobs it becomes, all frozen; validates their ranges once and never mutates."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockHash, HandoffId, JobKey, RequestId, WorkerRef

MAX_TOP_LOGPROBS = 20
MAX_COUNT = 2**31 - 1
"""Fits every integer type that a count passes on its way to a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The draw is a function of (seed, choice, position, logits) alone.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1`, `min_p == 0` switch a filter off.
    `stop_token_ids` is complete: the end-of-sequence set is already in it unless it is ignored.
    `logprobs` is the number of alternatives to report per token; None reports nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.max_tokens <= MAX_COUNT, "max_tokens", f"must be in [1, {MAX_COUNT}]", self.max_tokens)
        _require(0.0 <= self.temperature <= 2.0, "temperature", "must be in [0, 2]", self.temperature)
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]", self.top_p)
        _require(0 <= self.top_k <= MAX_COUNT, "top_k", f"must be 0 (off) or in [1, {MAX_COUNT}]", self.top_k)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be in [0, 1]", self.min_p)
        _require(0 <= self.seed < 2**64, "seed", "must fit in 64 unsigned bits", self.seed)
        if self.logprobs is not None:
            _require(
                0 <= self.logprobs <= MAX_TOP_LOGPROBS,
                "top_logprobs",
                f"must be in [0, {MAX_TOP_LOGPROBS}]",
                self.logprobs,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked, as token ids. `priority`: lower runs first. `cache_salt` separates prefix caches.

    `block_names` remembers, by root and block size, what the prompt's blocks are called: a function of the rest that
    is dear to work out, so that a process with several workers hashes a prompt once."""

    id: RequestId
    model: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    block_names: dict[tuple[BlockHash, int], tuple[BlockHash, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _require(bool(self.id), "id", "must not be empty", self.id)
        _require(len(self.prompt_tokens) > 0, "prompt", "must hold at least one token", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """`output_tokens` were already sent to the client by earlier attempts; they count against
    `max_tokens` and are never folded into the prompt."""

    request: Request
    attempt: int
    choice: int = 0
    output_tokens: tuple[int, ...] = field(default=())

    @property
    def key(self) -> JobKey:
        return JobKey(self.request.id, self.attempt, self.choice)

    @property
    def num_known_tokens(self) -> int:
        return len(self.request.prompt_tokens) + len(self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(_Job):
    """All of it here: prefill, then decode to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(_Job):
    """Compute the known tokens, draw one, offer the KV under `handoff` for as long as its lease lives."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(_Job):
    """Take the KV that `source` offers under `handoff`, then decode to the end."""

    handoff: HandoffId
    source: WorkerRef


Job = Generate | Prefill | Resume


def _require(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{param} {rule}, got {value!r}", param=param)
