"""Test keys, models and limits of tenants through the HTTP front end, with scripted workers."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tandem.admission.api_keys import hash_text, key_digest
from tandem.admission.quota import UNIT, Levels, QuotaLimits, Reservation
from tandem.admission.tenant import Tenant
from tandem.admission.tenant_quota_state import QuotaReservation, TokenUsage
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Failed, Finished, FinishReason, Token
from tandem.core.ids import HandoffId, JobKey, RequestId, TenantId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.tenants_file import parse_tenants
from tandem.gateway.text.text_model import TextModel
from tandem.orchestration.director import OpenRequest, RequestDirector
from tandem.orchestration.request_state import JobGroupPhase
from tandem.routing.placement import Placement
from tests.unit.gateway.conftest import ScriptedDispatch
from tests.unit.gateway.rig import Rig, StartRig, busy_pair, collect, pulled, token
from tests.unit.gateway.scripted_worker import until
from tests.unit.orchestration.known_workers import BookedWorkers

KEY, OTHER, OPERATOR = "tdm_one", "tdm_other", "tdm_operator"
FILE = f"""
tenants:
  acme: {{keys: [{{hash: "{hash_text(key_digest(KEY))}"}}], models: [tiny, nickname]}}
  other: {{keys: [{{hash: "{hash_text(key_digest(OTHER))}"}}], models: []}}
  boss: {{keys: [{{hash: "{hash_text(key_digest(OPERATOR))}"}}], operator: true}}
"""
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 1}
CLOSED = ["/v1/models", "/v1/models/tiny", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
OPEN_PATHS = ["/health", "/live", "/ready", "/openapi.json", "/docs"]
METRICS_PATHS = ["/metrics", "/metrics/targets", "/metrics/endpoint-picker"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TenantGateway:
    """Own the HTTP front end with two tenants, over a dispatch that serves three models."""

    def __init__(self, text: TextModel, config: GatewayConfig | None = None) -> None:
        served = [
            ServedModel("tiny", 512, text, 1),
            ServedModel("secret", 512, text, 1),
            ServedModel("big", 512, text, 1, aliases=("nickname",)),
        ]
        self.dispatch = ScriptedDispatch(served)
        self.door = ApiKeyAuthenticator(parse_tenants(FILE, "f"), lambda: 0)
        app = GatewayApp(self.dispatch, self.door, config or GatewayConfig())
        self.metrics = app.metrics
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door", verify=False)

    async def get(self, path: str, headers: dict[str, str]) -> httpx.Response:
        if path.startswith("/v1/models") or path in OPEN_PATHS:
            return await self.client.get(path, headers=headers)
        return await self.client.post(path, headers=headers, json=BODY)


@pytest.fixture(scope="module")
def text(make_text: Callable[..., TextModel]) -> TextModel:
    """Share one text model among all gateways of the tests: making it takes longer than a request."""
    return make_text()


@pytest.fixture
async def gateway(text: TextModel) -> AsyncIterator[TenantGateway]:
    gateway = TenantGateway(text)
    yield gateway
    await gateway.client.aclose()


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "required"),
        ({"authorization": "Bearer "}, "required"),
        ({"authorization": f"Basic {KEY}"}, "required"),
        ({"x-api-key": ""}, "required"),
        (bearer("tdm_wrong"), "unknown or expired"),
        (bearer(hash_text(key_digest(KEY))), "unknown or expired"),
        ({"x-api-key": "tdm_wrong"}, "unknown or expired"),
        ({**bearer(KEY), "x-api-key": "tdm_wrong"}, "2 different API keys"),
        ({**bearer("tdm_wrong"), "x-api-key": KEY}, "2 different API keys"),
        ({**bearer(KEY), "x-api-key": OTHER}, "2 different API keys"),
    ],
    ids=str,
)
async def test_no_key_no_service(gateway: TenantGateway, headers: dict[str, str], reason: str) -> None:
    for path in CLOSED:
        answer = await gateway.get(path, headers)
        assert (path, answer.status_code, answer.headers["www-authenticate"]) == (path, 401, "Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "unauthenticated"), path
        assert reason in error["message"] and "tdm_" not in answer.text, path
    assert gateway.dispatch.requests == []


async def test_probes_and_documents_need_no_key(gateway: TenantGateway) -> None:
    for path in OPEN_PATHS:
        assert (path, (await gateway.get(path, {})).status_code) == (path, 200)


@pytest.mark.parametrize("path", METRICS_PATHS)
async def test_metrics_are_for_operators(gateway: TenantGateway, path: str) -> None:
    expected = {"": (401, "unauthenticated"), "tdm_wrong": (401, "unauthenticated"), KEY: (403, "forbidden")}
    for key, (status, code) in expected.items():
        answer = await gateway.client.get(path, headers=bearer(key) if key else {})
        error = answer.json()["error"]
        assert (key, answer.status_code, error["code"]) == (key, status, code)
        assert "9100" not in answer.text and "boss" not in answer.text
    answer = await gateway.client.get(path, headers=bearer(OPERATOR))
    assert answer.status_code == 200 and answer.text


@pytest.mark.parametrize("path", METRICS_PATHS)
async def test_metrics_with_a_port_of_their_own_are_there_and_nowhere_else(text: TextModel, path: str) -> None:
    gateway = TenantGateway(text, GatewayConfig(metrics_port=0))
    elsewhere = await gateway.client.get(path, headers=bearer(OPERATOR))
    assert elsewhere.status_code == 404 and "gateway.metrics_port" in elsewhere.json()["error"]["message"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway.metrics), base_url="http://metrics") as client:
        answer, health, models = [await client.get(place) for place in (path, "/health", "/v1/models")]
    await gateway.client.aclose()
    expected = {"/metrics": "tandem_open_requests", "/metrics/targets": "127.0.0.1:9100"}
    assert answer.status_code == 200 and expected.get(path, "vllm:num_requests_waiting") in answer.text
    assert (health.status_code, models.status_code) == (200, 404)


@pytest.mark.parametrize("headers", [bearer(KEY), {"x-api-key": KEY}, {**bearer(KEY), "x-api-key": KEY}], ids=str)
async def test_a_tenant_sees_the_models_that_it_may_use(gateway: TenantGateway, headers: dict[str, str]) -> None:
    cards = (await gateway.get("/v1/models", headers)).json()["data"]
    assert {card["id"] for card in cards} == {"tiny", "big", "nickname"}
    assert (await gateway.get("/v1/models", bearer(OTHER))).json()["data"] == []
    assert (await gateway.get("/v1/models/tiny", headers)).status_code == 200


async def test_a_model_that_it_may_not_use_is_like_one_that_is_not_there(gateway: TenantGateway) -> None:
    for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "x"})):
        answers = [
            await gateway.client.post(path, headers=bearer(KEY), json={**body, "model": name})
            for name in ("secret", "absent")
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        secret, absent = (answer.json()["error"] for answer in answers)
        assert {**secret, "message": ""} == {**absent, "message": ""}
        assert secret["message"].replace("secret", "absent") == absent["message"]
    assert gateway.dispatch.requests == []


async def test_a_tenants_file_that_is_broken_shows_in_readiness(gateway: TenantGateway) -> None:
    assert (await gateway.get("/ready", {})).json() == {"status": "ready"}
    gateway.door.keep_after("tenants file rejected: f:1: is no YAML")
    answer = await gateway.get("/ready", {})
    assert answer.status_code == 200 and "is no YAML" in answer.json()["warning"]


async def test_keys_are_never_logged(gateway: TenantGateway) -> None:
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        for key in (KEY, "tdm_wrong"):
            for path in CLOSED:
                await gateway.get(path, bearer(key))
    finally:
        logging.getLogger().removeHandler(handler)
    assert "tdm_" not in log.getvalue()


# ---- the dispatch and its quotas


class ScriptedQuotas:
    """Admit unless `refusal` is set, and wait for `gate`. `settled`: what each reservation used, in order of ends."""

    def __init__(self) -> None:
        self.settled: list[TokenUsage | None] = []
        self.requested: list[tuple[str, int, int]] = []
        self.checked: list[tuple[str, Sequence[tuple[int, int]]]] = []
        self.refusal: TandemError | None = None
        self.gate: asyncio.Event | None = None

    def check_feasible(self, tenant: Tenant, sizes: Sequence[tuple[int, int]]) -> None:
        self.checked.append((tenant.id, sizes))

    async def enter(self, tenant: Tenant, num_prompt_tokens: int, max_output_tokens: int) -> QuotaReservation:
        self.requested.append((tenant.id, num_prompt_tokens, max_output_tokens))
        if self.gate is not None:
            await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        return QuotaReservation(
            Reservation("one", 1, 0),
            Levels(requests=7 * UNIT),
            QuotaLimits(requests_per_minute=7),
            lambda _, spent: self.settled.append(spent),
            is_shared=True,
        )


@pytest.fixture
def quotas() -> ScriptedQuotas:
    return ScriptedQuotas()


@pytest.fixture
async def rig(start_rig: StartRig, quotas: ScriptedQuotas) -> Rig:
    return await start_rig(quotas=quotas)


async def test_a_request_is_settled_once_with_what_was_computed(rig: Rig, quotas: ScriptedQuotas) -> None:
    prefill, decode, request = await busy_pair(rig)
    assert request.rate_limits["x-ratelimit-limit-requests"] == "7"
    key = request.state.key
    prefill.publish(token(key, 0))
    decode.publish(pulled(key), token(key, 0), token(key, 1), token(key, 2), Finished(key, FinishReason.LENGTH, 3, 8))
    await collect(request)
    request.close()
    assert quotas.requested == [("open", 16, 3)] and quotas.settled == [TokenUsage(16 - 8, 3)]


@pytest.mark.parametrize("num_cached", [None, 8])
async def test_a_disconnected_client_pays_for_the_prompt_and_the_delivered_tokens(
    rig: Rig, quotas: ScriptedQuotas, num_cached: int | None
) -> None:
    prefill, _, request = await busy_pair(rig)
    prefill.publish(replace(token(request.state.key, 0), num_cached_tokens=num_cached))
    await anext(aiter(request))
    request.close()
    request.close()
    assert quotas.settled == [TokenUsage(16 - (num_cached or 0), 1)]


async def test_tokens_cached_by_an_earlier_attempt_are_charged(rig: Rig, quotas: ScriptedQuotas) -> None:
    prefill, decode, request = await busy_pair(rig)
    key = request.state.key
    prefill.publish(replace(token(key, 0), num_cached_tokens=0))
    await anext(aiter(request))
    decode.publish(Failed(key, ErrorKind.OVERLOADED, "no room for the KV"))
    await until(lambda: request.state.phase is JobGroupPhase.RUNNING and request.state.key != key)
    again = request.state.key
    decode.publish(pulled(again), replace(token(again, 0), num_cached_tokens=15), token(again, 1))
    decode.publish(Finished(again, FinishReason.LENGTH, 2, 15))
    events = [event async for event in request]
    assert events[-1] == Finished(again, FinishReason.LENGTH, 2, 0)
    assert quotas.settled == [TokenUsage(16, 2)]


async def test_tokens_may_arrive_before_the_submit_reply(rig: Rig, quotas: ScriptedQuotas) -> None:
    prefill, decode = await rig.pair()
    prefill.hold_submit = asyncio.Event()
    request = await rig.open()
    await until(lambda: prefill.verbs(request.state.request.id) == ["prefill"])
    key = request.state.key
    prefill.publish(token(key, 0), Finished(key, None, 1, 0))
    decode.publish(pulled(key), token(key, 0), token(key, 1), Finished(key, FinishReason.LENGTH, 2, 0))
    await collect(request)
    prefill.hold_submit.set()
    assert quotas.settled == [TokenUsage(16, 2)]


def running(sampling: SamplingParams, num_choices: int = 1) -> tuple[OpenRequest, Callable[..., None]]:
    """Return a request with a prompt of 10 tokens at its worker, and a function that publishes that worker's events."""
    job = Request(id=RequestId("r"), model="m", prompt_tokens=(1,) * 10, sampling=sampling, num_choices=num_choices)
    worker = WorkerRef(WorkerId("w"), 1, "w:1")
    director = RequestDirector(BookedWorkers(), GatewayConfig(), lambda request: HandoffId("h"))
    open_request = director.probe(job, Placement(worker, worker), 0.0).open_request
    assert open_request.usage() is None, "no worker has begun it"
    director.on_submit_result(worker, open_request.state.key, None, 0.0)

    def publish(*events: Token | Finished) -> None:
        director.on_worker_events(worker, events, 0.0)

    return open_request, publish


def test_all_choices_count_and_their_prompt_once() -> None:
    request, publish = running(SamplingParams(max_tokens=4), num_choices=2)
    keys = [JobKey(RequestId("r"), 1, choice) for choice in (0, 1)]
    publish(token(keys[0], 0), token(keys[1], 0), token(keys[1], 1))
    assert request.usage() == TokenUsage(10, 3)
    publish(Finished(keys[0], FinishReason.STOP, 1, 8), Finished(keys[1], FinishReason.STOP, 2, 8))
    assert request.usage() == TokenUsage(2, 3)


def test_a_prompt_that_was_only_computed_counts() -> None:
    request, publish = running(SamplingParams(max_tokens=0))
    publish(Finished(request.state.key, FinishReason.LENGTH, 0, 0))
    assert request.usage() == TokenUsage(10, 0)


async def test_a_request_that_never_ran_costs_nothing(rig: Rig, quotas: ScriptedQuotas) -> None:
    await rig.pair()
    for worker in rig.workers:
        worker.on_submit = lambda job: (ErrorKind.OVERLOADED, "full")
    request = await rig.open()
    await until(lambda: request.state.key.attempt > 0 and request.state.phase is JobGroupPhase.QUEUED)
    request.close()
    assert quotas.settled == [None]


async def test_a_quota_that_refuses_leaves_nothing(rig: Rig, quotas: ScriptedQuotas) -> None:
    await rig.pair()
    quotas.refusal = TandemError(ErrorKind.QUOTA, "no", retry_after_s=3.0, reason="requests_per_minute")
    with pytest.raises(TandemError) as refused:
        await rig.open()
    assert refused.value is quotas.refusal and not rig.left_over()


async def test_a_failure_after_admission_releases_the_quota(
    rig: Rig, quotas: ScriptedQuotas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind of failure does not matter: an entry that is not closed counts against its tenant until it expires."""

    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RequestDirector, "submit", breaks)
    with pytest.raises(ZeroDivisionError):
        await rig.open()
    assert quotas.settled == [None] and not rig.left_over()


async def test_the_feasibility_check_uses_the_requested_sizes(rig: Rig, quotas: ScriptedQuotas) -> None:
    await rig.pair()
    requests = [await rig.open(num_choices=num_choices) for num_choices in (1, 2)]
    rig.dispatch.check_feasible(
        [request.state.request for request in requests], RequestContext(request_id="r", received_at=0.0)
    )
    assert quotas.checked == [("open", [(16, 3), (16, 6)])]
    assert quotas.requested == [("open", *size) for size in quotas.checked[0][1]]
    for request in requests:
        request.close()


async def test_a_drain_during_admission_releases_the_quota(rig: Rig, quotas: ScriptedQuotas) -> None:
    await rig.pair()
    quotas.gate = asyncio.Event()
    opening = asyncio.create_task(rig.open())
    await until(lambda: quotas.requested)
    await rig.dispatch.drain(1.0)
    quotas.gate.set()
    with pytest.raises(TandemError) as refused:
        await opening
    assert refused.value.kind is ErrorKind.DRAINING and quotas.settled == [None]


def caller_of(policy: Any, requested: Any = None, lane: Lane = Lane.INTERACTIVE) -> RequestContext:
    """Return the context of a request whose tenant has a policy of disaggregation, and which may request another."""
    tenant = Tenant(id=TenantId("t"), disaggregation=policy, lane=lane)
    return RequestContext(request_id="r", received_at=0.0, tenant=tenant, disaggregation=requested)


async def test_a_request_chooses_where_its_tenant_may(rig: Rig) -> None:
    await rig.pair()
    for policy, requested, num_jobs in ((None, "off", 1), ("off", "off", 1), ("prefer", "strict", 2)):
        before = sum(len(worker.jobs) for worker in rig.workers)
        request = await rig.open(caller=caller_of(policy, requested))
        await until(lambda request=request: request.state.phase.name == "RUNNING")
        assert sum(len(worker.jobs) for worker in rig.workers) - before == num_jobs
        request.close()
    with pytest.raises(TandemError, match="the policy of this tenant is off"):
        await rig.open(caller=caller_of("off", "auto"))
    assert len(rig.dispatch.director.queue) == 0


async def test_a_tenants_own_policy_beats_that_of_the_gateway(rig: Rig) -> None:
    await rig.pair()
    jobs: dict[str, list[Any]] = {"off": [], "gateway": []}
    for name, policy in (("off", "off"), ("gateway", None)):
        before = [len(worker.jobs) for worker in rig.workers]
        request = await rig.open(caller=caller_of(policy, lane=Lane.BATCH))
        await until(lambda request=request: request.state.phase.name == "RUNNING")
        jobs[name] = [job for worker, n in zip(rig.workers, before, strict=True) for job in worker.jobs[n:]]
        request.close()
    assert [type(job) for job in jobs["off"]] == [GenerateJob] and len(jobs["gateway"]) == 2
    assert all(job.request.tenant == "t" and job.request.lane is Lane.BATCH for job in jobs["off"] + jobs["gateway"])
    assert len({job.request.cache_salt for job in jobs["off"] + jobs["gateway"]} - {""}) == 1
