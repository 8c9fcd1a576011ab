"""Log lines name the request that they are of, at both fronts, and none that they are not of."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from tandem.core.errors import TandemError
from tandem.core.ids import WorkerRef
from tandem.core.request import Job
from tandem.obs.logs.log_context import InRequest, request_fields
from tandem.obs.logs.log_formatters import JsonFormatter, Origin
from tandem.wire.gen import inference_pb2 as pb
from tests.unit.gateway.conftest import Front
from tests.unit.gateway.rig import Rig
from tests.unit.gateway.scripted_worker import until


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    """All that is logged, as JSON."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter(Origin("tandem-gateway", "g", 1)))
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


def named(said: io.StringIO) -> list[str]:
    """The requests of its lines about a bug."""
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    return [line.get("request_id", "") for line in lines if "thought of" in line.get("exception", "")]


def test_a_line_of_an_http_request_names_it(front: Front, http: httpx.Client, said: io.StringIO) -> None:
    for name in ("a-1", "a-2"):
        front.stream(RuntimeError("never thought of"))
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert http.post("/v1/chat/completions", json=body, headers={"x-request-id": name}).status_code == 500
    assert named(said) == ["a-1", "a-2"]


def test_a_line_of_a_grpc_request_names_it(front: Front, stub: Any, said: io.StringIO) -> None:
    hello = pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="Hello")])
    for name in ("b-1", "b-2"):
        front.stream(RuntimeError("never thought of"))
        with pytest.raises(grpc.RpcError):
            stub.Chat(hello, metadata=(("x-request-id", name),))
    assert named(said) == ["b-1", "b-2"]


async def test_what_a_request_sends_for_another_is_not_taken_for_its_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes to the line sends all that has found a place."""
    await rig.pair()
    named: list[dict[str, str]] = []
    submit = rig.fleet.submit

    async def look(worker: WorkerRef, job: Job) -> None:
        named.append(request_fields())
        await submit(worker, job)

    monkeypatch.setattr(rig.fleet, "submit", look)
    with InRequest("c-1"):
        request = await rig.open()
        await until(lambda: len(named) == 2)
    assert named == [{}, {}]
    await request.aclose()


async def test_a_request_that_is_broken_off_is_not_taken_for_the_one_that_runs(
    rig: Rig, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.pair()
    request = await rig.running()
    with InRequest("d-1"):
        failure = RuntimeError("never thought of")
        rig.dispatch._execute(rig.dispatch.director.abort(request.state.request.id, failure, rig.clock.now()))
    assert named(said) == [""] and request.state.request.id in said.getvalue()
    with pytest.raises(TandemError):
        [event async for event in request]
    await request.aclose()
