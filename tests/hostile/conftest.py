"""Share one gateway, in this process and with a backend that answers at once, among the tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

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
