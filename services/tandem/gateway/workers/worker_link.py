"""One life of one worker as this gateway reaches it: its Watch stream and the calls to it; decides nothing.

The worker is live while its Watch stream carries something at least every `worker_timeout_s` seconds. A broken stream
is opened again, and the worker resends from the positions given; if that does not work within `RECONNECT_S`, what
runs on it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from tandem.core.clock import Clock, wall_ns
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import JobEvent
from tandem.core.ids import GatewayId, HandoffKey, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.core.step_cost import StepCost
from tandem.core.topology import Topology
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.text.text_models import TextModels
from tandem.routing.worker_view import POOLS, Pool, WorkerView
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.idle_timeout import IdleTimeout
from tandem.wire.job_codec import Submission, encode_key, encode_submission
from tandem.wire.kv_codec import decode_worker, encode_handoff_key, encode_worker
from tandem.wire.link_codec import decode_link
from tandem.wire.peer_auth import PeerAuth, reason_of
from tandem.wire.worker_codec import decode_bundle, decode_load, decode_refusal, decode_step_cost, decode_update

log = logging.getLogger(__name__)
CALL_TIMEOUT_S = 10.0
MEASURE_TIMEOUT_S = 60.0
"""A worker measures one way after the other."""
RECONNECT_S = 2.0
RETRY_S = 0.25
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class LinkCalls:
    """What a link calls, on the event loop. `positions` says which jobs are waited for and from which token on;
    `changed` is called when the worker may have room that it had not before, `seen` whenever
    `WorkerLink.view` is another, `on_links` when it says over what links it reads others."""

    reported: Callable[[WorkerRef, Sequence[JobEvent]], None]
    lost: Callable[[WorkerRef, str], None]
    positions: Callable[[WorkerRef], list[tuple[JobKey, int]]]
    changed: Callable[[WorkerView], None]
    seen: Callable[[WorkerLink], None]
    on_links: Callable[[WorkerRef, Sequence[LinkReport]], None]


class WorkerLink:
    """`is_live`: the stream is up. `is_gone`: it has been down for longer than `RECONNECT_S`. `links`: the newest
    report that it has made on each source."""

    def __init__(
        self,
        gateway: GatewayId,
        ref: WorkerRef,
        texts: TextModels,
        clock: Clock,
        config: GatewayConfig,
        trust: PeerAuth,
    ) -> None:
        self.ref = ref
        self.model: ServedModel | None = None
        self.is_live = False
        self.is_gone = False
        self.links: dict[WorkerId, LinkReport] = {}
        self._told_role = ""
        self._gateway = gateway
        self._texts = texts
        self._clock = clock
        self._config = config
        self._trust = trust
        self._shown = trust.certificate_signature()
        self._channel = trust.open_channel(ref.address)
        self._stub = trust.stub(self._channel, ref.incarnation)
        self._described: pb.DescribeReply | None = None
        self._load = WorkerLoad()
        self._step_cost: StepCost | None = None
        self._placed: dict[RequestId, int] = {}
        self._decoding: set[RequestId] = set()
        self._seen: Callable[[WorkerLink], None] = _nobody
        self._calls: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self, calls: LinkCalls) -> None:
        self._seen = calls.seen
        self._task = asyncio.create_task(self._run(calls), name=f"watch-{self.ref.id}")

    async def close(self) -> None:
        """What was sent last gets `FLUSH_S` to arrive; a worker that is gone must hold nobody up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            if self._calls:
                await asyncio.wait(self._calls, timeout=FLUSH_S)
        finally:
            await self._channel.close(None)
        await asyncio.gather(*self._calls, return_exceptions=True)

    def view(self) -> WorkerView | None:
        """None while the worker is not live or not described yet."""
        about = self._described
        if about is None or not self.is_live:
            return None
        pool = _pool(self._told_role, about.role, about.pool)
        place = about.topology
        return WorkerView(
            self.ref,
            pool,
            about.model,
            about.fingerprint,
            self._load,
            tuple(self._placed.values()),
            self._step_cost,
            num_inflight=len(self._decoding),
            topology=Topology(place.host, place.rack, place.zone),
            block_size=self.block_size,
            block_bytes=sum(rank.region.block_bytes for rank in about.transport.ranks),
        )

    @property
    def block_size(self) -> int:
        """Tokens; 0 while the worker is not described yet."""
        return 0 if self._described is None else self._described.transport.layout.block_size

    @property
    def metrics_address(self) -> str:
        """Of its own /metrics; empty while it is not described, and where it has none."""
        return "" if self._described is None else self._described.metrics_address

    def look(self) -> WorkerView:
        """`view` of a worker that has one."""
        view = self.view()
        assert view is not None, f"{self.ref} is not live"
        return view

    def take_role(self, role: str) -> bool:
        """The registry says what routers are to take this worker for; empty, or not known here: what it says of itself.
        Whether that is news; then whoever ranks workers has to forget this one first, and look at it again."""
        is_news, self._told_role = role != self._told_role, role
        if is_news:
            meaning = "" if role in POOLS else ", which is what its pool is"
            log.info("worker %s: role %r%s", self.ref, role, meaning)
        return is_news

    # ---- calls

    def expect(self, request: RequestId, num_tokens: int) -> None:
        """A request was placed here: so many tokens of its prompt will come to be computed, unless it is told that they
        won't: 0. What the worker takes it says itself."""
        if num_tokens:
            self._placed[request] = num_tokens
        elif self._placed.pop(request, None) is None:
            return
        self._seen(self)

    def expect_decode(self, request: RequestId, *, is_coming: bool = True) -> None:
        """A request was placed here to decode, or does not come; what the worker takes it says itself."""
        if is_coming == (request in self._decoding):
            return
        self._decoding ^= {request}
        self._seen(self)

    async def submit(self, job: Job) -> None:
        """Raises TandemError: the worker's refusal, or WORKER_LOST when it does not answer. Whatever comes of it, the
        job is not expected here any more."""
        try:
            request = encode_submission(Submission(self._gateway, self.ref.incarnation, job))
            reply = await self._stub.Submit(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TandemError(ErrorKind.WORKER_LOST, f"worker {self.ref.id}: {reason_of(error)}") from error
        finally:
            if not isinstance(job, ResumeJob):
                self.expect(job.request.id, 0)
            if not isinstance(job, PrefillJob):
                self.expect_decode(job.request.id, is_coming=False)
        self._take_load(reply.load)
        self._seen(self)
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)

    async def measure(self, source: WorkerRef) -> LinkReport:
        """Have the worker measure the way by which it reads another one. Raises TandemError."""
        try:
            request = pb.ProbeLinkRequest(source=encode_worker(source))
            reply = await self._stub.ProbeLink(request, timeout=MEASURE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TandemError(ErrorKind.WORKER_LOST, f"worker {self.ref.id}: {reason_of(error)}") from error
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)
        return decode_link(reply.report)

    def cancel(self, keys: Sequence[JobKey]) -> None:
        self._send(self._stub.Cancel(pb.CancelRequest(keys=map(encode_key, keys)), timeout=CALL_TIMEOUT_S))

    def release(self, key: HandoffKey) -> None:
        self._send(self._stub.Release(pb.ReleaseRequest(key=encode_handoff_key(key)), timeout=CALL_TIMEOUT_S))

    def _send(self, call: Awaitable[object]) -> None:
        task = asyncio.create_task(self._forget(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _forget(self, call: Awaitable[object]) -> None:
        """A worker that cannot be reached learns of a cancel from the positions of the next Watch, or from its end."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            log.debug("worker %s: %s", self.ref.id, reason_of(error))

    # ---- the stream

    async def _run(self, calls: LinkCalls) -> None:
        down_since = self._clock.now()
        while True:
            reason = "the stream ended"
            try:
                self._renew_channel()
                await self._describe()
                await self._watch(calls)
            except grpc.aio.AioRpcError as error:
                reason = reason_of(error)
            except TandemError as error:
                reason = error.message
            except TimeoutError:
                reason = f"silent for {self._config.worker_timeout_s:g} s"
            except Exception as error:
                # The worker sends it again. Requests of which nothing can ever be taken end by their own timeouts.
                log.exception("what worker %s sends cannot be taken", self.ref)
                reason = repr(error)
            if self.is_live:
                self.is_live, down_since = False, self._clock.now()
                self._seen(self)
            if not self.is_gone and self._clock.now() - down_since >= RECONNECT_S:
                self.is_gone = True
                calls.lost(self.ref, reason)
            await asyncio.sleep(RETRY_S)

    def _renew_channel(self) -> None:
        """A channel shows the certificate that it was opened with for as long as it is open. The calls on the old one
        end by themselves: none takes longer than `CALL_TIMEOUT_S`, and one that is cut off tells nobody."""
        shown = self._trust.certificate_signature()
        if shown == self._shown:
            return
        old, self._channel = self._channel, self._trust.open_channel(self.ref.address)
        self._stub = self._trust.stub(self._channel, self.ref.incarnation)
        self._shown = shown
        self._send(old.close(CALL_TIMEOUT_S))

    async def _describe(self) -> None:
        """Make sure that the worker at this address is the life we mean, and learn what it serves."""
        # The first answer is large, and nothing runs on that worker yet; later ones decide whether it is lost.
        timeout_s = self._config.worker_timeout_s if self.model is None else RECONNECT_S
        reply = await self._stub.Describe(pb.DescribeRequest(with_bundle=self.model is None), timeout=timeout_s)
        if decode_worker(reply.worker) != self.ref:
            raise TandemError(ErrorKind.WORKER_LOST, "another worker answers at its address")
        if self.model is None:
            text = await self._texts.load(reply.bundle_digest, decode_bundle(reply.bundle))
            aliases = tuple(reply.aliases)
            self.model = ServedModel(reply.model, reply.max_model_len, text, wall_ns() // 10**9, aliases)
        _pool(reply.role, reply.pool)
        self._described = reply

    async def _watch(self, calls: LinkCalls) -> None:
        """Take updates until the stream ends. Raises TimeoutError when the worker falls silent."""
        waited_for = [
            pb.WatchPosition(key=encode_key(key), next_index=index) for key, index in calls.positions(self.ref)
        ]
        stream = self._stub.Watch(pb.WatchRequest(gateway=self._gateway, positions=waited_for))
        try:
            async with IdleTimeout(self._config.worker_timeout_s) as patience:
                patience.wait()
                async for update in stream:
                    self._take(update, calls)
                    patience.wait()
        finally:
            stream.cancel()

    def _take(self, update: pb.WatchUpdate, calls: LinkCalls) -> None:
        before = self._load if self.is_live else WorkerLoad()
        if not self.is_live:
            self.is_live, self.is_gone = True, False
            log.info("worker %s (%s) is live", self.ref, self._pool_name())
        if update.HasField("load"):
            self._take_load(update.load)
        if update.HasField("step_cost"):
            self._step_cost = decode_step_cost(update.step_cost)
        self._seen(self)
        calls.reported(self.ref, decode_update(update))
        if update.links:
            reports = [decode_link(report) for report in update.links]
            self.links.update((report.source.id, report) for report in reports)
            calls.on_links(self.ref, reports)
        if self._load.may_take_more_than(before):
            calls.changed(self.look())

    def _take_load(self, message: pb.Load) -> None:
        """Unless it is older than what is known: an idle worker would say nothing that puts it right."""
        load = decode_load(message)
        if load.number >= self._load.number:
            self._load = load

    def _pool_name(self) -> str:
        view = self.view()
        return view.pool if view is not None else "?"


def _pool(*names: str) -> Pool:
    """The first that this version knows."""
    for name in names:
        for pool in POOLS:
            if pool == name:
                return pool
    raise TandemError(ErrorKind.INTERNAL, f"a worker is in the unknown pool {names[-1]!r}")


def _nobody(link: WorkerLink) -> None:
    """Looks at a link that was not started."""
