"""The process of `tandem worker`: signals, the line that says it is ready; composes nothing itself."""

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

if TYPE_CHECKING:
    from tandem.worker.model.worker_model import WorkerModel
    from tandem.worker.worker import Worker

SWITCH_INTERVAL_S = 0.001
"""Python threads: the event loop must not wait long for the engine's thread to let go."""

_log = logging.getLogger("tandem.worker")


def run(config: Config) -> int:
    """Serve until told to stop. Returns the exit status: 0 after SIGTERM or SIGINT, 1 when something failed."""
    prepare_process()
    # Only now: importing the model's libraries reads the environment.
    from tandem.worker.model.worker_model import load_worker_model

    try:
        model = load_worker_model(config)
        return uvloop.run(_serve(config, model))
    except TandemError as error:
        _log.error("%s", error.message)
        return 1
    except KeyboardInterrupt:
        return 0


def prepare_process() -> None:
    """To be called before torch is imported."""
    # Workers share cores: a thread pool that has nothing to do must sleep instead of spinning.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def settle_process() -> None:
    """To be called once a worker has started and every thread runs.

    What is there by now, 200,000 objects, mostly stays: a collection that looks at all of it stops every thread for
    more than a tenth of a second, in whatever step it falls. And the kernel learns the threads' names, for `top -H` and
    profilers.
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
    _say_ready(worker, config)
    broken = asyncio.create_task(worker.failed())
    try:
        await _first(signals.get(), broken)
        if not broken.done():
            _log.info("stopping: waiting up to %g s for running work", config.worker.drain_s)
            await _first(worker.drain(config.worker.drain_s), signals.get(), broken)
    finally:
        await worker.stop()
        has_failed = broken.done()
        broken.cancel()
    return 1 if has_failed else 0


async def _first(*waits: Awaitable[object]) -> None:
    """Until one of them has ended. Coroutines that have not are cancelled, tasks are left alone."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    mine = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)


def _say_ready(worker: Worker, config: Config) -> None:
    """One line of JSON for whoever started this process."""
    me = worker.me
    ready = {"ready": True, "worker": me.id, "address": me.address, "incarnation": me.incarnation}
    sys.stdout.write(json.dumps({**ready, "pool": config.worker.pool}) + "\n")
    sys.stdout.flush()
