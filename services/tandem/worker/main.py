"""Run the process of `tandem worker`: handle signals, and print a line of JSON when the worker is ready."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.worker.node import run_node

if TYPE_CHECKING:
    from tandem.worker.model.worker_model import WorkerModel
    from tandem.worker.worker import Worker

SWITCH_INTERVAL_S = 0.001
"""Switch interval of Python threads in seconds, short because the event loop must not wait for the engine's thread."""

_log = logging.getLogger("tandem.worker")


def run(config: Config) -> int:
    """Load the model, serve as a worker until a signal arrives, and return the exit status of the process: 0 after
    SIGTERM or SIGINT, 1 after a failure, which was logged.

    If a worker spans several machines and this is not the first of them (`engine.node_rank` above 0), runs only the
    ranks of this machine."""
    if config.engine.node_rank > 0:
        return run_node(config)
    prepare_process()
    _log.info("importing torch")
    # Imported after prepare_process, because the model's libraries read the environment on import.
    from tandem.worker.model.worker_model import load_worker_model

    try:
        model = load_worker_model(config)
        return uvloop.run(_serve(config, model))
    except TandemError as error:
        _log.error("the worker cannot run: %s", error.message)
        return 1
    except KeyboardInterrupt:
        return 0


def prepare_process() -> None:
    """Make OpenMP threads of this process wait without spinning, and shorten the thread switch interval of Python. Must
    be called before torch is imported."""
    # Workers share cores: a thread pool that has nothing to do must sleep instead of spinning.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def settle_process() -> None:
    """Exclude all objects that exist now from garbage collection, and give the threads their names in the kernel too,
    for `top -H` and profilers. Called once a worker runs with all its threads.

    Most of the about 200,000 objects exist as long as the process, and a collection that visits them stops every thread
    for more than a tenth of a second, in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():  # its name is the program's
            with contextlib.suppress(OSError):  # only Linux has this
                Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name)


async def _serve(config: Config, model: WorkerModel) -> int:
    from tandem.worker.factory import start_worker

    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    worker = await start_worker(config, model)
    settle_process()
    _print_ready(worker, config)
    broken = asyncio.create_task(worker.failed())
    try:
        await _first(signals.get(), broken)
        if not broken.done():
            _log.info("the worker stops and waits up to %g s (worker.drain_s) for its jobs", config.worker.drain_s)
            await _first(worker.drain(config.worker.drain_s), signals.get(), broken)
    finally:
        await worker.stop()
        has_failed = broken.done()
        broken.cancel()
    return 1 if has_failed else 0


async def _first(*waits: Awaitable[object]) -> None:
    """Wait until one of the awaitables has ended, then cancel those coroutines that have not; tasks are left alone."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    mine = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)


def _print_ready(worker: Worker, config: Config) -> None:
    """Print one line of JSON for the process that started this one."""
    me = worker.me
    ready = {"ready": True, "worker": me.id, "address": me.address, "incarnation": me.incarnation}
    sys.stdout.write(json.dumps({**ready, "pool": config.worker.pool}) + "\n")
    sys.stdout.flush()
