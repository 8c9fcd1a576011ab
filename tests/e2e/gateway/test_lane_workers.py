"""Test real workers that are bound to lanes: requests run only on workers of their lane, and wait for one otherwise."""

from __future__ import annotations

import pytest

from tests.e2e.gateway.http import Answer, completion, send
from tests.e2e.gateway.processes import Cluster, until


@pytest.mark.timeout(180)
def test_requests_run_on_workers_of_their_lane_and_wait_for_one_where_none_is_left(running: Cluster) -> None:
    running.worker("day", "mixed", "--lanes", "interactive,standard")
    night = running.worker("night", "mixed", "--lanes", "batch")
    gateway = running.gateway("gateway", "--no-worker-wait-s", "1")
    running.wait_serving()
    assert list(night.describe().lanes) == ["batch"]

    def complete(lane: str) -> Answer:
        headers = {"x-tandem-lane": lane, "x-tandem-explain": "1"}
        return send(gateway.url, completion(40, 1, 4), headers=headers)

    def place(lane: str) -> str:
        """Return the worker that answers a request of a lane; empty where the request fails."""
        answer = complete(lane)
        return str(answer.about()["reasons"][0]["decode"]) if answer.status == 200 else ""

    workers = {"interactive": "day", "standard": "day", "batch": "night"}
    for lane, worker in workers.items():
        until(lambda lane=lane: place(lane), f"a worker for {lane}")  # type: ignore[misc]
        assert [place(lane) for _ in range(3)] == [worker] * 3
    assert len({complete(lane).text() for lane in workers}) == 1, "the lane does not change the answer"

    night.kill()
    until(lambda: place("batch") == "", "the loss of the batch worker")
    refused = complete("batch")
    error = refused.error()
    assert refused.status == 503 and error is not None
    assert (error["code"], "no worker serves the lane batch" in error["message"]) == ("no_worker", True), error
    assert place("interactive") == "day"

    again = running.worker("night-2", "mixed", "--lanes", "batch")
    again.wait_ready()
    until(lambda: place("batch") == "night-2", "a request on the new batch worker")
