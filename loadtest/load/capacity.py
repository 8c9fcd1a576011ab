"""Measure what one client process can send and time: a load test, at rising rates, of a server that computes nothing.

    taskset -c 2,3 python -m loadtest.load.capacity [--rates 100,200,400] [--tokens 64] [--seconds 10]

The server is a process of its own. It answers each request with a token every `--gap-ms`, so any delay is the client's:
how late it sent, and how much later than `--gap-ms` it received the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

from loadtest.client.calls import Caller
from loadtest.client.client import Client
from loadtest.client.endpoint import ANSWER_TOKENS, Endpoint
from loadtest.client.open_loop import MAX_OPEN, OpenLoop, open_session
from loadtest.common.tables import ms, table
from loadtest.load.stats_collector import StatsCollector
from tandem.core.clock import SystemClock
from tandem.core.slo import Slo
from tandem.workload.mix import poisson
from tandem.workload.request_class import RequestClass

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
_TOKEN = b'data: {"object":"text_completion","choices":[{"index":0,"text":" of","token_ids":[282]}]}\n\n'
_END = b"data: [DONE]\n\n"


class _Answering(asyncio.Protocol):
    """Protocol of one connection that answers every request with a fixed number of tokens."""

    def __init__(self, num_tokens: int, gap_s: float) -> None:
        self._num_left, self._gap_s, self._num_missing, self._head = num_tokens, gap_s, -1, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._num_missing < 0:
            self._head += data
            head, sign, data = self._head.partition(b"\r\n\r\n")
            if not sign:
                return
            if not head.startswith(b"POST"):  # some clients look for models or metrics first
                self._transport.abort()
                return
            self._num_missing = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        self._num_missing -= len(data)
        if self._num_missing == 0:
            self._transport.write(_HEAD)
            asyncio.get_running_loop().call_later(self._gap_s, self._send_token)

    def _send_token(self) -> None:
        if self._transport.is_closing():
            return
        self._num_left -= 1
        self._transport.write(_TOKEN if self._num_left else _TOKEN + _END)
        if self._num_left:
            asyncio.get_running_loop().call_later(self._gap_s, self._send_token)
        else:
            self._transport.close()


def _serve(port_pipe: Connection, num_tokens: int, gap_s: float) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Answering(num_tokens, gap_s), "127.0.0.1", 0, backlog=4096)
        port_pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.load.capacity", description="What one client process can do.")
    parser.add_argument(
        "--rates", default="100,200,400,800", metavar="R,R,...", help="requests/s (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="between tokens (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate (default: %(default)s)")
    args = parser.parse_args(argv)
    heads = ["asked req/s", "done req/s", "tok/s", "failed", "of a core", "µs a token", "late p50 / p99 ms"]
    heads.append("ITL p50 / p99 ms")
    rows = [_measure(args, float(rate)) for rate in args.rates.split(",")]
    sys.stdout.write(table(heads, rows))
    return 0


def _measure(args: argparse.Namespace, rate: float) -> list[str]:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=_serve, args=(sender, args.tokens, args.gap_ms / 1e3), daemon=True)
    server.start()
    try:
        return asyncio.run(_load(args, rate, f"http://127.0.0.1:{receiver.recv()}"))
    finally:
        server.terminate()
        server.join()


async def _load(args: argparse.Namespace, rate: float, url: str) -> list[str]:
    endpoint, clock, tally = Endpoint(url=url, model="none", extra=ANSWER_TOKENS), SystemClock(), StatsCollector(Slo())
    caller = Caller(endpoint, {})
    groups = [RequestClass("same", 1.0, (args.prompt, args.prompt), (args.tokens, args.tokens))]
    requests = poisson(groups, 0, round(rate * args.seconds), rate)
    before = resource.getrusage(resource.RUSAGE_SELF)
    async with open_session() as session:
        loop = OpenLoop(Client(endpoint, session, clock), clock, asyncio.sleep, MAX_OPEN, tally.ended, tally.sent)
        await loop.run(map(caller.call, requests))
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    itl = tally.scopes(tally.last_end_s)[0].times["itl"]
    return [
        f"{rate:g}",
        f"{(tally.num_ended - tally.num_failed) / tally.last_end_s:.0f}",
        f"{tally.num_tokens / tally.last_end_s:,.0f}",
        f"{tally.num_failed}",
        f"{busy_s / tally.last_end_s:.0%}",
        f"{busy_s / max(tally.num_tokens, 1) * 1e6:.0f}",
        f"{ms(tally.late.percentile(0.5))} / {ms(tally.late.percentile(0.99))}",
        f"{ms(itl.p50)} / {ms(itl.p99)}",
    ]


if __name__ == "__main__":
    sys.exit(main())
