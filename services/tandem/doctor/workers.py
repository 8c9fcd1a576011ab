"""The workers of a cluster as the registry lists them and as they describe themselves; never gives one work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import grpc.aio

from tandem.core.clock import Clock, wall_ns
from tandem.core.errors import TandemError
from tandem.core.groups import group_by
from tandem.core.ids import WorkerRef
from tandem.doctor.clock_skew import Skew
from tandem.doctor.finding import Finding, fail, ok, skip, warn, wrong
from tandem.stores.worker_record import WorkerRecord
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.peer_auth import reason_of

ANSWER_S = 5.0
NUM_AT_ONCE = 32
_PREFILLS, _DECODES = ("prefill", "mixed"), ("decode", "mixed")


class MemberList(Protocol):
    """Who is in a cluster. Raises TandemError where nobody can say."""

    async def all(self) -> tuple[WorkerRecord, ...]: ...

    def stub(self, worker: WorkerRef) -> AbstractAsyncContextManager[WorkerStub]: ...


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """`problem`: why it did not describe itself, else empty, and `is_stranger` that it or we are not believed. What it
    would say itself is the registry's word then."""

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
        """KV moves only between workers that have this alike."""
        return self.model, self.fingerprint, self.transport


@dataclass(frozen=True, slots=True)
class WorkerList:
    """`reason`: why nobody could list the workers, else empty."""

    workers: tuple[WorkerFacts, ...] = ()
    reason: str = ""


async def read_fleet(members: MemberList, clock: Clock) -> WorkerList:
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def described(record: WorkerRecord) -> WorkerFacts:
        async with gate:
            return await _describe(members, record, clock)

    return WorkerList(tuple(await asyncio.gather(*map(described, await members.all()))))


def judge_workers(fleet: WorkerList) -> tuple[Finding, ...]:
    if fleet.reason:
        return (skip("workers", fleet.reason),)
    if not fleet.workers:
        fix = "`tandem worker --redis-url URL --secret-file FILE`, or `tandem serve`; with the same --namespace"
        return (warn("workers", "no worker is registered", fix),)
    live = [worker for worker in fleet.workers if worker.is_live]
    lost = tuple(_lost(worker) for worker in fleet.workers if not worker.is_live)
    ill = tuple(
        warn("workers", f"{w.ref.id} says of Redis: {w.redis_problem}", "the way from that worker to redis.url")
        for w in live
        if w.redis_problem
    )
    told = ", ".join(f"{w.ref.id} ({w.role}{', draining' if w.is_draining else ''})" for w in live)
    return (*((ok("workers", f"{len(live)} answer: {told}"),) if live else ()), *lost, *ill)


def judge_fingerprints(fleet: WorkerList) -> tuple[Finding, ...]:
    """And transports: KV moves only between workers that have both alike."""
    live = [worker for worker in fleet.workers if worker.is_live]
    if not live:
        return (skip("fingerprints", fleet.reason or "no worker answers"),)
    return tuple(_alike(model, found) for model, found in _by_model(live))


def judge_roles(fleet: WorkerList, disaggregation: str) -> tuple[Finding, ...]:
    """Somebody prefills and somebody decodes, among those that are partners."""
    live = [worker for worker in fleet.workers if worker.is_live and not worker.is_draining]
    if not live:
        return (skip("roles", fleet.reason or "no worker answers that takes work"),)
    return tuple(_manned(model, found, disaggregation) for model, found in _by_model(live))


def skews_of(fleet: WorkerList) -> list[Skew]:
    return [worker.skew for worker in fleet.workers if worker.skew is not None]


async def _describe(members: MemberList, record: WorkerRecord, clock: Clock) -> WorkerFacts:
    ref = record.worker
    known = (ref, record.effective_role, record.model, record.fingerprint)
    asked_ns, began = wall_ns(), clock.now()
    try:
        async with members.stub(ref) as stub:
            said = await stub.Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
            within_s = (clock.now() - began) / 2
    except grpc.aio.AioRpcError as error:
        is_stranger = error.code() is grpc.StatusCode.UNAUTHENTICATED
        return WorkerFacts(*known, problem=reason_of(error), is_stranger=is_stranger)
    except TandemError as error:
        return WorkerFacts(*known, problem=error.message, is_stranger=True)
    ahead_s = (said.wall_ns - asked_ns) / 1e9 - within_s
    return WorkerFacts(
        ref,
        said.role,
        said.model,
        said.fingerprint,
        is_draining=said.load.draining,
        redis_problem=said.redis_problem,
        transport=said.transport_kind,
        layout=record.layout,
        skew=Skew(ref.id, ahead_s, within_s) if said.wall_ns else None,
    )


def _lost(worker: WorkerFacts) -> Finding:
    if worker.is_stranger:
        fix = "the same cluster.secret_file and TLS files here as there; the check of clocks says if these differ"
    else:
        fix = (
            f"is it running, and is {worker.ref.address} open from here? Others reach it at worker.advertise_address; "
            "in a pod look at the NetworkPolicy. A worker that is gone leaves the list within 10 s"
        )
    return fail("workers", f"{worker.ref}: {worker.problem}", fix)


def _by_model(workers: Sequence[WorkerFacts]) -> Iterator[tuple[str, list[WorkerFacts]]]:
    for model, found in groupby(sorted(workers, key=lambda w: (w.model, w.ref.id)), lambda w: w.model):
        yield model, list(found)


def _alike(model: str, workers: Sequence[WorkerFacts]) -> Finding:
    groups = group_by(workers, lambda worker: worker.kind)
    if len(groups) == 1:
        layout = ", ".join(sorted({worker.layout or "unknown" for worker in workers}))
        return ok("fingerprints", f"{model}: {_kind(workers[0])} of all {len(workers)}, blocks of {layout}")
    told = "; ".join(f"{_kind(found[0])} of {', '.join(w.ref.id for w in found)}" for found in groups.values())
    fix = (
        "the same model.id and files, model.dtype, model.quantization, model.batch_invariant, engine.kv_cache_dtype, "
        "engine.block_size and handoff.transport for all of a model (`tandem config` on each); during a rolling update "
        "it passes"
    )
    return warn("fingerprints", f"{model}: KV moves only within each of {told}", fix)


def _kind(worker: WorkerFacts) -> str:
    return f"{worker.fingerprint[:12]} over {worker.transport or 'an unknown transport'}"


def _manned(model: str, workers: Sequence[WorkerFacts], disaggregation: str) -> Finding:
    """A pair of one kind is enough."""
    roles = ", ".join(f"{sum(w.role == r for w in workers)} {r}" for r in sorted({w.role for w in workers}))
    for kind in {worker.kind for worker in workers}:
        found = {worker.role for worker in workers if worker.kind == kind}
        if found & set(_PREFILLS) and found & set(_DECODES):
            return ok("roles", f"{model}: {roles}")
    lacks = "decodes" if any(worker.role == "prefill" for worker in workers) else "prefills"
    other = "decode" if lacks == "decodes" else "prefill"
    told = f"{model}: {roles}, and no partner of theirs {lacks}"
    fix = f"a worker with --pool {other}, or `tandem role WORKER {other}`"
    return wrong("roles", told, fix, is_fatal=disaggregation == "strict")
