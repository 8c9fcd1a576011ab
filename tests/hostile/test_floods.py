"""Test floods against the quotas of tenants, with workers: what is beyond a quota is refused, what an attacker abandons
is freed, forged keys cost nobody anything, and another tenant is served meanwhile."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from tandem.admission.api_keys import hash_text, key_digest
from tests.e2e.gateway.http import Post, completion
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import PATIENCE_S, Gateway, until

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
PER_MINUTE = 10
TENANTS = {
    "limited": f"requests_per_minute: {PER_MINUTE}, ",
    "crowded": "max_concurrency: 2, ",
    "frugal": "requests_per_minute: 3, ",
    "calm": "",
}
FLOOD, CALM_REQUESTS, ABANDONED = 100, 20, 20


@pytest.fixture(scope="module")
def gateway(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    file: Path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    keys = {name: hash_text(key_digest(f"tdm_{name}")) for name in TENANTS}
    lines = [f"  {name}: {{{limits}keys: [{{hash: '{keys[name]}'}}]}}\n" for name, limits in TENANTS.items()]
    file.write_text("tenants:\n" + "".join(lines))
    gateway: Gateway = pair.cluster.gateway("tenants", "--auth", "keys", "--tenants", str(file))
    gateway.wait_ready()
    gateway.wait_serving()
    yield gateway


def post(gateway: Gateway, tenant: str, number: int) -> httpx.Response:
    headers = {"x-api-key": f"tdm_{tenant}"}
    url = f"{gateway.url}/v1/completions"
    return httpx.post(url, json=completion(20, number, 2), headers=headers, timeout=PATIENCE_S, trust_env=False)


def test_a_flood_beyond_a_quota_is_refused_and_others_are_served(pair: Pair, gateway: Gateway) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(8) as flood, ThreadPoolExecutor(1) as calm:
        attacks = [flood.submit(post, gateway, "limited", number) for number in range(FLOOD)]
        others = [calm.submit(post, gateway, "calm", 1_000 + number) for number in range(CALM_REQUESTS)]
    answers = [attack.result() for attack in attacks]
    statuses = Counter(answer.status_code for answer in answers)
    allowed = PER_MINUTE * (1 + (time.monotonic() - began) / 60) + 1
    assert set(statuses) == {200, 429} and statuses[200] <= allowed, statuses
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "quota_exceeded" and int(answer.headers["retry-after"]) > 0
    assert [other.result().status_code for other in others] == [200] * CALM_REQUESTS
    pair.wait_idle()


def test_abandoned_streams_free_their_places(pair: Pair, gateway: Gateway) -> None:
    body = completion(20, 2_000, 4_000, stream=True)
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(Post(gateway.url, body, key="tdm_crowded")).wait_events(1)
        assert post(gateway, "crowded", 2_001).status_code == 429
        assert post(gateway, "calm", 2_002).status_code == 200
    for _ in range(ABANDONED):
        until(lambda: _opens_and_leaves(gateway, body), "a place of a tenant whose streams were abandoned")
    until(lambda: post(gateway, "crowded", 2_003).status_code == 200, "a request of that tenant")
    pair.wait_idle()


def _opens_and_leaves(gateway: Gateway, body: dict[str, object]) -> bool:
    with Post(gateway.url, body, key="tdm_crowded") as stream:
        try:
            stream.wait_events(1)
        except AssertionError:  # refused, while the gateway has not noticed yet that an earlier client has left
            return False
    return True


FORGED = ("TDM_FRUGAL", "tdm_fruga", "tdm_frugall", "frugal", "x" * 5_000, "Bearer tdm_frugal")


def test_forged_keys_cost_nobody_anything(pair: Pair, gateway: Gateway) -> None:
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S, trust_env=False) as http:
        for number in range(200):
            headers = {"authorization": f"Bearer {FORGED[number % len(FORGED)]}"}
            refused = http.post("/v1/completions", json=completion(20, number, 2), headers=headers)
            assert refused.status_code == 401, (headers, refused.text)
    statuses = [post(gateway, "frugal", 3_000 + number).status_code for number in range(4)]
    assert statuses == [200, 200, 200, 429]
    pair.wait_idle()


LARGE = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "7" * 3_900_000}]}).encode()
PEAK_MIB, KEPT_MIB = 400, 50


def test_large_bodies_of_all_tenants_together_fit_the_memory_of_the_charts_gateway(gateway: Gateway) -> None:
    """Sixteen bodies at a time, more than a gateway reads at once; it refuses them, and the memory goes back."""
    values = yaml.safe_load((ROOT / "helm/tandem/values.yaml").read_text())
    assert values["gateway"]["resources"]["limits"]["memory"] == "1Gi" and PEAK_MIB < 1024

    def send(number: int) -> int:
        headers = {"x-api-key": f"tdm_{list(TENANTS)[number % len(TENANTS)]}"}
        url = f"{gateway.url}/v1/chat/completions"
        return httpx.post(url, content=LARGE, headers=headers, timeout=PATIENCE_S, trust_env=False).status_code

    before = memory_mib(gateway, "VmRSS")
    with ThreadPoolExecutor(16) as clients:
        assert set(clients.map(send, range(160))) == {400}
    assert memory_mib(gateway, "VmHWM") <= PEAK_MIB
    until(lambda: memory_mib(gateway, "VmRSS") <= before + KEPT_MIB, "memory that goes back")


def memory_mib(gateway: Gateway, name: str) -> float:
    lines = Path(f"/proc/{gateway.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
