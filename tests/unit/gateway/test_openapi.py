"""Test the OpenAPI document and its page: complete, and consistent with what is refused."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tandem.gateway.http.page_headers import page_headers
from tandem.gateway.http.routes import OF_COMPLETIONS
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody

Front = Any  # the fixtures' class lives in conftest
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    response = http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                yield from references(each)

    found = {name.rpartition("/")[2] for name in references(document)}
    assert found and found <= document["components"]["schemas"].keys()


def test_every_status_of_a_completion_is_documented(document: dict[str, Any]) -> None:
    announced = document["paths"]["/v1/chat/completions"]["post"]["responses"].keys()
    assert announced == {"200", *(str(kind.http) for kind in OF_COMPLETIONS)}
    assert document["openapi"].startswith("3.1.")


def test_the_page_is_complete_and_loads_nothing_from_elsewhere(http: httpx.Client, document: dict[str, Any]) -> None:
    response = http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert all(path in response.text for path in document["paths"])
    assert all(f'id="{name}"' in response.text for name in document["components"]["schemas"])
    assert "<script" not in response.text and "http://" not in response.text and "https://" not in response.text


def test_the_page_has_the_consoles_headers_and_its_style_is_allowed(http: httpx.Client) -> None:
    response = http.get("/docs")
    styles = re.findall("<style>(.*?)</style>", response.text, re.DOTALL)
    expected = page_headers(*styles)
    assert {name: response.headers[name] for name in expected} == expected
    digest = base64.b64encode(hashlib.sha256(styles[0].encode()).digest()).decode()
    assert f"style-src 'self' 'sha256-{digest}';" in response.headers["content-security-policy"]


def outside(facts: dict[str, Any]) -> list[Any]:
    """Values just outside of a range."""
    found: list[Any] = []
    found += [facts["minimum"] - 1] if "minimum" in facts else []
    found += [facts["exclusiveMinimum"]] if "exclusiveMinimum" in facts else []
    found += [facts["maximum"] + 1] if "maximum" in facts else []
    found += ["x" * (facts["minLength"] - 1)] if "minLength" in facts else []
    found += ["x" * (facts["maxLength"] + 1)] if "maxLength" in facts else []
    return found


def inside(facts: dict[str, Any]) -> list[Any]:
    """The last values inside of a range, of those whose other fields allow them."""
    found = [facts[name] for name in ("minimum", "maximum") if name in facts]
    return [*found, *(["x" * facts[name] for name in ("minLength", "maxLength")] if "minLength" in facts else [])]


ONLY_CHAT = {"top_logprobs": {"logprobs": True}, "max_completion_tokens": {}}
BODIES = msgspec.json.schema_components([ChatBody, CompletionBody])[1]
RANGES = {
    name: facts
    for body in ("ChatBody", "CompletionBody")
    for name, facts in BODIES[body]["properties"].items()
    if facts.keys() & {"minimum", "exclusiveMinimum", "minLength"}
}
NUMBERS = sorted(RANGES)


def post(http: httpx.Client, name: str, value: Any) -> httpx.Response:
    """Request a completion with the value, or a chat where only chats have the field."""
    if name in ONLY_CHAT:
        return http.post("/v1/chat/completions", json=CHAT | ONLY_CHAT[name] | {name: value})
    return http.post("/v1/completions", json=TEXT | {name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_values_outside_a_documented_range_are_refused_by_name(front: Front, http: httpx.Client, name: str) -> None:
    front.instant()
    for value in outside(dict(RANGES[name])):
        response = post(http, name, value)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), value
    assert front.dispatch.requests == []


@pytest.mark.parametrize("name", NUMBERS)
def test_the_bounds_of_a_documented_range_are_accepted(front: Front, http: httpx.Client, name: str) -> None:
    front.instant()
    for value in inside(dict(RANGES[name])):
        response = post(http, name, value)
        assert response.status_code == 200, (value, response.text)


def test_there_must_be_a_message(http: httpx.Client, document: dict[str, Any]) -> None:
    assert document["components"]["schemas"]["ChatBody"]["properties"]["messages"]["minItems"] == 1
    assert http.post("/v1/chat/completions", json=CHAT | {"messages": []}).status_code == 400
