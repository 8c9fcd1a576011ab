"""Test that a running cluster refuses bad input in OpenAI's error format and serves the next request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.tiny_model import CONTEXT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def body(**options: Any) -> bytes:
    return json.dumps({"model": "tiny"} | options).encode()


BAD = {
    "no messages": (CHAT, body(messages=[]), 400),
    "messages missing": (CHAT, body(), 400),
    "unknown model": (CHAT, body(model="nobody", messages=MESSAGES), 404),
    "prompt over the limit": (TEXT, body(prompt=[5] * (CONTEXT + 1), max_tokens=1), 400),
    "prompt and answer over the limit": (TEXT, body(prompt=[5] * CONTEXT, max_tokens=2), 400),
    "10 MB": (CHAT, body(messages=[{"role": "user", "content": "x" * 10_000_000}]), 413),
    "messages of a wrong type": (CHAT, body(messages="hi"), 400),
    "temperature of a wrong type": (TEXT, body(prompt="hi", temperature="warm"), 400),
    "temperature out of range": (TEXT, body(prompt="hi", temperature=3), 400),
    "invalid UTF-8": (CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
    "not JSON": (CHAT, b"{", 400),
    "not an object": (CHAT, b"[]", 400),
    "nothing": (CHAT, b"", 400),
    "n=0": (CHAT, body(messages=MESSAGES, n=0), 400),
    "max_tokens=0 of a chat": (CHAT, body(messages=MESSAGES, max_tokens=0), 400),
    "a field twice": (TEXT, b'{"model":"tiny","prompt":"a","prompt":"b"}', 400),
    "half of a surrogate pair": (TEXT, b'{"model":"tiny","prompt":"\\ud800"}', 400),
    "a bare NUL": (TEXT, b'{"model":"tiny","prompt":"a\0"}', 400),
    "not a number": (TEXT, b'{"model":"tiny","prompt":"a","temperature":NaN}', 400),
    "a number of 5,000 digits": (TEXT, b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5000 + b"}", 400),
    "a bias for a token that is none": (TEXT, body(prompt="hi", logit_bias={"100000": 1}), 400),
    "more choices than anybody needs": (TEXT, body(prompt="hi", n=1000), 400),
    "one prompt of several over the limit": (TEXT, body(prompt=["hi", [5] * (CONTEXT + 1)]), 400),
    "token ids outside the vocabulary": (TEXT, body(prompt=[10**6]), 400),
    "negative token ids": (TEXT, body(prompt=[-1]), 400),
    "an empty prompt": (TEXT, body(prompt=[]), 400),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_the_next_request_served(calm: Pair, case: str) -> None:
    path, content, status = BAD[case]
    with httpx.Client(trust_env=False, timeout=60, base_url=calm.gateway.url) as http:
        refused = http.post(path, content=content, headers={"content-type": "application/json"})
        assert refused.status_code == status, refused.text
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["message"] and error["code"]
        assert http.post(TEXT, content=body(prompt="hi", max_tokens=2)).status_code == 200
    calm.wait_idle()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", CHAT, 405), ("POST", "/v1/nothing", 404)])
def test_a_wrong_address(calm: Pair, method: str, path: str, status: int) -> None:
    refused = httpx.request(method, f"{calm.gateway.url}{path}", trust_env=False, timeout=60)
    assert refused.status_code == status and refused.json()["error"]["type"] == "invalid_request_error"
