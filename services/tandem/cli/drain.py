"""`tandem drain`: tells a worker to take no new work and waits for what it has; never ends the worker."""

from __future__ import annotations

import argparse
import asyncio

import grpc.aio

from tandem.cli.members import members_of
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved
from tandem.wire.gen import worker_pb2
from tandem.wire.trust import reason_of

MARGIN_S = 5.0
"""For the answer, beyond the time that the worker is given."""
MAX_TIMEOUT_S = 86_400.0


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Returns 0 when nothing is left, else 1. Raises TandemError."""
    timeout_s = resolved.config.worker.drain_s if args.timeout is None else args.timeout
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        message = f"--timeout {timeout_s:g} must be between 0 and {MAX_TIMEOUT_S:g} seconds"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="timeout")
    num_left = asyncio.run(_drain(resolved, args.worker, timeout_s))
    said = f"{num_left} jobs and leases are left after {timeout_s:g} s" if num_left else "nothing is left"
    print(f"{args.worker} takes no new work, {said}")  # noqa: T201 - the command's output
    return 1 if num_left else 0


async def _drain(resolved: Resolved, worker: str, timeout_s: float) -> int:
    async with members_of(resolved.config) as members:
        record = await members.find(worker)
        request = worker_pb2.DrainRequest(timeout_ms=round(timeout_s * 1e3))
        try:
            async with members.stub(record.worker) as stub:
                reply = await stub.Drain(request, timeout=timeout_s + MARGIN_S)
        except grpc.aio.AioRpcError as error:
            raise TandemError(ErrorKind.WORKER_LOST, f"worker {worker}: {reason_of(error)}") from error
        return reply.num_left
