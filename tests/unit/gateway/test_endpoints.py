"""Test what the gateway serves besides completions: tokens, health, metrics, limits, and what it does not serve."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from tandem.admission.quota import UNIT, Levels, QuotaLimits
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.rate_limits import duration, rate_limit_headers

LABEL = r'[a-z_]+="(?:[^"\\]|\\.)*"'
SAMPLE = re.compile(rf"[a-z0-9_:]+(\{{{LABEL}(,{LABEL})*\}})? [-0-9.e+]+")
Front = Any  # the fixtures' class lives in conftest
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def tokens_of(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/tokenize", json={"model": "tiny"} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_tokenize_returns_the_tokens_that_a_completion_would_compute(front: Front, http: httpx.Client) -> None:
    front.instant()
    http.post("/v1/completions", json={"model": "tiny", "prompt": "Grüße"})
    http.post("/v1/chat/completions", json=CHAT)
    prompt, chat = [list(request.prompt_tokens) for request in front.dispatch.requests]
    assert tokens_of(http, prompt="Grüße") == {
        "count": len(prompt),
        "max_model_len": 512,
        "tokens": prompt,
        "token_strs": None,
    }
    assert tokens_of(http, messages=CHAT["messages"])["tokens"] == chat
    assert tokens_of(http, prompt="Grüße", add_special_tokens=False)["tokens"] == prompt[1:]
    bare = tokens_of(http, messages=CHAT["messages"], add_generation_prompt=False)["tokens"]
    assert chat[: len(bare)] == bare and len(bare) < len(chat)
    named = tokens_of(http, prompt="a 你", return_token_strs=True)
    assert len(named["token_strs"]) == named["count"] and named["token_strs"][:2] == ["<s>", "a"]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "none"}])
def test_tools_are_counted_with_the_messages_that_show_them(
    front: Front, http: httpx.Client, choice: dict[str, Any]
) -> None:
    front.instant()
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    body = {**CHAT, "tools": tools, **choice}
    http.post("/v1/chat/completions", json=body)
    (request,) = front.dispatch.requests
    assert tokens_of(http, **body)["tokens"] == list(request.prompt_tokens)
    bare = tokens_of(http, messages=CHAT["messages"])["tokens"]
    assert (bare == list(request.prompt_tokens)) == bool(choice)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": CHAT["messages"], "tool_choice": "required"}, "tool_choice"),
        ({}, "prompt"),
        ({"prompt": "x", "messages": CHAT["messages"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "model": "none"}, "model"),
        ({"messages": []}, "messages"),
    ],
)
def test_an_invalid_tokenize_body_is_refused_by_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    response = http.post("/tokenize", json={"model": "tiny"} | body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_detokenizing_undoes_tokenizing(http: httpx.Client) -> None:
    text = "Grüße 你好 😀"
    ids = tokens_of(http, prompt=text, add_special_tokens=False)["tokens"]
    assert http.post("/detokenize", json={"model": "tiny", "tokens": ids}).json() == {"prompt": text}
    assert http.post("/detokenize", json={"model": "tiny", "tokens": []}).json() == {"prompt": ""}
    refused = http.post("/detokenize", json={"model": "tiny", "tokens": [420]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


def test_a_model_need_be_named_only_among_several(front: Front, http: httpx.Client) -> None:
    refused = http.post("/tokenize", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    front.dispatch.served = front.dispatch.served[:1]
    assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    front.dispatch.served = []
    assert http.post("/tokenize", json={"prompt": "x"}).status_code == 503


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/responses", "Responses"),
        ("/v1/responses/resp_1/cancel", "Responses"),
        ("/v1/batches", "Batch"),
        ("/v1/files/f/content", "files"),
        ("/v1/fine_tuning/jobs", "fine-tuning"),
        ("/v1/audio/speech", "audio"),
        ("/v1/images/generations", "images"),
        ("/v1/moderations", "moderations"),
        ("/v1/load_lora_adapter", "LoRA"),
        ("/v1/messages", "Anthropic"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unsupported_route_names_what_is_unsupported(http: httpx.Client, method: str, path: str, what: str) -> None:
    response = http.request(method, path, json={})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert what in error["message"] and "does not serve" in error["message"]


def test_the_openai_client_raises_not_found_for_unsupported_routes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="Responses"):
        client.responses.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="Batch"):
        client.batches.list()
    with pytest.raises(openai.NotFoundError, match="moderations"):
        client.moderations.create(input="x")


def test_the_states_of_a_gateway(front: Front, http: httpx.Client) -> None:
    assert http.get("/health").json() == http.get("/live").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    front.dispatch.missing = "no live worker"
    response = http.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json() == {"status": "not_ready", "reason": "no live worker"}
    assert http.get("/health").json() == {"status": "ok"}


def metrics(http: httpx.Client) -> dict[str, float]:
    """Return the metrics once no request is open: a client has its answer before the gateway counts it."""
    while True:
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.text.split("\n") if line and not line.startswith("#")]
        assert not [line for line in lines if not SAMPLE.fullmatch(line)]
        found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
        if found["tandem_open_requests"] == 0:
            return found


def test_every_request_is_counted_once_by_its_outcome(front: Front, http: httpx.Client) -> None:
    before = metrics(http)
    front.instant("Paris")
    http.post("/v1/chat/completions", json=CHAT | {"n": 2})
    http.post("/v1/completions", json={"model": "tiny", "prompt": ["x", "y"], "stream": True})
    http.post("/v1/completions", json={"model": "none", "prompt": "x"})
    front.stream("Paris", TandemError(ErrorKind.KV_LOST, "gone"))
    http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True})
    front.stream("Paris", RuntimeError("bug"))
    http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    after = metrics(http)
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    outcome = 'tandem_requests_total{{endpoint="{}",lane="interactive",outcome="{}",tenant="open"}}'.format
    num_paris = len(front.ids("Paris"))
    assert {name: grown[name] for name in grown if name.startswith("tandem_requests")} == {
        outcome("chat", "finished"): 1,
        outcome("completion", "finished"): 1,
        outcome("completion", "model_not_found"): 1,
        outcome("completion", "kv_lost"): 1,
        outcome("completion", "internal"): 1,
    }
    of = 'tandem_{}_tokens_total{{path="remote",tenant="open"}}'.format
    assert grown[of("prompt")] == sum(len(r.prompt_tokens) for r in front.dispatch.requests)
    assert grown[of("output")] == 4 * (num_paris + 1) + 1 + 2 * num_paris
    duration = "gen_ai_server_request_duration_seconds_count"
    assert sum(number for name, number in grown.items() if name.startswith(duration)) == 5
    first = [name for name in grown if name.startswith("gen_ai_server_time_to_first_token_seconds_count")]
    assert sum(grown[name] for name in first) == 4, "all but the one whose model nobody serves"
    gaps = [name for name in grown if name.startswith("tandem_inter_token_latency_seconds_count")]
    assert sum(grown[name] for name in gaps) == 5 * (num_paris - 1) + num_paris, "the end of a sequence is no token"
    admitted = 'tandem_admissions_total{decision="admitted",lane="interactive",reason="",tenant="open"}'
    assert grown[admitted] == 5
    assert 'tandem_http_responses_total{status="404"}' in grown


def test_unknown_model_names_make_no_metric_series(http: httpx.Client) -> None:
    for number in range(50):
        http.post("/v1/completions", json={"model": f"made-up-{number}", "prompt": "x"})
    assert not [name for name in metrics(http) if "made-up" in name]


def test_openmetrics_is_served_to_clients_that_accept_it(front: Front, http: httpx.Client) -> None:
    front.instant("Paris")
    http.post("/v1/chat/completions", json=CHAT)
    answer = http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.1"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n") and "tandem_requests_total{" in answer.text


def test_an_endpoint_picker_finds_one_series_of_each_metric(http: httpx.Client) -> None:
    """llm-d's picker reads the first series of a family and these two labels (core-metrics-extractor)."""
    found = {family.name: family.samples for family in read_text(http.get("/metrics/endpoint-picker").text)}
    picked = {name: (sample.labels, sample.value) for name, (sample,) in found.items()}
    assert picked == {
        "vllm:num_requests_waiting": ({}, 0),
        "vllm:num_requests_running": ({}, 0),
        "vllm:kv_cache_usage_perc": ({}, 0.25),
        "vllm:cache_config_info": ({"block_size": "16", "num_gpu_blocks": "1000"}, 1),
    }
    exported = {family.name for family in read_text(http.get("/metrics").text)}
    assert not exported & picked.keys(), "sums over gateways and workers would count sequences twice"


def test_the_scrape_targets_list_the_workers(http: httpx.Client) -> None:
    assert http.get("/metrics/targets").json() == [
        {"targets": ["127.0.0.1:9100"], "labels": {"pool": "prefill", "worker": "p1", "model": "tiny"}}
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_rate_limit_headers_are_sent_where_limits_exist(front: Front, http: httpx.Client, stream: bool) -> None:
    front.instant("Paris")
    unlimited = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]
    rate_limits = rate_limit_headers(Levels(59 * UNIT, 0), QuotaLimits(requests_per_minute=60, tokens_per_minute=9000))
    front.instant("Paris", rate_limits)
    limited = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    sent = {name: value for name, value in limited.headers.items() if name.startswith("x-ratelimit")}
    assert sent == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "9000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0ms"),
        (-1, "0ms"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (1.2, "2s"),
        (59.5, "1m0s"),
        (360, "6m0s"),
        (3601, "1h0m1s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, written: str) -> None:
    assert duration(seconds) == written


@pytest.mark.parametrize(
    ("kind", "reason", "expected_reason"),
    [
        (ErrorKind.QUOTA, "tokens_per_minute", "tokens_per_minute"),
        (ErrorKind.OVERLOADED, "", "overloaded"),
        (ErrorKind.SLO_MISS, "", "predicted_slo_miss"),
        (ErrorKind.NO_WORKER, "", "no_worker"),
        (ErrorKind.WORKER_LOST, "", None),
        (ErrorKind.UNAUTHENTICATED, "", None),
    ],
)
def test_refusals_name_the_limit_and_the_retry_time(
    front: Front, http: httpx.Client, kind: ErrorKind, reason: str, expected_reason: str | None
) -> None:
    def refuse(request: object) -> None:
        raise TandemError(kind, "no", reason=reason)

    front.dispatch.script = refuse
    response = http.post("/v1/chat/completions", json=CHAT)
    assert response.headers.get("x-tandem-reject-reason") == expected_reason
    assert response.headers.get("retry-after") == (None if expected_reason is None else "1")


def test_a_body_with_a_field_twice_is_refused(http: httpx.Client) -> None:
    for body in (
        b'{"model":"tiny","prompt":"x","prompt":"y"}',
        b'{ "model": "tiny", "prompt": "x", "pro\\u006dpt": "y" }',
    ):
        response = http.post("/v1/completions", content=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_fields_twice_further_down_or_escaped_once_are_taken(front: Front, http: httpx.Client) -> None:
    """Fields inside `metadata` are not interpreted, and a name may be written with escapes."""
    front.instant()
    body = b'{"model":"tiny","pro\\u006dpt": "x", "metadata": {"a": 1, "a": 2}}'
    assert http.post("/v1/completions", content=body).status_code == 200


def test_a_prompt_may_hold_a_nul(front: Front, http: httpx.Client) -> None:
    front.instant()
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "a\0b", "echo": True})
    assert answer.json()["choices"][0]["text"].startswith("a\0b")
    assert http.post("/v1/completions", content=b'{"model":"tiny","prompt":"a\0b"}').status_code == 400
