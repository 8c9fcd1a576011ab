"""A gateway program before the door's worker, in a process of its own, with all telemetry or with none; measures
nothing.

    python -m loadtest.telemetry_server off|on --worker ID@ADDRESS --redis URL [--log FILE] [--core N]

`on` is the program as it is, with a JSON line for each request in `--log` and whatever OpenTelemetry's variables ask
for. Says its URL on stdout and serves until stdin ends. `off` needs nothing that an older commit lacks, so that this
file can be run with the packages of one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import uvloop

from tandem.core.config import Config, GatewayConfig, RedisConfig
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.gateway.main import Gateway


class DoorGateway(Gateway):
    """Its only worker is known from the start, and in no registry."""

    worker = WorkerRef(WorkerId(""), Incarnation(1), "")

    async def _discover(self) -> Mapping[WorkerRef, str]:
        return {self.worker: ""}


async def _serve(config: Config) -> None:
    gateway = DoorGateway(config)
    await gateway.start()
    async with asyncio.timeout(30):
        while gateway._dispatcher.ready() is not None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()
    sys.stdout.write(json.dumps({"url": gateway.url}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await gateway.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtest.telemetry_server")
    parser.add_argument("side", choices=("off", "on"))
    parser.add_argument("--worker", required=True)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--log", default="")
    parser.add_argument("--core", type=int, help="the only one to run on")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    name, _, address = args.worker.partition("@")
    DoorGateway.worker = WorkerRef(WorkerId(name), Incarnation(1), address)
    config = Config(gateway=GatewayConfig(port=0, auth="off"), redis=RedisConfig(url=args.redis))
    uvloop.run(_serve(_told(config, args.log) if args.side == "on" else _untold(config)))
    return 0


def _untold(config: Config) -> Config:
    """Without the console, and with nothing in the place of what counts tokens and answers, as far as this commit has
    it. What a request's ledger costs stays."""
    try:
        from tandem.gateway.measures import Measures
        from tandem.gateway.pace import Pace
    except ImportError:
        return config

    def nothing(*_: Any) -> None:
        pass

    for name in ("responded", "admitted", "refused", "begun", "answered"):
        setattr(Measures, name, nothing)
    setattr(Pace, "left", nothing)  # noqa: B010 - not an assignment to a method, to the eye of mypy
    telemetry = replace(config.telemetry, log_requests="off")
    return replace(config, telemetry=telemetry, gateway=replace(config.gateway, console=False))


def _told(config: Config, log: str) -> Config:
    import logging

    from tandem.obs.logs import set_up_logging

    telemetry: Any = replace(config.telemetry, log_format="json", log_requests="all")
    set_up_logging(telemetry, "tandem-gateway", handlers=[logging.FileHandler(log)])
    return replace(config, telemetry=telemetry)


if __name__ == "__main__":
    sys.exit(main())
