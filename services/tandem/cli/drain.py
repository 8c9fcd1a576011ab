"""Implement `tandem drain`: stop workers from accepting jobs and wait for the jobs they have; workers keep running."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from pathlib import Path

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
    num_left = asyncio.run(_drain_one(config, args.worker, timeout_s, undo=args.undo))
    if args.undo:
        print(f"{args.worker} accepts new jobs again")  # noqa: T201 - the command's output
        return 0
    return _print_result(args.worker, num_left, timeout_s)


async def _drain_one(config: Config, worker: str, timeout_s: float, *, undo: bool) -> int:
    async with members_of(config) as members:
        record = await members.find(worker)
        try:
            return await _drain(members.trust, record.worker, timeout_s, undo=undo)
        except grpc.aio.AioRpcError as error:
            what = f"undo the drain of worker {worker}" if undo else f"drain worker {worker}"
            raise TandemError(ErrorKind.WORKER_LOST, f"cannot {what}: {reason_of(error)}") from error


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

    If the worker has ended without removing its file, there is nothing left to drain: returns 0.
    """
    try:
        return _print_result(worker.id, await _drain(trust, worker, timeout_s), timeout_s)
    except grpc.aio.AioRpcError as error:
        # A failed call alone does not show that the worker has ended: it may have refused the call's signature.
        has_ended = means_other_life(error) or await refuses_connections(worker.address, PROBE_S)
        what = "does not run any more" if has_ended else f"is not drained: {reason_of(error)}"
        print(f"{worker.id} {what}")  # noqa: T201 - the command's output
        return 0 if has_ended else 1


async def _drain(trust: PeerAuth, worker: WorkerRef, timeout_s: float, *, undo: bool = False) -> int:
    """Drain a worker, or undo its drain, and return the number of jobs and leases that are left."""
    request = worker_pb2.DrainRequest(timeout_ms=round(timeout_s * 1e3), undo=undo)
    async with open_stub(trust, worker) as stub:
        reply = await stub.Drain(request, timeout=timeout_s + MARGIN_S)
        return int(reply.num_left)


def _print_result(worker: str, num_left: int, timeout_s: float) -> int:
    result = f"{num_left or 'no'} jobs and leases are left" + (f" after {timeout_s:g} s" if num_left else "")
    print(f"{worker} accepts no new jobs; {result}")  # noqa: T201 - the command's output
    return 1 if num_left else 0
