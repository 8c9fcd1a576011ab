"""Test one gateway in front of two models: each request goes to workers of its own model, and the gateway stays ready
while any of them can serve, whatever else is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import PATIENCE_S, Cluster, Gateway, Redis, Worker, cluster, redis_server, until
from tests.e2e.gateway.tiny_model import make_model

NO_WAIT = ("--no-worker-wait-s", "1")


def complete(gateway: Gateway, model: str, prompt: str = "x") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)


def path_of(gateway: Gateway, model: str) -> str:
    """Return the path of a completion, or its status where it failed."""
    answer = complete(gateway, model)
    return answer.headers["x-tandem-path"] if answer.status_code == 200 else str(answer.status_code)


def probe(gateway: Gateway, path: str) -> tuple[int, str]:
    """Return the status of a probe, and what its body says is missing or wrong."""
    answer = httpx.get(f"{gateway.url}{path}", timeout=PATIENCE_S, trust_env=False)
    body = answer.json()
    return answer.status_code, body.get("reason") or body.get("warning") or ""


def shortages(gateway: Gateway) -> set[str]:
    name = "tandem_model_shortage"
    return {series.removeprefix(name) for series in gateway.metrics() if series.startswith(f"{name}{{")}


class Rig(NamedTuple):
    """Two models behind one gateway: a prefill and a decode worker of the first, a mixed worker of the second."""

    redis: Redis
    cluster: Cluster
    prefill: Worker
    decode: Worker
    mixed: Worker
    gateway: Gateway


@pytest.fixture
def rig(tmp_path: Path, model: Path) -> Iterator[Rig]:
    second = make_model(tmp_path / "second", seed=8)
    with redis_server() as redis, cluster(tmp_path, redis.url, model, *SETTINGS, *NO_WAIT) as running:
        prefill, decode = running.worker("p", "prefill"), running.worker("d", "decode")
        names = ("--model", str(second), "--served-model-name", "second,another")
        mixed, gateway = running.worker("m", "mixed", *names), running.gateway("gateway")
        running.wait_serving()
        until(lambda: path_of(gateway, "tiny") == "remote", "a request on two workers")
        until(lambda: path_of(gateway, "second") == "local", "an answer of the second model")
        assert probe(gateway, "/ready") == (200, "") and shortages(gateway) == set()
        yield Rig(redis, running, prefill, decode, mixed, gateway)


@pytest.mark.timeout(180)
def test_each_model_has_its_workers_and_a_partial_loss_is_no_outage(rig: Rig) -> None:
    gateway = rig.gateway
    cards = httpx.get(f"{gateway.url}/v1/models", timeout=PATIENCE_S, trust_env=False).json()["data"]
    roots = {card["id"]: card["root"] for card in cards}
    assert roots == {"tiny": "tiny", "org/alias": "tiny", "second": "second", "another": "second"}
    for prompt in ("one", "two"):
        texts = [complete(gateway, name, prompt).json()["choices"][0]["text"] for name in ("tiny", "another")]
        assert texts[0] != texts[1]
    assert complete(gateway, "third").status_code == 404

    rig.prefill.kill()
    reason = "model tiny has no live prefill worker"
    until(lambda: probe(gateway, "/ready") == (200, reason), "a warning without a prefill worker")
    until(lambda: path_of(gateway, "tiny") == "fallback;reason=no_prefill_worker", "a fallback")
    assert shortages(gateway) == {'{gen_ai_request_model="tiny",lacks="prefill"}'}

    rig.redis.stop()
    rig.decode.kill()
    until(lambda: "workers cannot be listed" in probe(gateway, "/ready")[1], "a warning about Redis")
    until(lambda: "model tiny has no live worker" in probe(gateway, "/ready")[1], "a warning that a model is missing")
    assert probe(gateway, "/ready")[0] == 200 and path_of(gateway, "second") == "local"
    until(lambda: path_of(gateway, "tiny") in ("404", "503"), "a refusal of the missing model")


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_a_gateway_without_any_worker_is_not_ready_until_one_is_back(rig: Rig) -> None:
    gateway = rig.gateway
    rig.decode.kill()
    reason = "model tiny has no live decode worker"
    until(lambda: probe(gateway, "/ready") == (200, reason), "a warning without a decode worker")
    until(lambda: path_of(gateway, "tiny") == "fallback;reason=no_decode_worker", "a fallback")
    rig.prefill.kill()
    rig.mixed.kill()
    until(lambda: probe(gateway, "/ready")[0] == 503, "a gateway that is not ready")
    assert probe(gateway, "/live") == (200, "") and path_of(gateway, "second") in ("404", "503")
    rig.cluster.again(rig.mixed)
    until(lambda: path_of(gateway, "second") == "local", "an answer of the second model")
    assert probe(gateway, "/ready") == (200, "model tiny has no live worker")
