"""Connect to one incarnation of one worker: receive its Watch stream, and send it jobs and other calls.

The worker is live while its Watch stream carries a message at least every `worker_timeout_s` seconds. A broken stream
is opened again with a request that names the next expected token of each job, and the worker resends from there. The
jobs on the worker are lost at once where its process has ended, that is, where its host refuses connections to its
address or another worker answers there. Where it is not known whether the process has ended, the jobs are lost when the
stream is not open again within `RECONNECT_S` seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import grpc

from tandem.core.clock import Clock, wall_ns
from tandem.core.config import GatewayConfig, Pool
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import JobEvent
from tandem.core.ids import GatewayId, JobKey, WorkerId, WorkerRef
from tandem.core.lane import ALL_LANES
from tandem.core.link import LinkReport
from tandem.core.request import Job
from tandem.core.step_cost import StepCost
from tandem.core.topology import Topology
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.text.text_models import TextModels
from tandem.gateway.workers.pool_events import PoolEvent, PositionsRequested
from tandem.orchestration.commands import CancelJob, OfferMigration, ReleaseLease, WorkerOrder
from tandem.orchestration.known_workers import InflightJobs
from tandem.routing.worker_view import POOLS, WorkerView
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.idle_timeout import IdleTimeout
from tandem.wire.job_codec import Submission, encode_key, encode_submission
from tandem.wire.kv_codec import decode_worker, encode_handoff_key, encode_worker
from tandem.wire.link_codec import decode_link
from tandem.wire.listener_probe import refuses_connections
from tandem.wire.peer_auth import PeerAuth, means_other_life, reason_of
from tandem.wire.worker_codec import (
    decode_bundle,
    decode_lanes,
    decode_load,
    decode_refusal,
    decode_step_cost,
    decode_update,
)

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 10.0
MEASURE_TIMEOUT_S = 60.0
"""Seconds that the measurement of a link may take. One measurement takes less, but a worker measures its links one
after the other."""
RECONNECT_S = 2.0
"""Seconds from the end of a worker's stream until the worker and its jobs count as lost, where it is not known whether
its process has ended."""
RETRY_S = 0.25
"""Seconds between two attempts to reopen a stream, and the longest wait for the answer to a test connection."""
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class LinkUpdated:
    """Hold the content of one message of a worker's Watch stream, for `WorkerLink.apply`.

    `link`: the connection on which the message arrived. `load`, `step_cost`: None where they have not changed since the
    last message. `events`: events of the worker's jobs. `reports`: reports on the links over which the worker reads
    other workers' memory.
    """

    link: WorkerLink
    load: WorkerLoad | None
    step_cost: StepCost | None
    events: Sequence[JobEvent]
    reports: Sequence[LinkReport]


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """Report that the Watch stream of the connection `link` has ended or could not be opened, for
    `WorkerLink.on_broken`.

    `reason`: text for logs. `has_ended`: true where the worker's process is known to have ended; false where it may
    still run."""

    link: WorkerLink
    reason: str
    has_ended: bool


LinkEvent = LinkUpdated | LinkBroken | PoolEvent
"""Entry of the queue from which a `WorkerPool` reads: an event of one of its links, or an event of the pool itself for
the request driver."""


class WorkerLink:
    """Keep the connection to one incarnation of a worker, with the worker's latest load, role, model and link reports.

    A task keeps the worker's Watch stream open and puts what arrives into the queue `events`. The queue's reader passes
    each event to this object, in order (`apply`, `on_broken`). `is_live`: the stream is up. `is_gone`: the worker and
    its jobs count as lost. `is_missing`: the stream has been down for at least `RECONNECT_S` seconds, after which a
    worker that stops in an orderly manner has left the registry. `model`: the model that the worker serves; None until
    the worker has described itself.

    `links`: the worker's newest report on each link over which it reads another worker's memory, by the id of that
    other worker. `inflight`: the load of jobs that were placed at the worker and that it has neither accepted nor
    refused yet. `trust`: authenticates the calls.
    """

    def __init__(
        self,
        gateway: GatewayId,
        ref: WorkerRef,
        texts: TextModels,
        clock: Clock,
        config: GatewayConfig,
        trust: PeerAuth,
        events: asyncio.Queue[LinkEvent],
    ) -> None:
        self.ref = ref
        self.model: ServedModel | None = None
        self.is_live = False
        self.is_gone = False
        self.is_missing = False
        self.links: dict[WorkerId, LinkReport] = {}
        self.inflight = InflightJobs()
        self._assigned_role = ""
        self._gateway = gateway
        self._texts = texts
        self._clock = clock
        self._config = config
        self._trust = trust
        self._certificate = trust.certificate_signature()
        self._channel = trust.open_channel(ref.address)
        self._stub = trust.stub(self._channel, ref.incarnation)
        self._description: pb.DescribeReply | None = None
        self._lanes = ALL_LANES
        self._load = WorkerLoad()
        self._step_cost: StepCost | None = None
        self._events = events
        self._down_since = clock.now()
        self._has_failed = False
        self._calls: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name=f"watch-{ref.id}")

    async def close(self) -> None:
        """Close the connection and wait until that is done. Calls in progress get at most `FLUSH_S` seconds to reach
        the worker, because a worker that does not answer must not delay the shutdown."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            if self._calls:
                await asyncio.wait(self._calls, timeout=FLUSH_S)
        finally:
            await self._channel.close(None)
        await asyncio.gather(*self._calls, return_exceptions=True)

    def view(self) -> WorkerView | None:
        """Return what routing sees of the worker: its load, pool, model and the requests placed there; None while it is
        not live or has not described itself."""
        description = self._description
        if description is None or not self.is_live:
            return None
        pool = _pool(self._assigned_role, description.role, description.pool)
        topology = description.topology
        return WorkerView(
            self.ref,
            pool,
            description.model,
            description.fingerprint,
            self._load,
            tuple(self.inflight.tokens.values()),
            self._step_cost,
            num_inflight=len(self.inflight.decodes),
            topology=Topology(topology.host, topology.rack, topology.zone),
            block_size=description.transport.layout.block_size,
            block_bytes=sum(rank.region.block_bytes for rank in description.transport.ranks),
            lanes=self._lanes,
            max_num_seqs=description.max_num_seqs,
        )

    @property
    def live_load(self) -> WorkerLoad:
        """Return the worker's last load; an empty one while `view` is None."""
        return self._load if self.is_live and self._description is not None else WorkerLoad()

    @property
    def metrics_address(self) -> str:
        """Return host:port of the worker's own metrics; empty where it has none or has not described itself."""
        return "" if self._description is None else self._description.metrics_address

    def require_view(self) -> WorkerView:
        """Return `view()` of a worker that is live; raises AssertionError where it is not."""
        view = self.view()
        assert view is not None, f"{self.ref} is not live"
        return view

    def assign_role(self, role: str) -> bool:
        """Set the role (`prefill`, `decode` or `mixed`) that the registry assigns to this worker, and return whether it
        changed.

        With an empty or unknown role, the role or pool that the worker itself reports counts. After a change the caller
        must remove the worker from the ranking and add it again."""
        has_changed = role != self._assigned_role
        self._assigned_role = role
        if has_changed:
            if role in POOLS:
                log.info("worker %s is used in the role %s", self.ref, role)
            else:
                log.info("worker %s is used in its own role, because the assigned role is %r", self.ref, role)
        return has_changed

    # ---- calls

    async def submit(self, job: Job) -> None:
        """Send a job to the worker and wait until it is accepted; its tokens arrive over the Watch stream.

        Raises TandemError: the worker's refusal, or WORKER_LOST where the worker is gone or does not answer. In all
        cases the job is removed from `inflight`."""
        try:
            if self.is_gone:
                raise TandemError(ErrorKind.WORKER_LOST, f"worker {self.ref.id} is gone")
            request = encode_submission(Submission(self._gateway, self.ref.incarnation, job))
            reply = await self._stub.Submit(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TandemError(ErrorKind.WORKER_LOST, f"worker {self.ref.id}: {reason_of(error)}") from error
        finally:
            self.inflight.answered(job)
        self._take_load(decode_load(reply.load))
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)

    async def measure(self, source: WorkerRef) -> LinkReport:
        """Let the worker measure the link over which it reads the memory of the worker `source`, and return its report.

        Raises TandemError: the worker's refusal, or WORKER_LOST where the worker does not answer."""
        try:
            request = pb.ProbeLinkRequest(source=encode_worker(source))
            reply = await self._stub.ProbeLink(request, timeout=MEASURE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TandemError(ErrorKind.WORKER_LOST, f"worker {self.ref.id}: {reason_of(error)}") from error
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)
        return decode_link(reply.report)

    def send_order(self, order: WorkerOrder) -> None:
        """Send the worker an order: to cancel jobs, to offer sequences for migration, or to release a lease. Does not
        wait for the answer, and ignores a failure."""
        stub = self._stub
        match order:
            case CancelJob(_, keys):
                self._send(stub.Cancel(pb.CancelRequest(keys=map(encode_key, keys)), timeout=CALL_TIMEOUT_S))
            case OfferMigration(_, keys):
                request = pb.OfferMigrationRequest(keys=map(encode_key, keys))
                self._send(stub.OfferMigration(request, timeout=CALL_TIMEOUT_S))
            case ReleaseLease(_, key):
                self._send(stub.Release(pb.ReleaseRequest(key=encode_handoff_key(key)), timeout=CALL_TIMEOUT_S))

    def _send(self, call: Awaitable[object]) -> None:
        task = asyncio.create_task(self._ignore_failure(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _ignore_failure(self, call: Awaitable[object]) -> None:
        """Await a call and ignore its failure: the worker learns of a cancel from the next Watch request, or when Watch
        ends."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            log.debug("a call of worker %s failed: %s", self.ref.id, reason_of(error))

    # ---- what the stream brings, applied by the owner of `events`

    def apply(self, update: LinkUpdated) -> bool:
        """Apply an update, which also shows that the worker is live. Returns whether the worker may now accept a prompt
        that it would have rejected before."""
        before = self._load if self.is_live else WorkerLoad()
        if not self.is_live:
            self.is_live = True
            self.is_gone = self.is_missing = False
            log.info("worker %s of pool %s is live", self.ref, self.require_view().pool)
        if update.load is not None:
            self._take_load(update.load)
        if update.step_cost is not None:
            self._step_cost = update.step_cost
        self.links.update((report.source.id, report) for report in update.reports)
        return self._load.may_take_more_than(before)

    def on_broken(self, *, has_ended: bool) -> bool:
        """Record that the stream is down, and return whether the worker counts as gone from this call on.

        That is so when its process has ended (`has_ended`), or once the stream has been down for `RECONNECT_S` seconds.
        Later calls return False until the worker has been live again."""
        now = self._clock.now()
        if self.is_live:
            self.is_live = False
            self._down_since = now
        self.is_missing = now - self._down_since >= RECONNECT_S
        if self.is_gone or not (has_ended or self.is_missing):
            return False
        self.is_gone = True
        return True

    def reopen(self) -> None:
        """Close the stream at the next update and open it again, because an update could not be processed.

        The worker then sends the update again. A request whose updates always fail ends by its own timeout.
        """
        self._has_failed = True

    def _take_load(self, load: WorkerLoad) -> None:
        """Store the load unless a newer one is known: an idle worker would send no update that corrects an old one."""
        if load.number >= self._load.number:
            self._load = load

    # ---- the stream

    async def _run(self) -> None:
        while True:
            reason, has_ended = "the stream ended", False
            try:
                self._renew_channel()
                await self._describe()
                await self._watch()
            except grpc.aio.AioRpcError as error:
                reason, has_ended = reason_of(error), means_other_life(error)
            except TandemError as error:
                reason, has_ended = error.message, error.kind is ErrorKind.WORKER_LOST
            except TimeoutError:
                reason = f"silent for {self._config.worker_timeout_s:g} s"
            except Exception as error:
                log.exception(
                    "the gateway failed to process an update of worker %s and opens its stream again", self.ref
                )
                reason = repr(error)
            # First without the test connection, whose answer takes time: the worker gets no further job meanwhile.
            self._events.put_nowait(LinkBroken(self, reason, has_ended))
            if not has_ended and await refuses_connections(self.ref.address, RETRY_S):
                reason = f"its process has ended ({reason})"
                self._events.put_nowait(LinkBroken(self, reason, has_ended=True))
            await asyncio.sleep(RETRY_S)

    def _renew_channel(self) -> None:
        """Reopen the channel where the client certificate was renewed: an open channel keeps the certificate it was
        opened with.

        Calls on the old channel get `CALL_TIMEOUT_S`, the longest that a call may take."""
        certificate = self._trust.certificate_signature()
        if certificate == self._certificate:
            return
        old_channel, self._channel = self._channel, self._trust.open_channel(self.ref.address)
        self._stub = self._trust.stub(self._channel, self.ref.incarnation)
        self._certificate = certificate
        self._send(old_channel.close(CALL_TIMEOUT_S))

    async def _describe(self) -> None:
        """Verify that this incarnation answers at the address, and fetch what it serves. Raises WORKER_LOST where
        another worker or incarnation answers."""
        # The first reply includes the tokenizer and may be slow: no jobs run there yet. A later one that is slow means
        # that the worker is lost.
        timeout_s = self._config.worker_timeout_s if self.model is None else RECONNECT_S
        reply = await self._stub.Describe(pb.DescribeRequest(with_bundle=self.model is None), timeout=timeout_s)
        if decode_worker(reply.worker) != self.ref:
            raise TandemError(ErrorKind.WORKER_LOST, f"another worker answers at {self.ref.address}")
        if self.model is None:
            text = await self._texts.load(reply.bundle_digest, decode_bundle(reply.bundle))
            aliases = tuple(reply.aliases)
            self.model = ServedModel(reply.model, reply.max_model_len, text, wall_ns() // 10**9, aliases)
        _pool(reply.role, reply.pool)
        self._lanes = decode_lanes(reply.lanes)
        self._description = reply

    async def _watch(self) -> None:
        """Queue updates until the stream ends. Raises TimeoutError where the worker sends nothing for
        `worker_timeout_s`."""
        reply: asyncio.Future[list[tuple[JobKey, int]]] = asyncio.get_running_loop().create_future()
        self._events.put_nowait(PositionsRequested(self.ref, reply))
        positions = [pb.WatchPosition(key=encode_key(key), next_index=index) for key, index in await reply]
        self._has_failed = False
        stream = self._stub.Watch(pb.WatchRequest(gateway=self._gateway, positions=positions))
        try:
            async with IdleTimeout(self._config.worker_timeout_s) as idle_timeout:
                idle_timeout.wait()
                async for update in stream:
                    if self._has_failed:
                        raise TandemError(ErrorKind.INTERNAL, "an update could not be processed")
                    self._events.put_nowait(self._decode(update))
                    idle_timeout.wait()
        finally:
            stream.cancel()

    def _decode(self, update: pb.WatchUpdate) -> LinkUpdated:
        return LinkUpdated(
            self,
            decode_load(update.load) if update.HasField("load") else None,
            decode_step_cost(update.step_cost) if update.HasField("step_cost") else None,
            decode_update(update),
            [decode_link(report) for report in update.links],
        )


def _pool(*names: str) -> Pool:
    """Return the first name that is a known pool. Raises INTERNAL where none is."""
    for name in names:
        for pool in POOLS:
            if pool == name:
                return pool
    raise TandemError(ErrorKind.INTERNAL, f"a worker is in the unknown pool {names[-1]!r}")
