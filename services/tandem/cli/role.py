"""Implement `tandem role`: list the workers of a cluster, or set the role of one without a restart."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence, Set
from typing import get_args

import grpc.aio

from tandem.cli.cluster_members import ClusterMembers, members_of
from tandem.core.config import Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import Resolved
from tandem.stores.worker_registry import WorkerRecord
from tandem.wire.gen import worker_pb2
from tandem.wire.peer_auth import reason_of

ANSWER_S = 3.0
_HEADINGS = ("WORKER", "POOL", "ROLE", "LANES", "INCARNATION", "ADDRESS", "STATE")


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Print the list of workers, or set a worker's role if the arguments name a worker, and print the change.

    Returns the exit code 0. Raises TandemError if a worker is named without a role or is unknown, or Redis does not
    answer."""
    if args.worker and not args.role:
        message = f"the new role of {args.worker} is missing: add one of {', '.join(get_args(Pool))}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="role")
    print(asyncio.run(_run(resolved, args.worker, args.role)))  # noqa: T201 - the command's output
    return 0


async def _run(resolved: Resolved, worker: str | None, role: str | None) -> str:
    async with members_of(resolved.config) as members:
        if worker is None or role is None:
            return await _listing(members)
        record = await members.find(worker)
        await members.set_role(record, role)
        others = [one for one in await members.all() if one.model == record.model and one.worker != record.worker]
        change = f"{worker}: {record.effective_role} -> {role} (pool {record.pool})"
        return change + _warning(record.model, {role, *(one.effective_role for one in others)})


def _warning(model: str, roles: Set[str]) -> str:
    """Return a line that warns where the workers of a model with one role have no partner with the other; empty where
    they have one, or are all mixed."""
    if "prefill" in roles and roles.isdisjoint({"decode", "mixed"}):
        lacks = "decode"
    elif "decode" in roles and "prefill" not in roles:
        lacks = "prefill"
    else:
        return ""
    return f"\nwarning: {model} has no {lacks} worker now, so that no request is divided between two workers"


async def _listing(members: ClusterMembers) -> str:
    records = await members.all()
    states = await asyncio.gather(*(_state(members, record) for record in records))
    rows = [_row(record, state) for record, state in zip(records, states, strict=True)]
    return table([_HEADINGS, *rows]) if rows else "no worker is registered"


def _row(record: WorkerRecord, state: str) -> tuple[str, ...]:
    worker = record.worker
    lanes = ",".join(record.lanes) or "all"
    return (worker.id, record.pool, record.effective_role, lanes, str(worker.incarnation), worker.address, state)


async def _state(members: ClusterMembers, record: WorkerRecord) -> str:
    """Return the state that a worker reports. A worker that does not answer is listed until its entry lapses."""
    try:
        async with members.stub(record.worker) as stub:
            reply = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return f"unreachable: {reason_of(error)}"
    except TandemError as error:
        return f"unreachable: {error.message}"
    return (
        f"draining, {_num_jobs(reply.load)} left" if reply.load.draining else f"live, {_num_jobs(reply.load)} running"
    )


def _num_jobs(load: worker_pb2.Load) -> int:
    return load.num_running + load.num_waiting


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines of text. Each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
