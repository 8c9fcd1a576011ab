"""Test that requests of inference.proto reach every field of the HTTP bodies with the same meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.grpc.requests import _RENAMED, _SHAPES, body_of
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tandem.wire.gen import inference_pb2 as pb

NOT_OVER_GRPC = {
    "stream": "the method says it",
    "stream_options": "the last update always tells the usage",
    **{f"guided_{form}": "structured_outputs is its successor" for form in ("json", "regex", "choice", "grammar")},
    "messages.function_call": "refused over HTTP too; tool_calls is its successor",
    "messages.audio": "refused over HTTP too",
    "messages.reasoning": "another name of reasoning_content",
}


def missing(struct: type, message: Descriptor, where: str = "") -> Iterator[str]:
    """Yield the fields of `struct`, and of the structs inside it, that `message` lacks."""
    for field in msgspec.structs.fields(struct):
        path = f"{where}{field.name}"
        names = [field.name, f"{field.name}_json", *(new for new, old in _RENAMED.items() if old == field.name)]
        found = [message.fields_by_name[name] for name in names if name in message.fields_by_name]
        if not found:
            yield path
        for inner in structs_in(msgspec.inspect.type_info(field.type)):
            for descriptor in found:
                if descriptor.message_type is not None and descriptor.message_type.name not in _SHAPES:
                    yield from missing(inner, descriptor.message_type, f"{path}.")


def structs_in(info: Any) -> list[type]:
    if isinstance(info, msgspec.inspect.StructType):
        return [info.cls]
    if isinstance(info, msgspec.inspect.Metadata):
        return structs_in(info.type)
    inside = [info.item_type] if isinstance(info, msgspec.inspect.ListType) else getattr(info, "types", ())
    return [struct for each in inside for struct in structs_in(each)]


@pytest.mark.parametrize(
    ("struct", "message"),
    [
        (ChatBody, pb.ChatRequest.DESCRIPTOR),
        (CompletionBody, pb.CompleteRequest.DESCRIPTOR),
        (TokenizeBody, pb.TokenizeRequest.DESCRIPTOR),
        (DetokenizeBody, pb.DetokenizeRequest.DESCRIPTOR),
    ],
    ids=["chat", "completion", "tokenize", "detokenize"],
)
def test_every_field_of_the_body_is_reachable(struct: type, message: Descriptor) -> None:
    found = set(missing(struct, message))
    assert found <= NOT_OVER_GRPC.keys()


def test_the_walk_would_find_what_is_missing() -> None:
    inner = msgspec.defstruct("inner", [("role", str), ("colour", str)])
    outer = msgspec.defstruct("outer", [("messages", list[inner] | None), ("taste", int)])  # type: ignore[valid-type]
    assert set(missing(outer, pb.ChatRequest.DESCRIPTOR)) == {"messages.colour", "taste"}


def test_absent_is_not_zero() -> None:
    message = pb.ChatMessage(role="user", content="")
    body = body_of(pb.ChatRequest(model="m", messages=[message], temperature=0.0, n=0, logprobs=False), ChatBody)
    assert (body.temperature, body.n, body.logprobs, body.messages[0].content) == (0.0, 0, False, "")
    assert (body.top_p, body.seed, body.stop, body.messages[0].name) == (None, None, None, None)


def test_content_may_be_parts() -> None:
    parts = [pb.ContentPart(type="text", text="a"), pb.ContentPart(type="text")]
    body = body_of(pb.ChatRequest(model="m", messages=[pb.ChatMessage(role="user", content_parts=parts)]), ChatBody)
    content = body.messages[0].content
    assert isinstance(content, list) and [(part.type, part.text) for part in content] == [("text", "a"), ("text", None)]


def test_prompts_keep_their_order_and_kind() -> None:
    prompts = [pb.Prompt(text="a"), pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2])), pb.Prompt(), pb.Prompt(text="")]
    assert body_of(pb.CompleteRequest(model="m", prompt=prompts), CompletionBody).prompt == ["a", [1, 2], "", ""]


@pytest.mark.parametrize("text", ['{"b": 1, "a": {"z": 12345678901234567890, "y": [1.0, null]}}', "{}"])
def test_json_text_keeps_order_and_numbers(text: str) -> None:
    body = body_of(pb.ChatRequest(model="m", chat_template_kwargs_json=text), ChatBody)
    assert msgspec.json.encode(body.chat_template_kwargs) == text.replace(" ", "").encode()


@pytest.mark.parametrize(
    "text", ["{", "", "{} {}", '{"a": 1}, "model": "other"', "[" * 100_000, '{"a": NaN}', '"text"', "1"]
)
def test_bad_json_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(TandemError) as refusal:
        body_of(pb.ChatRequest(model="m", chat_template_kwargs_json=text), ChatBody)
    assert refusal.value.kind is ErrorKind.INVALID_REQUEST
    assert refusal.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty"])
def test_values_that_json_cannot_express_are_refused_by_name(name: str, value: float) -> None:
    """As JSON these values would become null, which means that the field is absent."""
    with pytest.raises(TandemError) as refusal:
        body_of(pb.ChatRequest(model="m", **{name: value}), ChatBody)
    assert refusal.value.kind is ErrorKind.INVALID_REQUEST and refusal.value.param == name


def test_a_bias_that_json_cannot_express_is_refused_by_its_token() -> None:
    with pytest.raises(TandemError) as refusal:
        body_of(pb.CompleteRequest(model="m", logit_bias={7: float("nan")}), CompletionBody)
    assert refusal.value.param == "logit_bias.7"
