"""Test wrong JSON in every field of every body: each is refused with a typed error that names a field, or is one of the
values that the field's documentation allows."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.effort import IS_NIGHTLY
from tests.unit.gateway.conftest import Front

pytestmark = pytest.mark.slow
CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
GOOD: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (ChatBody, {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    TEXT: (CompletionBody, {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}),
    TOKENIZE: (TokenizeBody, {"model": "tiny", "prompt": "hi"}),
    DETOKENIZE: (DetokenizeBody, {"model": "tiny", "tokens": [5]}),
}
VALUES = (
    *(
        "null",
        "true",
        "false",
        "0",
        "-1",
        "1.5",
        "1e400",
        "-0.0",
        "9007199254740993",
        "9" * 40,
        '""',
        '"x"',
        '"\\u0000"',
    ),
    *(
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        "[]",
        "{}",
        "[null]",
        "[[]]",
        '["x"]',
        "[0]",
        '{"a": null}',
        '{"": 0}',
        "[1e400]",
    ),
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "01",
        "+1",
        "0x10",
        "'x'",
        "undefined",
        "[1,]",
        "{a: 1}",
        '"' + "x" * 5_000 + '"',
    ),
    *("[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 5_000, '"\\x"', '"\t"', "tru", '{"type": "function"}'),
)
TEXTS = (
    *(
        "",
        " ",
        "null",
        "true",
        "0",
        '"x"',
        "[]",
        "[{}]",
        "{",
        "}",
        "{}}",
        "{} {}",
        '{"model"}',
        '{"model": }',
        "{,}",
        "\ufeff{}",
    ),
    *(
        '{"model": "tiny"',
        '{"model": "tiny",}',
        "{'model': 'tiny'}",
        '{model: "tiny"}',
        "// x\n{}",
        "{}/**/",
        "\0{}",
        "{}\0",
    ),
    '{"model": "tiny", "model": "tiny", "prompt": "a", "messages": [], "tokens": []}',
    '{"model": "tiny", "\\u006dodel": "many", "prompt": "a"}',
    '{"model": ' + "[" * 100_000,
    '{"a":' * 50_000,
    '{"model": "' + "\\ud800" * 100 + '"}',
)
MAX_ERROR_BYTES = 10_000
"""Of an error response, however much of the request it repeats."""
BYTES = (
    b"\xff",
    b"\xfe\xff{\x00}",
    b'{"model": "\xff"}',
    b'{"model": "\xed\xa0\x80"}',
    b'{"model": "\xc0\xaf"}',
    b"\x1f\x8b\x08",
)


def post(http: httpx.Client, path: str, body: str | bytes) -> httpx.Response:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (path, body[:200], response.status_code, response.text[:300])
    if response.status_code != 200:
        error = response.json()["error"]
        assert len(response.content) < MAX_ERROR_BYTES, (path, body[:200], len(response.content))
        assert set(error) == {"message", "type", "param", "code"} and error["message"], (path, body[:200], error)
        assert error["type"] == "invalid_request_error", (path, body[:200], error)
    return response


def with_value(path: str, name: str, value: str) -> str:
    """Return the text of a good body in which one field has a value that need not be JSON."""
    fields = {key: json.dumps(good) for key, good in GOOD[path][1].items()} | {name: value}
    return "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}"


@pytest.mark.parametrize("path", GOOD)
def test_wrong_values_in_every_field(attacked: Front, http: httpx.Client, path: str) -> None:
    kind, _ = GOOD[path]
    num_refused = 0
    for index, field in enumerate(msgspec.structs.fields(kind)):
        values = VALUES if IS_NIGHTLY else VALUES[index % 3 :: 3]
        for value in values:
            response = post(http, path, with_value(path, field.encode_name, value))
            num_refused += response.status_code == 400
    assert num_refused > len(msgspec.structs.fields(kind))


@pytest.mark.parametrize("path", GOOD)
def test_texts_that_are_no_body(attacked: Front, http: httpx.Client, path: str) -> None:
    for body in (*TEXTS, *BYTES):
        assert post(http, path, body).status_code == 400, body[:200]


MESSAGES = [
    *({"role": role, "content": "a"} for role in ("", "root", "USER", "system\0", "a" * 1000)),
    *(
        {"role": "user", "content": content}
        for content in (None, 5, True, {}, [5], ["a"], [{}], [{"type": "text"}], [None])
    ),
    *({"role": "user", "content": [{"type": kind, "text": "a"}]} for kind in ("image_url", "input_audio", "", "TEXT")),
    *({"role": "assistant", "tool_calls": calls} for calls in ({}, [5], [{}], [{"function": 5}], [{"function": {}}])),
    *(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        for arguments in ("{", "[]", "5", '"x"', "nul", "[" * 50_000, '{"a":' * 200 + "1" + "}" * 200, 5, [], "\0")
    ),
    *({"role": "user", "content": "a", "function_call": call} for call in ({"name": "f"}, 5)),
    *({"content": "a"}, {}, 5, None, [], "a", {"role": 5, "content": "a"}, {"role": None, "content": "a"}),
]
TOOLS = [
    *([{"type": kind, "function": {"name": "f"}}] for kind in ("", "web_search", "code_interpreter", 5, None)),
    *([{"type": "function", "function": {"name": name}}] for name in ("", "a b", "ä", "a" * 65, "a/b", "a\n", 5, None)),
    *([{"type": "function", "function": {"name": "f", "parameters": wrong}}] for wrong in (5, [], "x", True)),
    [{"type": "function", "function": {"name": "f"}}] * 2,
    [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)],
    *([{"type": "function"}], [{"function": {"name": "f"}}], [5], [None], {}, 5, "f"),
]


def test_wrong_messages_and_tools(attacked: Front, http: httpx.Client) -> None:
    body = GOOD[CHAT][1]
    for message in MESSAGES:
        for path, more in ((CHAT, {}), (TOKENIZE, {"prompt": None})):
            answer = post(http, path, json.dumps({**body, **more, "messages": [message]}))
            assert answer.status_code == 400, (path, message)
    for tools in TOOLS:
        assert post(http, CHAT, json.dumps({**body, "tools": tools})).status_code == 400, tools
    for repeated in ({"role": "x" * 100_000, "content": "a"}, {"role": "user", "content": [{"type": "x" * 100_000}]}):
        assert post(http, CHAT, json.dumps({**body, "messages": [repeated]})).status_code == 400
    for fields in ({"logit_bias": {"x" * 100_000: 1}}, {"model": "x" * 100_000}, {"tool_choice": "x" * 100_000}):
        assert post(http, CHAT, json.dumps({**body, **fields})).status_code in (400, 404)
    assert post(http, CHAT, '{"%s": 1, "%s": 2}' % ("x" * 100_000, "x" * 100_000)).status_code == 400  # noqa: UP031
    too_many = {**body, "messages": [{"role": "user", "content": ""}] * 2_049}
    assert post(http, CHAT, json.dumps(too_many)).status_code == 400
