"""Discover workers, keep a link to each, and probe the links between prefill and decode workers.

Redis lists workers but does not decide whether they live: a worker is live while its Watch stream is."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set

from tandem.core.clock import Clock
from tandem.core.config import GatewayConfig, Pool, TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import GatewayId, HandoffKey, JobKey, WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.core.request import Job
from tandem.gateway.context.interfaces import ScrapeTarget, ServedModel
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.text.text_models import TextModels
from tandem.gateway.workers.pool_events import PlacementsChanged, PoolEvent, ProbeDue, WorkerLost, WorkerReported
from tandem.gateway.workers.worker_link import LinkBroken, LinkEvent, LinkUpdated, WorkerLink
from tandem.orchestration.known_workers import DISCOVERY_PERIOD_S, KnownWorkers
from tandem.routing.link_policy import has_requirements
from tandem.routing.pd_pairs import PROBE_RETRY_S
from tandem.routing.worker_view import POOLS, Pair, WorkerView
from tandem.wire.peer_auth import PeerAuth

log = logging.getLogger(__name__)
SEARCH_PERIOD_S = 0.1
"""Seconds between two discoveries while no request can be served."""
_NO_REQUIREMENTS = TransferConfig()


class WorkerPool(KnownWorkers[WorkerLink]):
    """Discover the workers, hold a `WorkerLink` to each, and know between which pairs of them KV may move (`pairs`).

    `discover` returns the registered workers, each with the role assigned to it or an empty one; where it raises
    TandemError, the previous list stays in force. `requirements` are those that a link must meet. `routing` and
    `candidates()` are for the placement of requests. What workers report takes effect while one reader iterates over
    `events()`."""

    def __init__(
        self,
        gateway: GatewayId,
        discover: Callable[[], Awaitable[Mapping[WorkerRef, str]]],
        texts: TextModels,
        clock: Clock,
        config: GatewayConfig,
        trust: PeerAuth,
        requirements: TransferConfig = _NO_REQUIREMENTS,
    ) -> None:
        super().__init__(config)
        self._requirements = requirements
        self._trust = trust
        self._gateway = gateway
        self._discover = discover
        self._texts = texts
        self._clock = clock
        self._config = config
        self._events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        self._links: dict[WorkerId, WorkerLink] = {}
        self._live: set[WorkerRef] = set()
        # Models of workers that are not live any more, and until when a request may wait for new workers.
        self._recently_live: dict[str, tuple[ServedModel, float]] = {}
        self._loop = BackgroundLoop("worker discovery", self._search)
        self._discovery_error: str | None = None
        """Why workers cannot be listed; None where they can."""

    async def start(self) -> None:
        self._loop.start()

    async def stop(self) -> None:
        await self._loop.stop()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    async def events(self) -> AsyncIterator[PoolEvent]:
        """Apply what arrives from workers, in order, and yield what the request driver must act on; never ends. For one
        reader."""
        while True:
            event = await self._events.get()
            match event:
                case LinkUpdated(link):
                    try:
                        report = self._apply_update(event)
                    except Exception:
                        log.exception("worker %s: cannot process an update", link.ref)
                        link.reopen()
                        continue
                    if report.events or report.freed is not None:
                        yield report
                case LinkBroken(link, reason):
                    # Not behind queued events, among which the worker may already be back and ask for its positions.
                    if lost := self._on_broken(link, reason):
                        yield lost
                case _:
                    yield event

    # ---- state

    def views(self) -> list[WorkerView]:
        """Return what routing sees of each live worker."""
        return [view for link in list(self._links.values()) if (view := link.view()) is not None]

    def num_live(self) -> Mapping[Pool, int]:
        """Return the number of live workers by pool; every pool has an entry."""
        found = Counter(view.pool for view in self.views())
        return {pool: found[pool] for pool in POOLS}

    def scrape_targets(self) -> list[ScrapeTarget]:
        """Return where to read the metrics of each live worker; workers without metrics are left out."""
        found = [(view, link.metrics_address) for link in self._links.values() if (view := link.view()) is not None]
        return [ScrapeTarget(address, view.ref.id, view.pool, view.model) for view, address in found if address]

    def workers(self) -> list[WorkerRef]:
        """Return all workers that this pool has a link to, live or not."""
        return [link.ref for link in self._links.values()]

    def cache_root(self, model: str) -> tuple[str, int] | None:
        """Return what the block hashes of a model depend on besides tokens: its fingerprint, and the block size in
        tokens. None while no live worker serves the model.

        During a rollout workers of one model may differ. Then the values of the worker linked first count, and blocks
        that workers of the other build cache are not found until the first build has left."""
        for view in self.views():
            if view.model == model and view.block_size:
                return view.fingerprint, view.block_size
        return None

    def models(self) -> Sequence[ServedModel]:
        """Return the models of live workers, and for `no_worker_wait_s` seconds also a model whose last worker is gone,
        so that new requests for it wait like those in the queue."""
        found: dict[str, ServedModel] = {}
        for link in list(self._links.values()):
            if link.model is not None and link.is_live:
                found.setdefault(link.model.name, link.model)
        now = self._clock.now()
        self._recently_live = {name: recent for name, recent in self._recently_live.copy().items() if recent[1] > now}
        for name, (model, _) in self._recently_live.copy().items():
            found.setdefault(name, model)
        return tuple(found.values())

    def ready(self) -> str | None:
        """Return None where requests can be served: by one worker alone, or by a pair between which a test block has
        moved. Otherwise return a sentence that describes what is missing."""
        views = self.views()
        if not views:
            return (
                "no live worker"
                if self._discovery_error is None
                else f"no live worker is known: {self._discovery_error}"
            )
        policy = self._config.disaggregation
        can_serve_alone = policy != "strict" and any(v.pool == "mixed" for v in views)
        pairs = self.pairs
        # Requests that fall back because no link can be used are served too.
        if (
            can_serve_alone
            or policy == "off"
            or pairs.linked
            or (policy == "prefer" and (pairs.suspected or pairs.refused))
        ):
            return None
        missing = [pool for pool in ("prefill", "decode") if not any(v.pool in (pool, "mixed") for v in views)]
        if missing:
            return f"no live {' and no live '.join(missing)} worker"
        return (pairs.refused and pairs.problem()) or "no block has moved between a prefill and a decode worker yet"

    def suspect(self, workers: Set[WorkerRef]) -> None:
        """Stop using the pairs among `workers` until a test block has moved between each, because KV may have been lost
        between two of them."""
        for pair in self.pairs.suspect(workers, self._clock.now()):
            log.warning("%s lost KV of %s: the link between them is tested again", pair[1].id, pair[0].id)
        self._probe_pairs()

    # ---- calls

    async def submit(self, worker: WorkerRef, job: Job) -> None:
        """Send a job to a worker and wait until it is accepted. Raises TandemError: the worker's refusal, or
        WORKER_LOST where the worker is gone or does not answer."""
        link = self.find(worker)
        if link is None:
            raise TandemError(ErrorKind.WORKER_LOST, f"worker {worker.id} is gone")
        try:
            await link.submit(job)
        finally:
            self.changed(link)

    def cancel(self, worker: WorkerRef, keys: Sequence[JobKey]) -> None:
        """Send the worker an order to end these jobs; does nothing where the worker is gone."""
        link = self.find(worker)
        if link is not None:
            link.cancel(keys)

    def release(self, worker: WorkerRef, key: HandoffKey) -> None:
        """Send the worker an order to release the lease of a hand-off; does nothing where the worker is gone."""
        link = self.find(worker)
        if link is not None:
            link.release(key)

    def reopen(self, worker: WorkerRef) -> None:
        """Open the worker's Watch stream again, so that it resends an update that could not be processed; does nothing
        where the worker is gone."""
        link = self.find(worker)
        if link is not None:
            link.reopen()

    # ---- discovery

    def find(self, worker: WorkerRef) -> WorkerLink | None:
        link = self._links.get(worker.id)
        return link if link is not None and link.ref == worker else None

    def view(self, link: WorkerLink) -> WorkerView | None:
        return link.view()

    async def _search(self) -> float:
        """Discover workers once; return the seconds until the next time."""
        try:
            await self._reconcile(await self._discover())
            self._discovery_error = None
        except TandemError as error:
            self._discovery_error = error.message
        self._probe_pairs()
        is_searching = self._discovery_error is None and self.ready() is not None
        return SEARCH_PERIOD_S if is_searching else DISCOVERY_PERIOD_S

    async def _reconcile(self, refs: Mapping[WorkerRef, str]) -> None:
        """Link to new workers and incarnations, drop dead links of unlisted workers, and apply assigned roles.

        Of two incarnations the newer one counts. Where its link is gone, the listed one counts even if it is older: the
        host's clock may have been set back between them."""
        listed = {ref.id: ref for ref in refs}
        for ref in refs:
            known = self._links.get(ref.id)
            if known is None or ref.incarnation > known.ref.incarnation or (known.is_gone and ref != known.ref):
                if known is not None:
                    self._events.put_nowait(self._drop(known, "the worker restarted"))
                self._links[ref.id] = WorkerLink(
                    self._gateway, ref, self._texts, self._clock, self._config, self._trust, self._events
                )
                if known is not None:
                    await known.close()
        for link in [x for x in self._links.values() if x.ref.id not in listed and x.is_gone]:
            del self._links[link.ref.id]
            self._events.put_nowait(self._drop(link, "gone"))
            await link.close()
        self._assign_roles(refs)

    def _assign_roles(self, roles: Mapping[WorkerRef, str]) -> None:
        """Apply assigned roles; running requests stay where they are."""
        changed = [
            link for ref, role in roles.items() if (link := self.find(ref)) is not None and link.assign_role(role)
        ]
        for link in changed:
            self._ranking.remove(link.ref)
            self.changed(link)
        if changed:
            self._events.put_nowait(PlacementsChanged())

    def _apply_update(self, update: LinkUpdated) -> WorkerReported:
        link = update.link
        may_take_more = link.apply(update)
        self.changed(link)
        is_known = self.find(link.ref) is link
        if update.reports and is_known:
            self._on_link_reports(link.ref, update.reports)
        return WorkerReported(link.ref, update.events, link.require_view() if may_take_more and is_known else None)

    def _on_broken(self, link: WorkerLink, reason: str) -> WorkerLost | None:
        is_lost = link.on_broken()
        self.changed(link)
        if not is_lost or self.find(link.ref) is not link:
            return None
        log.warning("worker %s is lost: %s", link.ref, reason)
        return self._drop(link, reason)

    def changed(self, link: WorkerLink) -> None:
        """Update the ranking from a link's view, and probe the pairs of a worker that has become live.

        Calls of a dropped link are ignored, as from a submit that ends late."""
        if self.find(link.ref) is not link:
            return
        if link.view() is None:
            self._mark_not_live(link)
            self._ranking.remove(link.ref)
            return
        self._ranking.put(link.require_view)
        if link.ref not in self._live:
            self._live.add(link.ref)
            for other in self._links.values():
                self._on_link_reports(
                    other.ref, [report for report in other.links.values() if report.source == link.ref]
                )
            self._probe_pairs()

    def _mark_not_live(self, link: WorkerLink) -> None:
        """Mark a worker as not live, and keep its model for `no_worker_wait_s`; do nothing where it is marked
        already."""
        if link.ref in self._live and link.model is not None:
            self._recently_live[link.model.name] = (link.model, self._clock.now() + self._config.no_worker_wait_s)
        self._live.discard(link.ref)

    def _drop(self, link: WorkerLink, reason: str) -> WorkerLost:
        """Remove a worker from pairs and ranking; return the event that its jobs are lost."""
        self.pairs.drop(link.ref)
        self._mark_not_live(link)
        self.routing.links.forget(link.ref)
        self._ranking.remove(link.ref)
        return WorkerLost(link.ref, reason)

    def _probe_pairs(self) -> None:
        """Have test blocks moved between prefill and decode workers that are due for a probe by `PairRegistry`."""
        for pair, model in self.pairs.due(self.views(), self._clock.now()):
            self._events.put_nowait(ProbeDue(pair, model))

    async def record_probe(self, pair: Pair, probe: Awaitable[bool]) -> None:
        """Await `probe`, the test of a pair (prefill, decode) that was requested by `ProbeDue`, and record whether the
        pair may be used.

        `probe` returns whether a block has moved. Where it did, the link is also measured if it must meet requirements
        and was not measured yet."""
        try:
            moved = await probe and await self._verify(pair)
            if any(self.find(ref) is None for ref in pair):
                log.info("%s or %s left before a block moved between them", *pair)
                return
            self.pairs.ended(pair, moved=moved, retry_at=self._clock.now() + PROBE_RETRY_S)
            if moved:
                log.info("a block moved from %s to %s", pair[0].id, pair[1].id)
            else:
                log.warning("no block moved from %s to %s", pair[0].id, pair[1].id)
        finally:
            self.pairs.gone(pair)
        self._events.put_nowait(PlacementsChanged())

    async def _verify(self, pair: Pair) -> bool:
        """Return whether the link of a pair is known to meet its requirements or not; the consumer probes it where
        necessary.

        A report with a problem that does not refuse the link means that the link could not be measured."""
        producer, consumer = pair
        if self._requirements.on_slow_link == "warn" or not has_requirements(self._requirements):
            return True
        link = self.find(consumer)
        if link is None:
            return False
        try:
            report = self.pairs.report(pair)
            if report is None or (report.problem and not report.refused):
                self._on_link_reports(consumer, [await link.measure(producer)])
        except TandemError as error:
            log.warning("the link from %s to %s cannot be measured: %s", producer.id, consumer.id, error.message)
            return False
        return True

    def _on_link_reports(self, consumer: WorkerRef, reports: Sequence[LinkReport]) -> None:
        """Record reports of a worker on the links over which it reads others.

        Reports on sources that are not live are ignored, because nothing would remove them; `changed` repeats
        them once the source is live."""
        changed = [link for link in reports if link.source in self._live and self.pairs.on_link_report(consumer, link)]
        for report in changed:
            what = f"not used: {report.problem}" if report.refused else "used again"
            log.warning("the link from %s to %s is %s", report.source.id, consumer.id, what)
        if changed:
            self._probe_pairs()
