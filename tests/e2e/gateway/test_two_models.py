"""Test one gateway in front of two models: each request goes to workers of its own model, and pairs do not mix."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import cluster, until
from tests.e2e.gateway.tiny_model import make_model


def complete(url: str, model: str, prompt: str) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)


@pytest.mark.timeout(120)
def test_each_model_is_served_by_its_own_workers(tmp_path: Path, redis_url: str, model: Path) -> None:
    second = make_model(tmp_path / "second", seed=8)
    with cluster(tmp_path, redis_url, model, *SETTINGS, "--namespace", "two") as running:
        workers = [
            running.worker("p", "prefill"),
            running.worker("d", "decode"),
            running.worker("m", "mixed", "--model", str(second), "--served-model-name", "second,another"),
        ]
        gateway = running.gateway("gateway")
        for program in (*workers, gateway):
            program.wait_ready()
        until(lambda: complete(gateway.url, "tiny", "x").headers.get("x-tandem-path") == "remote", "a split answer")
        until(lambda: complete(gateway.url, "second", "x").status_code == 200, "an answer of the second model")
        cards = httpx.get(f"{gateway.url}/v1/models", timeout=60, trust_env=False).json()["data"]
        assert {card["id"]: card["root"] for card in cards} == {
            "tiny": "tiny",
            "org/alias": "tiny",
            "second": "second",
            "another": "second",
        }
        for prompt in ("one", "two"):
            first, other = complete(gateway.url, "tiny", prompt), complete(gateway.url, "another", prompt)
            assert (first.headers["x-tandem-path"], other.headers["x-tandem-path"]) == ("remote", "local")
            assert first.json()["choices"][0]["text"] != other.json()["choices"][0]["text"]
        assert complete(gateway.url, "third", "x").status_code == 404
        for worker in workers:
            until(worker.is_idle, f"an idle {worker.name}")
