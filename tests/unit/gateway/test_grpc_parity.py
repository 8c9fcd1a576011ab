"""Test every case over HTTP and over gRPC, streamed and not: the dispatch gets the same request, and the client the
same answer or the same error. The protocols' own refusals are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc
import httpx
import pytest

from tandem.admission.quota import REQUESTS, UNIT, Levels, QuotaLimits, RateLimitedError, ReservationResult
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import FinishReason
from tandem.core.request_stages import Stage
from tandem.gateway.context.rate_limits import rate_limit_headers
from tandem.wire.gen import inference_pb2 as pb
from tests.unit.gateway.conftest import Front, ScriptedStream, grpc_refusal
from tests.unit.gateway.parity import (
    HELLO,
    comparable,
    send_alike,
    send_grpc,
    send_http,
    send_over_both_protocols,
    spell,
    whole_body,
)

pytestmark = pytest.mark.slow

UNICODE = "Grüße 你好 👩‍🚀 é"
Script = Callable[[Front], ScriptedStream]


def answer(text: str = "Paris is it.", path: str = "remote") -> Script:
    return lambda front: front.answer(text, path)


def steps(*given: Any, path: str = "remote") -> Script:
    return lambda front: front.stream(*given, path=path)


def instant(front: Front) -> Any:
    return front.instant(UNICODE)


END = Front.finished(tokens=4)
LENGTH = steps("Par", Front.finished(FinishReason.LENGTH, tokens=3, cached=0), path="fallback;reason=no decode worker")

ANSWERED: dict[str, tuple[dict[str, Any], Script]] = {
    "plain": ({}, answer()),
    "greedy": ({"temperature": 0, "max_tokens": 9}, answer()),
    "drawn": ({"temperature": 1.3, "top_p": 0.7, "top_k": 40, "min_p": 0.05, "seed": 7}, answer()),
    "all of the vocabulary": ({"top_k": -1, "seed": -3}, answer()),
    "largest seed": ({"seed": 2**63 - 1}, answer()),
    "the other model": ({"model": "org/tiny"}, answer(path="local")),
    "unicode": ({}, answer(UNICODE)),
    "one stop": ({"stop": "is"}, answer()),
    "stops across tokens": ({"stop": ["s i", "never"]}, answer()),
    "no stops": ({"stop": []}, answer()),
    "stop in the middle of characters": ({"stop": ["👩"]}, answer(UNICODE)),
    "token ids": ({"return_token_ids": True}, answer(UNICODE)),
    "past the end": ({"ignore_eos": True, "max_tokens": 3}, LENGTH),
    "length": ({"max_tokens": 3}, LENGTH),
    "nothing said": ({}, steps(1, Front.finished(tokens=1))),
    "one choice": ({"n": 1}, answer()),
    "choices": ({"n": 3, "max_tokens": 6}, instant),
    "choices that stop": ({"n": 2, "stop": ["Par"]}, instant),
    "stop tokens": ({"stop_token_ids": [5, 6, 7], "min_tokens": 2, "max_tokens": 4}, LENGTH),
    "stop shown": ({"stop": "is", "include_stop_str_in_output": True}, answer()),
    "control tokens": ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, steps("Par", 2, END)),
    "penalties": ({"presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.1}, answer()),
    "bias": ({"logit_bias": {"5": -100, "7": 2.5}}, answer()),
    "who asks": ({"user": "Ada", "priority": -3, "cache_salt": "salt", "disaggregation": "auto"}, answer()),
    "tier": ({"service_tier": "flex"}, answer()),
    "kept": ({"cache_control": {"type": "ephemeral", "ttl": "10m"}, "prompt_cache_retention": "24h"}, answer()),
    "own special tokens": ({"add_special_tokens": False}, answer()),
}

REFUSED: dict[str, tuple[dict[str, Any], ErrorKind]] = {
    "temperature": ({"temperature": 2.5}, ErrorKind.INVALID_REQUEST),
    "top_p": ({"top_p": 0}, ErrorKind.INVALID_REQUEST),
    "top_k": ({"top_k": -2}, ErrorKind.INVALID_REQUEST),
    "min_p": ({"min_p": 1.5}, ErrorKind.INVALID_REQUEST),
    "max_tokens": ({"max_tokens": -1}, ErrorKind.INVALID_REQUEST),
    "no choice": ({"n": 0}, ErrorKind.INVALID_REQUEST),
    "empty stop": ({"stop": [""]}, ErrorKind.INVALID_REQUEST),
    "too many stops": ({"stop": [str(number) for number in range(17)]}, ErrorKind.INVALID_REQUEST),
    "unknown model": ({"model": "größer"}, ErrorKind.MODEL_NOT_FOUND),
    "no model": ({"model": None}, ErrorKind.INVALID_REQUEST),
    "priority": ({"priority": -(2**31)}, ErrorKind.INVALID_REQUEST),
    "tier": ({"service_tier": "gold"}, ErrorKind.INVALID_REQUEST),
    "bias": ({"logit_bias": {"5": 101}}, ErrorKind.INVALID_REQUEST),
    "bias of no token": ({"logit_bias": {"-1": 1}}, ErrorKind.INVALID_REQUEST),
    "penalty": ({"presence_penalty": 2.5}, ErrorKind.INVALID_REQUEST),
    "repetition": ({"repetition_penalty": 0}, ErrorKind.INVALID_REQUEST),
    "stop token": ({"stop_token_ids": [-1]}, ErrorKind.INVALID_REQUEST),
    "more tokens than most": ({"min_tokens": 5, "max_tokens": 4}, ErrorKind.INVALID_REQUEST),
    "scores": ({"prompt_logprobs": 21}, ErrorKind.INVALID_REQUEST),
    "too many choices": ({"n": 129}, ErrorKind.INVALID_REQUEST),
    "too long an answer": ({"max_tokens": 512}, ErrorKind.CONTEXT_LENGTH),
}

OF_CHAT: dict[str, tuple[dict[str, Any], Script]] = {
    "logprobs": ({"logprobs": True, "top_logprobs": 2}, answer(UNICODE)),
    "logprobs alone": ({"logprobs": True}, answer()),
    "no logprobs": ({"logprobs": False}, answer()),
    "newer limit": ({"max_completion_tokens": 5, "max_tokens": 9}, answer()),
    "roles": (
        {
            "messages": [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "Hi", "name": "Ada"},
                {"role": "assistant", "content": ""},
                {"role": "tool", "content": "42", "tool_call_id": "x"},
            ]
        },
        answer(),
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two", "")]}]},
        answer(),
    ),
    "goes on": (
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        answer(),
    ),
    "template variables": ({"chat_template_kwargs": {"enable_thinking": False, "b": [1, None, "ü"]}}, answer()),
}

OF_COMPLETIONS: dict[str, tuple[dict[str, Any], Script]] = {
    "logprobs": ({"logprobs": 2}, answer(UNICODE)),
    "no alternatives": ({"logprobs": 0}, answer()),
    "token ids in": ({"prompt": [5, 6, 7]}, answer()),
    "one list of token ids": ({"prompt": [[5, 6, 7]]}, answer()),
    "several texts": ({"prompt": ["a", "größer"], "n": 2}, instant),
    "several lists": ({"prompt": [[5, 6], [7]], "logprobs": 1}, instant),
    "echo": ({"echo": True}, instant),
    "echo alone": ({"echo": True, "max_tokens": 0, "logprobs": 2, "prompt": "größer"}, instant),
    "echo of all": ({"echo": True, "logprobs": 3, "n": 2, "prompt": ["a b", "c"], "return_token_ids": True}, instant),
    "best": ({"n": 2, "best_of": 2}, instant),
    "one text in a list": ({"prompt": ["你好"]}, answer()),
}

REFUSED_CHAT: dict[str, tuple[dict[str, Any], ErrorKind]] = {
    "no messages": ({"messages": []}, ErrorKind.INVALID_REQUEST),
    "role": ({"messages": [{"role": "boss", "content": "x"}]}, ErrorKind.INVALID_REQUEST),
    "part": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ErrorKind.UNSUPPORTED),
    "part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ErrorKind.INVALID_REQUEST),
    "too many alternatives": ({"logprobs": True, "top_logprobs": 21}, ErrorKind.INVALID_REQUEST),
    "alternatives alone": ({"top_logprobs": 2}, ErrorKind.INVALID_REQUEST),
    "no such variable": ({"chat_template_kwargs": [1]}, ErrorKind.INVALID_REQUEST),
}

REFUSED_COMPLETION: dict[str, tuple[dict[str, Any], ErrorKind]] = {
    "unknown token": ({"prompt": [5, 100_000]}, ErrorKind.INVALID_REQUEST),
    "negative token": ({"prompt": [-1]}, ErrorKind.INVALID_REQUEST),
    "no prompt": ({"prompt": []}, ErrorKind.INVALID_REQUEST),
    "mixed prompts": ({"prompt": ["a", [1], ""]}, ErrorKind.INVALID_REQUEST),
    "best": ({"n": 1, "best_of": 2}, ErrorKind.UNSUPPORTED),
    "too long a prompt": ({"prompt": [5] * 600}, ErrorKind.CONTEXT_LENGTH),
}


@pytest.fixture(scope="module")
def http(running_front: Front) -> Iterator[httpx.Client]:
    """Share one client among all cases, because making a client takes longer than a case."""
    with httpx.Client(base_url=running_front.url, timeout=20, trust_env=False, verify=False) as client:
        yield client


def all_cases(shared: Any, chat: Any, completion: Any) -> list[Any]:
    cases = [(kind, name, *case) for kind in ("chat", "completion") for name, case in shared.items()]
    cases += [("chat", name, *case) for name, case in chat.items()]
    cases += [("completion", name, *case) for name, case in completion.items()]
    return [pytest.param(kind, *case, id=f"{kind}: {name}") for kind, name, *case in cases]


@pytest.mark.parametrize(("kind", "given", "script"), all_cases(ANSWERED, OF_CHAT, OF_COMPLETIONS))
def test_all_four_calls_get_the_same_answer(
    front: Front, http: httpx.Client, stub: Any, kind: str, given: dict[str, Any], script: Script
) -> None:
    script(front)
    outcome = send_alike(http, stub, kind, given)
    assert outcome.error == () and outcome.choices[0].finish_reason and outcome.usage
    requests = [comparable(request, "seed" in given) for request in front.dispatch.requests]
    assert requests and requests == requests[: len(requests) // 4] * 4


@pytest.mark.parametrize(
    ("kind", "given"),
    [("chat", {"prompt_logprobs": 2}), ("completion", {"prompt_logprobs": 1, "prompt": ["a b", "c"]})],
)
def test_a_prompt_is_scored_alike(
    front: Front, http: httpx.Client, stub: Any, kind: str, given: dict[str, Any]
) -> None:
    """Streams carry no prompt scores."""
    front.instant(UNICODE)
    whole, streamed, grpc_whole, grpc_streamed = send_over_both_protocols(http, stub, kind, whole_body(kind, given))
    assert whole.prompt_logprobs[0][0] is None and len(whole.prompt_logprobs[0][1]) == given["prompt_logprobs"]
    assert grpc_whole.plain() == whole.plain()
    assert streamed.error[0] == "invalid_request" and grpc_streamed.plain() == streamed.plain()


@pytest.mark.parametrize(("kind", "given", "expected"), all_cases(REFUSED, REFUSED_CHAT, REFUSED_COMPLETION))
def test_all_four_calls_get_the_same_refusal(
    front: Front, http: httpx.Client, stub: Any, kind: str, given: dict[str, Any], expected: ErrorKind
) -> None:
    outcome = send_alike(http, stub, kind, given)
    assert outcome.error[0] == expected.value and outcome.error[1]
    assert front.dispatch.requests == []


@pytest.mark.parametrize("expected", list(ErrorKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("begun", [False, True])
def test_errors_of_the_dispatch_are_reported_alike(
    front: Front, http: httpx.Client, stub: Any, expected: ErrorKind, *, begun: bool
) -> None:
    """The error may also occur in the middle of an answer, after a stream has sent a part of it."""
    error = TandemError(expected, "zu früh", param="messages[0].content", retry_after_s=2.5, reason="queue_full")
    front.stream(*(["Par"] if begun else []), error)
    whole, streamed, grpc_whole, grpc_streamed = send_over_both_protocols(http, stub, "chat", whole_body("chat", {}))
    assert whole.error == (expected.value, "zu früh", "messages[0].content", expected.openai_type)
    assert grpc_whole.plain() == whole.plain()
    assert grpc_streamed.error == streamed.error == whole.error
    assert grpc_streamed.choices == streamed.choices and bool(streamed.choices) == begun
    assert whole.retry_after == grpc_streamed.retry_after == "3"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_timing_is_reported_alike(front: Front, http: httpx.Client, stub: Any, kind: str) -> None:
    stages = {f"{stage.value}_ms" for stage in Stage}
    for timing, given, timed in (
        ("1", {}, {*stages, "total_ms", "first_token_ms"}),
        ("1", {"max_tokens": 0, "echo": True} if kind == "completion" else {}, None),
        ("0", {}, set()),
    ):
        front.instant(UNICODE)
        outcome = send_alike(http, stub, kind, given, **{"x-tandem-timing": timing})
        assert not outcome.error
        assert outcome.timed == timed or (timed is None and {*stages, "total_ms"} <= outcome.timed)
    refused = send_over_both_protocols(http, stub, kind, whole_body(kind, {}), **{"x-tandem-timing": "2"})
    assert {outcome.error[2] for outcome in refused} == {"x-tandem-timing"}
    front.stream("Par", TandemError(ErrorKind.KV_LOST, "gone"))
    failed = send_over_both_protocols(http, stub, kind, whole_body(kind, {}), **{"x-tandem-timing": "1"})
    assert all(outcome.error[0] == "kv_lost" and not outcome.timed for outcome in failed)


def test_a_missing_worker_is_reported_alike(front: Front, http: httpx.Client, stub: Any) -> None:
    front.dispatch.served = []
    front.dispatch.missing = "no live worker"
    outcome = send_alike(http, stub, "completion", {})
    assert outcome.error[0] == "no_worker" and outcome.retry_after == "1"


def test_models_are_listed_alike(front: Front, http: httpx.Client, stub: Any) -> None:
    over_http = http.get("/v1/models").json()["data"]
    cards = stub.ListModels(pb.ListModelsRequest()).data
    names = ("id", "created", "owned_by", "root", "max_model_len")
    assert len(cards) >= 2
    assert [[getattr(card, name) for name in names] for card in cards] == [
        [card[name] for name in names] for card in over_http
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": UNICODE, "return_token_strs": True},
        {"prompt": "", "add_special_tokens": False},
        {**HELLO, "add_generation_prompt": False},
        {**HELLO, "tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"},
        {"prompt": "a", **HELLO},
        {},
    ],
    ids=["text", "nothing", "chat", "tools", "both", "neither"],
)
def test_tokens_are_counted_alike(front: Front, http: httpx.Client, stub: Any, body: dict[str, Any]) -> None:
    answer = http.post("/tokenize", json={"model": "tiny", **body})
    request = spell({"model": "tiny", **body}, pb.TokenizeRequest())
    if answer.status_code == 200:
        body = answer.json()
        reply = stub.Tokenize(request)
        assert (reply.count, list(reply.tokens), reply.max_model_len) == (body["count"], body["tokens"], 512)
        assert list(reply.token_strs) == (body["token_strs"] or [])
        text = http.post("/detokenize", json={"model": "tiny", "tokens": body["tokens"]}).json()["prompt"]
        assert stub.Detokenize(pb.DetokenizeRequest(model="tiny", tokens=body["tokens"])).prompt == text
    else:
        error = grpc_refusal(stub.Tokenize, request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == answer.json()["error"]["message"]


def test_a_lane_is_named_alike(front: Front, http: httpx.Client, stub: Any) -> None:
    front.instant()
    body = whole_body("completion", {})
    ours, llm_d_s, old = "x-tandem-lane", "x-llm-d-inference-objective", "x-gateway-inference-objective"
    for given, lane in (
        ({ours: "batch"}, "batch"),
        ({ours: "Standard"}, "standard"),
        ({llm_d_s: "standard"}, "standard"),
        ({old: "Batch"}, "batch"),
        ({old: "batch", llm_d_s: "standard"}, "standard"),
        ({llm_d_s: "unknown to us", ours: "interactive"}, "interactive"),
    ):
        outcomes = [send_http(http, "completion", body, False, given.items())]
        outcomes.append(send_grpc(stub, "completion", body, False, given.items()))
        assert [outcome.error for outcome in outcomes] == [(), ()]
        assert [request.lane.label for request in front.dispatch.requests[-2:]] == [lane] * 2
    for header in (ours, llm_d_s, old):
        wrong = {header: "fast", "x-request-id": "mine"}.items()
        over_http, over_grpc = send_http(http, "chat", {}, False, wrong), send_grpc(stub, "chat", {}, False, wrong)
        assert over_http.error[0] == "invalid_request" and header in over_http.error
        assert over_grpc.plain() == over_http.plain()


def test_the_remaining_quota_is_reported_alike(front: Front, http: httpx.Client, stub: Any) -> None:
    left = rate_limit_headers(Levels(3 * UNIT, 0), QuotaLimits(requests_per_minute=10, tokens_per_minute=5))
    front.instant(rate_limits=left)
    headers = http.post("/v1/completions", json=whole_body("completion", {})).headers
    _, call = stub.Complete.with_call(spell(whole_body("completion", {}), pb.CompleteRequest()))
    sent = {name: value for name, value in call.initial_metadata() if name.startswith("x-ratelimit")}
    assert sent == {name: value for name, value in headers.items() if name.startswith("x-ratelimit")}
    assert sent["x-ratelimit-remaining-requests"] == "3" and len(sent) == 6


def test_prompts_that_can_never_all_be_admitted_are_refused_before_the_first(
    front: Front, http: httpx.Client, stub: Any
) -> None:
    never = TandemError(ErrorKind.INVALID_REQUEST, "too many", param="prompt", reason="requests_per_minute")
    front.dispatch.never = never
    outcome = send_alike(http, stub, "completion", {"prompt": ["a", "b"]})
    assert outcome.error == ("invalid_request", "too many", "prompt", "invalid_request_error")
    assert front.dispatch.requests == []


def test_a_quota_refusal_reports_the_remaining_quota_alike(front: Front, http: httpx.Client, stub: Any) -> None:
    result = ReservationResult(Levels(0, 2 * UNIT), refused=REQUESTS, wait_ms=6100)

    def refuse(_: object) -> NoReturn:
        raise RateLimitedError(result, QuotaLimits(requests_per_minute=10, tokens_per_minute=5))

    front.dispatch.script = refuse
    answer = http.post("/v1/completions", json=whole_body("completion", {}))
    error = grpc_refusal(stub.Complete, spell(whole_body("completion", {}), pb.CompleteRequest()))
    assert (answer.status_code, answer.headers["x-tandem-reject-reason"]) == (429, "requests_per_minute")
    sent = {name: value for name, value in error.trailing_metadata() if name.startswith("x-ratelimit")}
    assert sent == {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit")}
    assert sent["x-ratelimit-reset-requests"] == "1m0s" and len(sent) == 6
