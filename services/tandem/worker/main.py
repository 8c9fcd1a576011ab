"""Run the process of `tandem worker`: a worker, or one machine's ranks of a worker that spans several machines
(engine.node_rank above 0)."""

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

from tandem.core.addresses import format_host
from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.worker.ranks.local_rank import RankChild

if TYPE_CHECKING:
    from tandem.worker.model.worker_model import WorkerModel
    from tandem.worker.worker import Worker

SWITCH_INTERVAL_S = 0.001
"""Switch interval of Python threads in seconds, short because the event loop must not wait for the engine's thread."""
END_S = 5.0
"""Seconds for a rank to stop its reads of KV and end; it is killed after that."""
POLL_S = 0.1

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


def run_node(config: Config) -> int:
    """Run this machine's ranks for one incarnation of the worker, until a signal arrives or one of them ends. The
    worker's first rank is on the machine of engine.master_addr.

    Returns the exit status: 0 after SIGTERM or SIGINT, and 1 when a rank has ended. All ranks end when the worker ends.
    The supervisor of this program should then start it again, so that it waits for the worker's next incarnation.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    engine = config.engine
    address = f"{format_host(engine.master_addr)}:{engine.master_port}"
    _log.info("ranks %d to %d connect to the first rank at %s", engine.node_ranks[0], engine.node_ranks[-1], address)
    ranks = {rank: RankChild(config, address, rank) for rank in engine.node_ranks}
    try:
        while not stop.wait(POLL_S):
            for rank, process in ranks.items():
                if (reason := process.ended()) is not None:
                    _log.error("the ranks of this machine end, because rank %d has: %s", rank, reason)
                    return 1
        return 0
    finally:
        for process in ranks.values():
            process.end()
        for process in ranks.values():
            process.stop(END_S)


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
    from tandem.worker.worker import start_worker

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
