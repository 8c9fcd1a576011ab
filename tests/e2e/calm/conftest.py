"""Share one cluster of real processes among all tests of this folder; tests that break a process start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.gateway.pair import SETTINGS, Pair, start_pair
from tests.e2e.gateway.processes import cluster


@pytest.fixture(scope="package")
def calm(tmp_path_factory: pytest.TempPathFactory, redis_url: str, model: Path) -> Iterator[Pair]:
    """Check at the end that nothing is held, no gateway cuts off requests, all programs exit with 0, and no log has
    errors.
    """
    directory = tmp_path_factory.mktemp("calm")
    with cluster(directory, redis_url, model, *SETTINGS, "--namespace", "calm") as running:
        pair = start_pair(running)
        yield pair
        pair.wait_idle()
        running.stop()
        codes = {program.name: program.exit_code for program in running.programs}
        assert set(codes.values()) == {0}, codes
        assert running.complaints() == []


@pytest.fixture(scope="package")
def client(calm: Pair) -> Iterator[openai.OpenAI]:
    with (
        openai.DefaultHttpxClient(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{calm.gateway.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="package")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=60) as http:
        yield http
