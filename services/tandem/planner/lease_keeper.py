"""Renew a Lease, or wait for it, while the planner runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.core.clock import Clock
from tandem.planner.kube_error import KubeError
from tandem.planner.leader_election import Election

if TYPE_CHECKING:
    from tandem.planner.kube_client import KubeApi

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Hold the Lease for this planner whenever the election allows it. `on_failure` is called with the error of each
    failed call."""

    def __init__(
        self, election: Election, store: KubeApi, name: str, clock: Clock, on_failure: Callable[[KubeError], None]
    ) -> None:
        self._election = election
        self._store = store
        self._name = name
        self._clock = clock
        self._on_failure = on_failure
        self._did_lead = False

    @property
    def leads(self) -> bool:
        """Return whether this planner may request changes now."""
        return self._election.leads(self._clock.now())

    @property
    def holder(self) -> str:
        return self._election.holder

    async def run(self, stopped: asyncio.Event) -> None:
        """Renew or claim the Lease until `stopped`. The Lease is kept until `resign`, because a decision may still be
        in progress."""
        while not stopped.is_set():
            await asyncio.to_thread(self.look)
            try:
                await asyncio.wait_for(stopped.wait(), self._election.period_s)
            except TimeoutError:
                continue

    def look(self) -> None:
        """Read the Lease, and renew or claim it if the election allows that. Blocks."""
        try:
            self._look()
        except KubeError as error:
            if not error.is_conflict:  # a conflict means that another planner was faster
                self._on_failure(error)
                _log.warning("lease %s: %s", self._name, error)
        self._log_leadership()

    def resign(self) -> None:
        released = self._election.resigned()
        if released is None:
            return
        try:
            self._store.replace_lease(self._name, released)
            _log.info("lease %s is left to the next planner", self._name)
        except KubeError as error:
            _log.info("lease %s cannot be left to the next planner, who will wait for its end: %s", self._name, error)

    def _look(self) -> None:
        election, clock = self._election, self._clock
        seen = self._store.read_lease(self._name)
        sent_at = clock.now()
        if seen is None:
            created = self._store.create_lease(self._name, election.me, election.lease_s)
            election.claimed(created, sent_at, clock.now())
            return
        election.saw(seen, clock.now())
        claim = election.claim(sent_at)
        if claim is not None:
            election.claimed(self._store.replace_lease(self._name, claim), sent_at, clock.now())

    def _log_leadership(self) -> None:
        leads = self.leads
        if leads != self._did_lead:
            _log.info(
                "this planner %s lease %s", "leads by" if leads else f"does not lead: {self.holder} has", self._name
            )
        self._did_lead = leads
