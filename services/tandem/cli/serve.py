"""Owns the start and the end of all that `tandem serve` runs on this machine; never serves a request itself."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module

from tandem.cli.gateway_child import GatewayChild
from tandem.cli.logs import set_up_logging
from tandem.cli.progress import Progress
from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved
from tandem.stores.embedded import EmbeddedServer

READY_TIMEOUT_S = 180.0


def run(resolved: Resolved, _args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, then drain and leave no process behind."""
    set_up_logging()
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    progress = Progress(SystemClock())
    with ExitStack() as stack:
        gateway = _start(resolved.config, stack, progress, stop)
        if gateway is None:
            return 0
        progress.done()
        print(_banner(gateway.url, resolved.config), flush=True)  # noqa: T201 - what the user waits for
        while not stop.wait(0.5):
            if gateway.exit_code() is not None:
                raise TandemError(ErrorKind.INTERNAL, f"the gateway ended with code {gateway.exit_code()}")
        print("\ndraining ...", file=sys.stderr, flush=True)  # noqa: T201
    return 0


def _start(config: Config, stack: ExitStack, progress: Progress, stop: threading.Event) -> GatewayChild | None:
    """Start everything in order; None when `stop` was set on the way. What was started is on the stack."""
    pools = {pool: size for pool in ("prefill", "decode", "mixed") if (size := getattr(config.serve, pool))}
    num_workers = sum(pools.values())
    config = _with_threads(config, num_workers)
    if not config.redis.url:
        progress.step("redis", "starting an embedded server")
        server = stack.enter_context(EmbeddedServer.start())
        config = replace(config, redis=replace(config.redis, url=server.url))
    progress.step("model", f"preparing {config.model.id}")
    _prepare_model(config)
    progress.step("ray", "starting")
    local = import_module("tandem.cli.local_ray")  # imports ray and torch: not before the first word to the user
    if stop.is_set():
        return None
    stack.enter_context(local.local_ray(num_workers))
    names = " + ".join(f"{size} {pool}" for pool, size in pools.items())
    progress.step("workers", f"{names}, threads each: {config.engine.num_threads}")
    local.deploy(config, pools)
    progress.step("gateway", "starting, then moving a test block between the workers")
    gateway = stack.enter_context(GatewayChild(config))
    if not gateway.wait_until_listening():
        raise TandemError(ErrorKind.INTERNAL, "the gateway did not start")
    problem = gateway.wait_until_ready(stop, READY_TIMEOUT_S)
    if problem is not None and not stop.is_set():
        raise TandemError(ErrorKind.INTERNAL, f"not ready within {READY_TIMEOUT_S:g} s: {problem}")
    return None if stop.is_set() else gateway


def _with_threads(config: Config, num_workers: int) -> Config:
    """Divide the cores among the workers of this machine, so that they do not fight for them."""
    if config.engine.num_threads:
        return config
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    return replace(config, engine=replace(config.engine, num_threads=num_threads))


def _prepare_model(config: Config) -> None:
    """Fetch and convert the model once, before several workers want it."""
    catalog = import_module("tandem.runtime.catalog")
    catalog.locate(config.model.id, catalog.cache_root(config.model.cache_dir))


def _banner(url: str, config: Config) -> str:
    model = config.model.served_name or config.model.id
    body = f'{{"model": "{model}", "temperature": 0, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    return f"""
Tandem serves {model} at {url}

  curl -i {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{body}'

  tandem chat --url {url}        Ctrl-C drains and stops
"""
