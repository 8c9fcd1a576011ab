"""Test the timing that a client receives against what that client measured."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest

from tandem.core.clock import SystemClock
from tandem.core.request_stages import Stage
from tests.e2e.gateway.http import completion
from tests.e2e.gateway.pair import Pair

TIMED = {"x-tandem-timing": "1"}
WITHIN = 0.01
pytestmark = pytest.mark.nightly
NUM_TRIES = 20
"""Number of attempts, of which one must be close: this machine may pause between the gateway's and the client's
clocks.
"""
clock, salts = SystemClock(), itertools.count(5_300_000)


def timed_request(http: httpx.Client, url: str, max_tokens: int, *, stream: bool) -> tuple[dict[str, float], float]:
    """Return the answer's timing in milliseconds, and how long the client waited."""
    body = completion(1000, next(salts), max_tokens, stream=stream)
    began = clock.now()
    with http.stream("POST", f"{url}/v1/completions", json=body, headers=TIMED) as answer:
        assert answer.status_code == 200
        if not stream:
            whole = answer.read()
            ended = clock.now()
            return json.loads(whole)["tandem"]["timing"], 1e3 * (ended - began)
        for line in answer.iter_lines():
            ended = clock.now()
            event: Any = json.loads(line[6:]) if line.startswith("data: {") else {}
            if "tandem" in event:
                return event["tandem"]["timing"], 1e3 * (ended - began)
    raise AssertionError("the stream tells nothing of its time")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("split", [True, False])
def test_the_stages_add_up_to_what_the_client_waited(calm: Pair, http: httpx.Client, split: bool, stream: bool) -> None:
    url, off = (calm.gateway if split else calm.whole).url, []
    num_tokens = 400
    for _ in range(NUM_TRIES):
        timing, waited_ms = timed_request(http, url, num_tokens, stream=stream)
        stages = {stage: timing[f"{stage.value}_ms"] for stage in Stage}
        assert sum(stages.values()) == pytest.approx(timing["total_ms"], abs=0.01)
        assert 0 < timing["first_token_ms"] < timing["total_ms"] <= waited_ms
        assert min(stages[stage] for stage in (Stage.RECEIVE, Stage.PREFILL, Stage.DECODE)) > 0
        assert (stages[Stage.TRANSFER] > 0) <= split
        if waited_ms < 1000:  # a request of a second or so
            num_tokens *= 2
            continue
        off.append(1 - timing["total_ms"] / waited_ms)
        if off[-1] < WITHIN:
            return
    raise AssertionError(f"of what the client waited nobody knows where it went: {off}")
