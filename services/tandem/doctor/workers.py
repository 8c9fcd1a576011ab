"""Check the workers of a cluster: the registry's list, and each worker's own description."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import grpc.aio

from tandem.core.clock import Clock, wall_ns
from tandem.core.errors import TandemError
from tandem.core.ids import WorkerRef
from tandem.doctor.clock_skew import Skew
from tandem.doctor.finding import Finding, fail, ok, skip, warn, wrong
from tandem.stores.worker_registry import WorkerRecord
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.peer_auth import reason_of

ANSWER_S = 5.0
NUM_AT_ONCE = 32
_DECODES = {"decode", "mixed"}


class MemberList(Protocol):
    """Interface of a cluster's list of workers, with connections to them.

    `all` returns the registered workers; `stub` opens a gRPC connection to one of them. Both raise TandemError if they
    get no answer."""

    async def all(self) -> tuple[WorkerRecord, ...]: ...

    def stub(self, worker: WorkerRef) -> AbstractAsyncContextManager[WorkerStub]: ...


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Hold what is known about a worker, from the registry and from the worker's own description.

    `problem`: why the worker did not describe itself, else empty; with a problem, the other fields have what the
    registry knows. `role`: role in which routers use the worker. `is_stranger`: it failed to authenticate, or refused
    our signature. `redis_problem`: Redis error that it reports, else empty. `transport`: name of the transport that
    moves its KV. `layout`: KV layout as text. `skew`: difference between its clock and ours, None if its version does
    not report its clock."""

    ref: WorkerRef
    role: str
    model: str
    fingerprint: str
    problem: str = ""
    is_stranger: bool = False
    is_draining: bool = False
    redis_problem: str = ""
    transport: str = ""
    layout: str = ""
    skew: Skew | None = None

    @property
    def is_live(self) -> bool:
        return not self.problem

    @property
    def kind(self) -> tuple[str, str, str]:
        """Return model, fingerprint and transport; KV moves only between workers for which all three are equal."""
        return self.model, self.fingerprint, self.transport


@dataclass(frozen=True, slots=True)
class WorkerList:
    """Hold the workers of a cluster as far as they are known.

    `reason`: why they could not be listed, else empty; `workers` is empty then."""

    workers: tuple[WorkerFacts, ...] = ()
    reason: str = ""


async def read_workers(members: MemberList, clock: Clock) -> WorkerList:
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def described(record: WorkerRecord) -> WorkerFacts:
        async with gate:
            return await _describe(members, record, clock)

    return WorkerList(tuple(await asyncio.gather(*map(described, await members.all()))))


def judge_workers(worker_list: WorkerList) -> tuple[Finding, ...]:
    if worker_list.reason:
        return (skip("workers", worker_list.reason),)
    if not worker_list.workers:
        fix = "run `tandem worker --redis-url URL --secret-file FILE`, or `tandem serve`; with the same --namespace"
        return (warn("workers", "no worker is registered: gateways answer 503", fix),)
    live = [worker for worker in worker_list.workers if worker.is_live]
    lost = tuple(_lost_finding(worker) for worker in worker_list.workers if not worker.is_live)
    fix = "repair redis.url of that worker, and its network to Redis"
    ill = [
        warn("workers", f"{w.ref.id} reports a Redis error: {w.redis_problem}", fix) for w in live if w.redis_problem
    ]
    summary = ", ".join(f"{w.ref.id} ({w.role}{', draining' if w.is_draining else ''})" for w in live)
    return (*((ok("workers", f"{len(live)} answer: {summary}"),) if live else ()), *lost, *ill)


def judge_fingerprints(worker_list: WorkerList) -> tuple[Finding, ...]:
    """Return a finding for each model on whether its workers have equal fingerprints and transports.

    Different ones are a warning, because KV then moves only between workers for which both are equal."""
    live = [worker for worker in worker_list.workers if worker.is_live]
    if not live:
        return (skip("fingerprints", worker_list.reason or "no worker answers"),)
    return tuple(_fingerprint_finding(model, found) for model, found in _by_model(live))


def judge_roles(worker_list: WorkerList, disaggregation: str) -> tuple[Finding, ...]:
    """Return a finding for each model on whether some of its workers prefill and some decode, so that KV can move from
    the former to the latter.

    `disaggregation`: value of gateway.disaggregation. If it is strict, a missing role is a failure, else a warning; if
    it is off, or all workers are mixed and it is not strict, no role is missing.
    """
    draining = [worker for worker in worker_list.workers if worker.is_live and worker.is_draining]
    live = [worker for worker in worker_list.workers if worker.is_live and not worker.is_draining]
    if not live:
        hint = "; `tandem drain WORKER --undo` ends the drain of one" if draining else ""
        return (skip("roles", worker_list.reason or f"no worker that accepts jobs answers{hint}"),)
    return tuple(_role_finding(model, found, disaggregation, draining) for model, found in _by_model(live))


def skews_of(worker_list: WorkerList) -> list[Skew]:
    return [worker.skew for worker in worker_list.workers if worker.skew is not None]


async def _describe(members: MemberList, record: WorkerRecord, clock: Clock) -> WorkerFacts:
    ref = record.worker
    known = (ref, record.effective_role, record.model, record.fingerprint)
    sent_ns, began = wall_ns(), clock.now()
    try:
        async with members.stub(ref) as stub:
            reply = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
            within_s = (clock.now() - began) / 2
    except grpc.aio.AioRpcError as error:
        is_stranger = error.code() is grpc.StatusCode.UNAUTHENTICATED
        return WorkerFacts(*known, problem=reason_of(error), is_stranger=is_stranger)
    except TandemError as error:
        return WorkerFacts(*known, problem=error.message, is_stranger=True)
    ahead_s = (reply.wall_ns - sent_ns) / 1e9 - within_s
    return WorkerFacts(
        ref,
        record.effective_role,  # the worker learns of a change some seconds later
        reply.model,
        reply.fingerprint,
        is_draining=reply.load.draining,
        redis_problem=reply.redis_problem,
        transport=reply.transport_kind,
        layout=record.layout,
        skew=Skew(ref.id, ahead_s, within_s) if reply.wall_ns else None,
    )


def _lost_finding(worker: WorkerFacts) -> Finding:
    if worker.is_stranger:
        fix = "use the same cluster.secret_file and TLS files here as there; the check `clock` shows if clocks differ"
    else:
        fix = (
            f"check that it runs and that {worker.ref.address} (its worker.advertise_address) is reachable from here; "
            "in a pod check the NetworkPolicy. A worker that has ended leaves the list within 10 s"
        )
    return fail("workers", f"{worker.ref}: {worker.problem}", fix)


def _by_model(workers: Sequence[WorkerFacts]) -> Iterator[tuple[str, list[WorkerFacts]]]:
    for model, found in groupby(sorted(workers, key=lambda w: (w.model, w.ref.id)), lambda w: w.model):
        yield model, list(found)


def _fingerprint_finding(model: str, workers: Sequence[WorkerFacts]) -> Finding:
    groups: defaultdict[tuple[str, str, str], list[WorkerFacts]] = defaultdict(list)
    for worker in workers:
        groups[worker.kind].append(worker)
    if len(groups) == 1:
        layout = ", ".join(sorted({worker.layout or "unknown" for worker in workers}))
        return ok("fingerprints", f"{model}: {_kind(workers[0])} of all {len(workers)}, blocks of {layout}")
    summary = "; ".join(f"{_kind(found[0])} of {', '.join(w.ref.id for w in found)}" for found in groups.values())
    fix = (
        "wait for the end of a rolling update; else set the same model.id and files, model.dtype, model.quantization, "
        "model.batch_invariant, engine.kv_cache_dtype, engine.block_size and transfer.backend for all workers of a "
        "model (`tandem config` on each)"
    )
    return warn("fingerprints", f"{model}: KV moves only within each of {summary}", fix)


def _kind(worker: WorkerFacts) -> str:
    return f"{worker.fingerprint[:12]} over {worker.transport or 'an unknown transport'}"


def _role_finding(
    model: str, workers: Sequence[WorkerFacts], disaggregation: str, draining: Sequence[WorkerFacts]
) -> Finding:
    """Report the roles of a model's workers; one pair of the same kind is enough. `draining`: the workers of all models
    that drain; one of them may be what is missing."""
    roles = ", ".join(f"{sum(w.role == r for w in workers)} {r}" for r in sorted({w.role for w in workers}))
    is_strict = disaggregation == "strict"
    if disaggregation == "off" or (not is_strict and all(worker.role == "mixed" for worker in workers)):
        return ok("roles", f"{model}: {roles}")
    # Only a strict gateway has a mixed worker compute a prompt for another worker.
    prefills = {"prefill", "mixed"} if is_strict else {"prefill"}
    for kind in {worker.kind for worker in workers}:
        found = {worker.role for worker in workers if worker.kind == kind}
        if found & prefills and found & _DECODES:
            return ok("roles", f"{model}: {roles}")
    has_prefill = any(worker.role == "prefill" for worker in workers)
    lacks, other = ("decodes", "decode") if has_prefill else ("prefills for another", "prefill")
    summary = f"{model}: {roles}, and no worker of their kind {lacks}: no request is disaggregated"
    fix = f"start a worker with --pool {other}, or run `tandem role WORKER {other}`"
    missing = [worker.ref.id for worker in draining if worker.model == model and worker.role == other]
    if missing:
        fix += f", or let {missing[0]} accept jobs again: `tandem drain {missing[0]} --undo`"
    return wrong("roles", summary, fix, is_fatal=is_strict)
