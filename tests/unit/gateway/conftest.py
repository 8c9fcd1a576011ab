"""Provide a small real tokenizer, a scripted dispatch, the app on a real server, and whole dispatchers."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import grpc
import httpx
import openai
import pytest
import uvloop
from tokenizers import Tokenizer

from tandem.core.config import Bytes, GatewayConfig
from tandem.core.errors import TandemError
from tandem.core.events import Finished, FinishReason, PromptLogprobs, SampledToken, Token
from tandem.core.ids import Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import AllowAll, Authenticator, KVBlocks, ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.grpc.server import GrpcServer
from tandem.gateway.http.monitoring_routes import PROBES
from tandem.gateway.http.protocol_limits import HttpLimits
from tandem.gateway.http.server import HttpServer
from tandem.gateway.text.text_model import TextModel
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.routing.worker_view import WorkerView
from tandem.wire.channels import CHANNEL_OPTIONS
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tandem.wire.tls import TlsFiles
from tests.tokenizer import TEMPLATE, train_tokenizer
from tests.unit.gateway.instant import instant_events
from tests.unit.gateway.rig import Rig, StartRig, bundle_of, rigs

_ALTERNATIVES = tuple((token, -0.5 - token) for token in range(42, 62))
HEARTBEAT_S = 0.05
"""Tests that hold a stream back see heartbeats soon; tests that do not hold it back end before the first one."""
Step = Token | PromptLogprobs | Finished | Exception | asyncio.Event
HELLO = pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="Hello")])
MUCH = pb.ChatRequest(model="tiny", messages=HELLO.messages, logprobs=True, top_logprobs=20)
"""With the alternatives of each, few tokens fill what lies between a client and the server."""
NARROW = [*CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0)]
"""Options of a channel that takes little ahead of its reader."""


def grpc_refusal(call: Callable[..., object], *given: Any, **options: Any) -> Any:
    """Return the error that ends a call over gRPC."""
    with pytest.raises(grpc.RpcError) as refused:
        call(*given, **options)
    return refused.value


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


@pytest.fixture(scope="session")
def make_text(tokenizer: Tokenizer) -> Callable[..., TextModel]:
    def make(
        template: str = TEMPLATE, *, special: dict[str, Any] | None = None, config: Any = None, **options: Any
    ) -> TextModel:
        return TextModel(bundle_of(tokenizer, template, special, config), **options)

    return make


class ScriptedStream:
    """Yield scripted steps in order: events are yielded, exceptions raised, and an asyncio.Event is awaited."""

    has_more = False
    num_attempts = 1
    workers = ("p1", "d1")
    reasons: ClassVar[dict[str, object]] = {"prefill": "p1", "decode": "d1"}

    def __init__(
        self, steps: Sequence[Step], path: str = "remote", rate_limits: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.rate_limits = rate_limits or {}
        self.finished_choices: list[int] = []
        self.num_closes = 0
        self.closed = threading.Event()
        self._steps = steps

    async def __aiter__(self) -> AsyncGenerator[Token | PromptLogprobs | Finished, None]:
        for step in self._steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    def finish(self, choice: int) -> None:
        self.finished_choices.append(choice)

    def close(self) -> None:
        self.num_closes += 1
        self.closed.set()


class Endless(ScriptedStream):
    """Yield the same token for ever, with alternatives if the request wants them; `num_given` counts the tokens."""

    def __init__(self) -> None:
        super().__init__([])
        self.num_given = 0

    async def __aiter__(self) -> AsyncGenerator[Token, None]:  # type: ignore[override]
        while True:
            yield Token(JobKey(RequestId("r"), 1), self.num_given, SampledToken(42, -0.5, _ALTERNATIVES))
            self.num_given += 1
            # Let other tasks run even where nobody consumes the tokens.
            await asyncio.sleep(0)

    def wait_until_blocked(self) -> None:
        """Wait until the buffers between the two are full and no further token is taken."""
        num_given = -1
        while num_given != self.num_given:
            num_given = self.num_given
            time.sleep(0.2)


class ScriptedDispatch:
    """Open whatever `script` returns for a request; a test sets `script` before its request."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.all_models = models
        self.reset()

    def reset(self) -> None:
        self.served = list(self.all_models)
        self.missing: str | None = None
        self.requests: list[Request] = []
        self.callers: list[RequestContext] = []
        self.never: TandemError | None = None
        self.opening: queue.Queue[Request] = queue.Queue()
        self.open_cancelled = threading.Event()
        self.hold_open = False
        self.script: Callable[[Request], ScriptedStream] = lambda request: ScriptedStream([])

    def models(self) -> Sequence[ServedModel]:
        return self.served

    def ready(self) -> str | None:
        return self.missing

    def num_queued(self) -> dict[Lane, int]:
        return {}

    def kv_blocks(self) -> KVBlocks | None:
        return KVBlocks(16, 1000, 750)

    def scrape_targets(self) -> list[tuple[str, WorkerView]]:
        ref = WorkerRef(WorkerId("p1"), Incarnation(1), "127.0.0.1:9000")
        return [("127.0.0.1:9100", WorkerView(ref, "prefill", "tiny", "f", WorkerLoad()))]

    def problem(self) -> str | None:
        return None

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        if self.never is not None:
            raise self.never

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> ScriptedStream:
        self.callers.append(caller)
        self.requests.append(request)
        self.opening.put(request)
        if self.hold_open:
            try:
                await asyncio.Event().wait()
            finally:
                self.open_cancelled.set()
        return self.script(request)


class Front:
    """Own both front ends on local ports, their one dispatch, and helpers to script it."""

    def __init__(
        self, dispatch: ScriptedDispatch, tokenizer: Tokenizer, door: Authenticator | None = None, **config: Any
    ) -> None:
        """`config`: settings of the gateway; with TLS files both front ends use TLS."""
        self.dispatch = dispatch
        self._door = door or AllowAll()
        self._config = GatewayConfig(max_body=Bytes(1 << 20), heartbeat_s=HEARTBEAT_S, **config)
        self.port = self.grpc_port = 0
        self._tokenizer = tokenizer
        self._listening = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return f"{self._config.scheme}://127.0.0.1:{self.port}"

    def stream(self, *steps: Step | str | int, path: str = "remote") -> ScriptedStream:
        """Queue a stream of steps, where a string stands for its tokens and an int for a token id."""
        out: list[Step] = []
        key, count = JobKey(request="r", attempt=1), 0  # type: ignore[arg-type]
        for step in steps:
            if isinstance(step, str | int):
                ids = [step] if isinstance(step, int) else self.ids(step)
                for token in ids:
                    sampled = SampledToken(token, -0.5, ((token, -0.5), (5, float("-inf"))))
                    out.append(Token(key, count, sampled))
                    count += 1
            else:
                out.append(step)
        stream = ScriptedStream(out, path)
        self.dispatch.script = lambda request: stream
        return stream

    def instant(
        self, text: str = "Paris 你好 😀.", rate_limits: Mapping[str, str] | None = None
    ) -> list[ScriptedStream]:
        """Answer every request at once; return the list to which each opened stream is added."""
        opened: list[ScriptedStream] = []

        def script(request: Request) -> ScriptedStream:
            opened.append(ScriptedStream(instant_events(request, self.ids(text)), rate_limits=rate_limits))
            return opened[-1]

        self.dispatch.script = script
        return opened

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @staticmethod
    def finished(reason: FinishReason | None = FinishReason.STOP, tokens: int = 7, cached: int = 4) -> Finished:
        return Finished(JobKey(request="r", attempt=1), reason, tokens, cached)  # type: ignore[arg-type]

    def answer(self, text: str, path: str = "remote") -> ScriptedStream:
        return self.stream(text, 1, self.finished(tokens=len(self.ids(text)) + 1), path=path)

    def let(self, gate: asyncio.Event) -> None:
        """Open a gate in a stream's steps, from the test's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(gate.set)

    def __enter__(self) -> Front:
        self._thread.start()
        assert self._listening.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.let(self._done)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        app = GatewayApp(self.dispatch, self._door, self._config)
        tls = TlsFiles.of_gateway(self._config) if self._config.has_tls else None
        if tls is not None:
            app.warn_of(tls.problem)
        server = HttpServer(app, "127.0.0.1", 0, graceful_s=1.0, limits=HttpLimits(probes=PROBES), tls=tls)
        self._loop = asyncio.get_running_loop()
        self.port = server.port
        await server.start()
        grpc_server = GrpcServer(self.dispatch, app.answers, self._door, max_message=self._config.max_body, tls=tls)
        await grpc_server.start("127.0.0.1", 0)
        self.grpc_port = grpc_server.port
        self._listening.set()
        await self._done.wait()
        await grpc_server.stop(1.0)
        await server.stop()


@pytest.fixture(scope="package")
def running_front(make_text: Callable[..., TextModel], tokenizer: Tokenizer) -> Iterator[Front]:
    text = make_text(config={"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]})
    names = ("tiny", "org/tiny")
    served = [ServedModel(name=name, max_model_len=512, text=text, created=1_700_000_000) for name in names]
    served.append(replace(served[0], name="many", aliases=("other", "org/third")))
    with Front(ScriptedDispatch(served), tokenizer) as front:
        yield front


@pytest.fixture
def front(running_front: Front) -> Front:
    running_front.dispatch.reset()
    return running_front


@pytest.fixture(scope="package")
def channel(running_front: Front) -> Iterator[grpc.Channel]:
    """Connect to the gRPC front end. Without the `front` fixture nothing is scripted."""
    with grpc.insecure_channel(f"127.0.0.1:{running_front.grpc_port}", options=CHANNEL_OPTIONS) as channel:
        yield channel


@pytest.fixture
def stub(front: Front, channel: grpc.Channel) -> Any:
    """Return a stub whose type hints are those of asynchronous calls, although its code is synchronous."""
    return InferenceStub(channel)  # type: ignore[arg-type]


@pytest.fixture
def http(front: Front) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, timeout=20, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False, timeout=20, verify=False)
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture
async def make_rig(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Rig]]:
    async with rigs(monkeypatch, tokenizer) as make:
        yield make


@pytest.fixture
async def rig(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig()
    await rig.start()
    return rig


@pytest.fixture
def start_rig(make_rig: Callable[..., Rig]) -> StartRig:
    async def start(**options: Any) -> Rig:
        rig = make_rig(**options)
        await rig.start()
        return rig

    return start


async def serve_alone(
    application: Any, limits: HttpLimits, *, graceful_s: float = 1.0, tls: TlsFiles | None = None
) -> HttpServer:
    """Serve an application that answers one request at a time and has no state."""

    async def with_lifespan(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await application(scope, receive, send)
        else:
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})

    server = HttpServer(with_lifespan, "127.0.0.1", 0, graceful_s=graceful_s, limits=limits, tls=tls)
    await server.start()
    return server
