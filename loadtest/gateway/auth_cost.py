"""Measure what peer authentication costs a call to a worker: signing, verifying, and whole calls with and without it.

    python -m loadtest auth [--rounds 20] [--calls 500]

Figures are processor time over all threads. Server and clients share a process, so a whole call includes both sides;
rounds without a secret, with one, and of an unauthenticated peer alternate, because machines are noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio

from tandem.core.ids import Incarnation
from tandem.wire.call_auth import CallCheck, headers_of
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.secret_file import SecretFile

LIFE = Incarnation(1)
CANCEL = "/tandem.v1.Worker/Cancel"
_Call = Callable[[], Awaitable[object]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest auth", description="What the cluster's secret costs a call.")
    parser.add_argument("--rounds", type=int, default=20, help="of each kind, alternating (default: 20)")
    parser.add_argument("--calls", type=int, default=500, help="in a round (default: 500)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "secret"
        path.write_text(secrets.token_hex(32))
        sign_s, judge_s = _parts(path, args.rounds, args.calls)
        calls = asyncio.run(_calls(path, args.rounds, args.calls))
    sys.stdout.write(f"| | us of a core, median of {args.rounds} rounds of {args.calls} |\n|---|---:|\n")
    rows = {"sign a call": sign_s, "judge one": judge_s, **calls}
    sys.stdout.write("".join(f"| {name} | {seconds * 1e6:.1f} |\n" for name, seconds in rows.items()))
    return 0


def _parts(path: Path, num_rounds: int, num_calls: int) -> tuple[float, float]:
    """Return the seconds of signing a call and of verifying it."""
    trust, secret, check = PeerAuth("loadtest", SecretFile(path)), SecretFile(path), CallCheck(LIFE)
    signing, judging = [], []
    for _ in range(num_rounds):
        began = time.process_time()
        signed = [trust.sign(CANCEL, LIFE) for _ in range(num_calls)]
        signing.append((time.process_time() - began) / num_calls)
        began = time.process_time()
        for call in signed:
            now = time.time()
            if check.judge(headers_of(call.metadata), CANCEL, secret.current(now), now) is not None:
                raise RuntimeError("a signed call is not believed")
        judging.append((time.process_time() - began) / num_calls)
    return statistics.median(signing), statistics.median(judging)


class _Idle(WorkerServicer):
    async def Cancel(self, request: worker_pb2.CancelRequest, context: Any) -> worker_pb2.CancelReply:
        return worker_pb2.CancelReply()


async def _calls(path: Path, num_rounds: int, num_calls: int) -> dict[str, float]:
    """Return the seconds of a call, one after the other, for each kind of client."""
    open_to_all, member = PeerAuth("loadtest"), PeerAuth("loadtest", SecretFile(path))
    async with AsyncExitStack() as stack:
        plain, guarded = [await _serve(trust, stack) for trust in (open_to_all, member)]
        request = worker_pb2.CancelRequest()
        anybody, ours, stranger = open_to_all.stub(plain, LIFE), member.stub(guarded, LIFE), WorkerStub(guarded)
        kinds: dict[str, _Call] = {
            "a call without a secret": lambda: anybody.Cancel(request),
            "a call with one": lambda: ours.Cancel(request),
            "a stranger's call, refused": lambda: _refused(stranger, request),
        }
        took: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(num_rounds):
            for name, call in kinds.items():
                began = time.process_time()
                for _ in range(num_calls):
                    await call()
                took[name].append((time.process_time() - began) / num_calls)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


async def _serve(trust: PeerAuth, stack: AsyncExitStack) -> grpc.aio.Channel:
    """Start an idle worker with this authentication and return a channel to it."""
    server = trust.server(LIFE)
    add_WorkerServicer_to_server(_Idle(), server)
    port = trust.listen(server, "127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    return await stack.enter_async_context(trust.open_channel(f"127.0.0.1:{port}"))


async def _refused(stub: WorkerStub, request: worker_pb2.CancelRequest) -> None:
    try:
        await stub.Cancel(request)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return
        raise
    raise RuntimeError("a stranger got in")
