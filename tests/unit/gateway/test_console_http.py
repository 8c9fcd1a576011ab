"""Test the console's routes: browser headers of the page, access to the state, and absence from request metrics."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tandem.admission.api_keys import hash_text, key_digest
from tandem.core.config import GatewayConfig
from tandem.core.ids import Incarnation, TenantId, WorkerId, WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.app import GatewayApp
from tandem.gateway.console.history import NUM_RECORDS
from tandem.gateway.console.routes import Console, load_assets
from tandem.gateway.console.view import MAX_ERROR_CHARS, MAX_WORKERS, GatewaySnapshot
from tandem.gateway.context.interfaces import AllowAll, Authenticator, ServedModel
from tandem.gateway.http.routes import routes_of
from tandem.gateway.telemetry.kv_flows import Flow
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.tenants_file import parse_tenants
from tandem.gateway.text.text_model import TextModel
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.worker_view import WorkerView
from tests.unit.gateway.conftest import ScriptedDispatch
from tests.unit.gateway.records import record

KEYS = {name: f"tdm_{name}" for name in ("acme", "other", "boss")}
FILE = f"""
tenants:
  acme: {{keys: [{{hash: "{hash_text(key_digest(KEYS["acme"]))}"}}], models: [tiny]}}
  other: {{keys: [{{hash: "{hash_text(key_digest(KEYS["other"]))}"}}]}}
  boss: {{keys: [{{hash: "{hash_text(key_digest(KEYS["boss"]))}"}}], operator: true}}
"""
P, D = (WorkerRef(WorkerId(name), Incarnation(7), f"10.9.8.7:{port}") for name, port in (("p", 4001), ("d", 4002)))
AWAY = WorkerRef(WorkerId("x"), Incarnation(3), "10.9.8.7:4003")
LOAD = WorkerLoad(num_running=2, num_blocks=64, num_free_blocks=40, num_prefill_tokens=900, num_decode_tokens=30)


class StillClock:
    def now(self) -> float:
        return 1000.0


class Rig:
    """Own a console over one snapshot, `glance`, which a test may change."""

    def __init__(self, text: TextModel, authenticator: Authenticator) -> None:
        served = [ServedModel("tiny", 512, text, 1), ServedModel("secret", 512, text, 1)]
        self.glance = GatewaySnapshot(
            life="gw-1",
            version="1.2.3",
            wall_s=1_800_000_000.0,
            now=1000.0,
            began_at=900.0,
            missing=None,
            models=served,
            known=(P, D, AWAY),
            live=(
                WorkerView(P, "prefill", "tiny", "f", LOAD, block_size=16),
                WorkerView(D, "decode", "secret", "f", replace(LOAD, draining=True), block_size=16),
            ),
            breakers={P.id: BreakerState.OPEN},
            flows=(Flow(P.id, D.id, "handoff", 3, 4096),),
            num_open={(TenantId("acme"), False): 1, (TenantId("other"), True): 2},
        )
        self.console = Console(lambda: self.glance, authenticator, StillClock())
        self.app = GatewayApp(
            ScriptedDispatch(served), authenticator, GatewayConfig(), observers=[self.console], clock=StillClock()
        )
        self.app.serve(routes_of(self.console))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://gateway", verify=False
        )

    async def state(self, who: str = "", **query: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {KEYS[who]}"} if who else {}
        reply = await self.client.get("/console/state", params=query, headers=headers)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


@pytest.fixture
async def rig(make_text: Callable[..., TextModel]) -> AsyncIterator[Rig]:
    rig = Rig(make_text(), AllowAll())
    yield rig
    await rig.client.aclose()


@pytest.fixture
async def locked(make_text: Callable[..., TextModel]) -> AsyncIterator[Rig]:
    rig = Rig(make_text(), ApiKeyAuthenticator(parse_tenants(FILE, "f"), lambda: 0))
    yield rig
    await rig.client.aclose()


# ---- the page


def test_the_package_has_every_file_that_the_page_loads() -> None:
    assets = load_assets()
    page = assets["index.html"].content.decode()
    named = set(re.findall(r'(?:src|href)="console/([^"]+)"', page))
    imported = {
        name
        for file, asset in assets.items()
        if file.endswith(".js")
        for name in re.findall(r'from "\./([^"]+)"', asset.content.decode())
    }
    assert named and imported and named | imported == assets.keys() - {"index.html"}


def test_the_page_has_no_inline_code_and_no_foreign_resource() -> None:
    for name, asset in load_assets().items():
        text = asset.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$|/\*.*?\*/", "", text, flags=re.M | re.S), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
    page = load_assets()["index.html"].content.decode()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", page)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/console", "text/html; charset=utf-8"),
        ("/console/main.js", "text/javascript; charset=utf-8"),
        ("/console/base.css", "text/css; charset=utf-8"),
        ("/console/icon.svg", "image/svg+xml"),
    ],
)
async def test_the_page_restricts_the_browser_by_headers(locked: Rig, path: str, kind: str) -> None:
    """The page needs no key, because it holds nothing of the cluster's state."""
    reply = await locked.client.get(path)
    assert (reply.status_code, reply.headers["content-type"]) == (200, kind)
    policy = dict(part.strip().partition(" ")[::2] for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["referrer-policy"] == "no-referrer"


async def test_an_unchanged_file_is_not_sent_again(rig: Rig) -> None:
    first = await rig.client.get("/console/main.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache" and tag.startswith('"')
    for known in (tag, f'"other", W/{tag}', "*"):
        again = await rig.client.get("/console/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert (await rig.client.get("/console/main.js", headers={"if-none-match": '"other"'})).status_code == 200
    assert (await rig.client.get("/console")).headers["etag"] != tag


@pytest.mark.parametrize("path", ["/console/nothing.js", "/console/../app.py", "/console/index.html", "/console/a/b"])
async def test_unknown_console_paths_are_not_found(rig: Rig, path: str) -> None:
    assert (await rig.client.get(path)).status_code == 404


@pytest.mark.parametrize(("path", "status"), [("/", 307), ("/console/", 308)])
async def test_the_root_and_a_trailing_slash_redirect_to_the_page(rig: Rig, path: str, status: int) -> None:
    reply = await rig.client.get(path)
    assert reply.status_code == status
    assert reply.next_request is not None and str(reply.next_request.url) == "http://gateway/console"


async def test_only_reading_is_served(rig: Rig) -> None:
    assert (await rig.client.post("/console/state")).status_code == 405


# ---- what it shows


async def test_the_state_shows_workers_and_flows_without_addresses(rig: Rig) -> None:
    reply = await rig.client.get("/console/state")
    assert "10.9.8.7" not in reply.text and reply.headers["cache-control"] == "no-store"
    state = reply.json()
    assert [(worker["id"], worker["state"], worker["pool"]) for worker in state["workers"]] == [
        ("d", "draining", "decode"),
        ("p", "resting", "prefill"),
        ("x", "away", ""),
    ]
    assert state["workers"][1]["num_prefill_tokens"] == 900 and state["workers"][1]["model"] == "tiny"
    assert state["flows"] == [["p", "d", "handoff", 3, 4096]]
    assert (state["gateway"]["num_running"], state["gateway"]["num_waiting"]) == (1, 2)
    assert len(state["stages"]) == 9 and state["models"] == ["tiny", "secret"]


async def test_an_answer_is_reported_once_with_its_stages(rig: Rig) -> None:
    rig.console.answered(record())
    state = await rig.state()
    (row,) = state["answers"]
    assert (row["total"], row["ttft"], row["workers"], row["num_cached"]) == (500.0, 100.0, ["p", "d"], 2)
    assert dict(zip(state["stages"], row["stages"], strict=True))["decode"] == 400.0
    assert state["recent"]["ttft"] == [100.0, 100.0] and state["slices"][0]["lanes"]["interactive"]["num_output"] == 4
    again = await rig.state(life="gw-1", since=state["number"])
    assert again["answers"] == again["slices"] == [] and again["number"] == 1


async def test_the_sequence_numbers_of_another_incarnation_are_unknown(rig: Rig) -> None:
    rig.console.answered(record())
    assert len((await rig.state(life="gw-0", since=1))["answers"]) == 1
    assert len((await rig.state(since=1))["answers"]) == 1


@pytest.mark.parametrize("since", ["-1", "x", "1" * 30, "٣"])
async def test_an_invalid_sequence_number_is_refused(rig: Rig, since: str) -> None:
    reply = await rig.client.get("/console/state", params={"since": since})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "since"


async def test_the_state_is_bounded(rig: Rig) -> None:
    refs = [WorkerRef(WorkerId(f"w{index:04}"), Incarnation(1), "h:1") for index in range(2 * MAX_WORKERS)]
    rig.glance = replace(rig.glance, known=refs, live=())
    for _ in range(2 * NUM_RECORDS):
        rig.console.answered(record(error="x" * 5000))
    state = await rig.state()
    assert (len(state["workers"]), state["num_workers"]) == (MAX_WORKERS, 2 * MAX_WORKERS)
    assert len(state["answers"]) == NUM_RECORDS and len(state["answers"][0]["error"]) == MAX_ERROR_CHARS


# ---- who sees what


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer tdm_wrong"}], ids=str)
async def test_the_state_requires_a_key(locked: Rig, headers: dict[str, str]) -> None:
    reply = await locked.client.get("/console/state", headers=headers)
    assert reply.status_code == 401 and set(reply.json()) == {"error"}


async def test_a_tenant_sees_its_own_and_an_operator_all(locked: Rig) -> None:
    for tenant, model in (("acme", "tiny"), ("other", "secret")):
        locked.console.answered(record(tenant=tenant, model=model))
    own, boss = await locked.state("acme"), await locked.state("boss")
    assert [row["tenant"] for row in own["answers"]] == [row["name"] for row in own["tenants"]] == ["acme"]
    assert "other" not in str(own) and "secret" not in str(own)
    assert own["models"] == ["tiny"] and own["viewer"] == {"tenant": "acme", "is_operator": False}
    assert own["recent"]["num_answers"] == 2 and len(own["workers"]) == 3
    assert [row["tenant"] for row in boss["answers"]] == ["other", "acme"]
    assert [(row["name"], row["num_waiting"]) for row in boss["tenants"]] == [("acme", 0), ("other", 2)]
    assert boss["viewer"]["is_operator"] and "secret" in boss["models"]


async def test_a_tenant_that_has_done_nothing_has_a_row_of_zeros(locked: Rig) -> None:
    (row,) = (await locked.state("acme"))["tenants"]
    assert (row["name"], row["num_answers"], row["ttft"]) == ("acme", 0, None)


async def test_watching_counts_in_no_metric(locked: Rig) -> None:
    async def responses() -> list[str]:
        answer = await locked.client.get("/metrics", headers={"x-api-key": KEYS["boss"]})
        return [line for line in answer.text.splitlines() if line.startswith("tandem_http_responses")]

    before = await responses()
    for path in ("/console", "/console/main.js", "/console/state"):
        await locked.client.get(path)
    await locked.state("acme")
    after = await responses()
    # Only the first request to /metrics itself was counted.
    assert before == [] and len(after) == 1 and after[0].endswith(" 1.0")
