"""Run one server of the front end's benchmark in a process of its own, on one core.

    python -m loadtest.gateway.server FRONT [--core N]

`tandem` is the gateway's app and server over an instant backend, `tls` the same with TLS and a certificate that this
program makes, `link` the same as `tandem` over the whole path from a worker,
`bare` an ASGI endpoint that answers at once on the same server, `starlette` the same as a Starlette application,
`fastapi` an empty FastAPI endpoint on uvicorn. The program prints its URL on stdout and serves until stdin ends.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import uvicorn
import uvloop

from loadtest.gateway.instant_backend import NEVER, InstantDispatch
from tandem.core.clock import SystemClock
from tandem.core.config import Bytes, GatewayConfig
from tandem.core.errors import TandemError
from tandem.core.ids import GatewayId, Incarnation, WorkerId, WorkerRef
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import AllowAll, RequestDispatcher
from tandem.gateway.http.server import HttpServer
from tandem.gateway.orchestration.driver import RequestDriver
from tandem.gateway.text.text_models import TextModels
from tandem.gateway.workers.worker_pool import WorkerPool
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.tls import TlsFiles

FRONTS = ("tandem", "tls", "link", "bare", "starlette", "fastapi")
MAX_BODY = Bytes(4 << 20)
_CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"by-step","choices":[{"index":0,"delta":{"content":" river"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_BODY = b'{"choices":[{"message":{"role":"assistant","content":" river"}}]}'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.gateway.server")
    parser.add_argument("front", choices=FRONTS)
    parser.add_argument("--core", type=int, help="the only one to run on")
    parser.add_argument("--worker", default="", help="id@address of the worker of `link`")
    args = parser.parse_args(argv)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    uvloop.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        tls = _made_certificate(stack) if args.front == "tls" else None
        port = await _start(args, stack, tls)
        gc.collect()
        gc.freeze()
        sys.stdout.write(json.dumps({"url": f"{'https' if tls else 'http'}://127.0.0.1:{port}"}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


def _made_certificate(stack: AsyncExitStack) -> TlsFiles:
    """Make a certificate with the openssl program, which ends with the stack, and read it."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-frontend-"))
    cert, key = f"{directory}/tls.crt", f"{directory}/tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return TlsFiles.of_gateway(GatewayConfig(tls_cert_file=cert, tls_key_file=key))


async def _start(args: argparse.Namespace, stack: AsyncExitStack, tls: TlsFiles | None) -> int:
    """Start a server that ends with the stack and return its port."""
    if args.front == "fastapi":
        return await _start_fastapi(stack)
    if args.front == "bare":
        app: Any = bare
    elif args.front == "starlette":
        app = _starlette()
    else:
        config = GatewayConfig(max_body=MAX_BODY)
        dispatch = InstantDispatch() if args.front in ("tandem", "tls") else await _linked(args.worker, config, stack)
        app = GatewayApp(dispatch, AllowAll(), config)
    server = HttpServer(app, "127.0.0.1", 0, graceful_s=1.0, tls=tls)
    await server.start()
    stack.push_async_callback(server.stop)
    return server.port


async def _linked(worker: str, config: GatewayConfig, stack: AsyncExitStack) -> RequestDispatcher:
    name, _, address = worker.partition("@")
    clock, ref = SystemClock(), WorkerRef(WorkerId(name), Incarnation(1), address)

    async def discover() -> Mapping[WorkerRef, str]:
        return {ref: ""}

    fleet = WorkerPool(GatewayId("door"), discover, TextModels(), clock, config, PeerAuth("door"))
    dispatcher = RequestDriver(fleet, config, clock, None)
    await dispatcher.start()
    stack.push_async_callback(dispatcher.stop)
    await fleet.start()
    stack.push_async_callback(fleet.stop)
    async with asyncio.timeout(30):
        while fleet.ready() is not None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    return dispatcher


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Read the request and answer with as many chunks as the body's `max_tokens`, one per iteration of the event loop.

    For `max_tokens` of 1 the answer is JSON.
    """
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    message = await receive()
    received = message["body"]
    while message["more_body"]:
        message = await receive()
        received += message["body"]
    body = json.loads(received)
    is_stream = body.get("stream")
    headers = [(b"content-type", b"text/event-stream" if is_stream else b"application/json")]
    if not is_stream:
        headers.append((b"content-length", str(len(_BODY)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if not is_stream:
        await send({"type": "http.response.body", "body": _BODY, "more_body": False})
        return
    async for chunk in _with_end(body):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _chunks(body: dict[str, Any]) -> AsyncIterator[bytes]:
    for _ in range(body["max_tokens"]):
        yield _CHUNK
        if body["model"] == NEVER:
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def _starlette() -> Any:
    """Make a Starlette application with one middleware and one exception handler, which all its messages pass."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        body = json.loads(await request.body())
        if not body.get("stream"):
            return Response(_BODY, media_type="application/json")
        return StreamingResponse(_with_end(body), media_type="text/event-stream")

    def label(app: Any) -> Any:
        async def labelled(scope: Any, receive: Any, send: Any) -> None:
            async def send_labelled(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"].append((b"x-request-id", b"label"))
                await send(message)

            await app(scope, receive, send_labelled)

        return labelled

    async def refuse(request: Request, error: Exception) -> Response:
        return Response(str(error), 500)

    # As many routes precede the measured one as in the gateway.
    others = [Route(f"/other/{number}", answer) for number in range(9)]
    routes = [*others, Route("/v1/chat/completions", answer, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(label)], exception_handlers={TandemError: refuse})


async def _start_fastapi(stack: AsyncExitStack) -> int:
    from fastapi import FastAPI, Request
    from fastapi.responses import Response, StreamingResponse

    app = FastAPI()

    async def answer(request: Request) -> Response:
        body = json.loads(await request.body())
        if not body.get("stream"):
            return Response(_BODY, media_type="application/json")
        return StreamingResponse(_with_end(body), media_type="text/event-stream")

    # The annotations are local names, which FastAPI would resolve among the module's.
    answer.__annotations__ = {"request": Request, "return": Response}
    app.post("/v1/chat/completions", response_model=None)(answer)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, http="httptools", access_log=False, log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)

    async def stop() -> None:
        server.should_exit = True
        await serving

    stack.push_async_callback(stop)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


async def _with_end(body: dict[str, Any]) -> AsyncIterator[bytes]:
    async for chunk in _chunks(body):
        yield chunk
    yield b"data: [DONE]\n\n"


if __name__ == "__main__":
    sys.exit(main())
