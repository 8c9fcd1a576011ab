"""Define the bodies of responses as OpenAI's clients read them.

A field whose value is UNSET is left out of the JSON. Docstrings of these structs are descriptions in openapi.json.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Details of the prompts' tokens. `cached_tokens`: those whose KV a worker took from a cache instead of computing
    it."""

    cached_tokens: int


class UsageReply(msgspec.Struct):
    """Numbers of tokens of a response, over all its prompts and choices. A prompt counts once, whatever the number of
    its choices. `prompt_tokens_details`: null while no worker has reported the number of cached tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class TimingFacts(msgspec.Struct, kw_only=True):
    """Time of each stage of the request in milliseconds. The stages add up to `total_ms`, the time from the arrival of
    the request to the writing of this object. With several prompts they are those of the prompt that ended last.

    `first_token_ms`: from the arrival to the first token sent; not a stage. `receive_ms`: reading, tokenizing and
    checking the request. `queue_ms`: in the gateway's queue. `route_ms`: until the workers accepted.
    `prefill_queue_ms`: until the worker began the prompt. `prefill_ms`: until the first token. `transfer_ms`: the
    transfer of KV after the first token. `decode_queue_ms`: until the decode worker began. `decode_ms`: until the last
    token. `deliver_ms`: only the delivery to the client remained."""

    total_ms: float
    first_token_ms: float | UnsetType = UNSET
    receive_ms: float
    queue_ms: float
    route_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_queue_ms: float
    decode_ms: float
    deliver_ms: float


class WaitFacts(msgspec.Struct):
    """Wait of a prompt. `stage`: the stage of `timing` of which it is a part. `cause`: what was waited for.
    `tokens_ahead`: with the cause `prompts_ahead`, the prompt tokens that were to be computed before it when it arrived
    at the worker."""

    stage: str
    cause: str
    ms: float
    tokens_ahead: int | UnsetType = UNSET


class YieldFacts(msgspec.Struct):
    """Sequences of one lane that were preempted for the request. `tokens`: what they have to compute again at most, for
    what is left of it in the prefix cache is not computed twice. `blocks`: the KV blocks that they held."""

    lane: str
    sequences: int
    tokens: int
    blocks: int


class TandemFacts(msgspec.Struct):
    """Tandem's own addition to the last chunk of a stream and to whole bodies.

    `path`: where the request ran: `remote` (prefill and decode on different workers), `local` (both on one worker) or
    `fallback` (both on one worker, though different ones were intended), with a reason. `attempts`: 1 plus the number
    of retries on other workers. `preemptions`: how often a choice of it was preempted and went on later, and
    `paused_ms` how long they waited in sum; absent where none was. `reasons`: why the router chose the placement, one
    object for each prompt, costs in milliseconds; present with the request header `x-tandem-explain`. With the
    same header, `waits`: for each prompt what it waited for before its first token (on two workers: before its second),
    in order; and `yielded`: what was preempted for the request. `timing`: the time of each stage; present with
    `x-tandem-timing`."""

    path: str
    attempts: int
    preemptions: int | UnsetType = UNSET
    paused_ms: float | UnsetType = UNSET
    reasons: list[dict[str, Any]] | UnsetType = UNSET
    waits: list[list[WaitFacts]] | UnsetType = UNSET
    yielded: list[YieldFacts] | UnsetType = UNSET
    timing: TimingFacts | UnsetType = UNSET


class Logprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallPiece(msgspec.Struct):
    """Piece of a tool call in a stream. `index`: number of the call within its choice. Only a call's first piece has
    `id`, `type` and the function's name; the `arguments` of all its pieces concatenate to one JSON text."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """Log probability of one token at a position of the prompt. `rank`: 1 for the likeliest token at the position; null
    for a token that is not among the requested alternatives. `decoded_token`: its text."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each position of the prompt, the token there and its alternatives, by token id; None for the first position."""


class TextLogprobs(msgspec.Struct):
    """Log probabilities of a plain completion; each list has one entry per token. `top_logprobs`: the alternatives by
    text. `text_offset`: the character of the choice's text at which the token begins. The first token of an echoed
    prompt has no log probability and so null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Reply(msgspec.Struct, kw_only=True):
    """Fields that bodies and chunks of all completions have. `created`: in seconds since the epoch. `service_tier`:
    OpenAI's name of the lane that the request ran in; present where the request named one."""

    id: str
    created: int
    model: str
    service_tier: str | UnsetType = UNSET


class ChatCompletion(Reply, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    tandem: TandemFacts


class TextCompletion(Reply, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: UsageReply
    tandem: TandemFacts


class CompletionChunk(Reply, kw_only=True):
    """Chunk of a streamed completion. `usage`: absent unless requested; then null in the chunks before the last one,
    unless `continuous_usage_stats` requested it in every chunk. `tandem`: in the last chunk only."""

    usage: UsageReply | UnsetType | None = UNSET
    tandem: TandemFacts | UnsetType = UNSET


class ChatChunk(CompletionChunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class TextChunk(CompletionChunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ErrorBody(msgspec.Struct):
    """Description of an error. `type`: OpenAI's type. `code`: the kind of the error, stable, for programs. `param`: the
    name of the field or header at fault; null where there is none."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class ModelCard(msgspec.Struct):
    """Description of a model. `id`: a name that requests may use. `root`: the served name, of which `id` may be an
    alias. `created`: in seconds since the epoch. `max_model_len`: longest context in tokens."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "tandem"
    parent: None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct):
    prompt: str


class ScrapeLabels(msgspec.Struct):
    pool: str
    worker: str
    model: str


class ScrapeGroup(msgspec.Struct):
    """Group of targets in Prometheus' HTTP service discovery. `targets`: addresses as host:port. `labels`: added by
    Prometheus to all series of these targets."""

    targets: list[str]
    labels: ScrapeLabels


class HealthReply(msgspec.Struct):
    """Health of the gateway. `status`: ok, ready or not_ready. `reason`: what is missing until requests can be served.
    `warning`: a problem in spite of which requests are served."""

    status: str
    reason: str | UnsetType = UNSET
    warning: str | UnsetType = UNSET
