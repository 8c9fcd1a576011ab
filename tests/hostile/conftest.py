"""Share one gateway, in this process and with a backend that answers at once, among the tests of this folder; those of
`make nightly` have workers too."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.gateway.pair import SETTINGS, Pair, start_pair
from tests.e2e.gateway.processes import cluster
from tests.unit.gateway.conftest import (
    Front,
    ScriptedStream,
    channel,
    front,
    http,
    make_text,
    running_front,
    stub,
    tokenizer,
)

__all__ = ["channel", "front", "http", "make_text", "running_front", "stub", "tokenizer"]
PATIENCE_S = 60.0
PLAIN = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3}


@pytest.fixture
def attacked(front: Front, http: httpx.Client) -> Iterator[Front]:
    """Answer every request at once. Check at the end that the next request is answered, and that no request is held."""
    opened: list[ScriptedStream] = front.instant()
    yield front
    assert http.post("/v1/completions", json=PLAIN).status_code == 200
    deadline = time.monotonic() + PATIENCE_S
    for stream in opened:
        assert stream.closed.wait(max(0.0, deadline - time.monotonic())), "a request is still held"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Pair]:
    """Check at the end that nothing is held and that no log has errors."""
    from tests.e2e.gateway.tiny_model import make_model  # imports torch and transformers

    model = make_model(tmp_path_factory.mktemp("tiny"))
    with cluster(tmp_path_factory.mktemp("hostile"), redis_url, model, *SETTINGS, "--namespace", "hostile") as running:
        pair = start_pair(running)
        yield pair
        pair.wait_idle()
        running.stop()
        # A generated request may allow too little time for its answer.
        late = ("outcome=deadline_exceeded", "reason=deadline")
        assert [line for line in running.complaints() if not any(words in line for words in late)] == []
