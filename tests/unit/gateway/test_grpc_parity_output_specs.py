"""Test keys, response formats, tools and reasoning over HTTP and gRPC, streamed and not: the same requests and
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from tandem.admission.api_keys import key_digest
from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind
from tandem.core.ids import TenantId
from tandem.core.lane import Lane
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.tenants_file import Key, Tenants
from tandem.gateway.text.text_model import TextModel
from tandem.wire.channels import CHANNEL_OPTIONS
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.unit.gateway.conftest import Front, ScriptedDispatch, grpc_refusal
from tests.unit.gateway.parity import (
    HELLO,
    Outcome,
    comparable,
    send_alike,
    send_grpc,
    send_over_both_protocols,
    whole_body,
)

pytestmark = pytest.mark.slow

KEY = "sk-parity"
PROXY_KEY = "sk-proxy"
TENANT = Tenant(id=TenantId("ada"), models=frozenset({"tiny"}), lane=Lane.STANDARD)
PROXY = Tenant(id=TenantId("edge"), proxy=True)
KEYLESS = Tenant(id=TenantId("bob"), lane=Lane.BATCH)
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}, "required": ["z", "a"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True}}
NAMED = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"z": 1, "a": "Köln"}}\n</tool_call>'
TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>'
TOOLS = {"tools": [WEATHER, CLOCK]}

ANSWERED: dict[str, tuple[str, dict[str, Any], str]] = {
    "text": ("chat", {"response_format": {"type": "text"}}, "Hi"),
    "any object": ("chat", {"response_format": {"type": "json_object"}}, '{"a": 1}'),
    "schema": (
        "completion",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        '{"z": 1, "a": "ü"}',
    ),
    "described schema": (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, "description": "d"}}},
        "{}",
    ),
    "regular expression": ("completion", {"structured_outputs": {"regex": "[a-z]+"}}, "abc"),
    "one of": ("chat", {"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
    "schema as text": ("chat", {"structured_outputs": {"json": '{"type":"integer"}'}}, "1"),
    "grammar": ("chat", {"structured_outputs": {"grammar": 'start: "a"'}}, "a"),
    "tools unused": ("chat", TOOLS, "No need."),
    "a call": ("chat", TOOLS, CALL),
    "calls": ("chat", {**TOOLS, "parallel_tool_calls": True}, TWO_CALLS),
    "one call at most": ("chat", {**TOOLS, "parallel_tool_calls": False}, TWO_CALLS),
    "no call": ("chat", {**TOOLS, "tool_choice": "none"}, CALL),
    "auto": ("chat", {**TOOLS, "tool_choice": "auto"}, CALL),
    "some call": ("chat", {**TOOLS, "tool_choice": "required"}, CALL),
    "named": ("chat", {**TOOLS, "tool_choice": NAMED}, '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'),
    "thoughts": ("chat", {}, "<think>Hmm. 你好</think>Paris"),
    "a call after thoughts": ("chat", TOOLS, f"<think>Hm</think>{CALL}"),
    "calls so far": (
        "chat",
        {
            **TOOLS,
            "messages": [
                *HELLO["messages"],
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Hm",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            ],
        },
        "It is noon.",
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any], ErrorKind]] = {
    "no schema": ("chat", {"response_format": {"type": "json_schema"}}, ErrorKind.INVALID_REQUEST),
    "form": ("chat", {"response_format": {"type": "poem"}}, ErrorKind.INVALID_REQUEST),
    "schema": (
        "completion",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "x"}}}},
        ErrorKind.INVALID_REQUEST,
    ),
    "regular expression": ("chat", {"structured_outputs": {"regex": "("}}, ErrorKind.INVALID_REQUEST),
    "two forms": ("chat", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, ErrorKind.INVALID_REQUEST),
    "no tools": ("chat", {"tool_choice": "required"}, ErrorKind.INVALID_REQUEST),
    "unknown tool": (
        "chat",
        {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        ErrorKind.INVALID_REQUEST,
    ),
    "choice": ("chat", {**TOOLS, "tool_choice": "maybe"}, ErrorKind.INVALID_REQUEST),
    "tool's kind": ("chat", {"tools": [{"type": "search", "function": {"name": "a"}}]}, ErrorKind.UNSUPPORTED),
    "tool's name": ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, ErrorKind.INVALID_REQUEST),
    "one that it may not use": ("chat", {"model": "org/tiny"}, ErrorKind.MODEL_NOT_FOUND),
}


class Locked(NamedTuple):
    """Hold a front end that requires keys, with a client of each protocol."""

    front: Front
    http: httpx.Client
    stub: Any

    def send_alike(self, kind: str, given: dict[str, Any], **metadata: str) -> Outcome:
        return send_alike(self.http, self.stub, kind, given, **metadata)


@pytest.fixture(scope="module")
def running(make_text: Callable[..., TextModel], tokenizer: Tokenizer) -> Iterator[Locked]:
    """Run a front end that parses Hermes tool calls and reasoning."""
    text = make_text()
    served = [ServedModel(name=name, max_model_len=2048, text=text, created=1) for name in ("tiny", "org/tiny")]
    digests = {key_digest(KEY): TENANT, key_digest(PROXY_KEY): PROXY}
    known = {digest: Key(digest, tenant, "parity", None) for digest, tenant in digests.items()}
    tenants = Tenants(known, {tenant.id: tenant for tenant in (TENANT, PROXY, KEYLESS)})
    keys = ApiKeyAuthenticator(tenants, lambda: 0)
    front = Front(ScriptedDispatch(served), tokenizer, keys, tool_parser="hermes", reasoning_parser="think")
    with (
        front,
        httpx.Client(base_url=front.url, timeout=20, trust_env=False, verify=False) as http,
        grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}", options=CHANNEL_OPTIONS) as channel,
    ):
        yield Locked(front, http, InferenceStub(channel))  # type: ignore[arg-type]


@pytest.fixture
def locked(running: Locked) -> Locked:
    running.front.dispatch.reset()
    return running


def send(locked: Locked, kind: str, given: dict[str, Any]) -> list[Outcome]:
    """Send a request of the tenant in all four ways."""
    body = whole_body(kind, given)
    return send_over_both_protocols(locked.http, locked.stub, kind, body, authorization=f"Bearer {KEY}")


def normalized(outcome: Outcome) -> dict[str, Any]:
    """Replace the random call ids after checking that each call has one and no two are the same."""
    ids = [call[0] for choice in outcome.choices.values() for call in choice.tool_calls.values()]
    assert all(ids) and len(set(ids)) == len(ids)
    for choice in outcome.choices.values():
        choice.tool_calls = {index: ["", *rest] for index, (_, *rest) in choice.tool_calls.items()}
    return outcome.plain()


@pytest.mark.parametrize(("kind", "given", "saying"), ANSWERED.values(), ids=ANSWERED)
def test_all_four_calls_get_the_same_answer(locked: Locked, kind: str, given: dict[str, Any], saying: str) -> None:
    locked.front.answer(saying)
    first, *others = map(normalized, send(locked, kind, given))
    assert first["error"] == () and first["choices"][0]["finish_reason"]
    assert others == [first] * 3
    dispatch = locked.front.dispatch
    requests = [comparable(request, seeded=False) for request in dispatch.requests]
    assert len(requests) == 4 and requests == requests[:1] * 4
    assert {caller.tenant for caller in dispatch.callers} == {TENANT}


def test_a_tool_call_arrives_with_its_arguments(locked: Locked) -> None:
    """The comparisons above would also hold if every reply were empty."""
    locked.front.answer(f"<think>Hm</think>{TWO_CALLS}")
    streamed = send(locked, "chat", TOOLS)[3].choices[0]
    assert streamed.reasoning == "Hm" and streamed.finish_reason == "tool_calls"
    assert [call[1:] for call in streamed.tool_calls.values()] == [
        ["function", "weather", '{"z": 1, "a": "Köln"}'],
        ["function", "clock", "{}"],
    ]


@pytest.mark.parametrize(("kind", "given", "expected"), REFUSED.values(), ids=REFUSED)
def test_all_four_calls_get_the_same_refusal(
    locked: Locked, kind: str, given: dict[str, Any], expected: ErrorKind
) -> None:
    assert locked.send_alike(kind, given, authorization=f"Bearer {KEY}").error[0] == expected.value
    assert locked.front.dispatch.requests == []


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
    ],
    ids=str,
)
def test_strangers_are_refused_alike(locked: Locked, shown: dict[str, str]) -> None:
    """The refusal comes before any part of the request is read."""
    outcome = locked.send_alike("chat", {"temperature": 99}, **shown)
    assert outcome.error[0] == "unauthenticated" and outcome.error[3] == "authentication_error"
    for method, request in (
        (locked.stub.ListModels, pb.ListModelsRequest()),
        (locked.stub.Tokenize, pb.TokenizeRequest(prompt="x")),
        (locked.stub.Detokenize, pb.DetokenizeRequest(tokens=[5])),
    ):
        error = grpc_refusal(method, request, metadata=tuple(shown.items()))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_key_may_be_sent_as_x_api_key(locked: Locked) -> None:
    locked.front.answer("Hi")
    assert locked.send_alike("completion", {}, **{"x-api-key": KEY}).error == ()


def test_only_models_that_a_tenant_may_use_are_listed(locked: Locked) -> None:
    listed = locked.stub.ListModels(pb.ListModelsRequest(), metadata=(("authorization", f"Bearer {KEY}"),)).data
    assert [model.id for model in listed] == ["tiny"]


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        (KEY, {"x-llm-d-inference-fairness-id": "bob"}, TENANT),
        (KEY, {"x-llm-d-inference-fairness-id": "nobody"}, TENANT),
        (PROXY_KEY, {}, PROXY),
        (PROXY_KEY, {"x-llm-d-inference-fairness-id": "bob"}, KEYLESS),
        (PROXY_KEY, {"x-gateway-inference-fairness-id": "ada"}, TENANT),
        (PROXY_KEY, {"x-gateway-inference-fairness-id": "bob", "x-llm-d-inference-fairness-id": "bob"}, KEYLESS),
    ],
    ids=str,
)
def test_only_a_proxy_may_name_the_tenant_of_its_requests(
    locked: Locked, key: str, given: dict[str, str], expected: Tenant
) -> None:
    locked.front.instant()
    assert locked.send_alike("completion", {}, authorization=f"Bearer {key}", **given).error == ()
    dispatch = locked.front.dispatch
    assert [caller.tenant for caller in dispatch.callers] == [expected] * 4
    assert {request.tenant for request in dispatch.requests} == {expected.id}
    assert {request.lane for request in dispatch.requests} == {expected.lane}


@pytest.mark.parametrize("header", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"])
@pytest.mark.parametrize("name", ["nobody", "", "open"])
def test_a_proxy_that_names_nobody_is_refused_alike(locked: Locked, header: str, name: str) -> None:
    outcome = locked.send_alike("chat", {}, authorization=f"Bearer {PROXY_KEY}", **{header: name})
    assert outcome.error[0] == "invalid_request" and header in outcome.error
    assert locked.front.dispatch.requests == []


@pytest.mark.parametrize(
    "names",
    [
        ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"),
        ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"),
        ("x-llm-d-inference-fairness-id", "x-llm-d-inference-fairness-id"),
        ("x-gateway-inference-fairness-id", "x-gateway-inference-fairness-id"),
    ],
    ids=str,
)
def test_a_request_of_a_proxy_for_two_tenants_is_refused_alike(locked: Locked, names: tuple[str, str]) -> None:
    locked.front.instant()
    sent = [("authorization", f"Bearer {PROXY_KEY}"), *zip(names, ("bob", "ada"), strict=True)]
    over_http = locked.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=sent)
    error = over_http.json()["error"]
    assert over_http.status_code == 400 and error["code"] == "invalid_request" and error["param"] == names[0]
    over_grpc = send_grpc(locked.stub, "completion", {"model": "tiny", "prompt": "x"}, False, sent)
    assert over_grpc.error == (error["code"], error["message"], error["param"], error["type"])
    assert locked.front.dispatch.requests == []
