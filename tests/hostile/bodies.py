"""Fuzz targets: the JSON bodies of HTTP and the messages of gRPC, up to the request that workers would receive."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from tandem.core.bundle import TokenizerBundle
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.grpc.requests import body_of
from tandem.gateway.openai.output_spec import OutputSpecFactory
from tandem.gateway.openai.prompt import checked_tokens, given_prompts
from tandem.gateway.openai.request_params import chat_ending, chat_params, completion_params, conversation, request
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from tandem.gateway.output.tools import make_tool_set
from tandem.gateway.text.text_model import TextModel
from tandem.wire.gen import inference_pb2 as pb
from tests.hostile.surface import Surface
from tests.tokenizer import TEMPLATE, train_tokenizer

_SPECS = OutputSpecFactory()
_CALLER = RequestContext(request_id="r", received_at=0.0)


@cache
def served_model() -> ServedModel:
    names = {"bos_token_id": 0, "bos_token": "<s>", "eos_token_ids": [1], "eos_token": "<|im_end|>"}
    bundle = TokenizerBundle(
        tokenizer_json=train_tokenizer().to_str().encode(),
        chat_template=TEMPLATE,
        generation_config_json="{}",
        special_tokens_json=json.dumps(names),
    )
    return ServedModel(name="tiny", max_model_len=512, text=TextModel(bundle), created=1_700_000_000)


def _chat(body: ChatBody) -> None:
    served = served_model()
    params = chat_params(body)
    spec = _SPECS.of_chat(body, served.text)
    messages, _ = spec.conversation(conversation(body.messages))
    chat_ending(body.messages, body.add_generation_prompt, body.continue_final_message)
    json.dumps(messages)
    spec.grammar((5, 6))
    spec.transforms((5, 6))
    request(params, served, (5, 6), "r", _CALLER)


def _completion(body: CompletionBody) -> None:
    served = served_model()
    params = completion_params(body)
    spec = _SPECS.of_completion(body, served.text)
    for given in given_prompts(body.prompt, served.text.vocab_size, served.max_model_len, params.num_choices):
        request(params, served, given if isinstance(given, tuple) else (5, 6), "r", _CALLER)
    spec.grammar((5, 6))


def _tokenize(body: TokenizeBody) -> None:
    if body.messages is not None:
        conversation(body.messages)
        chat_ending(body.messages, body.add_generation_prompt, body.continue_final_message)
    make_tool_set(body.tools, body.tool_choice, None)


def _read_chat(data: bytes) -> None:
    _chat(parse(data, ChatBody))


def _read_completion(data: bytes) -> None:
    _completion(parse(data, CompletionBody))


def _read_other(data: bytes) -> None:
    """Read bytes as the body of /tokenize or, where the first byte is d, of /detokenize."""
    if data[:1] == b"d":
        checked_tokens(parse(data[1:], DetokenizeBody).tokens, served_model().text.vocab_size, "tokens")
    else:
        _tokenize(parse(data[1:], TokenizeBody))


_MESSAGES: dict[bytes, tuple[Any, Any, Callable[[Any], None]]] = {
    b"c": (pb.ChatRequest, ChatBody, _chat),
    b"p": (pb.CompleteRequest, CompletionBody, _completion),
    b"t": (pb.TokenizeRequest, TokenizeBody, _tokenize),
}


def _read_message(data: bytes) -> None:
    """Read bytes after the first as the message that the first byte names."""
    kind, body, use = _MESSAGES.get(data[:1], _MESSAGES[b"c"])
    use(body_of(kind.FromString(data[1:]), body))


def _read_fields(data: bytes) -> None:
    """Read bytes as a choice of fields and values, since random bytes seldom are JSON: the first byte names the kind of
    body, and of each further pair of bytes the first names a field and the second its value."""
    kind, use = _USES[data[0] % 2] if data else _USES[0]
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    fields: dict[str, Any] = dict(_NEEDED)
    for name, value in zip(data[1::2], data[2::2], strict=False):
        fields[names[name % len(names)]] = _VALUES[value % len(_VALUES)]
    use(parse(json.dumps(fields).encode(), kind))


def _json(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", **fields}).encode()


_TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}], "name": "ann"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "4"},
]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": _SCHEMA, "strict": True}}
_SAMPLING = {
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": -3,
    "n": 2,
    "priority": 1,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "logit_bias": {"5": -1.5},
    "presence_penalty": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "service_tier": "flex",
    "cache_salt": "s",
    "disaggregation": "auto",
    "user": "u",
}
_CHATS = (
    _json(messages=_TALK[:1]),
    _json(messages=_TALK, tools=[_TOOL], tool_choice="required", parallel_tool_calls=False, logprobs=True),
    _json(messages=_TALK[:2], tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "add"}}),
    _json(messages=_TALK[:2], response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}),
    _json(messages=_TALK[:2], structured_outputs={"choice": ["yes", "no"]}, chat_template_kwargs={"a": 1}, **_SAMPLING),
    _json(messages=_TALK[:2], continue_final_message=True, add_generation_prompt=False, top_logprobs=2, logprobs=True),
)
_COMPLETIONS = (
    _json(prompt="hi", guided_regex="a+b", **_SAMPLING),
    _json(prompt=[5, 6, 7], echo=True, logprobs=2, best_of=1, prompt_logprobs=1, guided_json=json.dumps(_SCHEMA)),
    _json(prompt=["a", "b"], n=2, guided_choice=["a"], response_format={"type": "text"}),
    _json(prompt=[[5], [6, 7]], guided_grammar='start: "a" | "b"', suffix=None),
)
_OTHERS = (
    b"t" + _json(messages=_TALK, tools=[_TOOL], add_generation_prompt=False, return_token_strs=True),
    b"t" + _json(prompt="hi", add_special_tokens=False),
    b"d" + _json(tokens=[5, 6]),
)
_CALL = pb.ChatRequest(
    model="tiny", messages=[pb.ChatMessage(role="user", content="hi")], max_tokens=5, temperature=0.5
)
_PROMPT = pb.CompleteRequest(model="tiny", prompt=[pb.Prompt(text="hi")], logit_bias={5: -1.5})
_TEXT = pb.TokenizeRequest(model="tiny", prompt="hi")
_NEEDED = {"model": "tiny", "messages": _TALK[:2], "prompt": "hi"}
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        1.5,
        5,
        20,
        21,
        100,
        2**31,
        2**63,
        2**64,
        1e300,
        "",
        "a",
        "tiny",
        "auto",
        "\ud800",
    ),
    *(
        [],
        [1],
        [-1],
        ["a"],
        [""],
        [[5]],
        ["a", "b"],
        [5, "a"],
        {},
        {"5": 1},
        {"a": 1},
        {"5": 1e9},
        "none",
        "required",
        "flex",
    ),
    *(
        _TALK,
        _TALK[:1],
        _TALK[2:],
        [_TOOL],
        [_TOOL, _TOOL],
        _SCHEMA,
        json.dumps(_SCHEMA),
        "a+",
        'start: "a"',
        'root ::= "a"',
    ),
    *(
        {"include_usage": True},
        {"type": "function", "function": {"name": "add"}},
        {"type": "text"},
        {"type": "json_object"},
    ),
    *(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA, "strict": strict}}
        for strict in (True, False)
    ),
    *({name: value} for name, value in (("json", _SCHEMA), ("regex", "a"), ("choice", ["a"]), ("grammar", "a"))),
)
_USES: tuple[tuple[Any, Callable[[Any], None]], ...] = ((ChatBody, _chat), (CompletionBody, _completion))
SURFACES = {
    "body-fields": Surface(read=_read_fields, seeds=(b"\0", b"\0\1\4", b"\1\1\4\2\7")),
    "chat-body": Surface(read=_read_chat, seeds=_CHATS),
    "completion-body": Surface(read=_read_completion, seeds=_COMPLETIONS),
    "tokenize-body": Surface(read=_read_other, seeds=_OTHERS),
    "grpc-body": Surface(
        read=_read_message,
        seeds=tuple(
            sign + message.SerializeToString() for sign, message in ((b"c", _CALL), (b"p", _PROMPT), (b"t", _TEXT))
        ),
        errors=(DecodeError,),
    ),
}
