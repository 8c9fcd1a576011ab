"""Define the bodies of responses as OpenAI's clients read them.

A field whose value is UNSET is left out of the JSON. Docstrings of these structs are descriptions in openapi.json.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageReply(msgspec.Struct):
    """Number of tokens of all prompts and choices. A prompt counts once, whatever the number of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class TimingFacts(msgspec.Struct, kw_only=True):
    """Time of each stage of the request in milliseconds. The stages add up to `total_ms`, the time from the arrival of
    the request to the writing of this object. With several prompts they are those of the prompt that ended last."""

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


class TandemFacts(msgspec.Struct):
    """Tandem's own addition to the last chunk of a stream and to whole bodies.

    `path`: remote, local, or fallback with its reason. `attempts`: 1 plus the number of retries on other workers.
    `reasons`: why the router chose the placement, one object for each prompt, costs in milliseconds; present with
    `x-tandem-explain`. `timing`: the time of each stage; present with `x-tandem-timing`."""

    path: str
    attempts: int
    reasons: list[dict[str, Any]] | UnsetType = UNSET
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
    """Part of a tool call in a stream. Only a call's first part has `id`, `type` and the function's name."""

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
    """Log probability of one token of a prompt. `rank`: 1 for the likeliest token; null for a token that is not among
    the alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, the token and its alternatives by token id; None for the first token."""


class TextLogprobs(msgspec.Struct):
    """Log probabilities of a plain completion, by token. The first token of an echoed prompt has none and so null."""

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
    """Fields of all completions. `created`: in seconds since the epoch. `service_tier`: names the lane that was used;
    present where the request named one."""

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
    """Chunk of a streamed completion. `usage`: null in the chunks before the one that has the usage."""

    usage: UsageReply | UnsetType | None = UNSET
    tandem: TandemFacts | UnsetType = UNSET


class ChatChunk(CompletionChunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class TextChunk(CompletionChunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ErrorBody(msgspec.Struct):
    """Description of an error. `code`: stable, for programs. `param`: the name of the offending field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class ModelCard(msgspec.Struct):
    """Description of a model. `root`: the served name, of which `id` may be an alias."""

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
    """Group of targets in Prometheus' HTTP service discovery: addresses as host:port, and labels of all their
    series."""

    targets: list[str]
    labels: ScrapeLabels


class HealthReply(msgspec.Struct):
    """Health of the gateway. `reason`: what is missing. `warning`: a problem in spite of which requests are served."""

    status: str
    reason: str | UnsetType = UNSET
    warning: str | UnsetType = UNSET
