"""Send the same request to both front ends and bring their replies into one form.

A case is a JSON body as HTTP accepts it. The gRPC request is built from that body by reading the proto's descriptor in
the direction opposite to the gateway's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from tandem.core.ids import RequestId
from tandem.core.request import Request
from tandem.wire.gen import inference_pb2 as pb

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
REQUESTS: dict[str, type[Message]] = {"chat": pb.ChatRequest, "completion": pb.CompleteRequest}
METHODS = {("chat", False): "Chat", ("chat", True): "StreamChat"} | {
    ("completion", False): "Complete",
    ("completion", True): "StreamComplete",
}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"prompt": "The capital"}
STREAM_FIELDS = ("stream", "stream_options")
"""The JSON field `stream` is no proto field, because over gRPC the method decides it."""


@dataclass(slots=True)
class Choice:
    """Hold one choice as both front ends report it. `logprobs` are (token, bytes or offset, logprob, alternatives)."""

    text: str = ""
    reasoning: str = ""
    role: str = ""
    finish_reason: str = ""
    tool_calls: dict[int, list[str]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """Hold one reply. `error` is kind, message, parameter and type. `usage` counts tokens of the prompt, the output,
    both together, and the cached ones. `timed` names what was timed; the times themselves differ in each run.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    tier: str = ""
    usage: tuple[int | None, ...] = ()
    model: str = ""
    path: str = ""
    timed: frozenset[str] = frozenset()
    error: tuple[str | None, ...] = ()
    retry_after: str | None = None
    label: str | None = None

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def whole_body(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "tiny", **(HELLO if kind == "chat" else TEXT), **given}
    return {name: value for name, value in body.items() if value is not None}


def comparable(request: Request, seeded: bool) -> Request:
    """Drop request identities and, unless `seeded`, seeds: the gateway picks both at random."""
    sampling = request.sampling if seeded else replace(request.sampling, seed=0)
    return replace(request, id=RequestId("r"), sampling=sampling)


def send_over_both_protocols(
    http: httpx.Client, stub: Any, kind: str, body: dict[str, Any], **metadata: str
) -> list[Outcome]:
    """Return the outcomes over HTTP whole, HTTP streamed, gRPC whole and gRPC streamed."""
    sent = {"x-request-id": "mine", **metadata}.items()
    over_http = [send_http(http, kind, body, stream, sent) for stream in (False, True)]
    return over_http + [send_grpc(stub, kind, body, stream, sent) for stream in (False, True)]


def send_alike(http: httpx.Client, stub: Any, kind: str, given: dict[str, Any], **metadata: str) -> Outcome:
    """Send a request in all four ways, and return their outcome after checking that it is the same."""
    first, *others = send_over_both_protocols(http, stub, kind, whole_body(kind, given), **metadata)
    assert [other.plain() for other in others] == [first.plain()] * 3, (first, others)
    return first


def checked_times(timing: Mapping[str, float]) -> frozenset[str]:
    """Return the names of the timed stages after checking that they add up to the total."""
    stages = [value for name, value in timing.items() if name not in ("total_ms", "first_token_ms")]
    assert sum(stages) == pytest.approx(timing.get("total_ms", 0.0), abs=0.01)
    return frozenset(timing)


# ---- HTTP


def send_http(client: httpx.Client, kind: str, body: Mapping[str, Any], stream: bool, headers: Any = ()) -> Outcome:
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.post(PATHS[kind], json={**body, **streamed}, headers=dict(headers))
    outcome = Outcome(label=answer.headers["x-request-id"])
    if not stream or answer.status_code != 200:
        outcome.retry_after = answer.headers.get("retry-after")
        _take_json(outcome, kind, answer.json())
    else:
        events = [part[6:] for part in answer.text.split("\n\n") if part.startswith("data: ")]
        for event in events:
            if event != "[DONE]":
                _take_json(outcome, kind, json.loads(event))
        assert (events[-1] == "[DONE]") == (not outcome.error)
    if not outcome.error:
        assert outcome.path == answer.headers["x-tandem-path"]
    return outcome


def _take_json(outcome: Outcome, kind: str, reply: Any) -> None:
    if "error" in reply:
        error = reply["error"]
        outcome.error = (error["code"], error["message"], error["param"], error["type"])
        return
    outcome.model = reply["model"]
    outcome.tier = reply.get("service_tier") or ""
    if "prompt_logprobs" in reply:
        outcome.prompt_logprobs[0] = reply["prompt_logprobs"]
    outcome.path = reply.get("tandem", {}).get("path", outcome.path)
    outcome.timed |= checked_times(reply.get("tandem", {}).get("timing", {}))
    if usage := reply.get("usage"):
        cached = usage["prompt_tokens_details"] and usage["prompt_tokens_details"]["cached_tokens"]
        outcome.usage = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"], cached)
    for given in reply["choices"]:
        choice = outcome.choice(given["index"])
        message = given.get("message") or given.get("delta") or {}
        choice.text += given.get("text") or message.get("content") or ""
        choice.reasoning += message.get("reasoning_content") or ""
        choice.role += message.get("role") or ""
        choice.finish_reason += given["finish_reason"] or ""
        choice.token_ids += given.get("token_ids") or []
        if "prompt_logprobs" in given:
            outcome.prompt_logprobs[given["index"]] = given["prompt_logprobs"]
        for order, call in enumerate(message.get("tool_calls") or []):
            pieces = (call.get("id"), call.get("type"), call["function"].get("name"), call["function"]["arguments"])
            _add_call(choice, call.get("index", order), pieces)
        choice.logprobs += _json_logprobs(kind, given.get("logprobs") or {})


def _json_logprobs(kind: str, logprobs: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    if kind == "chat":
        return [
            (e["token"], e["bytes"], e["logprob"], [(t["token"], t["bytes"], t["logprob"]) for t in e["top_logprobs"]])
            for e in logprobs.get("content") or []
        ]
    names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    return list(zip(*(logprobs.get(name) or [] for name in names), strict=True))


# ---- gRPC


def send_grpc(stub: Any, kind: str, body: Mapping[str, Any], stream: bool, metadata: Any = ()) -> Outcome:
    request = spell({name: value for name, value in body.items() if name not in STREAM_FIELDS}, REQUESTS[kind]())
    outcome = Outcome()
    method = getattr(stub, METHODS[kind, stream])
    try:
        if stream:
            call = method(request, metadata=tuple(metadata), timeout=20)
            for update in call:
                _take_reply(outcome, kind, update)
        else:
            reply, call = method.with_call(request, metadata=tuple(metadata), timeout=20)
            _take_reply(outcome, kind, reply)
    except grpc.RpcError as error:
        _take_error(outcome, error)
    else:
        initial_metadata = dict(call.initial_metadata())
        outcome.label = initial_metadata["x-request-id"]
        assert outcome.path == initial_metadata["x-tandem-path"]
    return outcome


def _take_error(outcome: Outcome, error: Any) -> None:
    trailers = dict(error.trailing_metadata())
    detail = pb.ErrorDetail.FromString(trailers["tandem-error-bin"])
    param = detail.param if detail.HasField("param") else None
    outcome.error = (detail.kind, error.details(), param, detail.type)
    outcome.retry_after = trailers.get("retry-after")
    outcome.label = trailers["x-request-id"]


def _take_reply(outcome: Outcome, kind: str, reply: Any) -> None:
    outcome.model = outcome.model or reply.model
    outcome.path = reply.path or outcome.path
    if reply.HasField("timing"):
        names = {field.name for field in reply.timing.DESCRIPTOR.fields}
        names -= set() if reply.timing.HasField("first_token_ms") else {"first_token_ms"}
        outcome.timed |= checked_times({name: getattr(reply.timing, name) for name in names})
    outcome.tier += reply.service_tier
    for scored in reply.prompt_logprobs:
        outcome.prompt_logprobs[scored.prompt] = [_proto_prompt_scores(entry) for entry in scored.tokens]
    if reply.HasField("usage"):
        usage = reply.usage
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if usage.HasField("prompt_tokens_details") else None
        outcome.usage = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, cached)
    for given in reply.choices:
        choice = outcome.choice(given.index)
        if kind == "chat":
            choice.text += given.message.content
            choice.reasoning += given.message.reasoning_content
            choice.role += given.message.role
            for call in given.message.tool_calls:
                _add_call(choice, call.index, (call.id, call.type, call.function.name, call.function.arguments))
        else:
            choice.text += given.text
        choice.finish_reason += given.finish_reason
        choice.token_ids += given.token_ids
        choice.logprobs += [_proto_logprob(kind, entry) for entry in given.logprobs]


def _proto_logprob(kind: str, entry: Any) -> tuple[Any, ...]:
    logprob = entry.logprob if entry.HasField("logprob") else None
    if kind == "chat":
        top = [(other.token, list(other.bytes), other.logprob) for other in entry.top_logprobs]
        return (entry.token, list(entry.bytes), logprob, top)
    named = {_name(other): other.logprob for other in (*entry.top_logprobs, entry)} if logprob is not None else None
    return (_name(entry), entry.text_offset, logprob, named)


def _proto_prompt_scores(entry: Any) -> Any:
    """Return the scores in vLLM's form: by token id, with the rank among the alternatives."""
    if not entry.HasField("logprob"):
        return None
    ranks = {other.token_id: rank for rank, other in enumerate(entry.top_logprobs, start=1)}
    return {
        str(each.token_id): {"logprob": each.logprob, "rank": ranks.get(each.token_id), "decoded_token": each.token}
        for each in (entry, *entry.top_logprobs)
    }


def _name(entry: Any) -> str:
    """Return a token's name in the form of OpenAI's completions."""
    if "\ufffd" not in entry.token:
        return str(entry.token)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.bytes)


def _add_call(choice: Choice, index: int, pieces: tuple[str | None, ...]) -> None:
    known = choice.tool_calls.setdefault(index, [""] * len(pieces))
    choice.tool_calls[index] = [old + (new or "") for old, new in zip(known, pieces, strict=True)]


# ---- from a JSON body to its request over gRPC


def spell(body: Mapping[str, Any], message: Any) -> Any:
    """Fill `message` from `body`, by name. Raises KeyError for a field that the proto does not have."""
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in body.items():
        if value is None:
            continue
        if name == "prompt" and fields[name].message_type is not None:
            _spell_prompts(message, value)
        elif name == "tool_choice":
            _spell_tool_choice(message.tool_choice, value)
        elif f"{name}_json" in fields:
            setattr(message, f"{name}_json", json.dumps(value))
        elif name == "content" and isinstance(value, list):
            for part in value:
                spell(part, message.content_parts.add())
        elif name == "logit_bias":
            message.logit_bias.update({int(token): bias for token, bias in value.items()})
        else:
            _set(message, fields[name], name, value)
    return message


def _set(message: Any, descriptor: Any, name: str, value: Any) -> None:
    if descriptor.message_type is not None:
        if descriptor.is_repeated:
            for item in value:
                spell(item, getattr(message, name).add())
        else:
            getattr(message, name).SetInParent()
            spell(value, getattr(message, name))
    elif descriptor.is_repeated:
        getattr(message, name).extend([value] if isinstance(value, str) else value)
    else:
        setattr(message, name, value)


def _spell_prompts(message: Any, value: Any) -> None:
    is_one = isinstance(value, str) or (value and all(isinstance(item, int) for item in value))
    for each in [value] if is_one else value:
        if isinstance(each, str):
            message.prompt.add(text=each)
        else:
            message.prompt.add(token_ids=pb.TokenIds(ids=each))


def _spell_tool_choice(message: Any, value: Any) -> None:
    if isinstance(value, str):
        message.mode = value
    else:
        message.function = value["function"]["name"]
