"""The workers this gateway knows: finds them, keeps a link to each, probes their pairs; never places a request.

Redis is where workers are found, not the judge of their life: a worker lives while its Watch stream does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.config import GatewayConfig, TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import JobEvent, KVReceived
from tandem.core.ids import GatewayId, HandoffKey, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.core.request import Job, PrefillJob
from tandem.gateway.interfaces import ScrapeTarget, ServedModel
from tandem.gateway.supervise import log_and_continue
from tandem.gateway.text_models import TextModels
from tandem.gateway.worker_link import LinkCalls, WorkerLink
from tandem.routing.link_policy import has_requirements
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.placement import Placement
from tandem.routing.router import Routing
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import POOLS, ClusterView, Pair, Pool, WorkerView
from tandem.wire.peer_auth import PeerAuth

log = logging.getLogger(__name__)
DISCOVERY_PERIOD_S = 1.0
SEARCH_PERIOD_S = 0.1
"""Between two looks for workers while nothing can be served."""
PROBE_RETRY_S = 5.0
_NO_PROMISE = TransferConfig()


class WorkerEvents(Protocol):
    """Who is told what workers report."""

    def reported(self, worker: WorkerRef, events: Sequence[JobEvent]) -> None: ...

    def lost(self, worker: WorkerRef, reason: str) -> None: ...

    def positions(self, worker: WorkerRef) -> list[tuple[JobKey, int]]: ...

    async def probe(self, placement: Placement, model: str) -> bool: ...

    def on_capacity(self, worker: WorkerView) -> None: ...

    def place_queued(self) -> None: ...


class WorkerPool:
    """Links by worker id. `discover` lists the workers that say they live, each with the role that was set for it or an
    empty one; it may fail, then the last list stands. `pairs`: between which of them KV may move; it may not be changed
    from elsewhere."""

    def __init__(
        self,
        gateway: GatewayId,
        discover: Callable[[], Awaitable[Mapping[WorkerRef, str]]],
        texts: TextModels,
        clock: Clock,
        config: GatewayConfig,
        trust: PeerAuth,
        promised: TransferConfig = _NO_PROMISE,
    ) -> None:
        self._promised = promised
        self._trust = trust
        self._gateway = gateway
        self._discover = discover
        self._texts = texts
        self._clock = clock
        self._config = config
        self._listener: WorkerEvents | None = None
        self._links: dict[WorkerId, WorkerLink] = {}
        self._live: set[WorkerRef] = set()
        # What workers served that are not live any more, and until when a request may wait for others.
        self._missed: dict[str, tuple[ServedModel, float]] = {}
        self.pairs = PairRegistry(config.disaggregation)
        self.routing = Routing(config.routing_policy, remote_prefix=config.remote_prefix)
        self._roster = WorkerRanking(self.pairs.linked, self.pairs.failed.keys(), self.pairs.refused.keys())
        self._probing: dict[Pair, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._unlisted: str | None = None
        """Why workers cannot be listed."""

    async def start(self, listener: WorkerEvents) -> None:
        self._listener = listener
        self._task = asyncio.create_task(self._discover_forever(), name="fleet-discovery")

    async def stop(self) -> None:
        tasks = [*self._probing.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    # ---- what is known

    def view(self) -> ClusterView:
        views = tuple(view for link in list(self._links.values()) if (view := link.view()) is not None)
        pairs = self.pairs
        return ClusterView(views, frozenset(pairs.linked), frozenset(pairs.failed), frozenset(pairs.refused))

    def num_live(self) -> Mapping[Pool, int]:
        """By pool, those without a live worker included."""
        found = Counter(view.pool for link in list(self._links.values()) if (view := link.view()) is not None)
        return {pool: found[pool] for pool in POOLS}

    def scrape_targets(self) -> list[ScrapeTarget]:
        """Of live workers."""
        found = [(view, link.metrics_address) for link in self._links.values() if (view := link.view()) is not None]
        return [ScrapeTarget(address, view.ref.id, view.pool, view.model) for view, address in found if address]

    def workers(self) -> list[WorkerRef]:
        """All that there are links to, live or not at the moment."""
        return [link.ref for link in self._links.values()]

    def cache_root(self, model: str) -> tuple[str, int] | None:
        """What the names of a model's cached blocks depend on: fingerprint and block size. Where workers have
        different ones, as while a new build is rolled out, those of the one that was met first count, and what
        workers of another hold is not found until it has left; None while nobody serves it."""
        for link in self._links.values():
            view = link.view()
            if view is not None and view.model == model and link.block_size:
                return view.fingerprint, link.block_size
        return None

    def candidates(self) -> WorkerRanking:
        """What requests are placed among, as it is at any time."""
        return self._roster

    def models(self) -> Sequence[ServedModel]:
        """Those that live workers serve, and for `no_worker_wait_s` those that the last of them served, so that what
        comes in between waits as what was there does."""
        found: dict[str, ServedModel] = {}
        for link in list(self._links.values()):
            if link.model is not None and link.is_live:
                found.setdefault(link.model.name, link.model)
        now = self._clock.now()
        self._missed = {name: missed for name, missed in self._missed.copy().items() if missed[1] > now}
        for name, (model, _) in self._missed.copy().items():
            found.setdefault(name, model)
        return tuple(found.values())

    def ready(self) -> str | None:
        """None when a pair has moved a block or one worker may serve alone; else what is missing."""
        views = self.view().workers
        if not views:
            return "no live worker" if self._unlisted is None else f"no live worker is known: {self._unlisted}"
        policy = self._config.disaggregation
        alone = policy != "strict" and any(v.pool == "mixed" for v in views)
        pairs = self.pairs
        # What falls back because of the links between workers is served.
        if alone or policy == "off" or pairs.linked or (policy == "prefer" and (pairs.suspected or pairs.refused)):
            return None
        missing = [pool for pool in ("prefill", "decode") if not any(v.pool in (pool, "mixed") for v in views)]
        if missing:
            return f"no live {' and no live '.join(missing)} worker"
        return (pairs.refused and pairs.problem()) or "no block has moved between a prefill and a decode worker yet"

    def suspect(self, workers: Set[WorkerRef]) -> None:
        """KV may have been lost between two of these: their pairs are to move a block again before they are used."""
        for pair in self.pairs.suspect(workers, self._clock.now()):
            log.warning("%s lost KV of %s: the link between them is tested again", pair[1].id, pair[0].id)
        self._probe_pairs()

    # ---- what is sent

    def add_inflight(self, worker: WorkerRef, request: RequestId, num_tokens: int) -> None:
        """As `WorkerLink.expect`; nothing where the worker is gone."""
        link = self._find(worker)
        if link is not None:
            link.expect(request, num_tokens)

    def measured(self, placement: Placement, pulled: KVReceived) -> None:
        """How fast KV moved between two workers; nothing when one of them is gone. Not of a prefix: who reads that
        computes prompts, and its steps would count for the link."""
        producer, consumer = self._find(placement.prefill), self._find(placement.decode)
        if (
            producer is None
            or consumer is None
            or (source := producer.view()) is None
            or (target := consumer.view()) is None
        ):
            return
        self.routing.links.observe(source, target, pulled.num_bytes, pulled.busy_s)

    def coming(self, worker: WorkerRef, job: Job) -> None:
        """A job is about to be sent: until its worker has answered what it is to decode counts there, so that those
        that are placed with it do not all go to one worker."""
        link = self._find(worker)
        if link is not None and not isinstance(job, PrefillJob):
            link.expect_decode(job.request.id)

    async def submit(self, worker: WorkerRef, job: Job) -> None:
        """Raises TandemError when the worker refuses or cannot be reached."""
        link = self._find(worker)
        if link is None:
            raise TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} is gone")
        await link.submit(job)

    def cancel(self, worker: WorkerRef, keys: Sequence[JobKey]) -> None:
        link = self._find(worker)
        if link is not None:
            link.cancel(keys)

    def release(self, worker: WorkerRef, key: HandoffKey) -> None:
        link = self._find(worker)
        if link is not None:
            link.release(key)

    # ---- inside

    def _find(self, worker: WorkerRef) -> WorkerLink | None:
        link = self._links.get(worker.id)
        return link if link is not None and link.ref == worker else None

    async def _discover_forever(self) -> None:
        while True:
            async with log_and_continue("the look for workers"):
                try:
                    await self._reconcile(await self._discover())
                    self._unlisted = None
                except TandemError as error:
                    self._unlisted = error.message
                self._probe_pairs()
                is_searching = self._unlisted is None and self.ready() is not None
                await asyncio.sleep(SEARCH_PERIOD_S if is_searching else DISCOVERY_PERIOD_S)

    async def _reconcile(self, refs: Mapping[WorkerRef, str]) -> None:
        """Link to new workers and new lives; drop a dead link once its worker is not listed any more; take new roles.

        Of two lives that answer, the newer one counts. Where that is gone, whoever is listed does: a clock may have
        been set back between them.
        """
        listed = {ref.id: ref for ref in refs}
        for ref in refs:
            known = self._links.get(ref.id)
            if known is None or ref.incarnation > known.ref.incarnation or (known.is_gone and ref != known.ref):
                if known is not None:
                    self._drop(known, "the worker restarted")
                self._links[ref.id] = self._open(ref)
                if known is not None:
                    await known.close()
        for link in [x for x in self._links.values() if x.ref.id not in listed and x.is_gone]:
            del self._links[link.ref.id]
            self._drop(link, "gone")
            await link.close()
        self._take_roles(refs)

    def _take_roles(self, roles: Mapping[WorkerRef, str]) -> None:
        """What runs on a worker goes on there, whatever it is taken for from now on."""
        news = [link for ref, role in roles.items() if (link := self._find(ref)) is not None and link.take_role(role)]
        for link in news:
            self._roster.remove(link.ref)
            self._seen(link)
        if news:
            assert self._listener is not None
            self._listener.place_queued()

    def _open(self, ref: WorkerRef) -> WorkerLink:
        told = self._listener
        assert told is not None
        link = WorkerLink(self._gateway, ref, self._texts, self._clock, self._config, self._trust)
        link.start(
            LinkCalls(told.reported, self._lost, told.positions, told.on_capacity, self._seen, self._on_link_reports)
        )
        return link

    def _seen(self, link: WorkerLink) -> None:
        """A link that was given up has nothing to say, as when a submit of it ends late. A worker that has come is of
        little use before its pairs are tested."""
        if self._find(link.ref) is not link:
            return
        if link.view() is None:
            self._miss(link)
            self._roster.remove(link.ref)
            return
        self._roster.put(link.look)
        if link.ref not in self._live:
            self._live.add(link.ref)
            for other in self._links.values():
                self._on_link_reports(
                    other.ref, [report for report in other.links.values() if report.source == link.ref]
                )
            self._probe_pairs()

    def _miss(self, link: WorkerLink) -> None:
        """It is not live any more; nothing when that is known."""
        if link.ref in self._live and link.model is not None:
            self._missed[link.model.name] = (link.model, self._clock.now() + self._config.no_worker_wait_s)
        self._live.discard(link.ref)

    def _lost(self, worker: WorkerRef, reason: str) -> None:
        log.warning("worker %s is lost: %s", worker, reason)
        link = self._find(worker)
        if link is not None:
            self._drop(link, reason)

    def _drop(self, link: WorkerLink, reason: str) -> None:
        """Forget what was known of a worker's pairs, and end what runs on it."""
        self.pairs.drop(link.ref)
        self._miss(link)
        self.routing.links.forget(link.ref)
        assert self._listener is not None
        self._listener.lost(link.ref, reason)
        # Last, because what is lost is no longer expected there, which is another view of it.
        self._roster.remove(link.ref)

    def _probe_pairs(self) -> None:
        """Move a test block between prefill and decode workers that are new to each other, as far as `PairRegistry`
        says."""
        for pair, model in self.pairs.due(self.view().workers, self._clock.now()):
            self._probing[pair] = asyncio.create_task(self._probe(pair, model))

    async def _probe(self, pair: Pair, model: str) -> None:
        assert self._listener is not None
        try:
            moved = await self._listener.probe(Placement(*pair), model) and await self._verify(pair)
            if any(self._find(ref) is None for ref in pair):
                log.info("%s or %s was gone before a block moved between them", *pair)
                return
            self.pairs.ended(pair, moved=moved, retry_at=self._clock.now() + PROBE_RETRY_S)
            if moved:
                log.info("a block moved from %s to %s", pair[0].id, pair[1].id)
            else:
                log.warning("no block moved from %s to %s", pair[0].id, pair[1].id)
        finally:
            del self._probing[pair]
            self.pairs.gone(pair)
        self._listener.place_queued()

    async def _verify(self, pair: Pair) -> bool:
        """Where a way has to be as promised, it is known to be so, or not, before it is used: the consumer measures it.
        A report of a problem that refuses nothing is of one that it could not measure."""
        producer, consumer = pair
        if self._promised.on_slow_link == "warn" or not has_requirements(self._promised):
            return True
        link = self._find(consumer)
        if link is None:
            return False
        try:
            report = self.pairs.report(pair)
            if report is None or (report.problem and not report.refused):
                self._on_link_reports(consumer, [await link.measure(producer)])
        except TandemError as error:
            log.warning("the way from %s to %s cannot be measured: %s", producer.id, consumer.id, error.message)
            return False
        return True

    def _on_link_reports(self, consumer: WorkerRef, reports: Sequence[LinkReport]) -> None:
        """A worker says over what links it reads others. Of who is not live nothing is kept, because nothing would take
        it away again: `_seen` repeats it when that one comes."""
        changed = [link for link in reports if link.source in self._live and self.pairs.on_link_report(consumer, link)]
        for report in changed:
            what = f"not used: {report.problem}" if report.refused else "used again"
            log.warning("the way from %s to %s is %s", report.source.id, consumer.id, what)
        if changed:
            self._probe_pairs()
