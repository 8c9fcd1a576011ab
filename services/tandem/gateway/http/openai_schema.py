"""The bodies of our responses as OpenAI's clients read them; never fills one in.

A field of type UNSET is left out where it was not asked for.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageReply(msgspec.Struct):
    """A prompt counts once, whatever the number of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class TimingFacts(msgspec.Struct, kw_only=True):
    """In milliseconds. The stages add up to the total, which ends when this was written. Of several prompts they are
    those of the one that ended last."""

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
    """Our own addition to the last chunk and to whole bodies: remote, local, or fallback with its reason; and how many
    attempts it took, the first and each time that it went on elsewhere. `reasons`, one for each prompt, where
    `x-tandem-explain` asked for them: costs in milliseconds. `timing`: where its time went, where `x-tandem-timing`
    asked for it."""

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
    """`id`, `type` and the function's name come with a call's first piece."""

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
    """`rank` is 1 for the likeliest token, and null for one that is not among the alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id: itself and the alternatives; the first has none."""


class TextLogprobs(msgspec.Struct):
    """What has no log probability, the first token of an echoed prompt, has null."""

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
    """`created` in seconds since the epoch. `service_tier` names the lane that was used, where one was asked for."""

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
    """`usage` is null where it comes later."""

    usage: UsageReply | UnsetType | None = UNSET
    tandem: TandemFacts | UnsetType = UNSET


class ChatChunk(CompletionChunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class TextChunk(CompletionChunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ErrorBody(msgspec.Struct):
    """`code` is stable and for machines; `param` names the offending field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class ModelCard(msgspec.Struct):
    """`root` is the name of what is served under this one."""

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
    """Of Prometheus' HTTP service discovery: addresses as host:port, and what every series from there is labelled."""

    targets: list[str]
    labels: ScrapeLabels


class HealthReply(msgspec.Struct):
    """`reason` says what is missing, `warning` what is wrong though requests are served."""

    status: str
    reason: str | UnsetType = UNSET
    warning: str | UnsetType = UNSET
