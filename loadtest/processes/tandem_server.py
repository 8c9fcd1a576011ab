"""Run Tandem without Ray: a Redis, workers and a gateway until stopped.

python -m loadtest.processes.tandem_server --port N [--prefill N] [--decode N] [--mixed N] [any flag of `tandem serve`]

Without Ray the start takes seconds and nothing idles beside what is measured; the programs are those of `tandem serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest.processes.workers import MeasurementError, running_worker
from tandem.cli.resource_assignment import threads_by_pool
from tandem.core.ids import WorkerRef
from tandem.stores.embedded_redis import EmbeddedServer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.processes.tandem_server")
    parser.add_argument("--port", type=int, required=True)
    for pool, default in (("prefill", 0), ("decode", 0), ("mixed", 1)):
        parser.add_argument(f"--{pool}", type=int, default=default, help="workers of this pool (default: %(default)s)")
    args, flags = parser.parse_known_args(argv)
    try:
        asyncio.run(_serve(args, flags))
    except MeasurementError as error:
        sys.stderr.write(f"loadtest.processes.tandem_server: {error}\n")
        return 1
    return 0


async def _serve(args: argparse.Namespace, flags: list[str]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    pools = [pool for pool in ("prefill", "decode", "mixed") for _ in range(getattr(args, pool))]
    threads = {} if "--num-threads" in flags else threads_by_pool(Counter(pools))
    async with running_gateway(pools, threads, args.port, flags) as gateway:
        ended = asyncio.create_task(gateway.process.wait())
        stop_requested = asyncio.create_task(stopped.wait())
        await asyncio.wait([ended, stop_requested], return_when=asyncio.FIRST_COMPLETED)
        stop_requested.cancel()


class RunningGateway(NamedTuple):
    """`process`: the gateway's; it prints one line when it listens, JSON with its `url`. `workers`: in the order of
    their pools."""

    process: asyncio.subprocess.Process
    workers: Sequence[WorkerRef]

    async def url(self) -> str:
        """Wait until the gateway listens, and return its URL. Raises MeasurementError where it ends instead. Call this
        once."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise MeasurementError("the gateway did not start")
        return str(msgspec.json.decode(line)["url"])


@asynccontextmanager
async def running_gateway(
    pools: Sequence[str], threads: Mapping[str, int], port: int, flags: Sequence[str]
) -> AsyncIterator[RunningGateway]:
    """Run a Redis, one worker for each of `pools` and a gateway inside the context.

    `threads`: number of threads of each worker by its pool, for those that do not get it by `flags`. `flags`: of all
    programs; the gateway requires no keys unless they say otherwise.
    """
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        redis = await asyncio.to_thread(EmbeddedServer.start)
        stack.callback(redis.stop)
        flags = [*flags, "--redis-url", redis.url]
        own = {pool: [*flags, "--num-threads", str(count)] for pool, count in threads.items()}
        workers = [running_worker(pool, own.get(pool, flags), logs / f"{pool}-{i}") for i, pool in enumerate(pools)]
        refs = await asyncio.gather(*map(stack.enter_async_context, workers))
        command = (sys.executable, "-m", "tandem.cli", "gateway", "--auth", "off", "--port", str(port), *flags)
        gateway = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            yield RunningGateway(gateway, refs)
        finally:
            if gateway.returncode is None:
                gateway.terminate()
            await gateway.wait()


if __name__ == "__main__":
    sys.exit(main())
