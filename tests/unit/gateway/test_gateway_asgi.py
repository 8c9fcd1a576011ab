"""Test one exchange and one completion without a network, where the order of events can be forced."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from tandem.admission.tenant import Tenant
from tandem.core.clock import SystemClock
from tandem.core.config import Bytes, GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import TenantId
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import AllowAll, ServedModel
from tandem.gateway.http import openai_routes
from tandem.gateway.http.exchange import Exchange, header_value, json_response
from tandem.gateway.http.openai_routes import OpenAIRoutes
from tandem.gateway.openai.output_spec import OutputSpecFactory
from tandem.gateway.serving import completions
from tandem.gateway.serving.completions import LARGE_BODY_BYTES, NUM_ENCODERS, CompletionService
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_recorder import RequestRecorder
from tandem.gateway.text.text_model import TextModel
from tandem.obs.metrics.metrics import Metrics
from tests.unit.gateway.conftest import ScriptedDispatch
from tests.unit.gateway.scripted_worker import PATIENCE_S


class Client:
    """Play the client of one exchange, whose body has these parts; hang up on request, or when the response is
    complete."""

    def __init__(self, *parts: bytes) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self.num_bytes = sum(map(len, parts))
        self.unread = list(parts or [b""])

    async def receive(self) -> dict[str, Any]:
        if self.unread:
            body = self.unread.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self.unread)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.gone.set()

    def exchange(self, *headers: tuple[bytes, bytes]) -> Exchange:
        return Exchange({"type": "http", "headers": list(headers)}, self.receive, self.send)


async def read_body(exchange: Exchange, large: int = 10, begun: list[int] | None = None) -> bytes:
    """Read a body of at most 10 bytes, and note the sizes for which a turn was requested."""

    async def begin_large(num_bytes: int) -> float:
        if begun is not None:
            begun.append(num_bytes)
        return PATIENCE_S

    return await exchange.read_body(10, large, begin_large)


@pytest.mark.parametrize(
    ("length", "large", "expected"),
    [(b"7", 7, []), (b"7", 6, [7]), (None, 7, []), (None, 6, [10])],
    ids=["small", "large", "small without a length", "large without a length"],
)
async def test_a_turn_is_requested_once_before_a_large_body_is_read(
    length: bytes | None, large: int, expected: list[int]
) -> None:
    begun: list[int] = []
    client = Client(b"1234567")
    exchange = client.exchange(*([(b"content-length", length)] if length else []))
    assert await read_body(exchange, large, begun) == b"1234567"
    assert begun == expected


async def test_a_body_may_arrive_in_parts() -> None:
    begun: list[int] = []
    assert await read_body(Client(b"12", b"34", b"", b"567").exchange(), 5, begun) == b"1234567"
    assert begun == [10]


@pytest.mark.parametrize(
    ("parts", "large", "begun", "num_unread"),
    [
        ([b"12345678901"], 6, [], 0),
        ([b"12345678901", b"2"], 20, [], 1),
        ([b"1234567", b"8901", b"2"], 6, [10], 1),
        ([b"1234567", b"8901", b"2"], 20, [], 1),
    ],
    ids=["at once", "before the limit of a small one", "in its turn", "as a small one"],
)
async def test_a_body_beyond_the_limit_is_refused_as_soon_as_it_is_known(
    parts: list[bytes], large: int, begun: list[int], num_unread: int
) -> None:
    client, seen = Client(*parts), list[int]()
    with pytest.raises(TandemError) as caught:
        await read_body(client.exchange(), large, seen)
    assert caught.value.kind is ErrorKind.BODY_TOO_LARGE
    assert (seen, len(client.unread)) == (begun, num_unread)


async def test_a_declared_size_beyond_the_limit_is_refused_unread() -> None:
    client = Client(b"1")
    with pytest.raises(TandemError) as caught:
        await read_body(client.exchange((b"content-length", b"11")))
    assert caught.value.kind is ErrorKind.BODY_TOO_LARGE and client.unread


async def test_a_client_that_leaves_in_its_body() -> None:
    client = Client(b"1", b"2")

    async def receive() -> dict[str, Any]:
        return await Client.receive(client) if len(client.unread) == 2 else {"type": "http.disconnect"}

    client.receive = receive  # type: ignore[method-assign]
    with pytest.raises(ClientDisconnect):
        await read_body(client.exchange())


async def test_cleanup_after_a_complete_response_is_not_cancelled() -> None:
    exchange = Client().exchange()
    await read_body(exchange)
    tidied = False

    async def work() -> None:
        nonlocal tidied
        await json_response(b"{}")(exchange.scope, exchange.receive, exchange.send)
        for _ in range(5):
            await asyncio.sleep(0)
        tidied = True

    await exchange.run_until_disconnect(work())
    assert tidied


async def test_a_disconnect_cancels_work_and_waits_for_its_end() -> None:
    client, log = Client(), []
    exchange = client.exchange()
    await read_body(exchange)

    async def work() -> None:
        try:
            client.gone.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            log.append("tidied")

    await exchange.run_until_disconnect(work())
    assert log == ["tidied"]


async def test_a_cancellation_of_the_server_reaches_the_work() -> None:
    exchange, log = Client().exchange(), []
    await read_body(exchange)

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            log.append("tidied")

    serving = asyncio.create_task(exchange.run_until_disconnect(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert log == ["tidied"]


async def test_work_that_cancels_itself_counts_as_cancelled() -> None:
    exchange = Client().exchange()
    await read_body(exchange)

    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await exchange.run_until_disconnect(work())


async def test_an_error_of_the_handler_propagates() -> None:
    exchange = Client().exchange()
    await read_body(exchange)

    async def work() -> None:
        raise TandemError(ErrorKind.OVERLOADED, "full")

    with pytest.raises(TandemError, match="full"):
        await exchange.run_until_disconnect(work())


class RecordingExecutor(ThreadPoolExecutor):
    """Count the submitted tasks."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_submitted = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_submitted += 1
        return super().submit(*args, **kwargs)


@pytest.fixture
def roomy(make_text: Callable[..., TextModel], front: Any) -> ScriptedDispatch:
    """Answer requests of a model that takes long prompts."""
    dispatch: ScriptedDispatch = front.dispatch
    dispatch.served = [ServedModel(name="tiny", max_model_len=90_000, text=make_text(), created=0)]
    front.answer("x")
    return dispatch


def body_of(prompt: str) -> bytes:
    return json.dumps({"model": "tiny", "prompt": prompt}).encode()


async def complete(app: GatewayApp, client: Client, key: str = "a") -> int:
    """Send a client's completion with an API key, and return the status of the response."""
    headers = [(b"content-length", b"%d" % client.num_bytes), (b"x-api-key", key.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await app(scope, client.receive, client.send)
    return int(client.sent[0]["status"])


@pytest.mark.parametrize(("num_chars", "num_submitted"), [(2000, 0), (2001, 1)])
async def test_long_prompts_are_tokenized_by_a_thread(
    roomy: ScriptedDispatch, num_chars: int, num_submitted: int
) -> None:
    client = Client(body_of("a" * num_chars))
    with RecordingExecutor() as executor:
        recorder = RequestRecorder(SystemClock(), RequestMetrics(Metrics()))
        answers = CompletionService(roomy, executor, recorder, OutputSpecFactory())
        await OpenAIRoutes(answers, AllowAll(), 1 << 20, 10.0).completions(client.exchange())
        assert executor.num_submitted == num_submitted
    assert client.sent[0]["status"] == 200


@pytest.mark.parametrize("field", ["content", "name", "tool_call_id", "reasoning_content"])
async def test_a_chat_with_any_long_text_is_tokenized_by_a_thread(roomy: ScriptedDispatch, field: str) -> None:
    """Templates may show any of them, and a long text would stall the event loop."""
    message = {"role": "assistant", "content": "", field: "a" * 2001}
    client = Client(json.dumps({"model": "tiny", "messages": [message]}).encode())
    with RecordingExecutor() as executor:
        recorder = RequestRecorder(SystemClock(), RequestMetrics(Metrics()))
        answers = CompletionService(roomy, executor, recorder, OutputSpecFactory())
        await OpenAIRoutes(answers, AllowAll(), 1 << 20, 10.0).chat(client.exchange())
        assert executor.num_submitted == 1


async def test_lifespan_is_answered(front: Any) -> None:
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[str] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await GatewayApp(front.dispatch, AllowAll(), GatewayConfig())({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize("value", [b"", b"x y", b"\xff", b"a" * 129, b"\n"])
def test_invalid_request_ids_are_replaced(value: bytes) -> None:
    exchange = Client().exchange((b"x-request-id", value))
    assert len(exchange.request_id) == 32


def test_header_values_carry_no_line_breaks() -> None:
    assert header_value("a\r\nb\x00ü") == "a??b???"


async def test_the_texts_queued_for_tokenization_are_bounded(
    roomy: ScriptedDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further long texts than may wait are refused; short ones are tokenized at once."""
    monkeypatch.setattr(completions, "_MAX_WAITING", 1)
    app = GatewayApp(roomy, AllowAll(), GatewayConfig())
    gate = threading.Event()

    async def post_completion(num_chars: int) -> int:
        client = Client(body_of("a" * num_chars))
        status = await complete(app, client)
        if status == 503:
            assert (b"retry-after", b"1") in client.sent[0]["headers"]
            assert (b"x-tandem-reject-reason", b"tokenization") in client.sent[0]["headers"]
        return status

    for _ in range(NUM_ENCODERS):
        app._encoders.submit(gate.wait)
    waiting = [asyncio.create_task(post_completion(num_chars)) for num_chars in (9_000, 9_000, 9_000, 100)]
    statuses = [await waiting[2], await waiting[3]]
    gate.set()
    served = await asyncio.gather(*waiting[:2])
    assert [*served, *statuses, await post_completion(9_000)] == [200, 200, 503, 200, 200]


class TwoTenants(AllowAll):
    """Take the one API key of a request for the name of its tenant."""

    def identify(self, keys: AbstractSet[str]) -> Tenant:
        return Tenant(id=TenantId("".join(keys)))


class SlowClient(Client):
    """Announce a large body and send it byte by byte."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}


@pytest.mark.parametrize(("num_bytes", "limit"), [(LARGE_BODY_BYTES + 1, b"0.05"), (8 << 20, b"0.1")])
async def test_a_large_body_that_arrives_slowly_loses_its_turn(
    roomy: ScriptedDispatch, monkeypatch: pytest.MonkeyPatch, num_bytes: int, limit: bytes
) -> None:
    monkeypatch.setattr(openai_routes, "LARGE_BODY_S", 0.05)
    app = GatewayApp(roomy, TwoTenants(), GatewayConfig(max_body=Bytes(8 << 20)))
    app.answers._large_bodies.refused_s = 0.0
    client = SlowClient(num_bytes)
    assert await complete(app, client) == 408
    assert b"did not arrive within %b s" % limit in client.sent[1]["body"]
    assert app.answers._large_bodies.used == 0


async def test_large_bodies_of_one_tenant_do_not_hold_up_those_of_another(roomy: ScriptedDispatch) -> None:
    app = GatewayApp(roomy, TwoTenants(), GatewayConfig())

    async def post(key: str, prompt: str) -> int:
        return await complete(app, Client(body_of(prompt)), key)

    turn = await app.answers.begin_large(Tenant(id=TenantId("a")), 4 << 20)
    held_up = asyncio.create_task(post("a", "a" * LARGE_BODY_BYTES))
    assert [await post("b", "a" * LARGE_BODY_BYTES), await post("a", "a")] == [200, 200]
    assert not held_up.done()
    turn.end()
    assert await held_up == 200
    assert app.answers._large_bodies.used == 0
    assert await post("b", "a" * 1_000_000) == 400
    assert app.answers._large_bodies.used > 1_000_000
