"""Test tenants of a real gateway over real workers: separate caches, limits, and changing keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.e2e.gateway.http import prompt
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import PATIENCE_S, Gateway, until
from tests.e2e.gateway.tenants import key_of, tenants_file

BLOCK = 16
LENGTH = 6 * BLOCK + 1
"""A prompt of six blocks that can be hit, and one token more, which cannot."""
_salts = itertools.count(5_000_000)
TENANTS = {
    "one": "",
    "two": "",
    "public-one": "cache_sharing: public, ",
    "public-two": "cache_sharing: public, ",
    "slow": "requests_per_minute: 3, tokens_per_minute: 100000, ",
    "short": "max_prompt_tokens: 20, tokens_per_minute: 10, ",
    "leaving": "",
}


class Books(NamedTuple):
    """Hold the number of blocks that both workers have newly cached, and the cached tokens that the client was told."""

    num_blocks: int
    num_cached_tokens: int


class Tenancy:
    """Own the gateway with keys, which runs beside the shared ones over the same workers."""

    def __init__(self, pair: Pair, file: Path) -> None:
        self.pair = pair
        self.file = file
        self.file.write_text(tenants_file(TENANTS))
        self.gateway: Gateway = pair.cluster.gateway("tenants", "--auth", "keys", "--tenants", str(file))
        self.gateway.wait_serving()
        self.http = httpx.Client(base_url=self.gateway.url, timeout=PATIENCE_S, trust_env=False)

    def post(self, tenant: str, salt: int, **body: Any) -> httpx.Response:
        given = {"model": "tiny", "prompt": prompt(LENGTH, salt), "max_tokens": 2, "temperature": 0, **body}
        return self.http.post("/v1/completions", json=given, headers={"x-api-key": key_of(tenant)})

    def send(self, tenant: str, salt: int, **body: Any) -> Books:
        """Send a prompt; return what the workers have newly cached after it, and what the client is told."""
        before = self._num_blocks()
        answer = self.post(tenant, salt, **body)
        assert answer.status_code == 200, answer.text
        self.pair.wait_idle()
        num_cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Books(self._num_blocks() - before, num_cached)

    def _num_blocks(self) -> int:
        return sum(worker.books().num_cached_blocks for worker in (self.pair.prefill, self.pair.decode))


@pytest.fixture(scope="module")
def tenancy(calm: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenancy]:
    tenancy = Tenancy(calm, tmp_path_factory.mktemp("tenants") / "tenants.yaml")
    yield tenancy
    tenancy.http.close()
    assert tenancy.gateway.stop() == 0


def test_figures_of_all_tenants_are_at_a_port_of_their_own(tenancy: Tenancy) -> None:
    assert tenancy.http.get("/metrics", headers={"x-api-key": "tdm_one"}).status_code == 404
    assert tenancy.gateway.metrics()["tandem_ready"] == 1


def test_another_tenants_prompt_is_no_cache_hit(tenancy: Tenancy) -> None:
    """This is the probe of a timing attack without noise: exactly the same blocks are computed and stored again."""
    salt = next(_salts)
    first = tenancy.send("one", salt)
    assert first.num_cached_tokens == 0 and first.num_blocks >= 6
    again = tenancy.send("one", salt)
    assert again == Books(0, 6 * BLOCK)
    assert tenancy.send("two", salt) == first
    assert tenancy.send("two", salt) == again


def test_tenants_with_a_shared_cache_reuse_prefixes(tenancy: Tenancy) -> None:
    salt = next(_salts)
    first = tenancy.send("public-one", salt)
    assert tenancy.send("public-two", salt) == Books(0, 6 * BLOCK)
    assert tenancy.send("one", salt) == first


def test_a_cache_salt_separates_a_clients_cache(tenancy: Tenancy) -> None:
    salt = next(_salts)
    first = tenancy.send("one", salt, cache_salt="mine")
    assert tenancy.send("one", salt, cache_salt="mine") == Books(0, 6 * BLOCK)
    for tenant, chosen in (("one", "other"), ("two", "mine"), ("public-one", "mine"), ("two", "tenant one")):
        assert tenancy.send(tenant, salt, cache_salt=chosen) == first


def test_prompts_that_can_never_all_be_admitted_cost_no_quota(tenancy: Tenancy) -> None:
    """The client does not retry, because waiting does not help."""
    for _ in range(2):
        answer = tenancy.post("slow", 0, prompt=["a", "b", "c", "d"])
        assert answer.status_code == 400 and "retry-after" not in answer.headers
        message = answer.json()["error"]["message"]
        assert "4 prompts" in message and "3 requests per minute" in message


def test_limits_hold_and_are_reported(tenancy: Tenancy) -> None:
    client = openai.OpenAI(
        base_url=f"{tenancy.gateway.url}/v1",
        api_key="tdm_slow",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE_S),
    )
    with client:
        for left in (2, 1, 0):
            answer = client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
    headers = refused.value.response.headers
    assert refused.value.code == "quota_exceeded"
    assert headers["x-ratelimit-limit-requests"] == "3" and headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-tandem-reject-reason"] == "requests_per_minute" and 0 < int(headers["retry-after"]) <= 20
    tenancy.pair.wait_idle()


def test_a_prompt_that_is_too_long_for_a_tenant_names_both_numbers(tenancy: Tenancy) -> None:
    answer = tenancy.post("short", 0)
    assert answer.status_code == 400
    assert f"has {LENGTH} tokens, and this key allows at most 20" in answer.json()["error"]["message"]
    answer = tenancy.post("short", 0, prompt=prompt(11, 0))
    assert answer.status_code == 400
    assert "has 11 tokens, more than the 10 per minute" in answer.json()["error"]["message"]


def test_a_removed_tenant_is_refused_at_once_but_its_running_requests_finish(tenancy: Tenancy) -> None:
    assert tenancy.post("leaving", 1).status_code == 200
    body = {"model": "tiny", "prompt": prompt(8, 1), "max_tokens": 3000, "temperature": 0, "stream": True}
    headers = {"authorization": "Bearer tdm_leaving"}
    with tenancy.http.stream("POST", "/v1/completions", json=body, headers=headers) as running:
        lines = running.iter_lines()
        assert next(lines)
        tenancy.file.write_text(tenants_file({name: TENANTS[name] for name in TENANTS if name != "leaving"}))
        until(lambda: tenancy.post("leaving", 1).status_code == 401, "a key that is not valid any more")
        rest = list(lines)
    assert rest[-1] == "data: [DONE]" or rest[-2] == "data: [DONE]"
    assert tenancy.post("one", 1).status_code == 200
    tenancy.pair.wait_idle()
