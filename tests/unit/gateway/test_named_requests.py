"""Test that log lines of both front ends name the request that they belong to, and no other."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from tandem.core.ids import WorkerRef
from tandem.core.request import Job
from tandem.obs.logs.log_context import in_request, request_fields
from tandem.obs.logs.log_formatters import JsonFormatter
from tandem.wire.gen import inference_pb2 as pb
from tests.unit.gateway.conftest import Front
from tests.unit.gateway.rig import Rig, busy_pair, failure
from tests.unit.gateway.scripted_worker import until


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture all log lines as JSON."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter({"service": "tandem-gateway", "instance": "g", "pid": 1}))
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


def named(log: io.StringIO) -> list[str]:
    """Return the request ids of the log lines about a bug."""
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line.get("request_id", "") for line in lines if "thought of" in line.get("exception", "")]


def test_a_line_of_an_http_request_names_it(front: Front, http: httpx.Client, log: io.StringIO) -> None:
    for name in ("a-1", "a-2"):
        front.stream(RuntimeError("never thought of"))
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert http.post("/v1/chat/completions", json=body, headers={"x-request-id": name}).status_code == 500
    assert named(log) == ["a-1", "a-2"]


def test_a_line_of_a_grpc_request_names_it(front: Front, stub: Any, log: io.StringIO) -> None:
    hello = pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="Hello")])
    for name in ("b-1", "b-2"):
        front.stream(RuntimeError("never thought of"))
        with pytest.raises(grpc.RpcError):
            stub.Chat(hello, metadata=(("x-request-id", name),))
    assert named(log) == ["b-1", "b-2"]


async def test_a_job_sent_by_another_requests_task_is_logged_under_its_own_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that reaches the queue dispatches all requests that have a placement, including those of other tasks."""
    await rig.pair()
    named: list[dict[str, str]] = []
    submit = rig.fleet.submit

    async def look(worker: WorkerRef, job: Job) -> None:
        named.append(request_fields())
        await submit(worker, job)

    monkeypatch.setattr(rig.fleet, "submit", look)
    with in_request("c-1"):
        request = await rig.open()
        await until(lambda: len(named) == 2)
    assert named == [{}, {}]
    request.close()


async def test_a_request_that_is_broken_off_is_not_taken_for_the_one_that_runs(rig: Rig, log: io.StringIO) -> None:
    _, _, request = await busy_pair(rig)
    with in_request("d-1"):
        bug = RuntimeError("never thought of")
        rig.dispatch._execute(rig.dispatch.director.abort(request.state.request.id, bug, rig.clock.now()))
    assert named(log) == [""] and request.state.request.id in log.getvalue()
    await failure(request)
    request.close()
