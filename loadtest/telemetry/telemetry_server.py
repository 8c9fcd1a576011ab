"""Run a gateway with the benchmark's fake worker in a process of its own, with all telemetry or with none.

    python -m loadtest.telemetry.telemetry_server off|on --worker ID@ADDRESS --redis URL [--log FILE] [--log-all]
                                                    [--core N]

`on` runs the gateway unchanged, with its log in `--log` as JSON, and the exports that OpenTelemetry's
environment variables select. The program prints its URL on stdout and serves until stdin ends. A line of stdin, as
`{"telemetry": false, "flush": true}`, turns telemetry off or on; with `flush` all waiting spans are sent before it is
answered. `off` stays off, and needs nothing that an older commit lacks, so that this file can run with the packages of
an older commit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import uvloop

from tandem.core.config import Config, GatewayConfig, RedisConfig
from tandem.core.ids import GatewayId, Incarnation, WorkerId, WorkerRef
from tandem.gateway import main as program
from tandem.gateway.main import Gateway

_SENDING_S = 0.1
"""Longer than the span thread takes to send a batch; sending would otherwise go on in a turn without telemetry."""
_MEASURES = ("responded", "admitted", "refused", "begun", "answered")


class DoorGateway(Gateway):
    """Gateway whose only worker is known from the start, without a registry."""

    worker = WorkerRef(WorkerId(""), Incarnation(1), "")

    async def _discover(self) -> Mapping[WorkerRef, str]:
        return {self.worker: ""}


async def _serve(config: Config, switch: Switch | None) -> None:
    gateway = DoorGateway(config, GatewayId("door"))
    await gateway.start()
    async with asyncio.timeout(30):
        while gateway._dispatcher.ready() is not None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    gc.collect()
    getattr(program, "settle", gc.freeze)()  # an older one had no name for it
    _print({"url": gateway.url})
    while line := await asyncio.to_thread(sys.stdin.readline):
        fields = json.loads(line)
        if switch is not None:
            switch.turn(on=fields["telemetry"])
        if fields["flush"]:
            await _flush(gateway)
        await asyncio.sleep(_SENDING_S)
        _print({})
    await gateway.stop()


class Switch:
    """Turn metrics, traces and logs of the gateway in this process off and on.

    Parts that this commit does not have are left out. Each request still has its ledger and its record.
    """

    def __init__(self) -> None:
        try:
            from tandem.gateway.console.routes import Console
            from tandem.gateway.telemetry import request_recorder as recorder
            from tandem.gateway.telemetry.request_log import RequestLog
            from tandem.gateway.telemetry.request_metrics import RequestMetrics
            from tandem.gateway.telemetry.token_timing import TokenTiming
            from tandem.obs.tracing import OFF, begin_trace
        except ImportError:
            self._parts: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []
            return
        self._parts = [
            (recorder, "begin_trace", begin_trace, lambda _, *given: begin_trace(OFF, *given)),
            *((RequestMetrics, each, getattr(RequestMetrics, each), _nothing) for each in _MEASURES),
            *((each, "answered", each.answered, _nothing) for each in (RequestLog, Console)),
            (TokenTiming, "on_token_sent", TokenTiming.on_token_sent, _no_times),
        ]

    def turn(self, *, on: bool) -> None:
        for owner, name, real, nothing in self._parts:
            setattr(owner, name, real if on else nothing)


def _nothing(*_: Any) -> None:
    pass


def _no_times(timing: object, choice: int) -> list[float]:
    """Return a list for the caller to fill, of which nothing is evaluated."""
    return []


async def _flush(gateway: Gateway) -> None:
    """Send the pending spans."""
    spans = gateway._telemetry._spans
    if spans is not None:
        await asyncio.to_thread(spans._provider.force_flush)


def _print(facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtest.telemetry.telemetry_server")
    parser.add_argument("side", choices=("off", "on"))
    parser.add_argument("--worker", required=True)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--log", default="", help="file of the log")
    parser.add_argument("--log-all", action="store_true", help="log every request, not only failed ones")
    parser.add_argument("--core", type=int, help="the only one to run on")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    name, _, address = args.worker.partition("@")
    DoorGateway.worker = WorkerRef(WorkerId(name), Incarnation(1), address)
    config = Config(gateway=GatewayConfig(port=0, auth="off"), redis=RedisConfig(url=args.redis))
    if args.side == "off":
        Switch().turn(on=False)
        uvloop.run(_serve(config, None))
    else:
        uvloop.run(_serve(_quiet(config, args.log, is_all=args.log_all), Switch()))
    return 0


def _quiet(config: Config, log: str, *, is_all: bool) -> Config:
    from tandem.obs.logs.log_handler import LineHandler
    from tandem.obs.logs.logging_setup import set_up_logging

    telemetry: Any = replace(config.telemetry, log_format="json", log_requests="all" if is_all else "failed")
    set_up_logging(telemetry, "tandem-gateway", handlers=[LineHandler(open(log, "a"))])  # noqa: SIM115
    return replace(config, telemetry=telemetry)


if __name__ == "__main__":
    sys.exit(main())
