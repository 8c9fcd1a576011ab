"""Define a request and the jobs made from it, as frozen values whose ranges are validated once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import Grammar
from tandem.core.ids import OPEN_TENANT, BlockHash, HandoffId, HandoffKey, JobKey, RequestId, TenantId, WorkerRef
from tandem.core.lane import Lane

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_COUNT = 2**31 - 1
"""Fits every integer type that stores a count on its way to a kernel."""
MAX_RETAIN_S = 86_400.0
"""A day: the longest time for which a request may have its prompt retained."""
MAX_BIAS = 100
"""OpenAI's bound: enough to forbid or to force a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Define how tokens are sampled. A sample is a function of (seed, choice, position, known tokens, logits) alone.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1`, `min_p == 0` switch a filter off. `stop_token_ids`: all
    token ids that end the output, the end-of-sequence tokens of the model included unless the request ignores them.
    `logprobs`: number of alternatives to report per token; None: no log probabilities are reported. Log probabilities
    are of the model's own distribution, before the penalties, biases, grammar and filters below.

    Applied to the logits before the filters, in this order:
    - `repetition_penalty` divides positive logits and multiplies negative ones of all tokens of prompt and output
      (CTRL, arXiv 1909.05858; 1 is off);
    - `presence_penalty` once, and `frequency_penalty` for each occurrence, are subtracted from the logits of output
      tokens (OpenAI; 0 is off);
    - `logit_bias`: pairs (token id, bias) by rising id, each bias added to the logit of its token;
    - `min_tokens`: tokens of `stop_token_ids` are not sampled before this number of output tokens;
    - `grammar` leaves only the tokens that may follow, and ends the output where nothing else may follow, even before
      `min_tokens`.

    Greedy sampling takes the most likely of the remaining tokens. `max_tokens == 0` computes the prompt and samples
    nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    @property
    def needs_history(self) -> bool:
        """Return whether sampling a token needs the list of all tokens before it, for penalties or a grammar."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties) or self.grammar is not None

    def is_plain_at(self, index: int) -> bool:
        """Return whether the device can sample the output token at position `index` without the host: by temperature,
        `top_k`, `top_p` and `min_p` alone, and without log probabilities."""
        has_bias = bool(self.logit_bias) or index < self.min_tokens
        return not (self.needs_history or has_bias or self.logprobs is not None)

    def __post_init__(self) -> None:
        _require_within(self.max_tokens, 0, MAX_COUNT, "max_tokens")
        _require_within(self.presence_penalty, -2, 2, "presence_penalty")
        _require_within(self.frequency_penalty, -2, 2, "frequency_penalty")
        repetition = self.repetition_penalty
        _require(0.0 < repetition <= 10.0, "repetition_penalty", "must be in (0, 10]", repetition)
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be in [0, max_tokens]", self.min_tokens)
        for token, bias in self.logit_bias:
            _require_within(bias, -MAX_BIAS, MAX_BIAS, f"logit_bias.{token}")
        _require_within(self.temperature, 0, 2, "temperature")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]", self.top_p)
        _require(0 <= self.top_k <= MAX_COUNT, "top_k", f"must be 0 (off) or in [1, {MAX_COUNT}]", self.top_k)
        _require_within(self.min_p, 0, 1, "min_p")
        _require(0 <= self.seed < 2**64, "seed", "must fit in 64 unsigned bits", self.seed)
        if self.logprobs is not None:
            _require_within(self.logprobs, 0, MAX_TOP_LOGPROBS, "top_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Hold a client's request, with its prompt as token ids. Raises TandemError (INVALID_REQUEST) for values out of
    range.

    - `priority`: a lower number runs first within its `lane`.
    - `cache_salt`: only requests with the same salt share cached prefixes.
    - `num_choices`: number of outputs to sample for the prompt, each with its own random numbers.
    - `prompt_logprobs`: number of alternatives to report for each prompt token but the first; None: no log
      probabilities of the prompt are reported.
    - `retain_s`: seconds for which workers evict the cached blocks of the prompt only after all other blocks; 0: in the
      usual order. `max_retained_tokens`: most tokens that its tenant may have retained at each worker; 0: only the
      limit of the worker applies.
    - `traceparent`: the W3C trace context, which influences no decision; empty when not traced.
    - `block_names`: cache of the hashes of the prompt's blocks, by root hash and block size, so that a process with
      several workers hashes a prompt only once.
    """

    id: RequestId
    model: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    tenant: TenantId = OPEN_TENANT
    lane: Lane = Lane.INTERACTIVE
    priority: int = 0
    cache_salt: str = ""
    num_choices: int = 1
    prompt_logprobs: int | None = None
    retain_s: float = 0.0
    max_retained_tokens: int = 0
    traceparent: str = field(default="", compare=False)
    block_names: dict[tuple[BlockHash, int], tuple[BlockHash, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _require(bool(self.id), "id", "must not be empty", self.id)
        _require(len(self.prompt_tokens) > 0, "prompt", "must hold at least one token", 0)
        _require_within(self.retain_s, 0, MAX_RETAIN_S, "cache_control.ttl")
        _require_within(self.max_retained_tokens, 0, MAX_COUNT, "max_retained_tokens")
        _require(-MAX_COUNT <= self.priority <= MAX_COUNT, "priority", "must fit in 32 bits", self.priority)
        _require_within(self.num_choices, 1, MAX_CHOICES, "n")
        if self.prompt_logprobs is not None:
            _require_within(self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, "prompt_logprobs")

    @property
    def max_output_tokens(self) -> int:
        """Return the largest number of output tokens that the request may have, added up over all choices."""
        return self.sampling.max_tokens * self.num_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The part of a request that one worker runs: choices `[choice, choice + num_choices)` of one attempt.

    `output_tokens`: ids of the output tokens that earlier attempts have sent to the client. They count against
    `max_tokens` and are not part of the prompt. A job of several choices has none yet, because the choices differ only
    in their output.
    """

    request: Request
    attempt: int
    choice: int = 0
    num_choices: int = 1
    output_tokens: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        stop = self.choice + self.num_choices
        ok = self.choice >= 0 and self.num_choices >= 1 and stop <= MAX_CHOICES
        _require(ok, "num_choices", f"must be choices within [0, {MAX_CHOICES})", (self.choice, self.num_choices))
        is_single = self.num_choices == 1 or not self.output_tokens
        _require(is_single, "num_choices", "must be 1 where tokens were sampled already", self.num_choices)

    @property
    def key(self) -> JobKey:
        """Return the key of the first choice, which names the job."""
        return JobKey(self.request.id, self.attempt, self.choice)

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """Return the key of each choice."""
        if self.num_choices == 1:
            return (self.key,)
        choices = range(self.choice, self.choice + self.num_choices)
        return tuple(JobKey(self.request.id, self.attempt, choice) for choice in choices)

    def for_choice(self, choice: int) -> Self:
        """Return the part of this job for the choice with index `choice`, as a job of its own."""
        return self if self.num_choices == 1 else replace(self, choice=choice, num_choices=1)

    @property
    def num_known_tokens(self) -> int:
        """Count the tokens that are known when the job arrives: the prompt, and the output of earlier attempts."""
        return len(self.request.prompt_tokens) + len(self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefix:
    """The beginning of a prompt whose KV a job may read from another worker's cache instead of computing it.

    `source`: the worker that probably has the first `num_blocks` blocks of the job's known tokens in its prefix cache.
    `handoff`: the id under which the job requests them. Blocks that cannot be read are computed.
    """

    handoff: HandoffId
    source: WorkerRef
    num_blocks: int

    def __post_init__(self) -> None:
        _require(0 < self.num_blocks <= MAX_COUNT, "prefix.num_blocks", "must be positive", self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob(_Job):
    """Ask one worker to prefill the prompt and decode until the output ends.

    `prefix`: the beginning of the prompt whose KV is read from another worker's cache instead of computed; None: no KV
    is read.
    """

    prefix: RemotePrefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob(_Job):
    """Ask a worker to compute the KV of prompt and earlier output, sample one token of each choice, and offer the KV to
    another worker.

    `handoff`: the id under which the KV is offered, until the lease ends. `prefix`: the beginning of the prompt whose
    KV is read from another worker's cache instead of computed; None: no KV is read.
    """

    handoff: HandoffId
    prefix: RemotePrefix | None = None

    @property
    def offer(self) -> HandoffKey:
        """Return the key under which the KV is offered."""
        return HandoffKey(self.handoff, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeJob(_Job):
    """Ask a worker to read the KV that the worker `source` offers under the id `handoff`, and then decode until the
    output ends.

    `offer_attempt`: number of the attempt that computes or has computed this KV; 0: the attempt of this job.
    """

    handoff: HandoffId
    source: WorkerRef
    offer_attempt: int = 0

    @property
    def offer(self) -> HandoffKey:
        """Return the key of the hand-off under which `source` offers the KV."""
        return HandoffKey(self.handoff, self.offer_attempt or self.attempt)


Job = GenerateJob | PrefillJob | ResumeJob


def _require(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{param} {rule}, got {value!r}", param=param)


def _require_within(value: float, low: float, high: float, param: str) -> None:
    if not low <= value <= high:
        _require(False, param, f"must be in [{low}, {high}]", value)
