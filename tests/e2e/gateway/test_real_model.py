"""The real model behind a gateway, with KV moved by the default transport: an answer that makes sense."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.gateway.processes import Gateway, cluster

MODEL = "smollm2-135m-instruct"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("real")
    settings = ("--namespace", "real", "--kv-cache-memory", "128MiB")
    with cluster(directory, redis_url, MODEL, *settings) as running:
        running.worker("p", "prefill")
        running.worker("d", "decode")
        gateway = running.gateway("gateway")
        for program in running.programs:
            program.wait_ready()
        gateway.wait_serving()
        yield gateway
        assert running.complaints() == []


def test_the_capital_of_france(gateway: Gateway) -> None:
    with (
        openai.DefaultHttpxClient(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        whole = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=CHAT, max_tokens=24, temperature=0  # type: ignore[arg-type]
        )  # fmt: skip
        assert whole.headers["x-tandem-path"] == "remote"
        said = whole.parse().choices[0]
        assert "Paris" in (said.message.content or "")
        assert said.finish_reason == "stop", "the model ends its answer itself"
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=CHAT,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == said.message.content
