"""Discover workers, keep a connection to each, and test the links between prefill and decode workers.

Redis lists workers but does not decide whether they live: a worker is live while its Watch stream is open."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set

from tandem.core.clock import Clock
from tandem.core.config import GatewayConfig, Pool, TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import GatewayId, WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.core.request import Job
from tandem.gateway.context.interfaces import KVBlocks, ServedModel
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.text.text_models import TextModels
from tandem.gateway.workers.pool_events import PlacementsChanged, PoolEvent, ProbeDue, WorkerLost, WorkerReported
from tandem.gateway.workers.worker_link import LinkBroken, LinkEvent, LinkUpdated, WorkerLink
from tandem.orchestration.commands import WorkerOrder
from tandem.orchestration.known_workers import DISCOVERY_PERIOD_S, KnownWorkers
from tandem.routing.link_policy import has_requirements
from tandem.routing.pd_pairs import PROBE_RETRY_S
from tandem.routing.shortages import Shortage, find_shortages
from tandem.routing.worker_view import POOLS, Pair, WorkerView
from tandem.wire.peer_auth import PeerAuth

log = logging.getLogger(__name__)
SEARCH_PERIOD_S = 0.1
"""Seconds between two discoveries while no request can be served."""
FIRST_PAIR_WAIT_S = 30.0
"""Seconds for which a gateway that has never been ready waits for a pair of a prefill and a decode worker, where single
workers can already serve requests; then it becomes ready without a pair."""
MODEL_MEMORY_S = 3600.0
"""Seconds for which a model whose last worker is gone is reported as missing."""
_NO_REQUIREMENTS = TransferConfig()


class WorkerPool(KnownWorkers[WorkerLink]):
    """Discover the workers, hold a connection (`WorkerLink`) to each, and record between which pairs of them KV may
    move (`pairs`).

    `discover`: function that returns the registered workers, each with the role that the registry assigns to it; the
    role is empty where none is assigned. Where the function raises TandemError, the previous list of workers stays in
    force. `requirements`: the settings with the requirements that a link must meet before KV may move over it.
    `routing` and `candidates()` are for the placement of requests. What workers report takes effect only while one
    reader iterates over `events()`.

    `wakeable`: function that returns, by model name, the models for which a planner starts workers when requests wait.
    `optional_roles`: function that returns, by model name, the roles for which the planner's minimum is 0 workers. By
    default both return an empty mapping; the owner of the pool may replace them before it calls `start`."""

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
        self.wakeable: Callable[[], Mapping[str, ServedModel]] = dict
        self.optional_roles: Callable[[], Mapping[str, Set[str]]] = dict
        self._requirements = requirements
        self._trust = trust
        self._gateway = gateway
        self._discover = discover
        self._texts = texts
        self._clock = clock
        self._config = config
        self._events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        self._links: dict[WorkerId, WorkerLink] = {}
        self._listed: Set[WorkerRef] | None = None
        """The workers that the registry listed last; None before it was read."""
        self._live: set[WorkerRef] = set()
        self._known_models: dict[str, tuple[ServedModel, float]] = {}
        """Models that have a live worker or had one within `MODEL_MEMORY_S`, and when that worker was last seen."""
        self._was_ready = False
        self._serves_since: float | None = None
        """Since when requests can be served, if only on one worker each; None while they cannot."""
        self._loop = BackgroundLoop("worker discovery", self._search)
        self.start = self._loop.start
        self._discovery_error: str | None = None
        """Why workers cannot be listed; None where they can."""

    async def stop(self) -> None:
        await self._loop.stop()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    async def events(self) -> AsyncIterator[PoolEvent]:
        """Apply what arrives from workers, in order, and yield the events on which the request driver must act.

        The iterator does not end and may have one reader only.
        """
        while True:
            event = await self._events.get()
            match event:
                case LinkUpdated(link):
                    try:
                        report = self._apply_update(event)
                    except Exception:
                        self.reopen_after_error(link.ref)
                        continue
                    if report.events or report.freed is not None:
                        yield report
                case LinkBroken():
                    # Not behind queued events, among which the worker may already be back and ask for its positions.
                    if lost := self._on_broken(event):
                        yield lost
                case _:
                    yield event

    # ---- state

    def views(self) -> list[WorkerView]:
        """Return the view of each live worker: what routing sees of it, such as its load, pool and model."""
        return [view for link in list(self._links.values()) if (view := link.view()) is not None]

    def num_live(self) -> Mapping[Pool, int]:
        """Return the number of live workers by pool; every pool has an entry."""
        found = Counter(view.pool for view in self.views())
        return {pool: found[pool] for pool in POOLS}

    def kv_blocks(self) -> KVBlocks | None:
        """Return how many KV blocks all live workers have together and how many of these are unused, with the block
        size; None while no live worker has reported any blocks."""
        # Of 1,000 workers the views take 5 ms, the loads 0.3; an endpoint picker asks several times a second.
        live = [link for link in list(self._links.values()) if link.live_load.num_blocks]
        first = next((view for link in live if (view := link.view()) is not None), None)
        if first is None:
            return None
        loads = [link.live_load for link in live]
        num_unused = sum(max(0, load.num_free_blocks - load.num_reserved_blocks) for load in loads)
        return KVBlocks(first.block_size, sum(load.num_blocks for load in loads), num_unused)

    def scrape_targets(self) -> list[tuple[str, WorkerView]]:
        """Return the live workers that serve metrics themselves, each with the address (host:port) of its metrics."""
        found = [(link.metrics_address, view) for link in self._links.values() if (view := link.view()) is not None]
        return [(address, view) for address, view in found if address]

    def workers(self) -> list[WorkerRef]:
        """Return all workers that this pool keeps a connection to, live or not."""
        return [link.ref for link in self._links.values()]

    def cache_root(self, model: str) -> tuple[str, int] | None:
        """Return what the block hashes of a model depend on besides tokens and salt: its fingerprint, and the block
        size in tokens. None while no live worker serves the model.

        During a rollout workers of one model may differ. Then the values of the worker to which this gateway connected
        first count, and blocks that workers of the other build cache are not found until the workers of the first build
        are gone."""
        for view in self.views():
            if view.model == model and view.block_size:
                return view.fingerprint, view.block_size
        return None

    def live_models(self) -> dict[str, ServedModel]:
        """Return the models of live workers, by name."""
        links = list(self._links.values())
        return {link.model.name: link.model for link in reversed(links) if link.model is not None and link.is_live}

    def models(self) -> Sequence[ServedModel]:
        """Return the models that clients may request: those of live workers, and those that a planner can wake.

        A model whose last worker is gone is included for `no_worker_wait_s` seconds more, so that new requests for it
        wait like those that are queued already."""
        found = self.live_models()
        for name, model in self.wakeable().items():
            found.setdefault(name, model)
        oldest = self._clock.now() - self._config.no_worker_wait_s
        for name, (model, seen_at) in self._known_models.copy().items():
            if seen_at > oldest:
                found.setdefault(name, model)
        return tuple(found.values())

    def shortages(self) -> list[Shortage]:
        """Return what each model lacks, such as a live prefill worker; models that lack nothing are left out. The
        models considered have a live worker, had one within `MODEL_MEMORY_S` seconds, or can be woken by a planner."""
        views = self.views()
        models = dict.fromkeys([*(view.model for view in views), *self._known_models.copy(), *self.wakeable()])
        return find_shortages(models, views, self.pairs, self._config.disaggregation)

    def is_intended(self, shortage: Shortage) -> bool:
        """Return whether the planner may have ended the missing workers of a shortage on purpose: its minimum is 0
        workers for each of their roles, and it starts such workers again when requests wait.

        False for the lack of a link, and where this gateway cannot reach a registered worker of the model."""
        roles = {shortage.lacks} if shortage.lacks in ("prefill", "decode") else {"prefill", "decode"}
        is_optional = roles <= self.optional_roles().get(shortage.model, frozenset())
        return shortage.lacks != "link" and is_optional and not self._misses_registered(shortage.model)

    def num_wakeable(self) -> Mapping[Pool, int]:
        """Return, by pool, the number of models for which a planner may end all workers of the pool; every pool has an
        entry.

        A model does not count while this gateway cannot reach one of its registered workers."""
        models = self.optional_roles().items()
        found = Counter(role for model, roles in models if not self._misses_registered(model) for role in roles)
        return {pool: found[pool] for pool in POOLS}

    def ready(self) -> str | None:
        """Return None where requests can be served, otherwise a sentence that describes what is missing.

        A gateway is ready while some model lacks nothing. It is also ready where a planner starts the missing workers
        of a model once requests wait (these are held until then), unless this gateway cannot reach a registered worker
        of the model. A gateway that has been ready stays so while a live worker can serve requests of any model, if
        only as a fallback. One that has never been ready becomes ready with such a worker only after
        `FIRST_PAIR_WAIT_S` seconds, or at once where a link misses its requirements, because such a link is not tested
        again."""
        shortages = self.shortages()
        lacking = {shortage.model for shortage in shortages}
        if any(view.model not in lacking for view in self.views()) or any(map(self._is_awaited, shortages)):
            return None
        has_waited = self._serves_since is not None and self._clock.now() - self._serves_since >= FIRST_PAIR_WAIT_S
        if (self._was_ready or has_waited or self.pairs.refused) and any(shortage.is_served for shortage in shortages):
            return None
        return "; ".join(self._missing(shortages) or ["no live worker"])

    def problem(self) -> str | None:
        """Return a sentence on what is wrong although requests may be served: workers that a model lacks, a registry
        that cannot be read, or a link that misses its requirements. None where nothing is wrong."""
        missing = self._missing(self.shortages())
        if (link := self.pairs.problem()) is not None and link not in missing:
            missing.append(link)
        return "; ".join(missing) or None

    def _is_awaited(self, shortage: Shortage) -> bool:
        """Return whether requests that a shortage keeps from being served wait until a planner has started workers."""
        can_wake = not shortage.is_served and shortage.lacks != "link" and shortage.model in self.wakeable()
        return can_wake and not self._misses_registered(shortage.model)

    def _misses_registered(self, model: str) -> bool:
        """Return whether the registry was not read yet, or lists a worker of the model that this gateway cannot reach.

        A worker that has not described itself counts for every model. Once the gateway has been ready, a worker counts
        only while its link `is_missing`, so that starting and ending workers do not count."""
        if self._listed is None:
            return True
        missed = [
            link
            for link in list(self._links.values())
            if link.ref in self._listed and (link.is_missing if self._was_ready else not link.is_live)
        ]
        return any(link.model is None or link.model.name == model for link in missed)

    def _missing(self, shortages: Iterable[Shortage]) -> list[str]:
        unlisted = [f"workers cannot be listed: {self._discovery_error}"] if self._discovery_error is not None else []
        reasons = [
            f"{shortage.reason}; the planner starts one for the next request"
            if self._is_awaited(shortage)
            else shortage.reason
            for shortage in shortages
        ]
        return reasons + unlisted

    def suspect(self, workers: Set[WorkerRef]) -> None:
        """Stop using each pair whose two workers are both in `workers`, because KV between them may have been lost.
        Request a test of each such pair; it is used again once a test block has moved."""
        for pair in self.pairs.suspect(workers, self._clock.now()):
            message = "worker %s lost KV of worker %s; the gateway uses the pair again once a test block has moved"
            log.warning(message, pair[1].id, pair[0].id)
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

    def send_order(self, order: WorkerOrder) -> None:
        """Send an order to its worker; does nothing where the worker is gone."""
        link = self.find(order.worker)
        if link is not None:
            link.send_order(order)

    def reopen_after_error(self, worker: WorkerRef) -> None:
        """Log the exception that is being handled, and open the worker's Watch stream again, unless the worker is gone,
        so that it resends the update that could not be processed."""
        log.exception("the gateway failed to process an update of worker %s and opens its stream again", worker)
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
        is_searching = self._note_readiness() and self._discovery_error is None
        return SEARCH_PERIOD_S if is_searching else DISCOVERY_PERIOD_S

    def _note_readiness(self) -> bool:
        """Record what `ready` depends on besides the workers of now. Return whether the gateway is not ready."""
        now = self._clock.now()
        known = self._known_models | {name: (model, now) for name, model in self.live_models().items()}
        self._known_models = {name: entry for name, entry in known.items() if now - entry[1] < MODEL_MEMORY_S}
        unserved = {shortage.model for shortage in self.shortages() if not shortage.is_served}
        if unserved.issuperset(view.model for view in self.views()):
            self._serves_since = None
        elif self._serves_since is None:
            self._serves_since = now
        is_ready = self.ready() is None
        self._was_ready |= is_ready
        return not is_ready

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
        self._listed = frozenset(refs)
        self._assign_roles(refs)

    def _assign_roles(self, roles: Mapping[WorkerRef, str]) -> None:
        """Apply assigned roles; running requests stay where they are until a move of the rebalancer takes them away."""
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

    def _on_broken(self, broken: LinkBroken) -> WorkerLost | None:
        link = broken.link
        is_lost = link.on_broken(has_ended=broken.has_ended)
        self.changed(link)
        if not is_lost or self.find(link.ref) is not link:
            return None
        log.warning("worker %s is lost: %s", link.ref, broken.reason)
        return self._drop(link, broken.reason)

    def changed(self, link: WorkerLink) -> None:
        """Update the ranking from the view of `link`. For a worker that has just become live, also request tests of its
        pairs.

        Does nothing for a connection that the pool has dropped, for example where a submit ends late."""
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
            self._note_readiness()

    def _mark_not_live(self, link: WorkerLink) -> None:
        """Mark a worker as not live, and its model as last seen now; do nothing where it is marked already."""
        if link.ref in self._live and link.model is not None:
            self._known_models[link.model.name] = (link.model, self._clock.now())
        self._live.discard(link.ref)

    def _drop(self, link: WorkerLink, reason: str) -> WorkerLost:
        """Remove a worker from pairs and ranking; return the event that its jobs are lost."""
        self.pairs.drop(link.ref)
        self._mark_not_live(link)
        self.routing.links.forget(link.ref)
        self._ranking.remove(link.ref)
        return WorkerLost(link.ref, reason)

    def _probe_pairs(self) -> None:
        """Request tests (`ProbeDue`) of the pairs of prefill and decode workers that are due for one by
        `PairRegistry`."""
        for pair, model in self.pairs.due(self.views(), self._clock.now()):
            self._events.put_nowait(ProbeDue(pair, model))

    async def record_probe(self, pair: Pair, probe: Awaitable[str | None]) -> None:
        """Await `probe`, the test of a pair (prefill, decode) that was requested by `ProbeDue`, and record whether the
        pair may be used.

        `probe` returns None where a block has moved, otherwise a text that says why not. After a block has moved, the
        link is also measured if it must meet requirements and was not measured yet. The first failure of a pair is
        logged as a warning, its repetitions at DEBUG."""
        level = logging.DEBUG if pair in self.pairs.failed else logging.WARNING
        try:
            problem = await probe
            moved = problem is None and await self._verify(pair, level)
            if any(self.find(ref) is None for ref in pair):
                log.info("worker %s or %s left before a test block moved between them", *pair)
                return
            self.pairs.ended(pair, moved=moved, retry_at=self._clock.now() + PROBE_RETRY_S)
            self._note_readiness()
            if moved:
                log.info("a test block moved from worker %s to worker %s", pair[0].id, pair[1].id)
            elif problem is not None:
                message = "the test of prefill worker %s with decode worker %s failed and is repeated every %g s: %s"
                log.log(level, message, pair[0].id, pair[1].id, PROBE_RETRY_S, problem)
        finally:
            self.pairs.gone(pair)
        self._events.put_nowait(PlacementsChanged())

    async def _verify(self, pair: Pair, level: int) -> bool:
        """Return whether it is known if the link of a pair meets its requirements; the consumer measures the link first
        where there is no report on it.

        A report with a problem that does not refuse the link means that the link could not be measured. A failure is
        logged at `level`."""
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
            message = "the link from worker %s to worker %s cannot be measured: %s"
            log.log(level, message, producer.id, consumer.id, error.message)
            return False
        return True

    def _on_link_reports(self, consumer: WorkerRef, reports: Sequence[LinkReport]) -> None:
        """Record reports of a worker on the links over which it reads others.

        Reports on sources that are not live are ignored, because nothing would remove them; `changed` repeats
        them once the source is live."""
        changed = [link for link in reports if link.source in self._live and self.pairs.on_link_report(consumer, link)]
        for report in changed:
            if report.refused:
                message = "the link from worker %s to worker %s is not used: %s"
                log.warning(message, report.source.id, consumer.id, report.problem)
            else:
                log.info("the link from worker %s to worker %s is used again", report.source.id, consumer.id)
        if changed:
            self._probe_pairs()
