"""Implement `tandem drain`: stop workers from accepting jobs and wait for the jobs they have; workers keep running."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc.aio

from tandem.cli.cluster_members import members_of, open_stub
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.core.settings import Resolved
from tandem.wire.gen import worker_pb2
from tandem.wire.listener_probe import refuses_connections
from tandem.wire.peer_auth import PeerAuth, means_other_life, reason_of
from tandem.worker.run_file import read_run_files

T = TypeVar("T")

MARGIN_S = 5.0
"""Time for the reply, in addition to the worker's timeout."""
PROBE_S = 3.0
"""Longest wait for a connection to a worker that does not answer its call."""
MAX_TIMEOUT_S = 86_400.0


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Drain the worker that is named, or with `--local` all workers on this machine, and wait for their work to end.
    With `--undo` let the named worker accept jobs again.

    Returns the exit code: 0 if no jobs and leases are left at the end of the timeout, else 1; 0 with `--undo`. Raises
    TandemError for invalid flags, and if the named worker is unknown or does not answer."""
    config = resolved.config
    timeout_s = config.worker.drain_s if args.timeout is None else args.timeout
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        message = f"--timeout {timeout_s:g} must be between 0 and {MAX_TIMEOUT_S:g} seconds"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="timeout")
    if bool(args.worker) == args.local:
        message = "name either a worker, or --local for all workers of this machine"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="worker")
    if args.undo and (args.local or args.timeout is not None):
        raise TandemError(ErrorKind.INVALID_REQUEST, "--undo takes neither --local nor --timeout", param="undo")
    if args.local:
        return asyncio.run(_drain_local(config, timeout_s))
    if args.undo:
        asyncio.run(_call_one(config, args.worker, "undo the drain of", _undo))
        print(f"{args.worker} accepts new jobs again")  # noqa: T201 - the command's output
        return 0
    reply = asyncio.run(_call_one(config, args.worker, "drain", partial(_drain, timeout_s=timeout_s)))
    return _print_result(args.worker, reply, timeout_s)


async def _call_one(config: Config, worker: str, what: str, call: Callable[[PeerAuth, WorkerRef], Awaitable[T]]) -> T:
    """Return what `call` returns for the worker named `worker`. Raises TandemError where the worker is unknown or does
    not answer. `what`: the beginning of the error message, after "cannot"."""
    async with members_of(config) as members:
        record = await members.find(worker)
        try:
            return await call(members.trust, record.worker)
        except grpc.aio.AioRpcError as error:
            raise TandemError(ErrorKind.WORKER_LOST, f"cannot {what} worker {worker}: {reason_of(error)}") from error


async def _drain_local(config: Config, timeout_s: float) -> int:
    """Drain all workers on this machine concurrently, without Redis, which may be gone already."""
    if not config.worker.run_dir:
        message = (
            "worker.run_dir is empty: --local finds workers by their files there, so set --run-dir as for the workers"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="worker.run_dir")
    found = read_run_files(Path(config.worker.run_dir))
    trust = PeerAuth.of(f"drain-{socket.gethostname()}-{os.getpid()}", config.cluster)
    codes = await asyncio.gather(*(_drain_found(trust, worker, timeout_s) for worker in found))
    if not found:
        print(f"no worker runs on this machine: worker.run_dir {config.worker.run_dir} has no file of one")  # noqa: T201
    return max(codes, default=0)


async def _drain_found(trust: PeerAuth, worker: WorkerRef, timeout_s: float) -> int:
    """Drain a worker that was found by its run file; returns the exit code.

    If the worker has ended without removing its file, so that its address refuses connections, there is nothing left
    to drain: returns 0.
    """
    try:
        return _print_result(worker.id, await _drain(trust, worker, timeout_s), timeout_s)
    except grpc.aio.AioRpcError as error:
        # A failed call alone does not show that the worker has ended: it may have refused the call's signature.
        has_ended = means_other_life(error) or await refuses_connections(worker.address, PROBE_S)
        what = "does not run any more" if has_ended else f"is not drained: {reason_of(error)}"
        print(f"{worker.id} {what}")  # noqa: T201 - the command's output
        return 0 if has_ended else 1


async def _drain(trust: PeerAuth, worker: WorkerRef, timeout_s: float) -> worker_pb2.DrainReply:
    request = worker_pb2.DrainRequest(timeout_ms=round(timeout_s * 1e3))
    async with open_stub(trust, worker) as stub:
        return await stub.Drain(request, timeout=timeout_s + MARGIN_S)


async def _undo(trust: PeerAuth, worker: WorkerRef) -> None:
    async with open_stub(trust, worker) as stub:
        await stub.UndoDrain(worker_pb2.UndoDrainRequest(), timeout=MARGIN_S)


def _print_result(worker: str, reply: worker_pb2.DrainReply, timeout_s: float) -> int:
    """Print the result of a drain, and return the exit code of the command."""
    left = f"{reply.num_left or 'no'} jobs and leases are left"
    if reply.is_undone:
        print(f"{worker} accepts new jobs again, because its drain was undone; {left}")  # noqa: T201
        return 1
    result = left + (f" after {timeout_s:g} s" if reply.num_left else "")
    print(f"{worker} accepts no new jobs; {result}")  # noqa: T201 - the command's output
    return 1 if reply.num_left else 0
