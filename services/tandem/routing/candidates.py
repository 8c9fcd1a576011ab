"""Which workers one request is compared over: those that hold most of its prompt and the least loaded few, not all
pairs, of which there are as many as the square of the workers; never says what one costs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import closing
from itertools import islice
from typing import NamedTuple, Protocol

from tandem.core.ids import WorkerRef
from tandem.routing.loan import NUM_LENDERS, may_lend
from tandem.routing.view import Pair, Pool, Ranking, WorkerView
from tandem.routing.want import Want

NUM_BY_LOAD = 4
"""Least loaded workers that are compared for each part."""
NUM_BY_HITS = 8
"""Workers with the longest prefixes that are compared, for all parts together."""


class Candidates(Protocol):
    """What a choice is made from: workers that serve a model and take new work, by rising load, of which
    mostly little is taken; nothing may change while a ranking is open, and none may be opened twice."""

    @property
    def linked(self) -> Set[Pair]: ...

    @property
    def unlinked(self) -> Set[Pair]: ...

    @property
    def refused(self) -> Set[Pair]:
        """Those of the unlinked whose way is not what was promised."""
        ...

    def pools(self, model: str) -> Counter[Pool]:
        """How many there are with each label."""
        ...

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None: ...

    def givers(self, model: str) -> Ranking:
        """Those that prefill."""
        ...

    def takers(self, model: str) -> Ranking:
        """Those that decode."""
        ...

    def wholes(self, model: str) -> Ranking:
        """All, for both in one place: those that decode first."""
        ...


class Without:
    """Candidates as if some were not there."""

    def __init__(self, among: Candidates, absent: Set[WorkerRef]) -> None:
        self._among = among
        self._absent = absent

    @property
    def linked(self) -> Set[Pair]:
        return self._among.linked

    @property
    def unlinked(self) -> Set[Pair]:
        return self._among.unlinked

    @property
    def refused(self) -> Set[Pair]:
        return self._among.refused

    def pools(self, model: str) -> Counter[Pool]:
        found = (self._among.find(model, ref) for ref in self._absent)
        return self._among.pools(model) - Counter(view.pool for view in found if view is not None)

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None:
        return None if ref in self._absent else self._among.find(model, ref)

    def givers(self, model: str) -> Ranking:
        return _left(self._among.givers(model), self._absent)

    def takers(self, model: str) -> Ranking:
        return _left(self._among.takers(model), self._absent)

    def wholes(self, model: str) -> Ranking:
        return _left(self._among.wholes(model), self._absent)


class Site(NamedTuple):
    """One that may compute the prompt, and those from which it may read what it lacks of it."""

    worker: WorkerView
    lenders: tuple[WorkerView, ...] = ()


class Giver(NamedTuple):
    """One that may prefill, and those that may then decode."""

    site: Site
    takers: tuple[WorkerView, ...]


class Shortlist:
    """One request's, while it is placed."""

    def __init__(self, among: Candidates, want: Want, excluded: Set[WorkerRef], *, may_borrow: bool = True) -> None:
        self._among = among
        self._want = want
        self._excluded = excluded
        self._holders = self._find_holders()
        lenders = self._holders if may_borrow else []
        self._lenders = [(view, want.held(view).num_device_tokens) for view in lenders]

    def givers(self) -> list[Giver]:
        """Those that have a partner. All are walked over until enough are ready."""
        few = self._few_takers()
        found: dict[WorkerRef, Giver] = {}
        num_ready = 0
        with closing(self._left(self._among.givers(self._want.model))) as givers:
            for worker in givers:
                giver = self._giver(worker, few)
                is_ready = self._suits(giver.site)
                if giver.takers and (is_ready or len(found) < 2 * NUM_BY_LOAD):
                    found[worker.ref] = giver
                    num_ready += is_ready
                if num_ready == NUM_BY_LOAD:
                    break
        for worker in self._holders:
            if worker.prefills and worker.ref not in found and (giver := self._giver(worker, few)).takers:
                found[worker.ref] = giver
        return list(found.values())

    def wholes(self) -> list[Site]:
        """Those that may do all of it: a prefill worker decodes only where none other is left."""
        found: dict[WorkerRef, Site] = {}
        num_ready, has_decoder = 0, False
        with closing(self._left(self._among.wholes(self._want.model))) as workers:
            for worker in workers:
                if has_decoder and not worker.decodes:
                    break
                has_decoder = worker.decodes
                site = self._site(worker)
                is_ready = self._suits(site)
                if is_ready or len(found) < 2 * NUM_BY_LOAD:
                    found[worker.ref] = site
                    num_ready += is_ready
                if num_ready == NUM_BY_LOAD:
                    break
        for worker in self._holders:
            if worker.ref not in found and (worker.decodes or not has_decoder):
                found[worker.ref] = self._site(worker)
        return list(found.values())

    # ---- inside

    def _find_holders(self) -> list[WorkerView]:
        hits, want = self._want.hits, self._want
        if not hits:
            return []
        best = heapq.nsmallest(NUM_BY_HITS, hits.items(), key=lambda item: (-item[1].num_blocks, item[0].id))
        views = (self._among.find(want.model, ref) for ref, _ in best if ref not in self._excluded)
        return [view for view in views if view is not None]

    def _few_takers(self) -> list[WorkerView]:
        with closing(self._left(self._among.takers(self._want.model))) as takers:
            found = {view.ref: view for view in islice(takers, NUM_BY_LOAD)}
        found.update({view.ref: view for view in self._holders if view.decodes})
        return list(found.values())

    def _giver(self, worker: WorkerView, few: Iterable[WorkerView]) -> Giver:
        return Giver(self._site(worker), tuple(self._partners(worker, few)))

    def _site(self, worker: WorkerView) -> Site:
        if not self._lenders:
            return Site(worker)
        num_held = self._want.held(worker).num_tokens
        fit = (lender for lender, num in self._lenders if num > num_held and self._may_lend(lender, worker))
        return Site(worker, tuple(islice(fit, NUM_LENDERS)))

    def _may_lend(self, lender: WorkerView, taker: WorkerView) -> bool:
        """A way that has failed for hand-offs in one direction is not taken in the other."""
        way, back = (lender.ref, taker.ref), (taker.ref, lender.ref)
        failed = self._among.unlinked
        return may_lend(lender, taker) and way not in self._want.shut and way not in failed and back not in failed

    def _suits(self, site: Site) -> bool:
        """Whether it will probably accept the prompt now, with what it may read."""
        lent = max((self._want.held(lender).num_device_tokens for lender in site.lenders), default=0)
        return self._want.suits(site.worker, lent)

    def _partners(self, giver: WorkerView, few: Iterable[WorkerView]) -> list[WorkerView]:
        """Of a few, or of all where none of those is linked."""
        linked = [taker for taker in few if self._is_pair(giver, taker)]
        if linked:
            return linked
        with closing(self._left(self._among.takers(self._want.model))) as takers:
            return list(islice((taker for taker in takers if self._is_pair(giver, taker)), NUM_BY_LOAD))

    def _is_pair(self, giver: WorkerView, taker: WorkerView) -> bool:
        return (giver.ref, taker.ref) in self._among.linked and _may_pair(giver, taker)

    def _left(self, workers: Ranking) -> Ranking:
        return _left(workers, self._excluded)


def why_no_pair(among: Candidates, model: str, excluded: Set[WorkerRef]) -> tuple[str, bool]:
    """What keeps every prefill worker from every decode worker, and whether that may pass."""
    givers = [worker for worker in among.givers(model) if worker.ref not in excluded]
    takers = [worker for worker in among.takers(model) if worker.ref not in excluded]
    pairs = [(p.ref, d.ref) for p in givers for d in takers if _may_pair(p, d)]
    if not pairs:
        return "no worker of the same model build", False
    if all(pair in among.refused for pair in pairs):
        return "no way between the workers is as promised", False
    return "no link between the workers", any(pair not in among.unlinked for pair in pairs)


def _left(workers: Ranking, absent: Set[WorkerRef]) -> Ranking:
    with closing(workers):
        for worker in workers:
            if worker.ref not in absent:
                yield worker


def _may_pair(giver: WorkerView, taker: WorkerView) -> bool:
    return giver.ref != taker.ref and giver.fingerprint == taker.fingerprint
